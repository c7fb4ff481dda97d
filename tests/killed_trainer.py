"""A trainer left alone and one killed again and again: `killed_trainer.py WHOLE BROKEN CONFIG KILLS SEED`.

Each attempt is a fork of this process, which has imported everything and trained nothing, so that twenty attempts cost
seconds, not minutes. The parent lets an attempt tell some lines, waits a moment more, and kills it: while it loads,
samples, updates, or writes a table or a checkpoint. After the last kill one attempt goes on to the end.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from random import Random

import torch

from workbench import envs
from workbench.envs.base import State, Task
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

SOUND, TORN = 0, 3  # exit codes of an attempt


class Echo:
    """A game of at most three turns; commands with an even number of letters win. Many episodes win, many lose."""

    splits = ("train", "heldout")

    def tasks(self, split):
        return [Task(f"echo/{split}/{n}", "echo", split) for n in range(5)]

    def reset(self, task_id, seed=0):
        self.turn, self.cup = 0, "red" if task_id.endswith(("1", "3")) else "cup"
        return State(f"you see the {self.cup} .", ("go", "look around"))

    def step(self, action):
        self.turn += 1
        won = self.turn == 3 and len(action.replace(" ", "")) % 2 == 0
        return State(f"you {action} the {self.cup} .", ("go",), float(won), self.turn == 3, int(won))

    def close(self):
        pass


def attempt(run: RunFolder, config: TrainConfig, lines: int) -> int:
    """Train from the last checkpoint to the end, telling a byte a line; everything recorded before must be whole."""
    try:
        for name in run.tables:
            run.read(name)
    except Exception as error:
        print(f"a table is torn: {error}", file=sys.stderr)
        return TORN
    Trainer(config, run, lambda line: os.write(lines, b".")).run()
    return SOUND


def fork(run: RunFolder, config: TrainConfig) -> tuple[int, int]:
    """The process id of an attempt, and the pipe it tells its lines on."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    code = 1
    try:
        os.close(read)
        code = attempt(run, config, write)
    finally:
        os._exit(code)


def main(whole: str, broken: str, config: str, kills: int, seed: int) -> int:
    torch.set_num_threads(1)
    envs.ENVIRONMENTS["echo"] = Echo
    run, settings, draw = RunFolder.open(broken), TrainConfig(**json.loads(Path(config).read_text())), Random(seed)
    Trainer(settings, run)  # what it imports and reads on the way, forks need not import again
    if os.waitpid(fork(RunFolder.open(whole), settings)[0], 0)[1]:
        return 1
    killed = 0
    while killed < kills:
        child, lines = fork(run, settings)
        for _ in range(draw.choice((0, 1, 2, 3, 4))):
            if select.select([lines], [], [], 120)[0]:
                os.read(lines, 1)
        time.sleep(draw.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(lines)
        if not os.WIFSIGNALED(status):
            print(f"attempt {killed + 1} ended by itself with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
            return 1
        killed += 1
    code = os.waitstatus_to_exitcode(os.waitpid(fork(run, settings)[0], 0)[1])
    print(killed)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])))
