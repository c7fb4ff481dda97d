"""How much faster a warm memo answers than ALFWorld's engine, in one run that alternates between them.

    python benchmarks/memo.py [--games N] [--steps N] [--data FOLDER]

Each game is played by the same commands (its solution, then seeded random ones) by the engine and by a memo that knows
them already, resets not counted. Prints steps per second of each game and both medians; the last line is the ratio of
the medians. The engine here has its parsers memoised, without which it is more than ten times slower.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from workbench.envs.alfworld import AlfworldEnv, memoised
from workbench.envs.base import Env, State
from workbench.errors import WorkbenchError


def commands_of(env: AlfworldEnv, task: str, steps: int) -> list[str]:
    """The solution up to its last command, then random ones from the state it leads to."""
    rng, state = random.Random(task), env.reset(task)
    commands = env.walkthrough(task)[:-1][:steps]
    for command in commands:
        state = env.step(command)
    while len(commands) < steps:
        commands.append(rng.choice(state.admissible))
        state = env.step(commands[-1])
    return commands


def seconds(env: Env, task: str, commands: list[str], repeats: int) -> tuple[float, list[State]]:
    """Mean wall time of playing the commands, resets left out, and the states of the last time."""
    spent, states = 0.0, []
    for _ in range(repeats):
        states = [env.reset(task)]
        began = time.perf_counter()
        step: Callable[[str], State] = env.step
        for command in commands:
            states.append(step(command))
        spent += time.perf_counter() - began
    return spent / repeats, states


def main() -> int:
    parser = argparse.ArgumentParser(description="Steps per second of ALFWorld's engine and of a warm memo.")
    parser.add_argument("--games", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="commands a game")
    parser.add_argument("--data", default=None, help="released games; default: ALFWORLD_DATA, else generated ones")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"engine": [], "memo": []}
    try:
        engine = AlfworldEnv(options.data)
        tasks = engine.tasks(engine.splits[0])
        with tempfile.TemporaryDirectory() as folder:
            memo = memoised(options.data, path=folder)
            for task in tasks[:: max(1, len(tasks) // options.games)][: options.games]:
                commands = commands_of(engine, task.id, options.steps)
                seconds(memo, task.id, commands, 1)
                played = memo.played
                slow, said = seconds(engine, task.id, commands, 1)
                fast, repeated = seconds(memo, task.id, commands, 200)
                if said != repeated or memo.played != played:
                    print(f"memo and engine differ on {task.id}", file=sys.stderr)
                    return 1
                rates["engine"].append(options.steps / slow)
                rates["memo"].append(options.steps / fast)
                rate = f"engine {options.steps / slow:8.1f}  memo {options.steps / fast:10.0f} steps/s"
                print(f"{rate}  {task.id}", flush=True)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 2
    slow, fast = (statistics.median(values) for values in rates.values())
    print(f"engine: {slow:.1f} steps/s (median of {len(rates['engine'])} games)")
    print(f"memo, warm: {fast:.0f} steps/s")
    print(f"{fast / slow:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
