"""The explorer: a run's episodes on the left, one of them token by token on the right, and what is selected in Python.

The page asks and this answers (explorer.js says what); nothing is sent that was not asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anywidget
import polars as pl
import traitlets

from workbench import links, notes, pages
from workbench.errors import WorkbenchError, unknown
from workbench.figures.style import pick
from workbench.links import Link
from workbench.runs import RunFolder
from workbench.signals import SIGNALS

from . import filters
from .data import RunData


@dataclass(frozen=True)
class Selection:
    """What the view shows, as frames: the row of the episode, its turns (the selected one where there is one), and the
    sampled tokens of those (the selected span where there is one)."""

    link: Link
    episode: pl.DataFrame
    turns: pl.DataFrame
    tokens: pl.DataFrame


class Explorer(anywidget.AnyWidget):
    """Explore a run folder in a notebook.

    `link` says where the view is, as workbench.links writes it, and moves it when set; `selection` is what is selected
    there, as polars frames. `color` is the signal that colours tokens; `filter`, `search` and `sort` ("return", or
    "-return" for descending) shape the list; `height` is in px. `notes` is the run's NoteBook.

        explorer = Explorer("runs/train/20250301T101500Z-1a2b3c4d")
        explorer.selection.tokens
        explorer.selection = 10, 3, 5  # step 10, episode 3, turn 5

    Raises WorkbenchError where the folder is no run with episodes and turns, or the link names nothing in it.
    """

    _esm = pages.module("explorer")
    _css = pages.stylesheet("explorer")

    link = traitlets.Unicode("").tag(sync=True)
    color = traitlets.Unicode("advantage").tag(sync=True)
    filter = traitlets.Unicode("").tag(sync=True)
    search = traitlets.Unicode("").tag(sync=True)
    sort = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(720).tag(sync=True)

    def __init__(self, run: RunFolder | str | Path, link: str | Link = "", **options: Any):
        self.run = run if isinstance(run, RunFolder) else RunFolder.open(run)
        self.data = RunData(self.run)
        self.notes = notes.NoteBook(self.run.path)
        if not options.get("filter") and (self.data.summaries["recorded"] == 0).any():
            options["filter"] = "recorded > 0"
        super().__init__(**options)
        self.link = str(link) or self._start()
        self.on_msg(self._hear)

    def __repr__(self) -> str:
        return f"Explorer({str(self.run.path)!r}, link={self.link!r})"

    # What is selected

    @property
    def selection(self) -> Selection:
        """The frames of what is selected now."""
        at = links.parse(self.link)
        turns = self.data.turns_frame(at.step, at.episode)
        return Selection(
            link=at,
            episode=pick(self.data.summaries, "episodes", step=at.step, episode=at.episode),
            turns=turns if at.turn is None else pick(turns, "turns", turn=at.turn),
            tokens=self.data.tokens_frame(
                at.step, at.episode, at.turn, None if at.start is None else (at.start, at.end)
            ),
        )

    @selection.setter
    def selection(self, place: str | Link | Sequence[int]) -> None:
        """Move the view: a link, or (step, episode), with a turn and a span's start and end after them or not."""
        if not isinstance(place, str | Link):
            if not isinstance(place, Sequence) or isinstance(place, bytes) or not 1 <= len(place) <= 5:
                raise WorkbenchError(
                    f"a selection is a link or (step, episode, turn, start, end), the last of which may be left out; "
                    f"got {str(place)[:80]!r}"
                )
            place = Link(self.run.path.name, *place)
        self.link = str(place)

    @property
    def episodes(self) -> pl.DataFrame:
        """The episodes that the list shows, filtered and sorted as it is, one row each."""
        return self.data.select(
            filters.parse(self.filter), self.search, self.sort.removeprefix("-"), self.sort.startswith("-")
        )

    def refresh(self) -> None:
        """Read the run anew, for one that goes on."""
        self.data.refresh()
        self.send({"event": "refreshed"})

    @traitlets.validate("link")
    def _valid_link(self, proposal: Mapping[str, Any]) -> str:
        return str(self._place(links.parse(proposal["value"]))) if proposal["value"] else self._start()

    @traitlets.validate("color")
    def _valid_color(self, proposal: Mapping[str, Any]) -> str:
        known = [s.name for s in SIGNALS]
        if proposal["value"] not in known:
            raise unknown("signal to colour tokens by", proposal["value"], known)
        return proposal["value"]

    @traitlets.validate("filter")
    def _valid_filter(self, proposal: Mapping[str, Any]) -> str:
        self.data.select(filters.parse(proposal["value"]))
        return proposal["value"]

    def _place(self, at: Link) -> Link:
        """The link, if it names something in this run; the first episode of a step where it names none."""
        if at.run != self.run.path.name:
            raise WorkbenchError(f"the link is about run {at.run!r}; this is {self.run.path.name!r}")
        if at.step is None:
            return links.parse(self._start())
        found = pick(self.data.summaries, "episodes", step=at.step)
        if at.episode is None:
            return Link(at.run, at.step, found["episode"][0])
        turns = pick(found, "episodes", episode=at.episode)["recorded"][0]
        if at.turn is not None and at.turn >= turns:
            raise WorkbenchError(f"step {at.step}, episode {at.episode}: {turns} turns recorded, so no turn {at.turn}")
        if at.end is not None:
            row = pick(self.data.turns_frame(at.step, at.episode), "turns", turn=at.turn)
            n = row["token_ids"].list.len().fill_null(0)[0] if "token_ids" in row.columns else 0
            if at.end > n:
                where = f"step {at.step}, episode {at.episode}, turn {at.turn}"
                raise WorkbenchError(f"{where}: {n} tokens recorded, so no span {at.start}-{at.end}")
        return at

    def _start(self) -> str:
        """The episode shown at first: the most revised, else the median one."""
        picks = self.data.rows(count=0)["picks"]
        if not picks:
            raise WorkbenchError(
                f"{self.run.path}: no episode whose turns were recorded, so there is nothing to explore"
            )
        return str(Link(self.run.path.name, *(picks.get("most revised") or picks["median"])))

    # What the page asks

    def answer(self, request: str, **arguments: Any) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to one request of the page, and its buffers. Raises WorkbenchError on one that has none."""
        known: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "rows": self.data.rows,
            "groups": self.data.groups,
            "episode": self.data.episode,
            "window": self.data.window,
            "text": self.data.text,
            "compare": self.data.compare,
            "scale": self.data.scale,
            "notes": self._notes,
            "note_add": self._note_add,
            "note_edit": self._note_edit,
            "note_delete": self._note_delete,
        }
        if request not in known:
            raise unknown("request", str(request), known)
        answer = known[request](**arguments)
        return answer if isinstance(answer, tuple) else (answer, [])

    def _hear(self, _: Any, content: Mapping[str, Any], buffers: Any) -> None:
        reply: dict[str, Any] = {"id": content.get("id")}
        data: list[bytes] = []
        try:
            reply["answer"], data = self.answer(content.get("request", ""), **content.get("args", {}))
        except (WorkbenchError, OSError) as error:
            reply["error"] = str(error)
        except (TypeError, pl.exceptions.PolarsError) as error:
            reply["error"] = f"{content.get('request')}: {str(error).splitlines()[0]}"
        self.send(reply, data)

    def _open(self) -> dict[str, Any]:
        return self.data.overview() | {"labels": list(notes.LABELS), "notes": True}

    def _notes(self) -> dict[str, Any]:
        found = [asdict(n) for n in self.notes.notes()]
        return {"notes": found, "warnings": self.notes.warnings}

    def _note_add(self, **values: Any) -> dict[str, Any]:
        self.notes.add(**values)
        return self._notes()

    def _note_edit(self, note: str, **changes: Any) -> dict[str, Any]:
        self.notes.edit(note, **changes)
        return self._notes()

    def _note_delete(self, note: str) -> dict[str, Any]:
        self.notes.delete(note)
        return self._notes()
