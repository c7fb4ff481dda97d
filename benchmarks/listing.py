"""How long a listing takes after one run was added to a folder of many: `python benchmarks/listing.py [RUNS]`.

Tiny finished runs are made in a temporary folder (10,000 unless told otherwise) and listed once, which makes the index.
Then one run is added and the folder listed, best of three; beside it the plain way, which globs and parses both JSON
files of every run. The last line holds both times and their ratio.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.runs import RunFolder, list_runs


def make(out: Path, runs: int) -> None:
    """`runs` finished runs in one experiment, as small as a manifest of the runner is."""
    first = RunFolder.create(out, "many", {"seed": 0})
    first.update_manifest(
        status="complete", notebook="train", seconds=61.5, parameters={f"p{i}": i for i in range(24)},
        cells=[{"cell": i, "status": "completed", "seconds": 1.0, "line": "x = 1"} for i in range(8)],
        artifacts=[{"path": f"tables/steps/step={i:06d}.parquet", "bytes": 100, "sha256": "0" * 64} for i in range(20)],
    )  # fmt: skip
    first.complete()
    files = {path.name: path.read_bytes() for path in first.path.iterdir()}
    for number in range(1, runs):
        clock = f"{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}"
        path = first.path.parent / f"20260101T{clock}Z-{number:08x}"
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)


def plain(out: Path) -> list[dict[str, Any]]:
    """The listing as glob and JSON alone would have it."""
    return [
        json.loads(path.read_text()) | json.loads((path.parent / "manifest.json").read_text())
        for path in sorted(out.glob("*/*/config.json"))
    ]


def added(out: Path, read: Callable[[Path], Any], repeats: int = 3) -> float:
    """Seconds of a listing right after a run was added, the best of several."""
    best = float("inf")
    for seed in range(repeats):
        run = RunFolder.create(out, "many", {"seed": seed})
        run.update_manifest(status="complete", notebook="train", seconds=1.0)
        run.complete()
        start = time.perf_counter()
        read(out)
        best = min(best, time.perf_counter() - start)
    return best


def main(runs: int = 10_000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        make(out, runs)
        start = time.perf_counter()
        assert len(list_runs(out)) == runs
        print(f"first listing of {runs} runs, which makes the index: {time.perf_counter() - start:.2f} s")
        ours, theirs = added(out, list_runs), added(out, plain)
        print(f"listing after adding one: {ours:.3f} s, plain glob and JSON {theirs:.3f} s, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
