"""How fast rollouts are allocated, against a greedy loop in plain Python that looks at every task for every rollout.

    python benchmarks/budget.py [--tasks N] [--rollouts N] [--repeats N]

CoBA-RL's value (alpha 4, beta 7, tau 10), 2 to 128 rollouts a task, success rates drawn once from a fixed seed. Both
allocations must have the same total value to 1e-9, else the exit status is 1. Times are the best of the repeats, which
alternate. V0's exact allocation of its own value, on the same tasks, is timed beside them. The last line is how many
times faster than the loop CoBA-RL's allocation is.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workbench.budget import coba, v0

LO, HI, DENSITY = 2, 128, {"alpha": 4.0, "beta": 7.0, "tau": 10.0}


def loop(p: Sequence[float], total: int) -> list[int]:
    """Every rollout to the task whose value rises most by it."""
    budget = [LO] * len(p)

    def gain(i: int) -> float:
        if budget[i] == HI:
            return -1.0
        return coba.value(p[i], budget[i] + 1, **DENSITY) - coba.value(p[i], budget[i], **DENSITY)

    gains = [gain(i) for i in range(len(p))]
    for _ in range(total - LO * len(p)):
        best = max(range(len(p)), key=gains.__getitem__)
        budget[best] += 1
        gains[best] = gain(best)
    return budget


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    done = work()
    return done, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--rollouts", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    p = np.random.default_rng(0).random(given.tasks).tolist()
    ways: dict[str, Callable[[], list[int]]] = {
        "coba": lambda: coba.allocate(p, given.rollouts, lo=LO, hi=HI, **DENSITY),
        "loop": lambda: loop(p, given.rollouts),
        "v0, exact": lambda: v0.allocate(p, given.rollouts, lo=LO, hi=HI),
    }
    best: dict[str, float] = {}
    found: dict[str, list[int]] = {}
    for _ in range(given.repeats):
        for name, work in ways.items():
            found[name], seconds = timed(work)
            best[name] = min(best.get(name, seconds), seconds)
    print(f"{given.rollouts} rollouts over {given.tasks} tasks, {LO} to {HI} each, best of {given.repeats}")
    for name, seconds in best.items():
        print(f"{name:10s} {1e3 * seconds:9.2f} ms")
    values = [coba.total_value(p, found[name], **DENSITY) for name in ("coba", "loop")]
    if abs(values[0] - values[1]) > 1e-9 * values[1] or sum(found["coba"]) != given.rollouts:
        print(f"the allocations differ: values {values[0]:.12g} and {values[1]:.12g}")
        return 1
    print(f"same value {values[0]:.6g}")
    print(f"speedup {best['loop'] / best['coba']:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
