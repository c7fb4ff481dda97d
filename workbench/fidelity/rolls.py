"""Rolling a policy on from recorded states to the end of the game, kept in a table as it goes."""

import io
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from ..envs.base import EnvBatch
from ..errors import WorkbenchError
from ..policy import Policy
from ..prompts import Chat
from ..rollout import Job, Limits, Teacher, play
from ..runs.files import atomic_write
from .states import Place

SCHEMA = {"state": pl.String, "roll": pl.Int32, "outcome": pl.Int8}
SAVE_EVERY = 10.0  # seconds between files
_PURPOSE = 17  # of a random draw

Progress = Callable[[int, int], Any]


@dataclass(frozen=True, eq=False)
class Roller:
    """What plays on: a policy under the limits that its episodes were played with. envs: as many games as are live at
    once; seed: with the state and the number of the roll it decides every draw."""

    policy: Policy
    chat: Chat
    envs: EnvBatch
    limits: Limits
    temperature: float = 1.0
    teacher: Teacher | None = None
    seed: int = 0

    def digest(self) -> str:
        """A digest of all that outcomes depend on beside the state: weights, limits, temperature and seed."""
        digest = blake2b(repr((asdict(self.limits), self.temperature, self.seed)).encode(), digest_size=8)
        for name, tensor in self.policy.model.state_dict().items():
            plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(name.encode() + plain.numpy().tobytes())
        return digest.hexdigest()

    def job(self, place: Place, roll: int) -> Job:
        key = (self.seed, _PURPOSE, int(place.key, 16), roll)
        return Job(place.task, place.group, key, place.seed, place.start)

    def play(self, jobs: Sequence[Job]) -> list[int]:
        """The outcome of each job, 0 or 1."""
        played = play(self.policy, self.chat, self.envs, jobs, self.limits, self.temperature, self.teacher)
        return [episode.outcome for episode in played]


def roll(
    roller: Roller, places: Iterable[Place], rolls: int, folder: Path | None = None, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """{state: (rolls,) outcomes in {0, 1}}, from the files in `folder` where they are there, played where not.

    What was played is written there every few seconds and on Ctrl-C, so that a second call goes on where one ended;
    more rolls later keep those there are. progress: (rolls there are, rolls wanted), once at the start too. Fresh
    sessions of as many games as are live compute the prompt that the rolls of a state share once.
    """
    places = sorted(places, key=lambda p: (-p.depth, p.task.id, p.key))
    found = read(folder)
    jobs = [(p, r) for p in places for r in range(rolls) if r not in found.get(p.key, {})]
    total = rolls * len(places)
    fresh: list[tuple[str, int, int]] = []
    last, live = time.monotonic(), len(roller.envs)
    if progress:
        progress(total - len(jobs), total)
    try:
        for start in range(0, len(jobs), live):
            part = jobs[start : start + live]
            outcomes = roller.play([roller.job(place, number) for place, number in part])
            for (place, number), outcome in zip(part, outcomes, strict=True):
                found.setdefault(place.key, {})[number] = outcome
                fresh.append((place.key, number, outcome))
            if progress:
                progress(total - len(jobs) + start + len(part), total)
            if folder and time.monotonic() - last > SAVE_EVERY:
                fresh, last = _save(folder, fresh), time.monotonic()
    finally:
        if folder and fresh:
            _save(folder, fresh)
    return {p.key: np.array([found[p.key][r] for r in range(rolls)], np.int8) for p in places}


def read(folder: Path | None) -> dict[str, dict[int, int]]:
    """{state: {roll: outcome}} of what was played so far."""
    found: dict[str, dict[int, int]] = {}
    files = sorted(folder.glob("part-*.parquet")) if folder else []
    for file in files:
        try:
            rows = pl.read_parquet(file).select(*SCHEMA).rows()
        except (pl.exceptions.PolarsError, OSError):
            raise WorkbenchError(f"{file}: not a whole table of rolls; without it they are played again") from None
        for state, number, outcome in rows:
            found.setdefault(state, {})[number] = outcome
    return found


def _save(folder: Path, rows: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Write rows as one more file; returns the rows that are left to write, none."""
    numbers = [-1]
    for file in folder.glob("part-*.parquet"):
        with suppress(ValueError):
            numbers.append(int(file.stem.removeprefix("part-")))
    buffer = io.BytesIO()
    pl.DataFrame(rows, schema=SCHEMA, orient="row").write_parquet(buffer)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"part-{max(numbers) + 1:06d}.parquet", buffer.getvalue())
    return []


def line(done: int, total: int, began: float, played: int) -> str:
    """Where a rolling is, for a person who waits. began: time.monotonic() of its start; played: rolls since then."""
    spent = time.monotonic() - began
    left = spent * (total - done) / played if played else None
    pace = f", {played / spent:.0f} a second, {left / 60:.1f} minutes left" if left is not None and spent > 0 else ""
    return f"rolls {done}/{total}{pace}"
