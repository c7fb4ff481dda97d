"""compare: what a study shows, in the terminal."""

import argparse
import shlex
import tempfile
from pathlib import Path

from ..errors import WorkbenchError, printable


def add(commands: "argparse._SubParsersAction") -> None:
    compare = commands.add_parser("compare", help="say what the runs of a study show", description=_compare.__doc__)
    compare.add_argument("folder", metavar="STUDY", help="a sweep's folder, any folder of runs, or saved tables")
    compare.add_argument("--control", default="", help="what the others are held against (default: grpo)")
    compare.add_argument("--target", type=float, default=0.5, help="success rate whose cost is asked for (default: .5)")
    compare.add_argument("--panel", default="", help="panel of games (default: the first that was evaluated)")
    compare.add_argument("--out", metavar="FILE", help="write the figures too, as one HTML page")
    compare.add_argument("--save", metavar="FOLDER", help="save the runs as three small tables that compare reads")
    compare.set_defaults(command=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    """Compare the methods of a study: success with intervals, the chance to end above the control, the cost to a target
    success, and a verdict that names no winner where the interval, corrected for the number of methods, includes
    zero. Runs of several environments are compared within each."""
    from .. import comparison
    from ..collected import collect, save
    from ..sweep.mirror import is_url

    page = _page(arguments.out)
    if is_url(arguments.folder):
        raise WorkbenchError(f"{arguments.folder} is a URL: copy the study to a folder here, then compare that folder")
    if not 0 < arguments.target <= 1:
        raise WorkbenchError(f"--target must be a success rate above 0 and at most 1, got {arguments.target:g}")
    everything = collect(arguments.folder)
    data = comparison.finished(everything)
    parts, panel = data.by_env(), arguments.panel
    if page and len(parts) > 1:
        more = f"{len(parts)} environments, drawn by {_games(arguments.folder)}"
        raise WorkbenchError(f"--out writes the figures of one environment; these runs are of {more}")
    found = {env: _lines(part, arguments.control, panel, arguments.target) for env, part in parts.items()}
    for line in data.notes:
        print(printable(line))
    for env, lines in found.items():
        if len(parts) > 1:
            print("", printable(env), "", sep="\n")
        for line in lines:
            print(printable(line))
    given = {"folder": arguments.folder, "control": arguments.control, "panel": panel}
    given = {name: value for name, value in given.items() if value} | {"target": f"{arguments.target:g}"}
    print()
    if arguments.save:
        paths = save(everything, arguments.save)
        size = sum(path.stat().st_size for path in paths)
        print(f"tables  {arguments.save} ({size / 1e3:.0f} kB)")
    if page:
        _write_page(page, given)
        print(f"report  {page}")
    elif len(parts) > 1:
        print("Each environment is compared by itself, and so corrected for its own methods alone.")
        print(f"figures: {_games(arguments.folder)}")
    else:
        told = " ".join(f"-p {name} {shlex.quote(str(value))}" for name, value in given.items())
        print(f"figures: workbench run compare {told}")


def _games(folder: str) -> str:
    return f"workbench run games -p study {shlex.quote(folder)}"


def _lines(data, control: str, panel: str, target: float) -> list[str]:
    """What the runs of one environment (workbench.collected.Collected) show."""
    from .. import comparison

    control = comparison.pick_control(data.evals, control)
    return [
        *comparison.describe(data.evals, panel, control),
        "",
        *table(comparison.summary(data, control, panel, target=target), target),
        "",
        *comparison.verdict(data.evals, control, panel),
        *comparison.budget_sentences(comparison.budget(data), control),
        *comparison.unbalanced(data.evals, control),
        *comparison.differing(data.configs),
    ]


def table(summary, target: float) -> list[str]:
    """The summary of workbench.comparison as aligned lines, a heading first."""
    heading = ("", "runs", "success", "IQM", "95 %", "above control", "95 %", f"reached {100 * target:g} %", "rollouts",
               "seconds")  # fmt: skip
    rows = [heading]
    for row in summary.to_dicts():
        better = ("the control", "") if row["better"] is None else (
            f"{100 * row['better']:.0f} %", f"{100 * row['better_low']:.0f} to {100 * row['better_high']:.0f}"
        )  # fmt: skip
        missing = "not by half" if row["reached"] * 2 < row["runs"] else "–"
        spent = [missing if v is None else f"{v:,.0f}" for v in (row["rollouts"], row["seconds"])]
        rows.append((
            row["label"], str(row["runs"]), f"{100 * row['success']:.1f} %", f"{100 * row['iqm']:.1f} %",
            f"{100 * row['low']:.1f} to {100 * row['high']:.1f}", *better, f"{row['reached']} of {row['runs']}", *spent,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
            for r in rows]  # fmt: skip


def _page(out: str | None) -> Path | None:
    """Where the page goes, checked before anything is computed."""
    if not out:
        return None
    page = Path(out)
    if page.suffix != ".html" or not page.parent.is_dir():
        raise WorkbenchError(f"--out takes a file ending in .html in a folder that exists, got {out!r}")
    return page


def _write_page(page: Path, given: dict[str, str]) -> None:
    """The report of notebooks/compare.ipynb, executed for it."""
    from ..runs.execute import RunFailed, run_notebook
    from ..runs.files import atomic_write

    parameters = given | {"folder": str(Path(given["folder"]).resolve())}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run = run_notebook("compare", parameters, scratch, progress=False)
        except RunFailed as failure:
            raise WorkbenchError(f"{page} was not written: {str(failure).splitlines()[0]}") from None
        atomic_write(page, (run.path / "report.html").read_bytes())
