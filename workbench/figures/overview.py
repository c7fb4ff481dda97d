"""A run at a glance, from its tables alone: the curves, and the four signals (beliefs, pivotal turns, gates, head)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import polars as pl

from ..errors import WorkbenchError
from ..runs import RunFolder
from . import beliefs, curves, evidence, gates, lm_head, replay

TABLES = ("steps", "evals", "episodes", "turns", "updates", "modules")
_UNREAD = ("pieces", "token_ids", "context_ids", "response", "advantage", "dloss_dlogp", "entropy")  # of turns


@dataclass(frozen=True)
class View:
    """What one signal shows: figures, or the reason why there are none."""

    title: str
    figures: tuple[go.Figure, ...]
    reason: str = ""


def tables(run: RunFolder) -> dict[str, pl.DataFrame]:
    """The tables that the views are drawn from, those that the run has, without the columns that none of them reads."""
    found = {name: run.scan(name) for name in TABLES if name in run.tables}
    if "turns" in found:
        found["turns"] = found["turns"].drop(_UNREAD, strict=False)
    return {name: scan.collect() for name, scan in found.items()}


def views(found: Mapping[str, pl.DataFrame]) -> list[View]:
    """The curves and the four signals; views whose tables the run does not have are left out."""
    made = (
        _view("Curves", found, (_success, "evals", "steps"), (curves.health, "steps")),
        _view("Beliefs", found, (_paths, "turns", "episodes"), (_saturation, "turns", "episodes")),
        _view("Pivotal turns", found, (_revisions, "turns", "episodes"), (_turn_bars, "turns", "episodes")),
        _view("Token gates", found, (gates.gap_distribution, "turns", "episodes"),
              (gates.over_training, "turns", "episodes")),
        _view("Output head", found, (lm_head.changes, "modules"), (lm_head.gate, "updates")),
    )  # fmt: skip
    return [view for view in made if view.figures or view.reason]


def _view(title: str, found: Mapping[str, pl.DataFrame], *plans: tuple[Any, ...]) -> View:
    figures, reason = [], ""
    for draw, *names in plans:
        if not set(names) <= set(found):
            continue
        try:
            figures.append(draw(*(found[name] for name in names)))
        except WorkbenchError as error:
            reason = reason or str(error)
        except pl.exceptions.PolarsError:
            reason = reason or f"{', '.join(names)}: not the columns that a run of the trainer has"
    return View(title, tuple(figures), "" if figures else reason)


def _success(evals: pl.DataFrame, steps: pl.DataFrame) -> go.Figure:
    return curves.success(evals, steps)


def _chosen(draw: Callable[..., go.Figure]) -> Callable[[pl.DataFrame, pl.DataFrame], go.Figure]:
    """A figure of the group and the episode that the run's clearest pivotal turn is in."""

    def of(turns: pl.DataFrame, episodes: pl.DataFrame) -> go.Figure:
        turns = replay.beliefs_of(turns, episodes)
        return draw(turns, episodes, *beliefs.choose(turns, episodes))

    return of


_paths = _chosen(lambda turns, heads, step, group, one: beliefs.paths(turns, heads, step, group, highlight=one))
_revisions = _chosen(lambda turns, heads, step, group, _: beliefs.revisions(turns, heads, step, group))
_turn_bars = _chosen(lambda turns, heads, step, _, one: beliefs.turn_bars(turns, heads, step, one))


def _saturation(turns: pl.DataFrame, episodes: pl.DataFrame) -> go.Figure:
    return evidence.saturation(replay.beliefs_of(turns, episodes), episodes)
