"""How does the cost of each stage grow with the size of its work? Seconds over sizes, and the power they grow by."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..errors import WorkbenchError
from . import style

COLUMNS = ("axis", "size", "stage", "seconds")
NAMES = {"context": "context, tokens", "vocabulary": "vocabulary, tokens"}


def local(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame by axis, stage and size, with `exponent`: the slope of log seconds over log size from the size before
    it, null at the first. frame: axis, size, stage, seconds, a row a measurement; raises WorkbenchError where columns
    lack, a number is not above 0 and finite, or a line has fewer than two sizes or one of them twice."""
    style.need(frame, COLUMNS, "scaling", "a row a measurement is expected: " + ", ".join(COLUMNS))
    line = ["axis", "stage"]
    try:
        numbers = frame.with_columns(pl.col("size", "seconds").cast(pl.Float64))
    except pl.exceptions.InvalidOperationError:
        raise WorkbenchError("scaling: size and seconds must be numbers") from None
    for name in ("size", "seconds"):
        good = pl.col(name).is_not_null() & pl.col(name).is_finite() & (pl.col(name) > 0)
        if not (wrong := numbers.filter(~good)).is_empty():
            axis, stage, value = wrong.select(*line, name).row(0)
            raise WorkbenchError(f"scaling: {axis}, {stage}: {name} must be above 0 and finite, got {value}")
    counts = numbers.group_by(line, maintain_order=True).agg(pl.len(), pl.col("size").n_unique().alias("sizes"))
    for axis, stage, count, sizes in counts.rows():
        if sizes < 2 or sizes != count:
            raise WorkbenchError(
                f"scaling: {axis}, {stage}: two or more sizes, each once, are expected; got {count} rows of {sizes}"
            )
    places = {name: {v: i for i, v in enumerate(frame[name].unique(maintain_order=True))} for name in line}
    order = [pl.col(name).replace_strict(places[name], return_dtype=pl.Int64) for name in line]
    slope = pl.col("seconds").log().diff() / pl.col("size").cast(pl.Float64).log().diff()
    return frame.select(COLUMNS).sort(*order, "size").with_columns(slope.over(line).alias("exponent"))


def exponents(frame: pl.DataFrame) -> pl.DataFrame:
    """A row an axis and stage: `exponent`, the slope of a least squares line through log seconds over log size, and
    `above`, the smallest size in it. It takes the upper half of the sizes, two at least: at small ones costs that do
    not grow hide the power."""
    out = []
    for (axis, stage), part in local(frame).group_by("axis", "stage", maintain_order=True):
        upper = part.tail(max(2, math.ceil(part.height / 2)))
        slope = np.polyfit(np.log(upper["size"].to_numpy()), np.log(upper["seconds"].to_numpy()), 1)[0]
        out.append((axis, stage, float(slope), upper["size"][0]))
    return pl.DataFrame(out, schema=["axis", "stage", "exponent", "above"], orient="row")


def figure(frame: pl.DataFrame, held: str = "") -> go.Figure:
    """A panel an axis with a line a stage, both scales logarithmic, and each stage's exponent above it. Filled points
    are those that the exponent is fitted to. held: what stays the same in the other panels, for the subtitle."""
    rows, powers = local(frame), exponents(frame)
    axes, stages = (rows[name].unique(maintain_order=True).to_list() for name in ("axis", "stage"))
    if len(stages) > len(style.SERIES):
        raise WorkbenchError(f"scaling: at most {len(style.SERIES)} stages can be told apart, got {len(stages)}")
    colours = dict(zip(stages, style.SERIES, strict=False))
    across = min(2, len(axes))
    down = math.ceil(len(axes) / across)
    titles = [_title(axis, powers.filter(pl.col("axis") == axis), colours) for axis in axes]
    fig = make_subplots(down, across, horizontal_spacing=0.09, vertical_spacing=0.25 / down, subplot_titles=titles)
    for i, axis in enumerate(axes):
        place, panel = dict(row=i // across + 1, col=i % across + 1), rows.filter(pl.col("axis") == axis)
        for stage, part in panel.group_by("stage", maintain_order=True):
            _line(fig, stage[0], part, powers, colours[stage[0]], stage[0] not in {t.name for t in fig.data}, place)
        sizes = panel["size"].unique().sort().to_list()
        fig.update_xaxes(type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes], **place)
    told = "An exponent is the slope over the filled points, the upper half of the sizes."
    style.dress(fig, "By what power does cost grow?", f"{told} {held}".strip(), height=240 * down, panel_titles=True)
    style.panel_titles(fig)
    fig.update_yaxes(**style.log_ticks(rows["seconds"]))
    fig.update_yaxes(title_text="CPU seconds", col=1)
    return fig


def _title(axis: str, powers: pl.DataFrame, colours: dict[str, str]) -> str:
    told = (
        f'<span style="color:{colours[stage]}">{style.escape(stage)} {style.number(power, ".2f")}</span>'
        for stage, power in powers.select("stage", "exponent").rows()
    )
    return f"<b>{style.escape(NAMES.get(axis, axis))}</b>   " + "   ".join(told)


def _line(
    fig: go.Figure, stage: str, part: pl.DataFrame, powers: pl.DataFrame, colour: str, first: bool, place: dict
) -> None:
    axis, name = part["axis"][0], style.escape(stage)
    above = powers.filter((pl.col("axis") == axis) & (pl.col("stage") == stage))["above"][0]
    fig.add_scatter(
        x=part["size"].to_list(), y=part["seconds"].to_list(), name=name, legendgroup=name, showlegend=first,
        mode="lines+markers", line=dict(color=colour, width=2), customdata=_told(part["exponent"].to_list()),
        marker=dict(
            size=7, color=[colour if size >= above else style.PAPER for size in part["size"]],
            line=dict(color=colour, width=1.5),
        ),
        hovertemplate=f"{name}, {style.escape(axis)} %{{x:,}}: %{{y:.3g}} s%{{customdata}}<extra></extra>", **place,
    )  # fmt: skip


def _told(exponents: Sequence[float | None]) -> list[str]:
    return ["" if e is None else f"<br>from the size before by the power {style.number(e, '.2f')}" for e in exponents]
