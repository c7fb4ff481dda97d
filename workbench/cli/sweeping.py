"""sweep: run every cell of a study."""

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from ..errors import WorkbenchError, printable
from .codes import FAILED, INTERRUPTED

if TYPE_CHECKING:
    from ..sweep.place import Place
    from ..sweep.pool import Pool
    from ..sweep.ray import Cluster
    from ..sweep.study import Study


def add(commands: "argparse._SubParsersAction") -> None:
    sweep = commands.add_parser("sweep", help="run every cell of a study", description=_sweep.__doc__)
    sweep.add_argument("study", metavar="STUDY", help="a TOML file, or the name of a shipped study")
    sweep.add_argument("--out", default="runs", help="the folder or fsspec URL runs go into (default: runs)")
    sweep.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: what cores and memory allow)")
    sweep.add_argument("--limit", type=int, metavar="N", help="run N cells at most, in the study's order")
    sweep.add_argument("--dry-run", action="store_true", help="list the cells and what is done, and run nothing")
    sweep.add_argument(
        "--accept-changed", action="store_true", help="count cells that other code or versions have made as done"
    )
    sweep.add_argument("--ray", metavar="ADDRESS", help="run on this Ray cluster; local starts one here")
    sweep.add_argument("--cpus-per-run", type=float, default=1.0, metavar="N", help="that Ray gives a run (default: 1)")
    sweep.add_argument("--gpus-per-run", type=float, default=0.0, metavar="N", help="that Ray gives a run (default: 0)")
    sweep.set_defaults(command=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    """Run every cell of a study as an ordinary run. The same command again goes on: finished cells are passed over,
    stopped ones resumed; two sweeps of one study share the work."""
    from ..sweep import local
    from ..sweep.place import Place
    from ..sweep.study import Study

    for name in ("jobs", "limit"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise WorkbenchError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    study = Study.read(arguments.study)
    place = Place(arguments.out, study.name)
    if arguments.dry_run:
        return _dry_run(study, place, arguments.accept_changed)
    states = local.prepare(study, place, arguments.accept_changed, _note)
    try:
        with _workers(arguments, sum(state.state != "done" for state in states)) as workers:
            account = local.run_cells(study, states, place, workers.submit, workers.size, arguments.limit)
    except KeyboardInterrupt as stop:
        same = shlex.join(["workbench", *sys.argv[1:]])
        lines = [local.told_account(study, stop.args[0])] if stop.args else []
        print("\n".join([*lines, f"stopped; what ran can be resumed. To go on: {same}"]), file=sys.stderr)
        return INTERRUPTED
    print(local.told_account(study, account))
    return FAILED if account.failed or account.left else 0


def _note(line: str) -> None:
    print(printable(line), file=sys.stderr)


def _workers(arguments: argparse.Namespace, todo: int) -> "Pool | Cluster":
    """Where runs go: processes here, or a Ray cluster."""
    if arguments.ray:
        from ..sweep.ray import Cluster

        return Cluster(arguments.ray, arguments.cpus_per_run, arguments.gpus_per_run, arguments.jobs or 0)
    from ..sweep.pool import Pool, fitting

    return Pool(min(arguments.jobs or fitting(), max(1, todo)))


def _dry_run(study: "Study", place: "Place", accept_changed: bool) -> int:
    from ..sweep.state import CHANGED_WAY, survey, told_changes

    place.refresh()
    states = survey(study, place.folder)
    names = study.varying
    rows = [(s.state, *map(printable, (s.cell.label, *(str(s.cell.parameters[n]) for n in names)))) for s in states]
    heads = ("state", "label", *names)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    changed, noted = told_changes(states)
    for line in [*(f"{line}: accepted" if accept_changed else line for line in changed), *noted]:
        print(printable(line))
    done = sum(s.state == "done" for s in states)
    print(f"{done} of {len(states)} done already, {sum(s.state == 'to resume' for s in states)} to resume")
    if changed and not accept_changed:
        print(f"without --dry-run this would be refused: {CHANGED_WAY}")
    return 0
