"""fidelity: is the credit right?"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import WorkbenchError, printable


def add(commands: "argparse._SubParsersAction") -> None:
    fidelity = commands.add_parser(
        "fidelity", help="hold the credit of every method against what turns were worth", description=_fidelity.__doc__
    )
    fidelity.add_argument("run", metavar="RUN", nargs="?", help="a run folder")
    fidelity.add_argument("--episodes", type=int, default=200, metavar="N", help="episodes to value (default: 200)")
    fidelity.add_argument(
        "--rolls", type=int, default=16, metavar="N", help="times each state is played on (default: 16)"
    )
    fidelity.add_argument("--methods", default="", metavar="A,B", help="methods to score (default: all)")
    fidelity.add_argument("--model", default="", metavar="PATH", help="what plays on (default: the run's own policy)")
    fidelity.add_argument(
        "--steps", default="", metavar="N,M", help="training steps (default: where the policy is kept)"
    )
    fidelity.add_argument(
        "--teachers", default="right,random,wrong", metavar="A,B",
        help="skill texts to credit again under (default: right,random,wrong; none: none)",
    )  # fmt: skip
    fidelity.add_argument("--live", type=int, default=96, metavar="N", help="games live at once (default: 96)")
    fidelity.add_argument("--seed", type=int, default=0, help="of the choice of episodes and of all rolls (default: 0)")
    fidelity.add_argument("--out", metavar="FOLDER", help="where the tables go (default: fidelity/ in the run)")
    fidelity.add_argument("--compare", nargs="+", metavar="FOLDER", help="runs that were measured, as one table")
    fidelity.add_argument("--save", metavar="FILE.parquet", help="with --compare: write the table to this file")
    fidelity.set_defaults(command=_fidelity)


def _fidelity(arguments: argparse.Namespace) -> None:
    """How right is the credit? Recorded episodes are brought back state by state and played on many times by the run's
    own policy: what a turn changed of the chance to win is its true advantage. The credit of every method that the
    run's tables determine is scored against it, beside uniform and random credit. Rolls are kept in the run; a second
    call goes on from them."""
    from ..fidelity import frames, text
    from ..fidelity.measure import FOLDER, FidelityConfig, measure
    from ..runs import RunFolder

    if bool(arguments.run) == bool(arguments.compare):
        raise WorkbenchError("fidelity takes either a RUN to measure or --compare with folders that were measured")
    if arguments.save and not (arguments.compare and arguments.save.endswith(".parquet")):
        raise WorkbenchError(f"--save takes a file that ends in .parquet, with --compare; got {arguments.save!r}")
    if arguments.compare:
        found = [frames.load(folder) for folder in arguments.compare]
        for each in found:
            _say([text.sentences(each)[0], *text.table(each.scores), ""])
        _say(text.across(found))
        if arguments.save:
            frames.save_frame(frames.compared(found), arguments.save)
            print(f"table   {arguments.save}")
        return
    run = RunFolder.open(arguments.run)
    teachers = () if arguments.teachers == "none" else _list(arguments.teachers)
    config = FidelityConfig(
        arguments.episodes, arguments.rolls, _list(arguments.methods), {}, _numbers(arguments.steps), arguments.model,
        teachers, arguments.live, arguments.seed,
    )  # fmt: skip
    try:
        found = measure(run, config, lambda line: print(printable(line), file=sys.stderr, flush=True), _Bar())
    except KeyboardInterrupt:
        logging.disable()  # a game's engine that was stopped too is reported at length by what still asks for it
        print("\nstopped: the rolls so far are kept, and the same command goes on from them", file=sys.stderr)
        raise
    folder = frames.write(found, Path(arguments.out) if arguments.out else run.path / FOLDER)
    _say([*text.sentences(found), "", *text.table(found.scores), "", *text.by_teacher(found)])
    print(f"tables  {folder}")


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(printable(line))


def _list(given: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in given.split(",") if part.strip())


def _numbers(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _list(given))
    except ValueError:
        raise WorkbenchError(f"--steps takes numbers with commas between, got {given!r}") from None


class _Bar:
    """The rolls so far on one line of a terminal, or a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.live, self.total = sys.stderr.isatty(), -1
        self.began = self.told = time.monotonic()
        self.first = 0

    def __call__(self, done: int, total: int) -> None:
        from ..fidelity.rolls import line

        now = time.monotonic()
        if total != self.total or done < self.first:
            self.total, self.began, self.first, self.told = total, now, done, 0.0
        if self.live or done == total or now - self.told > 10:
            end = "\n" if done == total or not self.live else ""
            text = line(done, total, self.began, done - self.first)
            print(f"\r\x1b[K{text}" if self.live else text, end=end, file=sys.stderr, flush=True)
            self.told = now
