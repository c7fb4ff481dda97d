"""The runs of a study in three small tables, read from their folders or from where they were saved.

    evals  one row an evaluated game: label, model, seed, run, step, panel, role, task, kind, episode, outcome, turns
    steps  one row a training step: label, model, seed, run, step, rollouts, tokens, updates, seconds
    runs   one row a run: label, model, seed, run, digest, commit, seconds, state, error, parameters (JSON)

`label` is the name under which a study's cells are compared, the method where there is no study.json. Runs beside a
study.json that are none of its cells, as an earlier form of the study left them, do not count. `model` is the
warm start. rollouts: episodes drawn; tokens: sampled tokens trained on; seconds: wall-clock without evaluations; null
where a run did not record them.
"""

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from .config import canonical_json
from .errors import WorkbenchError
from .runs.files import atomic_write, read_json
from .runs.folder import RunFolder

KEYS = ("label", "model", "seed", "run")
EVALS = {
    "label": pl.String, "model": pl.String, "seed": pl.Int64, "run": pl.String, "step": pl.Int32, "panel": pl.String,
    "role": pl.String, "task": pl.String, "kind": pl.String, "episode": pl.Int32, "outcome": pl.Int8, "turns": pl.Int32,
}  # fmt: skip
STEPS = {
    "label": pl.String, "model": pl.String, "seed": pl.Int64, "run": pl.String, "step": pl.Int32, "rollouts": pl.Int64,
    "tokens": pl.Int64, "updates": pl.Int64, "seconds": pl.Float64,
}  # fmt: skip
RUNS = {
    "label": pl.String, "model": pl.String, "seed": pl.Int64, "run": pl.String, "digest": pl.String,
    "commit": pl.String, "seconds": pl.Float64, "state": pl.String, "error": pl.String, "parameters": pl.String,
}  # fmt: skip
_TABLES = {"evals": EVALS, "steps": STEPS, "runs": RUNS}


@dataclass(frozen=True)
class Collected:
    """The three tables, columns as in EVALS, STEPS and RUNS; `notes` says what was left out on the way."""

    evals: pl.DataFrame
    steps: pl.DataFrame
    runs: pl.DataFrame
    notes: tuple[str, ...] = ()

    def only(self, keep: pl.Expr, *notes: str) -> "Collected":
        """The runs that fulfil an expression on columns of `runs`, in all three tables."""
        runs = self.runs.filter(keep)
        evals, steps = (t.join(runs.select("run"), on="run", how="semi", maintain_order="left")
                        for t in (self.evals, self.steps))  # fmt: skip
        return replace(self, evals=evals, steps=steps, runs=runs, notes=self.notes + notes)

    def by_env(self) -> dict[str, "Collected"]:
        """The runs of each environment, in the order in which they come first, under labels that leave it out."""
        envs = dict(zip(self.runs["run"], (str(c.get("env", "")) for c in self.configs), strict=True))
        out = {}
        for env in dict.fromkeys(envs.values()):
            part = self.only(pl.col("run").is_in([run for run, own in envs.items() if own == env]))
            label = pl.col("label").str.replace(f" env={env}", "", literal=True)
            out[env] = replace(part, **{name: getattr(part, name).with_columns(label) for name in _TABLES})
        return out

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The parameters of each run."""
        return [json.loads(text) for text in self.runs["parameters"]]


def collect(folder: str | Path) -> Collected:
    """A study: saved tables, or a folder of run folders (a sweep's, with study.json, or any experiment's).

    Raises WorkbenchError where it holds neither, or a run is of another format version.
    """
    path = Path(folder)
    if (path / "evals.parquet").is_file():
        return load(path)
    runs = sorted(config.parent for config in path.glob("*/config.json"))
    if not runs:
        lack = "holds no run folders and no evals.parquet" if path.is_dir() else "is no folder"
        raise WorkbenchError(f"compare: {folder} {lack}; give a sweep's folder, an experiment's, or a collected one")
    return collect_runs(runs, labels(path))


def labels(folder: str | Path) -> dict[str, str] | None:
    """Label by parameters (canonical JSON) of the cells in a sweep's study.json; None where there is none."""
    path = Path(folder) / "study.json"
    if not path.is_file():
        return None
    try:
        return {canonical_json(cell["parameters"]): cell["label"] for cell in read_json(path)["cells"]}
    except (KeyError, TypeError):
        raise WorkbenchError(f"{path}: cells with a label and parameters each are expected") from None


def collect_runs(paths: Sequence[str | Path], label_of: Mapping[str, str] | None = None) -> Collected:
    """Run folders in their order, labelled by parameters as in `labels`, or by method where label_of is None.

    Of runs with the same parameters, which are repetitions and no seeds, the last complete one counts; runs whose
    parameters have no label and runs without an evaluation are left out. All of it is noted.
    """
    if not paths:
        raise WorkbenchError("compare: no runs were given; name their folders in `runs`, or a `folder` that holds them")
    found = [_Run.open(path, label_of) for path in paths]
    opened = [run for run in found if run is not None]
    if not opened:
        raise WorkbenchError(f"compare: none of the {len(found)} runs is a cell of the study.json beside them")
    kept: dict[str, _Run] = {}
    for run in opened:
        before = kept.get(run.key)
        if before is None or run.state == "complete" or before.state != "complete":
            kept[run.key] = run
    notes = []
    if len(opened) < len(found):
        notes.append(f"Left out, as no cells of the study: {len(found) - len(opened)} runs with other parameters.")
    if len(kept) < len(opened):
        notes.append(f"{len(opened) - len(kept)} runs repeat the parameters of others; the last complete one counts.")
    empty = [run for run in kept.values() if not run.folder.table_files("evals")]
    if empty:
        notes.append(f"Not evaluated yet, so left out: {', '.join(map(str, empty))}.")
    used = [run for run in kept.values() if run not in empty]
    if not used:
        raise WorkbenchError(f"compare: none of the {len(opened)} runs was evaluated")
    called = Counter(run.folder.path.name for run in used).most_common(1)[0]
    if called[1] > 1:
        raise WorkbenchError(f"compare: {called[1]} run folders are named {called[0]}; give each a name of its own")
    names = _model_names({run.config.get("model", "") for run in used})
    return Collected(
        *(_stack((_keyed(read(run), run, names, name) for run in used), name)
          for name, read in (("evals", _evals), ("steps", _steps), ("runs", _facts))),
        notes=tuple(notes),
    )  # fmt: skip


def save(data: Collected, folder: str | Path) -> list[Path]:
    """Write evals, steps and runs as parquet files that `collect` reads back; each whole or not at all."""
    out = []
    for name in _TABLES:
        frame, path = getattr(data, name), Path(folder) / f"{name}.parquet"
        text = [c for c in frame.columns if frame[c].dtype == pl.String and c != "parameters"]
        buffer = io.BytesIO()
        frame.with_columns(pl.col(text).cast(pl.Categorical)).write_parquet(buffer, compression_level=12)
        atomic_write(path, buffer.getvalue())
        out.append(path)
    return out


def load(folder: str | Path) -> Collected:
    """What `save` wrote. Raises WorkbenchError where a file is missing, torn or lacks a column."""
    frames = {}
    for name, schema in _TABLES.items():
        path = Path(folder) / f"{name}.parquet"
        try:
            frame = pl.read_parquet(path, glob=False)
            frames[name] = frame.select(pl.col(column).cast(kind) for column, kind in schema.items())
        except FileNotFoundError:
            raise WorkbenchError(f"{path} is missing; a collected study has evals, steps and runs") from None
        except (pl.exceptions.PolarsError, OSError) as error:
            raise WorkbenchError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return Collected(**frames)


@dataclass(frozen=True)
class _Run:
    folder: RunFolder
    label: str
    digest: str
    key: str
    state: str
    config: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, label_of: Mapping[str, str] | None) -> "_Run | None":
        """The run, or None where its parameters have no label."""
        folder = RunFolder.open(path)
        head = read_json(folder.path / "config.json")
        config, digest = head["config"], head["digest"]
        key = canonical_json(config)
        if label_of is not None and key not in label_of:
            return None
        label = config.get("method") if label_of is None else label_of[key]
        if label is None or not isinstance(config.get("seed"), int):
            raise WorkbenchError(f"{path} is no training run: its parameters name no method and seed")
        complete = folder.is_complete
        has_manifest = (folder.path / "manifest.json").is_file()
        return cls(folder, label, digest, key, "complete" if complete or not has_manifest else folder.state, config)

    def __str__(self) -> str:
        return f"{self.label} seed {self.config['seed']} ({self.folder.path.name})"


def _evals(run: _Run) -> pl.DataFrame:
    return tidy(run.folder.read("evals"))


def tidy(evals: pl.DataFrame) -> pl.DataFrame:
    """A run's evals table with the columns of EVALS, without those of the run."""
    kind = pl.col("kind") if "kind" in evals.columns else pl.lit(None, pl.String).alias("kind")
    names = ("step", "panel", "role", "task", "episode", "outcome")
    return evals.select(*names, kind, pl.col("n_turns").alias("turns"))


def _steps(run: _Run) -> pl.DataFrame:
    if not run.folder.table_files("steps"):
        return pl.DataFrame(schema={n: k for n, k in STEPS.items() if n not in KEYS})
    steps = run.folder.read("steps")
    drawn = "n_drawn" if "n_drawn" in steps.columns else "n_episodes"
    tokens = pl.col("response_tokens") if "response_tokens" in steps.columns else pl.lit(None, pl.Int64)
    frame = steps.select("step", pl.col(drawn).alias("rollouts"), tokens.alias("tokens"), "updates")
    if not run.folder.table_files("timings"):
        return frame.with_columns(seconds=pl.lit(None, pl.Float64))
    timings = run.folder.read("timings").group_by("step").agg(pl.col("seconds").sum())
    return frame.join(timings, on="step", how="left", maintain_order="left")


def _facts(run: _Run) -> pl.DataFrame:
    path = run.folder.path / "manifest.json"
    manifest = read_json(path) if path.is_file() else {}
    commit = (manifest.get("git") or {}).get("commit")
    row = {"digest": run.digest, "commit": commit, "seconds": manifest.get("seconds"), "state": run.state,
           "error": manifest.get("error"), "parameters": ""}  # fmt: skip
    return pl.DataFrame([row], schema={n: k for n, k in RUNS.items() if n not in KEYS})


def _keyed(frame: pl.DataFrame, run: _Run, names: Mapping[str, str], table: str) -> pl.DataFrame:
    model = names[run.config.get("model", "")]
    keys = {"label": run.label, "model": model, "seed": run.config["seed"], "run": run.folder.path.name}
    frame = frame.with_columns(**{name: pl.lit(value) for name, value in keys.items()})
    if table == "runs":
        told = run.config | ({"model": model} if "model" in run.config else {})
        frame = frame.with_columns(parameters=pl.lit(json.dumps(told, sort_keys=True)))
    return frame


def _stack(frames: Iterable[pl.DataFrame], table: str) -> pl.DataFrame:
    schema = _TABLES[table]
    return pl.concat([f.select(pl.col(n).cast(k) for n, k in schema.items()) for f in frames])


def _model_names(models: Iterable[str]) -> dict[str, str]:
    """Folders by their last part, where that tells them apart: where they lie differs from one machine to the next."""
    models = sorted(models)
    short = {m: Path(m).name if m.startswith(("/", ".", "~")) else m for m in models}
    return short if len(set(short.values())) == len(models) else dict(zip(models, models, strict=True))
