"""The look every figure shares: one template, one palette, and the only way text from a rollout gets into a figure."""

import html
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

import plotly.graph_objects as go
import polars as pl

from ..errors import WorkbenchError

WIDTH = 880

# Okabe and Ito's colour-blind-safe set. Blue is what counts for an outcome, vermilion what counts against it.
INK, MUTED, GRID, PAPER = "#1f2933", "#66727f", "#e4e8ec", "#ffffff"
BLUE, VERMILION, GREEN, PURPLE, SKY, AMBER = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#56b4e9", "#e69f00"
SUCCESS, FAILURE = BLUE, VERMILION
SERIES = (BLUE, VERMILION, GREEN, PURPLE, AMBER, SKY, "#5b5b5b", "#882255")
DIVERGING = ((0.0, "#b34a00"), (0.25, "#f0a868"), (0.5, "#f6f6f4"), (0.75, "#7fb8dc"), (1.0, "#00588a"))
DEPTH = ((0.0, "#c3d7e6"), (0.5, "#6f9fc0"), (1.0, "#2d5f85"))

SANS = '"Inter", "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", sans-serif'
MONO = '"JetBrains Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace'


def _template() -> go.layout.Template:
    axis = dict(
        gridcolor=GRID,
        linecolor="#c6ccd3",
        zeroline=False,
        zerolinecolor="#9aa5b1",
        zerolinewidth=1,
        ticks="outside",
        ticklen=4,
        tickcolor="#c6ccd3",
        tickfont=dict(size=12, color=MUTED),
        title=dict(font=dict(size=13, color=INK), standoff=8),
        automargin=True,
    )
    return go.layout.Template(
        layout=dict(
            paper_bgcolor=PAPER,
            plot_bgcolor=PAPER,
            colorway=SERIES,
            font=dict(family=SANS, size=13, color=INK),
            hoverlabel=dict(
                bgcolor="#ffffff",
                bordercolor="#9aa5b1",
                font=dict(family=SANS, size=12, color=INK),
                align="left",
                namelength=-1,
            ),
            legend=dict(
                orientation="h",
                x=0,
                xanchor="left",
                yanchor="bottom",
                bgcolor="rgba(0,0,0,0)",
                font=dict(size=12, color=INK),
                itemsizing="trace",
                title=dict(font=dict(size=12, color=MUTED)),
            ),
            xaxis=axis,
            yaxis=axis,
            hovermode="closest",
            colorscale=dict(diverging=[list(c) for c in DIVERGING]),
        )
    )


TEMPLATE = _template()


def dress(
    fig: go.Figure,
    title: str,
    subtitle: str = "",
    *,
    height: int = 420,
    legend: bool = True,
    panel_titles: bool = False,
    left: int = 70,
    right: int = 24,
    bottom: int = 58,
) -> go.Figure:
    """Give a figure the house look: a title that states the question, a wrapped subtitle, a legend above the data.

    `height` is the height in px of the data area; the heading, legend and axis titles are added to it. Title and
    subtitle are plain text; escaped, they are kept in `layout.meta` too.
    """
    lines = [escape(line) for line in textwrap.wrap(subtitle, 146)]
    rows = _legend_rows(fig) if legend else 0
    top = 54 + 19 * len(lines) + (8 + 22 * rows if legend else 0) + (26 if panel_titles else 0)
    total = top + height + bottom
    small = f'<br><span style="font-size:12.5px;color:{MUTED}">{"<br>".join(lines)}</span>' if lines else ""
    heading = dict(
        text=f'<b style="font-size:17px">{escape(title)}</b>{small}',
        x=0,
        xref="container",
        xanchor="left",
        pad=dict(l=16),
        y=1 - 25 / total,
        yref="container",
        yanchor="top",
        font=dict(size=14.5, color=INK),
    )
    above = 10 + (26 if panel_titles else 0)
    fig.update_layout(
        template=TEMPLATE,
        width=WIDTH,
        height=total,
        title=heading,
        margin=dict(l=left, r=right, t=top, b=bottom),
        showlegend=legend,
        legend=dict(y=1 + above / height),
        meta=dict(title=escape(title), subtitle=" ".join(lines)),
    )
    return fig


def _legend_rows(fig: go.Figure) -> int:
    """Lines that the legend will take, from the length of its labels."""
    used, rows = 0.0, 1
    for trace in fig.data:
        if trace.showlegend is False or not trace.name:
            continue
        width = 48 + 6.7 * len(html.unescape(trace.name))
        if used and used + width > WIDTH - 110:
            used, rows = 0.0, rows + 1
        used += width
    return rows


def panel_titles(fig: go.Figure) -> None:
    """Set subplot titles to the left and small. They are the annotations make_subplots leaves at the panels' tops."""
    columns = {}
    for axis in fig.select_xaxes():
        columns[round(sum(axis.domain) / 2, 6)] = axis.domain[0]
    for note in fig.layout.annotations:
        if note.yref == "paper" and note.xref == "paper":
            note.update(
                x=columns.get(round(note.x, 6), note.x), xanchor="left", font=dict(size=13, color=INK), yshift=3
            )


def flat_axis(values: Iterable[float | None]) -> dict:
    """Axis settings for values that do not move (or lie within rounding of zero): a window around them, one label.
    Nothing to set where they move."""
    found = [0.0 if abs(v) < 1e-9 else v for v in values if v is not None and math.isfinite(v)]
    if not found or min(found) != max(found):
        return {}
    room = abs(found[0]) / 2 or 1.0
    return dict(range=[found[0] - room, found[0] + room], tickvals=[found[0]], ticktext=[f"{found[0]:.4g}"])


def log_ticks(values: Iterable[float | None], percent: bool = False) -> dict:
    """A log axis with plain labels at 1, 2 and 5 times powers of ten (powers alone over more than two decades)."""
    found = [v for v in values if v is not None and math.isfinite(v) and v > 0]
    low, high = math.log10(min(found, default=1.0)), math.log10(max(found, default=1.0))
    pad = max(0.05 * (high - low), 0.03)
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    at = [m * 10.0**e for e in range(math.floor(low) - 1, math.ceil(high) + 1) for m in steps]
    at = [v for v in at if low - pad <= math.log10(v) <= high + pad]
    return dict(
        type="log",
        range=[low - pad, high + pad],
        tickvals=at,
        ticktext=[f"{100 * v:g}%" if percent else f"{v:g}" for v in at],
    )


def escape(text: str) -> str:
    """Text for a plotly label, where a few HTML tags, TeX between dollar signs and %{...} would otherwise be live."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029\u202a-\u202e\u2066-\u2069]", "\N{REPLACEMENT CHARACTER}", text)
    return html.escape(text, quote=False).replace("$", "&#36;").replace("%{", "&#37;{")


def shorten(text: str | None, width: int) -> str:
    """One line of at most `width` characters, escaped."""
    line = " ".join((text or "").split())
    return escape(line if len(line) <= width else line[: width - 1] + "…")


def wrap(text: str | None, width: int = 64, lines: int = 5) -> str:
    """Several escaped lines joined by <br>, cut after `lines`."""
    out = [piece for part in (text or "").splitlines() for piece in textwrap.wrap(part, width)]
    if len(out) > lines:
        out = out[:lines]
        out[-1] = out[-1][: width - 1] + "…"
    return "<br>".join(map(escape, out)) or "–"


def number(value: float | None, spec: str = "+.3f") -> str:
    """A number as read in a table: a dash where there is none, a true minus sign."""
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, spec).replace("-", "−")


def percent(value: float | None, digits: int = 0) -> str:
    """A share in percent; shares under one percent keep a digit, so that few is not told as none."""
    return (
        "–"
        if value is None or not math.isfinite(value)
        else f"{100 * value:.{digits or int(0 < abs(value) < 0.01)}f} %"
    )


def mix(colour: str, other: str, share: float) -> str:
    """A hex colour `share` of the way from one to the other."""
    a, b = (tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in (colour, other))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(a, b, strict=True))


def shade(value: float, scale: Sequence[tuple[float, str]]) -> str:
    """Colour of a value in [0, 1] on a scale of (position, colour)."""
    value = min(max(value, 0.0), 1.0)
    for (x0, c0), (x1, c1) in zip(scale, scale[1:], strict=False):
        if value <= x1:
            return mix(c0, c1, (value - x0) / (x1 - x0))
    return scale[-1][1]


def diverging(value: float | None, limit: float) -> str:
    """Colour of a signed value: white at zero, blue up to +limit, orange down to -limit, grey where there is none."""
    if value is None or not math.isfinite(value):
        return "#eceef0"
    return shade(0.5 + 0.5 * max(-1.0, min(1.0, value / limit if limit else 0.0)), DIVERGING)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on the colour."""
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * r + 0.587 * g + 0.114 * b > 140 else "#ffffff"


def spread(values: Iterable[float | None], share: float = 0.98, floor: float = 1e-9) -> float:
    """A symmetric colour limit: the given quantile of |value|, so that one outlier does not bleach the rest."""
    found = sorted(abs(v) for v in values if v is not None and math.isfinite(v))
    return max(found[min(len(found) - 1, int(share * len(found)))], floor) if found else floor


def need(frame: pl.DataFrame, columns: Sequence[str], table: str, why: str) -> None:
    """Raise WorkbenchError where a column is absent or holds nothing but nulls, or the table has no rows."""
    missing = [c for c in columns if c not in frame.columns]
    if missing:
        raise WorkbenchError(f"{table}: no column {', '.join(missing)}; {why}")
    if frame.is_empty():
        raise WorkbenchError(f"{table}: no rows to draw; {why}")
    for name in columns:
        if frame[name].null_count() == frame.height:
            raise WorkbenchError(f"{table}: column {name} is empty in this run; {why}")


def pick(frame: pl.DataFrame, table: str, **where: int) -> pl.DataFrame:
    """The rows at given keys; WorkbenchError naming the nearest key where there are none."""
    for name, value in where.items():
        found = frame.filter(pl.col(name) == value)
        if found.is_empty():
            known = frame[name].unique().sort().to_list()
            near = min(known, key=lambda k: abs(k - value)) if known else "none"
            raise WorkbenchError(f"{table}: no {name} {value} here; nearest is {near} (of {len(known)} recorded)")
        frame = found
    return frame
