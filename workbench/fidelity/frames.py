"""What a measurement leaves: frames of scores, reliability, states, turns and credit, on disk and read again."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..errors import WorkbenchError
from ..records import Episode
from ..runs.files import atomic_write, read_json
from . import scores
from .signals import TEACHERS, Name, Signals, padded
from .truth import Truth

DRAWS = 200  # of random credit
TABLES = ("scores", "reliability", "states", "turns", "credit")
Head = tuple[int, int, Episode, tuple[str, ...]]  # step, number, episode, keys of its states
SOLVER, RANDOM, CEILING, HALF = "solver's advantage", "random", "ceiling", "half of the rolls"


@dataclass(frozen=True, eq=False)
class Fidelity:
    """facts: of the measurement, by name. scores: one row a signal: env, signal, kind, teacher, and of each metric the
    value and its interval (scores.Score.row). reliability: one row a teacher and bin of the belief. states: one row a
    state of an episode: V and interval, n rolls (0: decided). turns: one row a turn: advantage and interval, pivotal.
    credit: one row a turn and signal: credit, and the belief after the turn."""

    facts: dict[str, Any]
    scores: pl.DataFrame
    reliability: pl.DataFrame
    states: pl.DataFrame
    turns: pl.DataFrame
    credit: pl.DataFrame

    @property
    def ceiling(self) -> float | None:
        """The rank correlation that a perfect credit could have with this truth."""
        return self.scores.filter(pl.col("signal") == CEILING)["correlation"].item()


def write(found: Fidelity, folder: str | Path) -> Path:
    """Write a measurement to a folder, each file whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        save_frame(getattr(found, name), folder / f"{name}.parquet")
    atomic_write(folder / "facts.json", json.dumps(found.facts, indent=1).encode())
    return folder


def save_frame(frame: pl.DataFrame, path: str | Path) -> None:
    """Write one frame to a parquet file, whole or not at all."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    atomic_write(Path(path).resolve(), buffer.getvalue())


def load(folder: str | Path) -> Fidelity:
    """A measurement from its folder or from a run that holds one. Raises WorkbenchError where there is none."""
    for place in (Path(folder), Path(folder) / "fidelity"):
        if all((place / f"{name}.parquet").is_file() for name in TABLES) and (place / "facts.json").is_file():
            return Fidelity(read_json(place / "facts.json"), *(pl.read_parquet(place / f"{n}.parquet") for n in TABLES))
    raise WorkbenchError(f"{folder} holds no measured fidelity: `workbench fidelity RUN` makes one")


def compared(found: Sequence[Fidelity]) -> pl.DataFrame:
    """The scores of several measurements under one another, with the run, rolls and ceiling of each."""
    return pl.concat(
        [
            f.scores.with_columns(
                run=pl.lit(f.facts["run"]), rolls=pl.lit(f.facts["rolls"]), ceiling=pl.lit(f.ceiling, pl.Float64)
            )
            for f in found
        ],
        how="diagonal_relaxed",
    )


def score_rows(
    found: Signals, truth: Truth, flags: np.ndarray | None, solved: Sequence[Sequence[float] | None],
    threshold: float, seed: int,
) -> list[tuple[Name, dict[str, Any]]]:  # fmt: skip
    """Every signal scored, then a solver's advantages on the episodes it solved, random credit, and two ceilings."""
    K = truth.mask.shape[1]
    rows = []
    for name, own in found.items():
        belief = None if own.belief is None else padded(own.belief, K + 1)
        made = scores.score(padded(own.credit, K), truth, belief, flags, threshold, seed=seed)
        rows.append((name, made.row()))
    if here := [e for e, own in enumerate(solved) if own is not None]:
        own = padded([np.asarray(solved[e]) for e in here], K)
        some = None if flags is None else flags[here]
        rows.append((Name(SOLVER, "solver"), scores.score(own, truth.of(here), None, some, threshold, seed=seed).row()))
    rows.append((Name(RANDOM, "baseline"), _random(truth, flags, threshold, seed)))
    return rows + _ceilings(truth, seed)


def teacher_gains(found: Signals, truth: Truth, seed: int) -> dict[str, dict[str, list[float | None]]]:
    """{signal: {text: [difference, low, high]}}: its rank correlation under the right skill text less that under
    another; low and high None where they cannot be told."""
    K, out = truth.mask.shape[1], {}
    for name, own in found.items():
        if name.teacher != "right":
            continue
        for text in TEACHERS[1:]:
            other = found.get(Name(name.name, name.kind, text))
            if other is not None:
                gain = scores.gain(padded(own.credit, K), padded(other.credit, K), truth, seed=seed)
                if np.isfinite(gain[0]):
                    out.setdefault(name.name, {})[text] = [*map(_known, gain)]
    return out


def _random(truth: Truth, flags: np.ndarray | None, threshold: float, seed: int) -> dict[str, Any]:
    """Credit drawn anew DRAWS times: its mean score, and between which scores 95 % of the draws lie."""
    rng = np.random.default_rng([seed, 29])
    normal = (rng.normal(size=truth.mask.shape) for _ in range(DRAWS))
    drawn = [scores.score(credit, truth, None, flags, threshold, 1, seed) for credit in normal]
    row = drawn[0].row()
    for metric in scores.METRICS:
        values = np.array([d.value[metric] for d in drawn])
        if np.isfinite(values).all():
            low, high = np.quantile(values, [0.025, 0.975])
            row |= {metric: float(values.mean()), f"{metric}_low": float(low), f"{metric}_high": float(high)}
    return row


def _ceilings(truth: Truth, seed: int) -> list[tuple[Name, dict[str, Any]]]:
    top = scores.ceiling(truth, seed=seed)
    empty = dict.fromkeys(f"{m}{end}" for m in scores.METRICS for end in ("", "_low", "_high"))
    counted = int(scores.varies(truth.advantage, truth.mask).sum())
    head = empty | {"episodes": len(truth.mask), "counted": counted, "told": None}
    named = dict(zip(("correlation", "correlation_low", "correlation_high"), map(_known, top), strict=True))
    rows = [(Name(CEILING, "ceiling"), head | named)]
    if truth.variance.any():
        half = scores.score(truth.halves[1], truth.half(0), seed=seed).row()
        kept = {n: v for n, v in half.items() if n.startswith(("correlation", "sign"))}
        rows.append((Name(HALF, "ceiling"), head | kept))
    return rows


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def scores_frame(rows: Sequence[tuple[Name, dict[str, Any]]], env: str) -> pl.DataFrame:
    floats = [f"{m}{end}" for m in scores.METRICS for end in ("", "_low", "_high")]
    data = [{"env": env, "signal": n.name, "kind": n.kind, "teacher": n.teacher, **row} for n, row in rows]
    return pl.DataFrame(data, schema_overrides=dict.fromkeys((*floats, "told"), pl.Float64), infer_schema_length=None)


def reliability_frame(found: Signals, truth: Truth, env: str, seed: int) -> pl.DataFrame:
    """One row a bin of each distinct belief: env, signal, teacher, belief, value, value_low, value_high, states."""
    rows = []
    for name, own in found.items():
        if own.belief is None or name.kind not in ("signal", "baseline"):
            continue
        bins = scores.reliability(padded(own.belief, truth.mask.shape[1] + 1), truth, seed=seed)
        rows += [{"env": env, "signal": name.name, "teacher": name.teacher, **row} for row in bins]
    schema = {"env": pl.String, "signal": pl.String, "teacher": pl.String, "belief": pl.Float64, "value": pl.Float64,
              "value_low": pl.Float64, "value_high": pl.Float64, "states": pl.Int64}  # fmt: skip
    return pl.DataFrame(rows, schema=schema)


def states_frame(heads: Sequence[Head], truth: Truth) -> pl.DataFrame:
    rows = []
    for e, (step, number, episode, keys) in enumerate(heads):
        for k, key in enumerate(keys):
            rows.append({
                "step": step, "episode": number, "group": episode.group, "state": k, "key": key,
                "value": float(truth.value[e, k]), "low": float(truth.value_low[e, k]),
                "high": float(truth.value_high[e, k]), "rolls": int(truth.rolls[e, k]),
            })  # fmt: skip
    return pl.DataFrame(rows)


def turns_frame(heads: Sequence[Head], truth: Truth, threshold: float) -> pl.DataFrame:
    pivotal, rows = truth.pivotal(threshold), []
    for e, (step, number, episode, _) in enumerate(heads):
        for k, turn in enumerate(episode.turns):
            rows.append({
                "step": step, "episode": number, "group": episode.group, "task": episode.task,
                "outcome": episode.outcome, "turn": k, "action": turn.action, "valid": turn.valid,
                "before": float(truth.value[e, k]), "after": float(truth.value[e, k + 1]),
                "advantage": float(truth.advantage[e, k]), "low": float(truth.low[e, k]),
                "high": float(truth.high[e, k]), "pivotal": bool(pivotal[e, k]),
            })  # fmt: skip
    return pl.DataFrame(rows)


def credit_frame(heads: Sequence[Head], found: Signals, solved: Sequence[Sequence[float] | None]) -> pl.DataFrame:
    names = ("step", "episode", "turn", "signal", "kind", "teacher", "credit", "belief")
    columns: dict[str, list] = {name: [] for name in names}

    def add(name: Name, e: int, credit: Sequence[float], belief: Sequence[float] | None) -> None:
        step, number, *_ = heads[e]
        n = len(credit)
        after = [None] * n if belief is None else [float(b) for b in belief[1:]]
        given = ([step] * n, [number] * n, range(n), [name.name] * n, [name.kind] * n, [name.teacher] * n)
        for column, values in zip(columns.values(), (*given, [float(c) for c in credit], after), strict=True):
            column.extend(values)

    for name, own in found.items():
        for e, credit in enumerate(own.credit):
            add(name, e, credit, None if own.belief is None else own.belief[e])
    for e, credit in enumerate(solved):
        if credit is not None:
            add(Name(SOLVER, "solver"), e, credit, None)
    return pl.DataFrame(columns, schema_overrides={"credit": pl.Float32, "belief": pl.Float32})
