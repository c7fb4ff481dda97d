"""A small made-up study: run folders and study.json, methods of known strength. Every number comes from one seed."""

import json
from pathlib import Path

import numpy as np
import polars as pl

from workbench.config import digest

KINDS = ("kitchen", "pantry", "bathroom", "corridor")


def evals(rng, step, success, hard, panel="heldout", role="student"):
    """One evaluation: a game is won where a draw and its hardness stay below `success`; hard ones need more turns."""
    n = len(hard)
    won = (rng.random(n) / 2 + hard / 2 < success).astype(int)
    turns = np.where(won, 2 + (4 * hard).astype(int) + rng.integers(0, 2, n), 8)
    columns = {
        "step": [step] * n, "panel": [panel] * n, "role": [role] * n, "task": [f"{panel}/{t}" for t in range(n)],
        "kind": [KINDS[t % 4] for t in range(n)], "seed": [0] * n, "episode": list(range(n)), "outcome": won,
        "return": won.astype(float), "n_turns": turns, "stop_reason": ["won" if w else "max_turns" for w in won],
        "invalid": [0] * n,
    }  # fmt: skip
    return pl.DataFrame(columns)


def write_run(folder, label, parameters, ends, seed=0, games=64, steps=6, reuse=1, finished=True):
    """One run folder under `folder` whose success rises evenly from .3 to `ends`; returns its path and digest."""
    rng, hard = np.random.default_rng(seed), np.random.default_rng(7).random(games)
    key = digest(parameters)
    path = Path(folder) / f"20260101T0000{seed % 60:02d}Z-{key}"
    tables = {"evals": {}, "steps": {}, "timings": {}}
    for step in range(0, steps + 1, steps // 2):
        tables["evals"][step] = evals(rng, step, 0.3 + (ends - 0.3) * step / steps, hard)
    for step in range(steps):
        row = {"step": step, "n_drawn": 48, "n_episodes": 48, "response_tokens": 1000 + step, "updates": reuse}
        tables["steps"][step] = pl.DataFrame([row])
        seconds = {"step": [step] * 2, "stage": ["rollout", "update"], "seconds": [1.0, 0.5 * reuse]}
        tables["timings"][step] = pl.DataFrame(seconds)
    for name, parts in tables.items():
        (path / "tables" / name).mkdir(parents=True)
        for step, frame in parts.items():
            frame.write_parquet(path / "tables" / name / f"step={step:06d}.parquet")
    header = {"format_version": 1, "experiment": "made", "digest": key}
    (path / "config.json").write_text(json.dumps(header | {"created": "2026-01-01", "config": parameters}))
    facts = {"status": "complete" if finished else "failed", "seconds": 12.5, "git": {"commit": "a" * 40}}
    (path / "manifest.json").write_text(json.dumps(header | facts | {"error": None if finished else "loss is nan"}))
    if finished:
        (path / "COMPLETE").write_text("2026-01-01\n")
    return path, key


def write(folder, ends, models=("small", "large"), seeds=2, spread=0.02, **options):
    """A study in `folder`: ends is {label: final strength}; labels "name k" are method "name" with option k.

    Returns the paths of its runs in order of label, model, seed.
    """
    rng, cells, paths = np.random.default_rng(3), [], []
    for label, strength in ends.items():
        method, _, option = label.partition(" ")
        for shift, model in enumerate(models):
            for seed in range(seeds):
                parameters = {
                    "method": method, "method_options": {"updates": int(option)} if option else {}, "model": model,
                    "seed": seed, "env": "twc", "steps": options.get("steps", 6),
                }  # fmt: skip
                at = strength - 0.05 * shift + rng.normal(0, spread)
                path, key = write_run(
                    folder, label, parameters, at, seed=len(paths), reuse=int(option or 1), **options
                )
                cells.append({"label": label, "digest": key, "parameters": parameters})
                paths.append(path)
    study = {"format_version": 1, "name": Path(folder).name, "notebook": "train", "cells": cells}
    (Path(folder) / "study.json").write_text(json.dumps(study))
    return paths
