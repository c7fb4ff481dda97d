"""The main job, end to end: train agents, look at their credit, compare with the control, write one report.

A method and its control are trained on several seeds by the ordinary runner, as many at once as there are cores for;
then the analysis notebooks run on what was recorded.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .errors import WorkbenchError, unknown
from .report import build_report
from .runs import RunFolder


@dataclass(frozen=True)
class Job:
    """One notebook to run: its label on the progress lines and its parameters."""

    label: str
    notebook: str
    parameters: dict[str, str]


def main(env: str = "twc", out: str = "runs", steps: int = 0, seeds: int = 0) -> None:
    """Train agent_opsd and grpo on `seeds` seeds and one gated run, analyse, and say where the report is.

    steps, seeds: 0 takes what fits the environment's demo. Raises WorkbenchError naming the first run
    that failed; runs that finished are kept.
    """
    if env not in _SETTINGS:
        raise unknown("environment of the demo", env, _SETTINGS)
    steps, seeds = steps or _SIZE[env][0], seeds or _SIZE[env][1]
    common = {"env": env, "steps": str(steps), "experiment": f"demo-{env}"} | _SETTINGS[env]
    trained = [
        Job(f"{name} {seed}", "train", common | {"method": name, "seed": str(seed)})
        for seed in range(seeds)
        for name in ("agent_opsd", "grpo")
    ]
    gate = {
        "method": "agent_opsd_dgg",
        "method_options": '{"window": 6, "threshold": 0.1}',
        "steps": str(max(1, steps // 2 - 1)),
    }
    gated = Job("agent_opsd_dgg 0", "train", common | gate)
    start = time.monotonic()
    workers = _workers()
    print(f"training {len(trained) + 1} runs of up to {steps} steps, {workers} at a time", flush=True)
    folders = _run_all(trained, out, workers)
    runs = [str(f.path) for f in folders]
    print(f"{time.monotonic() - start:.0f} s: analysing, beside the gated run", flush=True)
    views = [
        Job("beliefs", "beliefs", {"run": runs[0]}),
        Job("gates", "gates", {"run": runs[0]}),
        Job("compare", "compare", {"runs": repr(runs)}),
    ]
    reused, *sections = _run_all([gated, *views], out, workers, keep_going=True)
    if reused:
        sections += _run_all([Job("lm_head", "lm_head", {"run": str(reused.path)})], out, workers, keep_going=True)
    report = build_report(folders[0], [section for section in sections if section])
    for line in _findings(folders[0], sections[2]):
        print(line)
    print(f"{time.monotonic() - start:.0f} s in all\nrun folder  {folders[0].path}\nreport      {report}", flush=True)


_SIZE = {"twc": (12, 2), "alfworld": (1, 1)}  # steps and seeds that take minutes on two cores
_SETTINGS: dict[str, dict[str, str]] = {
    "twc": {"tasks_per_step": "8", "eval_games": "64", "eval_every": "6"},
    # No small model is shipped for ALFWorld: a pretrained one plays a few short games, to show the whole way.
    "alfworld": {
        "model": "smollm2",
        "tasks_per_step": "1",
        "group_size": "4",
        "max_turns": "4",
        "max_response_tokens": "24",
        "max_context": "2048",
        "eval_games": "2",
        "lr": "1e-5",
    },
}


def _workers() -> int:
    """One process a core, four at most; a GPU is used by one run at a time."""
    import torch

    return 1 if torch.cuda.is_available() else min(4, max(1, len(os.sched_getaffinity(0))))


def _run_all(jobs: Sequence[Job], out: str, workers: int, keep_going: bool = False) -> list[RunFolder | None]:
    """Run the jobs; keep_going tells of one that failed, as an analysis with nothing to show, and gives None for it."""
    stop = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_run, job, out, workers, stop) for job in jobs]
        try:
            return [_result(f, keep_going) for f in futures]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _result(future: Future, keep_going: bool) -> RunFolder | None:
    try:
        return future.result()
    except WorkbenchError as error:
        if not keep_going:
            raise
        print(f"left out: {error}", flush=True)
        return None


def _run(job: Job, out: str, workers: int, stop: threading.Event) -> RunFolder:
    """Run one notebook by the command line in a process of its own, passing on its lines."""
    if stop.is_set():
        raise WorkbenchError(f"{job.label} was not started")
    command = [sys.executable, "-m", "workbench.cli", "run", job.notebook, "--out", out]
    for name, value in job.parameters.items():
        command += ["-p", name, value]
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if stop.is_set():
            process.terminate()
        if line.startswith(("step ", "resumed ")):
            print(f"[{job.label}] {line}", end="", flush=True)
    if process.wait() != 0:
        raise WorkbenchError(f"{job.label} failed: " + " | ".join(lines[-4:]))
    return RunFolder.open(_folder_in(lines))


def _folder_in(lines: Sequence[str]) -> Path:
    found = [line.removeprefix("run").strip() for line in lines if line.startswith("run  ")]
    if not found:
        raise WorkbenchError("the runner did not say where it wrote")
    return Path(found[-1])


def _findings(run: RunFolder, comparison: RunFolder | None) -> list[str]:
    """What came out, from the records."""
    result = run.manifest["result"]
    out = [
        f"{panel}: {result['start'].get(panel, float('nan')):.2f} at the start, "
        f"{value:.2f} after {result['steps']} steps"
        for panel, value in result["final"].items()
    ]
    return [*out, *(comparison.manifest["result"].get("verdict", []) if comparison else [])]
