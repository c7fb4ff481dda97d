"""heavy: ways to evaluate a trained policy beyond its panels."""

import argparse
import sys

from ..errors import WorkbenchError


def add(commands: "argparse._SubParsersAction") -> None:
    heavy = commands.add_parser(
        "heavy", help="parallel attempts and one that reads them, against a vote", description=_heavy.__doc__
    )
    heavy.add_argument("run", metavar="RUN", help="a run folder with a checkpoint")
    heavy.add_argument("--attempts", type=int, default=4, help="attempts that are read (default: 4)")
    heavy.add_argument("--rounds", type=int, default=1, help="times that they are gone over (default: 1)")
    heavy.add_argument("--games", type=int, default=96, help="games of the panel (default: 96)")
    heavy.add_argument("--panel", default="", help="the panel (default: held out)")
    heavy.add_argument("--out", metavar="FILE.parquet", help="write one row a game to this file")
    heavy.set_defaults(command=_heavy)


def _heavy(arguments: argparse.Namespace) -> None:
    """Play a panel with a run's last checkpoint: attempts alone, a majority vote over their commands, and an episode
    whose first message lists the commands of earlier attempts. The vote gets as many rollouts as the last in all."""
    from ..heavy import of_run, text
    from ..runs import RunFolder

    for name in ("attempts", "rounds", "games"):
        if getattr(arguments, name) < 1:
            raise WorkbenchError(f"--{name} takes a number from 1, got {getattr(arguments, name)}")
    if arguments.out and not arguments.out.endswith(".parquet"):
        raise WorkbenchError(f"--out {arguments.out}: a file that ends in .parquet is expected")
    given = (arguments.panel, arguments.games, arguments.attempts, arguments.rounds)
    games = of_run(RunFolder.open(arguments.run), *given, message=lambda line: print(line, file=sys.stderr))
    print(text(games))
    if arguments.out:
        games.write_parquet(arguments.out)
        print(f"games   {arguments.out}")
