"""Play real ALFWorld games through the memo and the engine side by side, and compare every answer.

    python tests/check_alfworld.py [--data FOLDER] [--limit N] [--steps N] [--jobs N]

Each game is played by its walkthrough, twice by seeded random commands (some of them nonsense) and by its walkthrough
again, each time branching from the middle; first against a cold memo, then, in another order, against a warm one that
may not touch the engine. Text, admissible commands, reward, outcome, validity and the expert's word must be equal.
The last line is `N passed, N failed`, one count a game; the exit status is 0 if none failed and some passed.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from workbench.envs.alfworld import AlfworldEnv, memoised
from workbench.envs.base import State
from workbench.envs.memo import MemoEnv, Transitions
from workbench.errors import WorkbenchError

NONSENSE = ("dance", "go to the moon", "take sun 1 from sky 1", "", "LOOK", " look ", "go to  desk 1")
Line = tuple[str, State, str | None]


class Mismatch(Exception):
    pass


def compare(where: str, action: str, got: State, wanted: State) -> None:
    for field in State.__dataclass_fields__:
        if getattr(got, field) != getattr(wanted, field):
            raise Mismatch(f"{where}, {action!r}: {field} {getattr(got, field)!r}, engine {getattr(wanted, field)!r}")


def compare_experts(where: str, action: str, memo: MemoEnv, wanted: str | None) -> str | None:
    if memo.expert() != wanted:
        raise Mismatch(f"{where}, {action!r}: expert {memo.expert()!r}, engine {wanted!r}")
    return wanted


def draw(state: State, rng: random.Random) -> str:
    return rng.choice(NONSENSE) if rng.random() < 0.1 else rng.choice(state.admissible)


def play_cold(task: str, engine: AlfworldEnv, memo: MemoEnv, steps: int, seed: int) -> list[tuple[str, list[Line]]]:
    """Play both side by side; returns what the engine said, script by script."""
    rng = random.Random(f"{task}/{seed}")
    solution = engine.walkthrough(task)
    said = []
    for name in ("walkthrough", "random", "random again", "walkthrough again"):
        lines: list[Line] = []
        state = engine.reset(task)
        compare(name, "reset", memo.reset(task), state)
        snapshots = [engine.snapshot()]

        def step(action, name=name, lines=lines):
            state = engine.step(action)
            compare(name, action, memo.step(action), state)
            lines.append((action, state, compare_experts(name, action, memo, engine.expert())))
            return state

        lines.append(("", state, compare_experts(name, "reset", memo, engine.expert())))
        script = iter(solution if name.startswith("walkthrough") else [None] * steps)
        for action in script:
            if state.done:
                break
            state = step(draw(state, rng) if action is None else action)
            snapshots.append(engine.snapshot())
        if name.startswith("walkthrough") and not state.outcome:
            raise Mismatch(f"{name}: the engine does not say won after {len(solution)} commands")
        said.append((name, lines))
        middle = snapshots[len(snapshots) // 2]
        state = engine.restore(middle)
        compare(f"{name}, branch", "restore", memo.restore(middle), state)
        branch = lines[: len(middle[2]) + 1]
        for _ in range(5):
            if state.done:
                break
            state = step(draw(state, rng), f"{name}, branch", branch)
        said.append((f"{name}, branch", branch))
    return said


def play_warm(task: str, memo: MemoEnv, said: list[tuple[str, list[Line]]]) -> None:
    for name, lines in reversed(said):
        for k, (action, state, expert) in enumerate(lines):
            compare(f"warm {name}", action, memo.step(action) if k else memo.reset(task), state)
            compare_experts(f"warm {name}", action, memo, expert)
    if memo.played:
        raise Mismatch(f"warm: the engine played {memo.played} actions")


def check(data: str, task: str, steps: int, seed: int) -> tuple[str, int, str]:
    """(task, states compared, what went wrong or "")."""
    engine, compared = AlfworldEnv(data), 0
    with tempfile.TemporaryDirectory() as folder:
        cold = memoised(data, path=Transitions(folder))
        warm = memoised(data, path=Transitions(folder))
        try:
            said = play_cold(task, engine, cold, steps, seed)
            play_warm(task, warm, said)
            compared = 2 * sum(len(lines) for _, lines in said)
        except Exception as error:  # one game's failure must not hide the others
            return task, compared, f"{type(error).__name__}: {error}"
        finally:
            for env in (engine, cold, warm):
                env.close()
    return task, compared, ""


def main(arguments: list[str] | None = None) -> int:
    shared = Path(__file__).resolve().parents[2] / "shared" / "data" / "alfworld"
    parser = argparse.ArgumentParser(description="Compare the memo with ALFWorld's engine, game by game.")
    parser.add_argument("--data", default=os.environ.get("ALFWORLD_DATA") or str(shared), help="holds json_2.1.1/")
    parser.add_argument("--limit", type=int, default=None, help="games to play, spread over all (default: all)")
    parser.add_argument("--steps", type=int, default=25, help="random commands in each random script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    try:
        env = AlfworldEnv(options.data)
        tasks = [task.id for split in env.splits for task in env.tasks(split)]
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 2
    if options.limit is not None:
        tasks = tasks[:: max(1, len(tasks) // max(1, options.limit))][: options.limit]
    began, failed, states = time.perf_counter(), 0, 0
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(check, options.data, task, options.steps, options.seed) for task in tasks]
        for job in as_completed(jobs):
            task, compared, wrong = job.result()
            failed += bool(wrong)
            states += compared
            print(f"FAILED {task}: {wrong}" if wrong else f"ok {compared:4d} states  {task}", flush=True)
    print(f"{states} states compared in {time.perf_counter() - began:.0f} s with {options.jobs} processes")
    print(f"{len(tasks) - failed} passed, {failed} failed")
    return int(failed > 0 or not tasks)


if __name__ == "__main__":
    sys.exit(main())
