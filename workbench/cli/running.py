"""run, status, runs: execute a notebook as a reproducible run, see how it stands, list what was run."""

import argparse
import shlex
import sys

from .. import shipped
from ..errors import WorkbenchError, printable
from .codes import FAILED, INTERRUPTED


def add(commands: "argparse._SubParsersAction") -> None:
    run = commands.add_parser("run", help="execute a notebook as a reproducible run", description=_run.__doc__)
    names = ", ".join(shipped.notebooks())
    run.add_argument("notebook", nargs="?", help=f"a path, or the name of a shipped notebook: {names}")
    run.add_argument("-p", nargs=2, action="append", metavar=("NAME", "VALUE"), help="set a parameter (repeatable)")
    run.add_argument("--out", default="runs", help="the folder runs go into (default: runs)")
    run.add_argument("--resume", metavar="RUN", help="go on with an interrupted or failed run folder")
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.add_argument("--dry-run", action="store_true", help="say what would run, and make nothing")
    run.add_argument("--detach", action="store_true", help="run in a process of its own, which outlives the terminal")
    run.add_argument(
        "--changed-notebook", choices=("refuse", "ignore", "use"), default="refuse",
        help="with --resume, where the notebook was edited since: ignore the edit, or use it (default: refuse)",
    )  # fmt: skip
    run.set_defaults(command=_run)

    status = commands.add_parser("status", help="how a run stands, or all of a folder", description=_status.__doc__)
    status.add_argument("where", nargs="?", metavar="RUN|FOLDER", help="a run folder, or a folder that runs went into")
    status.add_argument("--out", default="runs", help="the folder looked at where none is named (default: runs)")
    status.set_defaults(command=_status)

    runs = commands.add_parser("runs", help="list runs", description=_runs.__doc__)
    runs.add_argument("--out", default="runs", help="the folder runs went into (default: runs)")
    runs.set_defaults(command=_runs)


def _run(arguments: argparse.Namespace) -> int:
    """Execute a notebook into a new run folder: names and types of parameters are checked before anything starts."""
    from ..runs.execute import RunFailed, RunInterrupted, run_notebook, shown

    given = dict(arguments.parameters)
    if len(given) < len(arguments.parameters):
        twice = next(name for name, _ in arguments.parameters if [n for n, _ in arguments.parameters].count(name) > 1)
        raise WorkbenchError(f"parameter {twice} is given more than once")
    if arguments.dry_run:
        return _dry_run(arguments, given)
    if arguments.detach:
        return _detach(arguments, given)
    try:
        run = run_notebook(
            arguments.notebook, given, arguments.out, arguments.resume, progress=not arguments.quiet,
            changed_notebook=arguments.changed_notebook,
        )  # fmt: skip
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        return FAILED
    except RunInterrupted as stop:
        print(stop, file=sys.stderr)
        return INTERRUPTED
    print(f"run     {shown(run.path)}\nreport  {shown(run.path / 'report.html')}")
    return 0


def _dry_run(arguments: argparse.Namespace, given: dict[str, str]) -> int:
    from ..runs import RunFolder
    from ..runs.plan import parameter_lines, plan, resumption
    from ..runs.status import status

    if arguments.resume is None:
        print("\n".join(plan(arguments.notebook, given).lines(arguments.out)))
        return 0
    run = RunFolder.open(arguments.resume)
    what = resumption(run, arguments.notebook, given, arguments.changed_notebook)
    print("\n".join(status(run).lines()))
    chosen = {name for name, value in what.values.items() if value != what.names[name].default}
    print("\n".join([*(f"note: {note}" for note in what.notes), *parameter_lines(what.names, what.values, chosen)]))
    return 0


def _detach(arguments: argparse.Namespace, given: dict[str, str]) -> int:
    from ..runs import RunFolder
    from ..runs.account import shown
    from ..runs.detach import LOG, go_on_detached
    from ..runs.plan import plan, resumption

    changed = arguments.changed_notebook
    if arguments.resume is None:
        run, changed = plan(arguments.notebook, given).begin(arguments.out), "ignore"
    else:
        run = RunFolder.open(arguments.resume)
        resumption(run, arguments.notebook, given, changed)
    process = go_on_detached(run, changed)
    print(f"run     {shown(run.path)}\nlog     {shown(run.path / LOG)}  (process {process})")
    print(f"look    workbench status {shlex.quote(shown(run.path))}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    """How a run stands: its state, steps, success, time spent and left; where it stopped and how to go on."""
    from pathlib import Path

    from ..runs import RunFolder
    from ..runs.status import folder_lines, status
    from ..sweep.mirror import is_url

    given = arguments.out if arguments.where is None else arguments.where
    if is_url(given):
        raise WorkbenchError(f"{given} is a URL: copy the study to a folder here, then ask for that folder's status")
    where = Path(given)
    if (where / "config.json").is_file():
        print("\n".join(status(RunFolder.open(where)).lines()))
        return 0
    if arguments.where is not None and not where.is_dir():
        raise WorkbenchError(f"{where} is neither a run folder nor a folder that runs went into")
    print("\n".join(folder_lines(where)) or f"no runs under {where}")
    return 0


def _runs(arguments: argparse.Namespace) -> None:
    """List the runs in a folder, oldest first."""
    from ..runs import list_runs

    rows = list_runs(arguments.out).to_dicts()
    if not rows:
        print(f"no runs under {arguments.out}")
        return
    width = max(len(row["path"]) for row in rows)
    for row in rows:
        seconds = "" if row["seconds"] is None else f"{row['seconds']:8.0f} s"
        line = f"{row['path']:<{width}}  {row['state']:<11} {seconds:>10}  {row['error'] or ''}".rstrip()
        print(printable(line))
