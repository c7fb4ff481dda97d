"""verify, ci, track: is a run reproducible, do notebooks still work, and what a tracker is told of a run."""

import argparse
import sys

from .codes import FAILED


def add(commands: "argparse._SubParsersAction") -> None:
    verify = commands.add_parser(
        "verify", help="execute a run again and name the first value that differs", description=_verify.__doc__
    )
    verify.add_argument("run", metavar="RUN", help="a run folder, complete or not")
    verify.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X",
        help="for another machine: floats are equal within X, relative above 1 (default: 0, the same bits)",
    )  # fmt: skip
    verify.add_argument("--quiet", action="store_true", help="no progress on stderr")
    verify.set_defaults(command=_verify)

    ci = commands.add_parser("ci", help="execute every notebook in a small form and check what it finds",
                             description=_ci.__doc__)  # fmt: skip
    ci.add_argument("--notebooks", metavar="DIR", help="a folder of notebooks (default: the shipped ones)")
    ci.add_argument("--out", default="ci", metavar="DIR", help="where runs and reports go (default: ci)")
    ci.add_argument("--small", metavar="FILE", help="small parameters (default: ci.toml beside the notebooks)")
    ci.add_argument("--tolerances", metavar="FILE", help="what results are expected (default: the same file)")
    ci.add_argument("--only", nargs="+", metavar="NAME", help="these, and what they need")
    ci.add_argument("--update", action="store_true", help="write what was found as what is expected")
    ci.set_defaults(command=_ci)

    track = commands.add_parser("track", help="tell a tracker what a run's tables say", description=_track.__doc__)
    track.add_argument("run", metavar="RUN", help="a run folder")
    track.add_argument("--to", required=True, metavar="TRACKER", help="tensorboard, mlflow, wandb or trackio")
    track.set_defaults(command=_track)


def _verify(arguments: argparse.Namespace) -> int:
    """Execute a run again with the parameters and threads that its manifest records, and compare every table bit for
    bit: the first table, row and column that differ, with both values. Exit status 1 where something differs; the
    second run is kept then. An interrupted run is verified as far as it went."""
    from ..runs.execute import shown
    from ..runs.verify import TIMES, verify

    verdict = verify(arguments.run, arguments.tolerance, progress=not arguments.quiet)
    seen = f"{verdict.files} table files with {verdict.rows} rows" if verdict.files else "no tables"
    if verdict.difference is None:
        how = f"within {arguments.tolerance:g}" if arguments.tolerance else "bit for bit"
        record = " and the result record" if verdict.result else ""
        print(f"the same, {how}: {seen}{record} (not compared: {', '.join(sorted(TIMES))})")
        return 0
    print(f"differs: {verdict.difference}")
    if verdict.also:
        print(f"  in the same step also: {', '.join(verdict.also)}")
    print(f"compared until then: {seen}\nthe second run is kept: {shown(verdict.again)}")
    return FAILED


def _ci(arguments: argparse.Namespace) -> int:
    """Execute every notebook of a folder in a small form, check its result record against what is expected, and write
    the reports with an index, junit.xml and a table. Exit status 1 where one fails. See docs/ci.md."""
    from ..ci import check, table

    outcomes = check(
        arguments.notebooks, arguments.out, arguments.small, arguments.tolerances, arguments.only or (),
        arguments.update, say=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(table(outcomes))
    return FAILED if any(outcome.status == "failed" for outcome in outcomes) else 0


def _track(arguments: argparse.Namespace) -> None:
    """Tell a tracker every step of a run that it was not told yet, from the run's tables."""
    from ..runs import RunFolder
    from ..trackers import send

    sent = send(RunFolder.open(arguments.run), arguments.to)
    print(f"{sent} steps were sent to {arguments.to}" if sent else f"{arguments.to} knows all steps of this run")
