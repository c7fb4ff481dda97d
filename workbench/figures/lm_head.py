"""Does the output head run away from the other layers, and what did the gate do about it? (arXiv 2605.19425)

The paper reports that reuse of a batch fails with a surge of the head's weight change while inner layers stay calm. Its
exact metric is not public; shown are relative Frobenius changes per module. Under Adam a step is about
lr sqrt(parameters) whatever the gradient, so a relative change reflects the weight's own norm too.
"""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..errors import WorkbenchError, unknown
from . import style

CHANGES = {"relative_change": "per update", "cumulative_change": "since the start"}
NO_MODULES = "record with the weight monitor on (monitor_every of train)"


def window(frame: pl.DataFrame, first: int = 0, last: int = -1) -> pl.DataFrame:
    """Rows of updates first..last (-1: to the end) of an updates or modules table."""
    rows = frame.filter(pl.col("update") >= first)
    rows = rows if last < 0 else rows.filter(pl.col("update") <= last)
    if rows.is_empty():
        known = f"{frame['update'].min()} to {frame['update'].max()}"
        raise WorkbenchError(f"no update from {first} to {last} in this run; it has {known}")
    return rows


def is_tied(modules: pl.DataFrame) -> bool:
    """Whether the head shares its weights with the input embedding."""
    return bool(modules.filter(pl.col("is_head"))["tied"].any())


def head_ratio(modules: pl.DataFrame, change: str = "relative_change") -> pl.DataFrame:
    """One row an update: step, update, reuse, head (the output head's relative change), median (over all other modules
    that do not share its weights) and ratio = head / median."""
    style.need(modules, [change], "modules", NO_MODULES)
    others = ~pl.col("is_head") & ~pl.col("tied")
    return (
        modules.group_by("step", "update", "reuse")
        .agg(
            pl.col(change).filter(pl.col("is_head")).first().alias("head"),
            pl.col(change).filter(others).median().alias("median"),
        )
        .with_columns((pl.col("head") / pl.col("median")).alias("ratio"))
        .sort("update")
    )


def by_layer(modules: pl.DataFrame, change: str = "relative_change") -> pl.DataFrame:
    """One row an update and layer, without head and what is tied to it: update, layer, label, change (its median)."""
    last = modules["layer"].max()
    label = (
        pl.when(pl.col("layer") < 0).then(pl.lit("embedding"))
        .when(pl.col("layer") == last).then(pl.lit("final norm"))
        .otherwise(pl.format("layer {}", pl.col("layer") + 1))
    )  # fmt: skip
    rows = modules.filter(~pl.col("is_head") & ~pl.col("tied"))
    return (
        rows.group_by("update", "layer")
        .agg(pl.col(change).median().alias("change"))
        .with_columns(label.alias("label"))
        .sort("layer", "update")
    )


def _tied_note(modules: pl.DataFrame) -> str:
    if is_tied(modules):
        return "The head is tied to the input embedding: its weights move for both reasons."
    return "The head has weights of its own (not tied to the embedding)."


def changes(modules: pl.DataFrame, change: str = "relative_change") -> go.Figure:
    """Relative weight change of the head against every layer over updates, above the head's ratio to the median module.

    change: "relative_change" (per update) or "cumulative_change" (since the start).
    """
    if change not in CHANGES:
        raise unknown("change", change, CHANGES)
    ratio, layers = head_ratio(modules, change), by_layer(modules, change)
    fig = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.7, 0.3])
    depth = layers["layer"].max() or 1
    blocks = layers.filter(pl.col("label").str.starts_with("layer"))["label"].unique(maintain_order=True).to_list()
    named = set(blocks if len(blocks) <= 6 else (blocks[0], blocks[-1])) | {"embedding", "final norm"}
    for (layer, label), part in layers.group_by("layer", "label", maintain_order=True):
        apart = label in ("embedding", "final norm")
        fig.add_scatter(
            x=part["update"].to_list(),
            y=part["change"].to_list(),
            mode="lines",
            name=label,
            showlegend=label in named,
            line=dict(
                color=style.MUTED if apart else style.shade(layer / max(depth, 1), style.DEPTH),
                width=1.3 if apart else 1.8,
                dash={"embedding": "dot", "final norm": "dashdot"}.get(label, "solid"),
            ),
            hovertemplate=f"update %{{x}}: {label} %{{y:.2e}}<extra></extra>",
            row=1,
            col=1,
        )
    lines = (
        (1, "median", "median of modules", style.INK, 2, "dash", ".2e"),
        (1, "head", "lm_head", style.VERMILION, 3.4, "solid", ".2e"),
        (2, "ratio", "lm_head / median", style.VERMILION, 2.4, "solid", ".2f"),
    )
    for row, name, label, colour, width, dash, spec in lines:
        fig.add_scatter(
            x=ratio["update"].to_list(),
            y=ratio[name].to_list(),
            mode="lines",
            name=label,
            showlegend=row == 1,
            line=dict(color=colour, width=width, dash=dash),
            customdata=ratio.select("step", "reuse").rows(),
            hovertemplate=f"update %{{x}} (step %{{customdata[0]}}, use %{{customdata[1]}} of its batch)<br>"
            f"{label} %{{y:{spec}}}<extra></extra>",
            row=row,
            col=1,
        )
    style.dress(
        fig,
        f"Does lm_head move more than the layers, {CHANGES[change]}?",
        f"Frobenius norm of the change over the norm of the weights; a layer's line is the median of its modules. "
        f"{_tied_note(modules)}",
        height=390,
    )
    fig.add_hline(y=1, line=dict(color="#9aa5b1", width=1), row=2, col=1)
    shown = layers["change"].to_list() + ratio["head"].to_list()
    fig.update_yaxes(title_text=f"relative change, {CHANGES[change]}", **style.log_ticks(shown), row=1)
    fig.update_yaxes(title_text="head / median", rangemode="tozero", row=2)
    fig.update_xaxes(title_text="applied update", row=2)
    return fig


def _batches(fig: go.Figure, updates: pl.DataFrame, rows: int) -> None:
    """Shade every other rollout batch, where there are few enough to be told apart."""
    spans = updates.group_by("step").agg(pl.col("update").min().alias("low"), pl.col("update").max().alias("high"))
    if spans.height > 80 or updates["reuse"].max() < 2:
        return
    for i, (low, high) in enumerate(spans.sort("step").select("low", "high").rows()):
        if i % 2:
            for row in range(1, rows + 1):
                fig.add_vrect(
                    x0=low - 0.5, x1=high + 0.5, fillcolor="#eef2f5", line_width=0, layer="below", row=row, col=1
                )


def gate(updates: pl.DataFrame) -> go.Figure:
    """Energy of the head's gradient, its increments and their z-score with the threshold; one mark a computed gradient,
    by what was decided."""
    style.need(updates, ["energy"], "updates", "the trainer records it for every computed gradient")
    gated = updates["z"].null_count() < updates.height
    panels = (("energy", "energy ‖G‖²"), ("increment", "increment"), ("z", "z of increment"))[: 3 if gated else 2]
    fig = make_subplots(len(panels), 1, shared_xaxes=True, vertical_spacing=0.055)
    kinds = (
        ("applied", pl.col("applied") & ~pl.col("stop"), style.BLUE, "circle", 6),
        ("applied, then reuse stopped", pl.col("applied") & pl.col("stop"), style.AMBER, "square", 8),
        ("discarded", ~pl.col("applied"), style.VERMILION, "x", 9),
    )
    for row, (name, label) in enumerate(panels, 1):
        fig.add_scatter(
            x=updates["update"].to_list(),
            y=updates[name].cast(pl.Float64).to_list(),
            mode="lines",
            line=dict(color="#b8c4cf", width=1.2),
            hoverinfo="skip",
            showlegend=False,
            row=row,
            col=1,
        )
        for kind, where, colour, symbol, size in kinds:
            part = updates.filter(where)
            if part.is_empty():
                continue
            first = part["reuse"] == 1
            fig.add_scatter(
                x=part["update"].to_list(),
                y=part[name].cast(pl.Float64).to_list(),
                mode="markers",
                name=f"{kind} ({part.height})",
                legendgroup=kind,
                showlegend=row == 1,
                marker=dict(
                    symbol=symbol,
                    size=size,
                    color=["#ffffff" if f and kind == "applied" else colour for f in first],
                    line=dict(color=colour, width=1.4),
                ),
                customdata=part.select("step", "reuse", "energy").rows(),
                hovertemplate=f"update %{{x}}: {kind}<br>step %{{customdata[0]}}, use %{{customdata[1]}} of its "
                f"batch<br>energy %{{customdata[2]:.3g}}, {label} %{{y:.3g}}<extra></extra>",
                row=row,
                col=1,
            )
        fig.update_yaxes(title_text=label, row=row)
    _batches(fig, updates, len(panels))
    threshold = updates["threshold"].drop_nulls()
    if gated and len(threshold):
        fig.add_hline(y=threshold[0], line=dict(color=style.VERMILION, width=1.4, dash="dash"), row=3, col=1)
    for row in range(2, len(panels) + 1):
        fig.add_hline(y=0, line=dict(color="#9aa5b1", width=1), row=row, col=1)
    style.dress(
        fig,
        "When did the head's gradient jump, and what was done?",
        (
            f"Gate at z > {threshold[0]:g}, armed once its window is full and never on a batch's first use (hollow). "
            f"{'Bands tell rollout batches apart.' if updates['reuse'].max() > 1 else ''}"
            if gated
            else "No gate scored this run: every computed gradient was decided without a z-score."
        ),
        height=150 * len(panels),
    )
    fig.update_yaxes(exponentformat="power", row=2)
    fig.update_yaxes(**style.log_ticks(updates["energy"].to_list()), row=1)
    fig.update_xaxes(title_text="computed gradient (update)", row=len(panels))
    return fig


def reuse_frame(updates: pl.DataFrame) -> pl.DataFrame:
    """One row a batch: step, computed (gradients), applied, discarded, stopped (whether reuse was cut short)."""
    return (
        updates.group_by("step")
        .agg(
            pl.len().alias("computed"),
            pl.col("applied").sum().cast(pl.Int64).alias("applied"),
            (~pl.col("applied")).sum().cast(pl.Int64).alias("discarded"),
            pl.col("stop").any().alias("stopped"),
        )
        .sort("step")
    )


def reuse(updates: pl.DataFrame) -> go.Figure:
    """How many updates each rollout batch gave: applied, and computed but discarded."""
    style.need(updates, ["applied"], "updates", "the trainer records it for every computed gradient")
    frame = reuse_frame(updates)
    fig = go.Figure()
    for name, colour in (("applied", style.BLUE), ("discarded", style.VERMILION)):
        fig.add_bar(
            x=frame["step"].to_list(),
            y=frame[name].to_list(),
            name=f"{name} ({frame[name].sum()})",
            marker=dict(color=colour),
            hovertemplate=f"step %{{x}}: %{{y}} {name}<extra></extra>",
        )
    mean = frame["applied"].mean()
    fig.add_hline(y=mean, line=dict(color=style.INK, width=1.4, dash="dash"))
    style.dress(
        fig,
        "How often was each rollout batch used?",
        f"{mean:.2f} applied updates a batch on average (dashed); reuse was cut short in "
        f"{frame['stopped'].sum()} of {frame.height} batches. A new batch costs rollouts, a reused one does not.",
        height=220,
    )
    fig.update_layout(barmode="stack", bargap=0.2, legend_traceorder="normal")
    fig.update_xaxes(title_text="training step (rollout batch)", showgrid=False)
    fig.update_yaxes(title_text="gradients", dtick=1 if frame["computed"].max() < 10 else None, rangemode="tozero")
    return fig


SIGNALS = {
    "energy": "head energy",
    "grad_norm": "global gradient norm",
    "kl": "KL from the sampler (nats)",
    "chi2": "χ² from the sampler",
    "clip_fraction": "clipped tokens",
}


def signals(updates: pl.DataFrame) -> go.Figure:
    """The head's energy beside what else could have warned: global gradient norm, KL, chi-square, clipped share."""
    names = [n for n in SIGNALS if n in updates.columns and updates[n].null_count() < updates.height]
    style.need(updates, names, "updates", "the trainer records these for every computed gradient")
    fig = make_subplots(
        len(names), 1, shared_xaxes=True, vertical_spacing=0.055, subplot_titles=[SIGNALS[n] for n in names]
    )
    dropped = updates.filter(~pl.col("applied"))["update"].to_list()
    for row, name in enumerate(names, 1):
        fig.add_scatter(
            x=updates["update"].to_list(),
            y=updates[name].to_list(),
            mode="lines",
            line=dict(color=style.VERMILION if name == "energy" else style.BLUE, width=1.6),
            name=SIGNALS[name],
            hovertemplate=f"update %{{x}}: {SIGNALS[name]} %{{y:.3g}}<extra></extra>",
            row=row,
            col=1,
        )
        values = dict(updates.select("update", name).rows())
        fig.add_scatter(
            x=dropped,
            y=[values[u] for u in dropped],
            mode="markers",
            marker=dict(symbol="x", size=7, color=style.INK),
            showlegend=False,
            hoverinfo="skip",
            row=row,
            col=1,
        )
    style.dress(
        fig,
        "Would another signal have told the same?",
        "One point a computed gradient; a cross marks one that was discarded. On a batch's first use the policy still "
        "is the sampler, so KL, χ² and clipping are 0 there.",
        height=104 * len(names),
        legend=False,
        panel_titles=True,
    )
    style.panel_titles(fig)
    _batches(fig, updates, len(names))
    fig.update_yaxes(exponentformat="power", nticks=4)
    for row, name in enumerate(names, 1):
        fig.update_yaxes(**style.flat_axis(updates[name].to_list()), row=row)
    fig.update_xaxes(title_text="computed gradient (update)", row=len(names))
    return fig
