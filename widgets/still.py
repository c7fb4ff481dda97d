"""The explorer as it stands, without a page: the list and one transcript as plain HTML, for an exported notebook."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from IPython.display import display

from workbench.figures import style
from workbench.figures.display import MARK
from workbench.signals import SIGNALS, Signal

from .explorer import Explorer

_CELL = "padding:2px 8px;border-bottom:1px solid #e4e8ec;text-align:left"
_COLUMNS = {
    "step": "d", "group": "d", "episode": "d", "outcome": "d", "return": ".3g", "advantage": "+.3f", "n_turns": "d",
    "n_tokens": "d", "revised": ".3f", "pivotal": "d",
}  # fmt: skip


def show(explorer: Explorer, rows: int = 12, tokens: int = 2000) -> None:
    """Display the first `rows` episodes of the list and the selected episode, at most `tokens` tokens of it."""
    page = f'<div {MARK}="text" style="max-width:880px">{listed(explorer, rows)}{transcript(explorer, tokens)}</div>'
    display({"text/html": page, "text/plain": f"{explorer!r}, shown without a page"}, raw=True)


def listed(explorer: Explorer, rows: int = 12) -> str:
    """The list's first episodes as an HTML table, the selected one bold."""
    found, chosen = explorer.episodes, explorer.selection.link
    names = [n for n in _COLUMNS if n in found.columns]
    body = "".join(_row(row, names, (chosen.step, chosen.episode)) for row in found.head(rows).iter_rows(named=True))
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
    more = f"<p>{found.height - rows} more episodes are not shown.</p>" if found.height > rows else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def transcript(explorer: Explorer, tokens: int = 2000) -> str:
    """The selected episode as HTML: what was seen, and what was said in cells coloured by the explorer's signal."""
    at, data = explorer.selection.link, explorer.data
    signal = next(s for s in SIGNALS if s.name == explorer.color)
    limit = data.scale(signal.name)["limit"]
    full = f"full colour at {style.number(limit, '.3g')} from {signal.centre or 0:g}, {signal.unit}"
    told = f"coloured by {signal.label} ({signal.meaning}; {full})" if limit else f"{signal.label} was not recorded"
    head = f"<p><b>Step {at.step}, episode {at.episode}</b>: {style.escape(told)}.</p>"
    turns = data.episode(at.step, at.episode)["turns"]
    if not turns:
        return head + "<p>The turns of this episode were not recorded.</p>"
    answer, (_, buffer) = data.window(at.step, at.episode, 0, turns[-1]["turn"], most=tokens)
    values = np.frombuffer(buffer, "<f4").reshape(len(answer["signals"]), -1)
    row = values[answer["signals"].index(signal.name)] if signal.name in answer["signals"] else np.full(tokens, np.nan)
    numbers = {turn["turn"]: turn for turn in turns}
    body = "".join(_turn(numbers[t["turn"]], t, _cells(t, row, signal, limit)) for t in answer["turns"])
    return head + body + ("<p>The rest is not shown.</p>" if answer["next"] else "")


def _row(row: Mapping[str, Any], names: list[str], chosen: tuple[int, int]) -> str:
    weight = ";font-weight:bold" if (row["step"], row["episode"]) == chosen else ""
    values = ((row[n], spec) for n, spec in _COLUMNS.items() if n in names)
    cells = (f'<td style="{_CELL}{weight}">{_number(value, spec)}</td>' for value, spec in values)
    return f"<tr>{''.join(cells)}</tr>"


def _number(value: float | None, spec: str) -> str:
    return style.number(value, "g" if spec == "d" else spec)


def _turn(numbers: Mapping[str, Any], turn: Mapping[str, Any], cells: str) -> str:
    facts = (("credit", "turn_advantage", "+.3f"), ("ΔB", "revision", "+.3f"), ("belief", "belief", ".3f"))
    told = ", ".join(f"{n} {style.number(numbers[k], spec)}" for n, k, spec in facts if numbers.get(k) is not None)
    flag = " ◆ pivotal" if numbers.get("pivotal") else ""
    small = f"color:{style.MUTED};font-size:12px"
    return (
        f'<div style="padding:6px 0;border-top:1px solid #e4e8ec">'
        f'<div style="{small}">turn {turn["turn"]}{flag}: {style.shorten(turn["observation"], 150)}</div>'
        f'<div style="font-family:monospace;line-height:1.7;white-space:pre-wrap">{cells}</div>'
        f'<div style="{small}">{told}</div></div>'
    )


def _cells(turn: Mapping[str, Any], row: np.ndarray, signal: Signal, limit: float | None) -> str:
    """A turn's cells as coloured spans; a cell of several tokens has the colour of their mean."""
    if not turn["cells"]:
        return style.escape(turn["response"] or turn["action"])
    starts = turn["starts"] or range(turn["first"], turn["first"] + turn["count"])
    edges = [start - turn["first"] + turn["offset"] for start in starts] + [turn["offset"] + turn["count"]]
    out = []
    for text, start, stop in zip(turn["cells"], edges, edges[1:], strict=False):
        colour = _colour(float(row[start:stop].mean()), signal, limit)
        shown = style.escape(text.replace("\n", "⏎\n"))
        out.append(f'<span style="background-color:{colour};color:{style.ink_on(colour)}">{shown}</span>')
    return "".join(out)


def _colour(value: float, signal: Signal, limit: float | None) -> str:
    if signal.centre is None and limit and math.isfinite(value):
        return style.shade(value / limit, ((0.0, "#ffffff"), (0.5, "#b9a6d8"), (1.0, "#4b2a86")))
    return style.diverging((value - (signal.centre or 0.0)) * (-1 if signal.flip else 1), limit or 0.0)
