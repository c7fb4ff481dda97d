"""Which method is better, and is the difference more than chance? Several runs on one panel of games.

Every function takes the evals tables of the runs in one frame, with three columns more: method, seed, run. All runs
must have played the same games.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from ..errors import WorkbenchError, unknown
from . import style
from .curves import band, rates

ENOUGH_SEEDS = 3  # below this, an interval over seeds says too little for a winner to be named


def gather(runs: Iterable[tuple[str, int, str, pl.DataFrame]]) -> pl.DataFrame:
    """(method, seed, name, evals table) of each run -> one frame. WorkbenchError where none is given."""
    frames = [evals.with_columns(method=pl.lit(m), seed=pl.lit(s), run=pl.lit(r)) for m, s, r, evals in runs]
    if not frames:
        raise WorkbenchError(
            "compare: no runs were given; name their folders in `runs` or their parent in `experiment`"
        )
    return pl.concat(frames, how="vertical_relaxed")


def pick_control(frame: pl.DataFrame, control: str = "") -> str:
    """The named control method, else grpo where it is among the runs, else the first by name."""
    methods = frame["method"].unique().sort().to_list()
    if control and control not in methods:
        raise unknown("control method", control, methods)
    return control or ("grpo" if "grpo" in methods else methods[0])


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on the parameters that runs differ in besides method, its options and seed: none where they match."""
    apart = {"method", "method_options", "seed", "run_dir", "experiment"}
    names = sorted({n for c in configs for n in c} - apart)
    values = {n: sorted({json.dumps(c.get(n), default=str) for c in configs}) for n in names}
    return [
        f"Beware: the runs differ in {n} too ({' / '.join(v)}), not in method and seed alone."
        for n, v in values.items()
        if len(v) > 1
    ]


def describe(frame: pl.DataFrame, panel: str = "", control: str = "grpo") -> list[str]:
    """What is compared: methods, seeds, games, the last step that all runs share."""
    rows = _panel(frame, panel)
    counts = rows.group_by("method").agg(pl.col("run").n_unique().alias("n")).sort("method").rows()
    listed = ", ".join(f"{m} ({n} run{'s' * (n > 1)})" for m, n in counts)
    return [
        f"{listed}; panel {rows['panel'][0]}, {rows['task'].n_unique()} games, compared at step "
        f"{last_shared_step(rows)}.",
        f"The control is {control}.",
    ]


def by_method(frame: pl.DataFrame, panel: str = "", step: int = -1) -> pl.DataFrame:
    """method, success: the mean over a method's runs at the compared step."""
    return finals(frame, panel, step).group_by("method").agg(pl.col("success").mean()).sort("method")


def _panel(frame: pl.DataFrame, panel: str) -> pl.DataFrame:
    """The student's games on one panel ("" is the first), after a check that every run played the same ones."""
    style.need(frame, ["outcome", "method", "seed", "run"], "evals", "compare needs runs that were evaluated")
    known = frame["panel"].unique(maintain_order=True).to_list()
    panel = panel or known[0]
    if panel not in known:
        raise unknown("panel", panel, known)
    rows = frame.filter(pl.col("panel") == panel, pl.col("role") == "student")
    games = rows.group_by("run").agg(pl.col("task").unique().sort().alias("tasks"))
    if games["tasks"].n_unique() > 1:
        names = ", ".join(games.sort("run")["run"].to_list()[:4])
        raise WorkbenchError(f"compare: runs {names} played different games on panel {panel}; give them one eval_seed")
    return rows


def last_shared_step(frame: pl.DataFrame) -> int:
    """The last step at which every run was evaluated; WorkbenchError where there is none."""
    steps = [set(part["step"].to_list()) for _, part in frame.group_by("run")]
    shared = set.intersection(*steps)
    if not shared:
        raise WorkbenchError("compare: the runs share no evaluated step; give them one eval_every")
    return max(shared)


def finals(frame: pl.DataFrame, panel: str = "", step: int = -1) -> pl.DataFrame:
    """One row a run at the last step all share, or `step`: method, seed, run, step, n, won, success, low, high."""
    rows = _panel(frame, panel)
    rows = style.pick(rows, "evals", step=last_shared_step(rows) if step < 0 else step)
    return rates(rows, ("method", "seed", "run", "step"))


def _games(rows: pl.DataFrame, method: str) -> np.ndarray:
    """(seeds, games) outcomes of one method, games in one order."""
    part = rows.filter(pl.col("method") == method).sort("run", "episode", "task")
    return np.stack([p["outcome"].to_numpy() for _, p in part.group_by("run", maintain_order=True)]).astype(float)


def _resampled(games: np.ndarray, seeds: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """(R,) mean success under R draws of seeds (R,S) and games (R,T)."""
    by_seed = games[:, picks].mean(2).T
    centre = by_seed.mean(1, keepdims=True)
    n = games.shape[0]
    # A bootstrap of n seeds spreads by (n - 1) / n too little; that matters at 3 seeds.
    wide = centre + (by_seed - centre) * (np.sqrt(n / (n - 1)) if n > 1 else 1.0)
    return np.take_along_axis(wide, seeds, 1).mean(1)


def differences(
    frame: pl.DataFrame, control: str = "grpo", panel: str = "", step: int = -1, resamples: int = 4000, seed: int = 0
) -> pl.DataFrame:
    """One row a method but the control: method, seeds, control_seeds, games, success, control, difference, low, high.

    The 95 % interval is a percentile bootstrap that draws seeds of either method and games of the panel together
    (games are the same for both), with deviations between seeds widened by sqrt(n / (n - 1)). With one seed it covers
    the draw of games alone. Measured on 600 made-up comparisons of a method with itself, 3 seeds, 96 games, seeds
    apart by 0 to 8 points: zero fell outside in 0 to 8 % (a plain bootstrap over seeds: 17 to 19 %).
    """
    rows = _panel(frame, panel)
    rows = style.pick(rows, "evals", step=last_shared_step(rows) if step < 0 else step)
    methods = rows["method"].unique().sort().to_list()
    if control not in methods:
        raise unknown("control method", control, methods)
    base, out = _games(rows, control), []
    for method in methods:
        if method == control:
            continue
        games, rng = _games(rows, method), np.random.default_rng(seed)
        picks = rng.integers(0, base.shape[1], (resamples, base.shape[1]))
        draws = [_resampled(g, rng.integers(0, len(g), (resamples, len(g))), picks) for g in (games, base)]
        low, high = np.quantile(draws[0] - draws[1], [0.025, 0.975])
        out.append(
            {
                "method": method,
                "seeds": len(games),
                "control_seeds": len(base),
                "games": base.shape[1],
                "success": games.mean(),
                "control": base.mean(),
                "difference": games.mean() - base.mean(),
                "low": low,
                "high": high,
            }
        )
    schema = {"method": pl.String, "seeds": pl.Int64, "control_seeds": pl.Int64, "games": pl.Int64}
    floats = ("success", "control", "difference", "low", "high")
    return pl.DataFrame(out, schema=schema | dict.fromkeys(floats, pl.Float64))


def _points(value: float) -> str:
    return style.number(100 * value, "+.1f")


def verdict(frame: pl.DataFrame, control: str = "grpo", panel: str = "", step: int = -1) -> list[str]:
    """What the runs show, one plain sentence a method. No winner is named where the interval includes zero, nor on
    fewer than three seeds of either method."""
    table = differences(frame, control, panel, step)
    if table.is_empty():
        return [f"Only {control} was run, so there is nothing to compare it with."]
    out = []
    for row in table.to_dicts():
        few = min(row["seeds"], row["control_seeds"])
        head = (
            f"{row['method']} wins {style.percent(row['success'], 1)} of {row['games']} games over {row['seeds']} "
            f"seed{'s' * (row['seeds'] > 1)}, {control} {style.percent(row['control'], 1)} over "
            f"{row['control_seeds']}: {_points(row['difference'])} points, "
            f"95 % interval {_points(row['low'])} to {_points(row['high'])}"
        )
        if few == 1:
            tail = "; with one seed that covers the draw of games only, so no winner is named."
        elif row["low"] <= 0 <= row["high"]:
            tail = "; the interval includes zero, so no winner is named."
        elif few < ENOUGH_SEEDS:
            tail = f"; {few} seeds are too few for an interval to be trusted, so no winner is named."
        else:
            tail = f"; {row['method'] if row['difference'] > 0 else control} is ahead on this panel at this budget."
        out.append(head + tail)
    if table.height > 1:
        out.append(f"{table.height} methods are held against one control; the intervals are not corrected for that.")
    return out


def _colours(frame: pl.DataFrame, control: str) -> dict[str, str]:
    """The control in grey, the methods in the series' colours by name."""
    methods = [m for m in frame["method"].unique().sort() if m != control]
    return {control: style.MUTED} | {m: style.SERIES[i % len(style.SERIES)] for i, m in enumerate(methods)}


def curves(frame: pl.DataFrame, panel: str = "", control: str = "grpo") -> go.Figure:
    """Success over training, a line a method: the mean over its seeds, the band from the worst to the best seed."""
    rows = _panel(frame, panel)
    runs = rates(rows, ("method", "seed", "run", "step"))
    fig = go.Figure()
    for method, colour in _colours(rows, control).items():
        part = runs.filter(pl.col("method") == method)
        if part.is_empty():
            continue
        ends = (
            pl.col("success").mean().alias("mean"),
            pl.col("success").min().alias("low"),
            pl.col("success").max().alias("high"),
        )
        line = part.group_by("step").agg(*ends, pl.len().alias("runs")).sort("step")
        seeds, x = part["run"].n_unique(), line["step"].to_list()
        if seeds > 1:
            band(fig, x, line["low"].to_list(), line["high"].to_list(), colour, style.escape(method))
        fig.add_scatter(
            x=x,
            y=line["mean"].to_list(),
            mode="lines+markers",
            name=f"{style.escape(method)} ({seeds} seed{'s' * (seeds > 1)})",
            legendgroup=style.escape(method),
            line=dict(color=colour, width=2.6),
            marker=dict(size=6),
            customdata=line.select("low", "high", "runs").rows(),
            hovertemplate=f"{style.escape(method)}, step %{{x}}: %{{y:.1%}}<br>seeds %{{customdata[0]:.1%}} to "
            "%{customdata[1]:.1%} (%{customdata[2]} runs)<extra></extra>",
        )
    style.dress(
        fig,
        "Which method learns faster on games it was not trained on?",
        f"Panel {rows['panel'][0]}, {rows['task'].n_unique()} games, the same for every run. Line: mean over seeds; "
        "band: worst to best seed, which is not a confidence interval.",
        height=330,
    )
    fig.update_xaxes(title_text="training step")
    fig.update_yaxes(title_text="success rate", tickformat=".0%", range=[0, 1.02])
    return fig


def final_figure(frame: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1) -> go.Figure:
    """Final success: a small point a run with its 95 % Wilson interval, a bar at each method's mean."""
    table = finals(frame, panel, step)
    colours = _colours(table, control)
    fig, labels = go.Figure(), []
    for place, (method, colour) in enumerate(colours.items()):
        part = table.filter(pl.col("method") == method).sort("seed")
        labels.append(f"{style.escape(method)}  ")
        if part.is_empty():
            continue
        n = part.height
        at = [place + (i - (n - 1) / 2) * min(0.16, 0.6 / n) for i in range(n)]
        fig.add_scatter(
            x=part["success"].to_list(),
            y=at,
            mode="markers",
            name=style.escape(method),
            marker=dict(size=8, color=colour),
            error_x=dict(
                type="data",
                array=(part["high"] - part["success"]).to_list(),
                arrayminus=(part["success"] - part["low"]).to_list(),
                thickness=1.3,
                width=3,
                color=colour,
            ),
            customdata=part.select("seed", "won", "n", "low", "high").rows(),
            hovertemplate=f"{style.escape(method)}, seed %{{customdata[0]}}: %{{x:.1%}}<br>%{{customdata[1]}} of "
            "%{customdata[2]} games, 95 % interval %{customdata[3]:.1%} to %{customdata[4]:.1%}<extra></extra>",
        )
        mean = part["success"].mean()
        fig.add_shape(type="line", x0=mean, x1=mean, y0=place - 0.4, y1=place + 0.4, line=dict(color=colour, width=3))
        fig.add_annotation(
            x=1.0,
            xref="paper",
            xanchor="left",
            y=place,
            text=f"  {style.percent(mean, 1)} (n = {n})",
            showarrow=False,
            font=dict(size=12, color=style.INK),
        )
    style.dress(
        fig,
        "Where did each run end?",
        f"Step {table['step'][0]}, {table['n'][0]} games a run. Points: runs (one a seed) with 95 % Wilson intervals "
        "over games; upright bars and numbers: means over seeds.",
        height=max(64 * len(labels), 110),
        legend=False,
        right=110,
    )
    fig.update_xaxes(title_text="success rate", tickformat=".0%", range=[0, 1.0])
    names = dict(tickvals=list(range(len(labels))), ticktext=labels, tickfont=dict(size=13, color=style.INK))
    fig.update_yaxes(range=[len(labels) - 0.45, -0.55], showgrid=False, ticks="", **names)
    return fig


def difference_figure(frame: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1) -> go.Figure:
    """Each method's final success less the control's, with a 95 % bootstrap interval; grey where no winner is named."""
    table = differences(frame, control, panel, step)
    colours, fig = _colours(frame, control), go.Figure()
    fig.add_vline(x=0, line=dict(color=style.INK, width=1.4))
    for place, row in enumerate(table.to_dicts()):
        few = min(row["seeds"], row["control_seeds"])
        named = few >= ENOUGH_SEEDS and not row["low"] <= 0 <= row["high"]
        colour = colours[row["method"]] if named else "#9aa5b1"
        fig.add_scatter(
            x=[100 * row["low"], 100 * row["high"]],
            y=[place, place],
            mode="lines",
            line=dict(color=colour, width=5),
            hoverinfo="skip",
        )
        fig.add_scatter(
            x=[100 * row["difference"]],
            y=[place],
            mode="markers",
            name=style.escape(row["method"]),
            marker=dict(size=13, color=colour, line=dict(color="#ffffff", width=2)),
            hovertext=[
                f"{style.escape(row['method'])} less {style.escape(control)}: {_points(row['difference'])} points<br>"
                f"95 % interval {_points(row['low'])} to {_points(row['high'])}<br>"
                f"{row['seeds']} and {row['control_seeds']} seeds, {row['games']} games"
            ],
            hoverinfo="text",
        )
        fig.add_annotation(
            x=1.0,
            xref="paper",
            xanchor="left",
            y=place,
            text=f"  {_points(row['difference'])} (n = {row['seeds']}, {row['control_seeds']})",
            showarrow=False,
            font=dict(size=12, color=style.INK),
        )
    limit = 112 * max([0.05] + [abs(v) for v in table["low"].to_list() + table["high"].to_list()])
    style.dress(
        fig,
        f"Is any method ahead of {control} by more than chance?",
        "Points of success over the control, with a 95 % bootstrap interval over seeds and games; n: seeds of the "
        f"method and of the control. Grey: the interval includes zero, or fewer than {ENOUGH_SEEDS} seeds.",
        height=max(54 * table.height, 90),
        legend=False,
        right=130,
    )
    fig.update_xaxes(title_text="difference in success rate (points)", tickformat="+.0f", range=[-limit, limit])
    labels = [f"{style.escape(m)}  " for m in table["method"]]
    names = dict(tickvals=list(range(len(labels))), ticktext=labels, tickfont=dict(size=13, color=style.INK))
    fig.update_yaxes(range=[len(labels) - 0.45, -0.55], showgrid=False, ticks="", **names)
    return fig
