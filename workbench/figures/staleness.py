"""What does a bound on staleness cost and buy? Ages of the samples trained on, and throughput against synchrony."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..errors import WorkbenchError
from ..staleness import Simulation
from . import style


def figure(*results: Simulation) -> go.Figure:
    """Left, the ages of the samples that each simulation trained on; right, its samples a second over those of the
    synchronous trainer, with how busy trainer and workers were. Raises WorkbenchError without a result."""
    if not results:
        raise WorkbenchError("staleness: there is no simulation to draw")
    titles = ["age of a sample when it is trained on", "samples a second, synchronous = 1"]
    fig = make_subplots(1, 2, column_widths=[0.58, 0.42], horizontal_spacing=0.12, subplot_titles=titles)
    names = _names(results)
    for i, (result, name) in enumerate(zip(results, names, strict=True)):
        colour = style.SERIES[i % len(style.SERIES)]
        counts, total = result.histogram, result.ages.size
        fig.add_bar(
            x=list(range(len(counts))), y=[n / total for n in counts], name=name, legendgroup=name,
            marker=dict(color=colour), customdata=counts, row=1, col=1,
            hovertemplate=f"{name}: %{{customdata}} samples of age %{{x}}, %{{y:.1%}}<extra></extra>",
        )  # fmt: skip
        fig.add_bar(
            x=[name], y=[result.speedup], legendgroup=name, showlegend=False, marker=dict(color=colour), row=1, col=2,
            text=[f"×{style.number(result.speedup, '.2f')}"], textposition="outside", cliponaxis=False,
            customdata=[[result.throughput, result.trainer_utilisation, result.worker_utilisation, result.dropped,
                         float(result.durations.mean())]],
            hovertemplate=f"{name}: %{{customdata[0]:.3g}} samples a second<br>trainer busy %{{customdata[1]:.0%}}, "
            "workers %{customdata[2]:.0%}<br>%{customdata[3]} rollouts dropped; those trained on took "
            "%{customdata[4]:.3g} s on average<extra></extra>",
        )  # fmt: skip
    fig.add_hline(y=1, line=dict(color=style.MUTED, width=1.2, dash="dot"), row=1, col=2)
    style.dress(fig, "How stale are the samples, and how much faster is the trainer?", _told(results),
                height=300, panel_titles=True)  # fmt: skip
    style.panel_titles(fig)
    fig.update_yaxes(title_text="share of samples", tickformat=".0%", rangemode="tozero", row=1, col=1)
    fig.update_xaxes(title_text="updates since its policy", dtick=1, row=1, col=1)
    fig.update_yaxes(range=[0, 1.15 * max(1.0, *(r.speedup for r in results))], row=1, col=2)
    fig.update_xaxes(showticklabels=False, ticks="", row=1, col=2)
    return fig


def _names(results: Sequence[Simulation]) -> list[str]:
    ways = {result.config.late for result in results}
    names = []
    for result in results:
        bound, late = result.config.max_staleness, result.config.late
        name = "synchronous" if bound == 0 else f"at most {bound}" + (f", {late}" if len(ways) > 1 else "")
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def _told(results: Sequence[Simulation]) -> str:
    c = results[0].config
    text = (
        f"Simulated: {c.workers} workers, rollouts of {c.rollout_seconds:g} s (median, log-normal with deviation "
        f"{c.tail:g}), batches of {c.batch}, {c.update_seconds:g} s an update, {c.updates} updates."
    )
    if any(r.config.late == "wait" for r in results):
        text += " Waiting: no update begins that would leave rollouts to grow too old."
    expected = c.rollout_seconds * math.exp(c.tail**2 / 2)
    for result in results:
        if result.dropped:
            bound, wasted = result.config.max_staleness, style.percent(result.wasted / result.busy)
            text += (
                f" Dropping, at most {bound}: {wasted} of the workers' time is thrown away, and rollouts trained on "
                f"took {result.durations.mean():.0f} s on average where all would take {expected:.0f} s."
            )
    return text
