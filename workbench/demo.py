"""The main job, end to end: train agents, look at their credit, compare with the control, write one report.

A method and its control are trained on several seeds by the ordinary runner, as many at once as there are cores for;
then the analysis notebooks run on what was recorded.
"""

import time
from collections.abc import Sequence

from .errors import unknown
from .report import build_report
from .runs import RunFolder
from .sweep.cell import Job
from .sweep.pool import fitting, run_all


def main(env: str = "twc", out: str = "runs", steps: int = 0, seeds: int = 0) -> None:
    """Train agent_opsd and grpo on `seeds` seeds and one gated run, analyse, and say where the report is.

    steps, seeds: 0 takes what fits the environment's demo. Raises WorkbenchError naming the first run
    that failed; runs that finished are kept.
    """
    if env not in _SETTINGS:
        raise unknown("environment of the demo", env, _SETTINGS)
    steps, seeds = steps or _SIZE[env][0], seeds or _SIZE[env][1]
    common = {"env": env, "steps": steps, "experiment": f"demo-{env}"} | _SETTINGS[env]
    trained = [
        Job(f"{name} {seed}", "train", common | {"method": name, "seed": seed}, out)
        for seed in range(seeds)
        for name in ("agent_opsd", "grpo")
    ]
    gate = {
        "method": "agent_opsd_dgg",
        "method_options": {"window": 6, "threshold": 0.1},
        "steps": max(1, steps // 2 - 1),
    }
    gated = Job("agent_opsd_dgg 0", "train", common | gate, out)
    start = time.monotonic()
    size = min(4, fitting())
    print(f"training {len(trained) + 1} runs of up to {steps} steps, {size} at a time", flush=True)
    folders = _run_all(trained, size)
    runs = [str(f.path) for f in folders]
    print(f"{time.monotonic() - start:.0f} s: analysing, beside the gated run", flush=True)
    views = [
        Job("beliefs", "beliefs", {"run": runs[0]}, out),
        Job("gates", "gates", {"run": runs[0]}, out),
        Job("compare", "compare", {"runs": runs}, out),
    ]
    reused, *sections = _run_all([gated, *views], size, keep_going=True)
    if reused:
        sections += _run_all([Job("lm_head", "lm_head", {"run": str(reused.path)}, out)], size, keep_going=True)
    report = build_report(folders[0], [section for section in sections if section])
    for line in _findings(folders[0], sections[2]):
        print(line)
    print(f"{time.monotonic() - start:.0f} s in all\nrun folder  {folders[0].path}\nreport      {report}", flush=True)


_SIZE = {"twc": (12, 2), "alfworld": (1, 1)}  # steps and seeds that take minutes on two cores
_SETTINGS: dict[str, dict[str, str | int | float]] = {
    "twc": {"tasks_per_step": 8, "eval_games": 64, "eval_every": 6},
    # No small model is shipped for ALFWorld: a pretrained one plays a few short games, to show the whole way.
    "alfworld": {
        "model": "smollm2",
        "tasks_per_step": 1,
        "group_size": 4,
        "max_turns": 4,
        "max_response_tokens": 24,
        "max_context": 2048,
        "eval_games": 2,
        "lr": 1e-5,
    },
}


def _run_all(jobs: Sequence[Job], size: int, keep_going: bool = False) -> list[RunFolder | None]:
    """Run the jobs; keep_going tells of one that failed, as an analysis with nothing to show, and gives None for it."""
    outcomes = run_all(jobs, size, _told, keep_going)
    for job, outcome in zip(jobs, outcomes, strict=True):
        if outcome.status != "complete":
            print(f"left out: {job.label} failed: {outcome.error}", flush=True)
    return [RunFolder(outcome.run) if outcome.status == "complete" else None for outcome in outcomes]


def _told(label: str, line: str) -> None:
    if line.startswith(("step ", "resumed ")):
        print(f"[{label}] {line}", flush=True)


def _findings(run: RunFolder, comparison: RunFolder | None) -> list[str]:
    """What came out, from the records."""
    result = run.manifest["result"]
    out = [
        f"{panel}: {result['start'].get(panel, float('nan')):.2f} at the start, "
        f"{value:.2f} after {result['steps']} steps"
        for panel, value in result["final"].items()
    ]
    return [*out, *(comparison.manifest["result"].get("verdict", []) if comparison else [])]
