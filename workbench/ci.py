"""Do the notebooks still work, and do they still find what they found? One command for a continuous-integration job.

Every notebook of a folder is executed in a small form, one after the other, each as an ordinary run; its result record
is checked (expectations.py); reports, an index, a JUnit file and a table are left for the service to keep. ci.toml
beside the notebooks says what is small and what is expected:

    [train.parameters]         # of the notebook train.ipynb
    steps = 2
    [train.expect]
    steps = 2
    [gated]                    # the same notebook in another form
    notebook = "train"
    parameters = { method = "agent_opsd_dgg", steps = 1 }
    [beliefs]
    needs = "train"            # its parameter `run` (or `runs`, with all of a list) is the run that train made before
    [alfworld]
    skip = "needs the released games"

A notebook's own metadata may say the same, as {"workbench": {"ci": {"parameters": ..., "needs": ...}}}; ci.toml wins.
"""

import html
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from . import expectations, shipped
from .config import coerce
from .errors import WorkbenchError, printable, unknown
from .expectations import Expectation
from .runs import RunFolder
from .runs.execute import RunFailed, run_notebook
from .runs.files import atomic_write, read_json, read_toml, told
from .runs.plan import plan
from .trackers import VARIABLE as TRACKERS

FILE = "ci.toml"
_FIELDS = ("notebook", "parameters", "needs", "expect", "skip")


@dataclass(frozen=True)
class Case:
    """One notebook in one small form. expect: None where nothing was ever expected of it."""

    label: str
    notebook: Path
    parameters: dict[str, Any]
    needs: tuple[str, ...] = ()
    expect: dict[str, Expectation] | None = None
    skip: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a case: status "ok", "failed" or "skipped", and why, a line each."""

    label: str
    status: str
    seconds: float
    why: tuple[str, ...] = ()
    run: RunFolder | None = None
    report: Path | None = None


def check(
    notebooks: str | Path | None = None,
    out: str | Path = "ci",
    small: str | Path | None = None,
    tolerances: str | Path | None = None,
    only: Sequence[str] = (),
    update: bool = False,
    say: Callable[[str], Any] = print,
) -> list[Outcome]:
    """Execute and check the notebooks of a folder (None: the shipped ones); what makes a run goes before what needs it.

    Leaves out/runs/, out/reports/ with index.html, and out/junit.xml, also where it is stopped half-way. small,
    tolerances: files to read in place of ci.toml beside the notebooks; the second may hold the expectations alone.
    update: write what was found into the file of tolerances. Raises WorkbenchError on bad input before anything runs.
    """
    folder = Path(notebooks) if notebooks is not None else shipped.root("notebooks")
    beside = folder / FILE
    first = Path(small) if small is not None else beside
    second = Path(tolerances) if tolerances is not None else first
    if small is not None and not first.is_file():
        raise WorkbenchError(f"{first} is missing")
    if tolerances is not None and not second.is_file() and not update:
        raise WorkbenchError(f"{second} is missing; --update writes it")
    all_cases = cases(folder, _toml(first), _toml(second), (str(first), str(second)))
    order = ordered(all_cases, only)
    for case in order:
        _checked(case)
    out = Path(out).resolve()
    outcomes: dict[str, Outcome] = {}
    before = os.environ.get(TRACKERS)
    os.environ[TRACKERS] = "none"
    try:
        for number, case in enumerate(order, 1):
            say(f"[{number}/{len(order)}] {case.label}")
            outcomes[case.label] = _run(case, outcomes, out, update)
            if outcomes[case.label].status != "ok":
                say(f"  {outcomes[case.label].status}: {outcomes[case.label].why[0]}")
    finally:
        os.environ.pop(TRACKERS) if before is None else os.environ.update({TRACKERS: before})
        _leave(out, list(outcomes.values()))
    if update:
        _update(second, order, outcomes, say)
    return list(outcomes.values())


def cases(
    folder: Path, small: Mapping[str, Any], tolerances: Mapping[str, Any], names: tuple[str, str] = (FILE, FILE)
) -> dict[str, Case]:
    """The cases of a folder by label: one a notebook, and one a table of `small` that names a notebook.

    Raises WorkbenchError on tables and fields that mean nothing, and a folder without notebooks.
    """
    paths = {path.stem: path.resolve() for path in sorted(folder.glob("*.ipynb"))}
    if not paths:
        raise WorkbenchError(f"{folder} holds no notebooks (*.ipynb)")
    for where, table in zip(names, (small, tolerances), strict=True):
        for label, section in table.items():
            if not isinstance(section, Mapping):
                raise WorkbenchError(f"{where}: {label} must be a table, [{label}]")
            for field in section:
                if field not in _FIELDS:
                    raise unknown(f"field of [{label}] in {where}", field, _FIELDS)
    found = {}
    for label in [*paths, *(name for name in small if name not in paths)]:
        given = small.get(label, {})
        stem = str(given.get("notebook", label)).removesuffix(".ipynb")
        if Path(label).name != label:
            raise WorkbenchError(f"{names[0]}: [{label}] is also the name of a file, so it must have no slash")
        if stem not in paths:
            raise unknown(f"notebook of [{label}] in {names[0]}", stem, paths)
        own = read_json(paths[stem]).get("metadata", {}).get("workbench", {}).get("ci", {}) if stem == label else {}
        where = f"[{label}] of {names[0]}"
        for field in own:
            if field not in _FIELDS:
                raise unknown(f"field of the metadata of {stem}.ipynb", field, _FIELDS)
        section = own | given
        small_own, small_given = (coerce(s.get("parameters", {}), dict, "parameters", where) for s in (own, given))
        expect = tolerances.get(label, {}).get("expect", section.get("expect"))
        needs = coerce(section.get("needs", []), str | list[str], "needs", where)
        found[label] = Case(
            label, paths[stem], small_own | small_given, (needs,) if isinstance(needs, str) else tuple(needs),
            None if expect is None else expectations.parse(expect, f"{names[1]}, [{label}.expect]"),
            coerce(section.get("skip"), str | None, "skip", where),
        )  # fmt: skip
    for label in tolerances:
        if label not in found:
            raise unknown(f"table of {names[1]}", label, found)
    return found


def ordered(all_cases: Mapping[str, Case], only: Iterable[str] = ()) -> list[Case]:
    """The cases (or those named, with what they need) so that each comes after what it needs. Raises WorkbenchError."""
    order: dict[str, Case] = {}

    def visit(label: str, path: tuple[str, ...], where: str) -> None:
        if label not in all_cases:
            raise unknown(where, label, all_cases)
        if label in path:
            raise WorkbenchError(f"notebooks need each other in a circle: {' -> '.join([*path, label])}")
        for need in all_cases[label].needs:
            visit(need, (*path, label), f"name that {label} needs")
        order.setdefault(label, all_cases[label])

    for label in list(only) or all_cases:
        visit(label, (), "notebook")
    return list(order.values())


def table(outcomes: Sequence[Outcome]) -> str:
    """Notebook, seconds, status and why, a line each, and a last line of the whole."""
    width = max([8, *(len(o.label) for o in outcomes)])
    lines = [f"{'notebook':<{width}}  seconds  status   why"]
    for o in outcomes:
        more = f" (and {len(o.why) - 1} more)" if len(o.why) > 1 else ""
        why = o.why[0] + more if o.why else ""
        lines.append(printable(f"{o.label:<{width}}  {o.seconds:7.1f}  {o.status:<7}  {why}".rstrip()))
    counts = [f"{sum(o.status == s for o in outcomes)} {s}" for s in ("ok", "failed", "skipped")]
    return "\n".join([*lines, f"{', '.join(counts)}, {sum(o.seconds for o in outcomes):.0f} s"])


def _toml(path: Path) -> dict[str, Any]:
    return read_toml(path) if path.is_file() else {}


def _parameters(case: Case, runs: Sequence[str]) -> dict[str, Any]:
    """The case's parameters with the runs that it needs."""
    names = plan(case.notebook).names
    given = dict(case.parameters)
    if runs:
        name = next((n for n in ("runs", "run") if n in names and n not in given), None)
        if name is None:
            raise WorkbenchError(f"{case.label} needs {', '.join(case.needs)} but declares no parameter run or runs")
        given[name] = list(runs) if name == "runs" else runs[0]
    return given


def _checked(case: Case) -> None:
    """Raise WorkbenchError on parameters that could not run."""
    plan(case.notebook, _parameters(case, [f"the run of {need}" for need in case.needs]))


def _run(case: Case, before: Mapping[str, Outcome], out: Path, update: bool) -> Outcome:
    if case.skip:
        return Outcome(case.label, "skipped", 0.0, (case.skip,))
    if lacking := [need for need in case.needs if before[need].run is None]:
        return Outcome(case.label, "skipped", 0.0, (f"needs {', '.join(lacking)}, which left no run",))
    clock, run = time.monotonic(), None
    try:
        parameters = _parameters(case, [str(before[need].run.path) for need in case.needs])
        run = run_notebook(case.notebook, parameters, out / "runs", progress=False)
        why = expectations.problems(run.manifest["result"], _standing(case, update))
    except RunFailed as failure:
        account = [line.strip() for line in str(failure).splitlines() if line.strip()]
        why = (failure.why or account[0], *account)
        report = _report(case.label, failure.run, out)
        return Outcome(case.label, "failed", time.monotonic() - clock, why, None, report)
    except WorkbenchError as error:
        return Outcome(case.label, "failed", time.monotonic() - clock, (str(error),))
    report = _report(case.label, run, out)
    return Outcome(case.label, "failed" if why else "ok", time.monotonic() - clock, tuple(why), run, report)


def _standing(case: Case, update: bool) -> dict[str, Expectation]:
    """What a result must hold to: everything, or the bounds alone where its values are about to be written."""
    bounds = {name: e for name, e in (case.expect or {}).items() if e.min is not None or e.max is not None}
    return bounds if update else case.expect or {}


def _report(label: str, run: RunFolder, out: Path) -> Path | None:
    """Copy a run's report to where the service finds it; of a failed run, make one."""
    target = out / "reports" / f"{label}.html"
    made = run.path / "report.html"
    if not made.is_file():
        from .report import build_report

        try:
            build_report(run)
        except WorkbenchError:
            return None
    with told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, target)
    return target


def _leave(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the index, the JUnit file and, where GitHub asks for it, the summary of the job."""
    cells = "".join(
        f"<tr class='{o.status}'><td>{_link(o)}</td><td>{o.seconds:.1f}</td><td>{o.status}</td>"
        f"<td>{'<br>'.join(html.escape(line) for line in o.why)}</td></tr>\n"
        for o in outcomes
    )
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Notebooks</title><style>body{font:16px/1.5 "
        "system-ui,sans-serif;margin:2rem;max-width:70rem}td,th{padding:.2rem 1rem .2rem 0;text-align:left;"
        "vertical-align:top}.failed td{color:#b3261e}.skipped td{color:#66727f}</style><h1>Notebooks</h1><table>"
        f"<tr><th>notebook</th><th>seconds</th><th>status</th><th>why</th></tr>\n{cells}</table></html>\n"
    )
    atomic_write(out / "reports" / "index.html", page.encode())
    atomic_write(out / "junit.xml", _junit(outcomes))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        rows = "".join(
            f"| {_plain(o.label)} | {o.seconds:.1f} | {o.status} | {_plain('; '.join(o.why))} |\n" for o in outcomes
        )
        with told(Path(summary)), open(summary, "a", encoding="utf-8") as handle:
            handle.write(f"| notebook | seconds | status | why |\n| --- | ---: | --- | --- |\n{rows}")


def _link(outcome: Outcome) -> str:
    name = html.escape(outcome.label)
    return f"<a href='{quote(outcome.label)}.html'>{name}</a>" if outcome.report else name


def _plain(text: str) -> str:
    return re.sub(r"[|<>`\n]", " ", text)


def _xml(text: str) -> str:
    """Text without what XML has no characters for."""
    return re.sub(r"[^\t\x20-\ud7ff\ue000-\ufffd]", "?", text)


def _junit(outcomes: Sequence[Outcome]) -> bytes:
    counts = {"failures": sum(o.status == "failed" for o in outcomes), "errors": 0}
    counts |= {"tests": len(outcomes), "skipped": sum(o.status == "skipped" for o in outcomes)}
    facts = {name: str(count) for name, count in counts.items()} | {"time": f"{sum(o.seconds for o in outcomes):.3f}"}
    suite = ElementTree.Element("testsuite", {"name": "workbench ci"} | facts)
    for o in outcomes:
        facts = {"classname": "notebooks", "name": _xml(o.label), "time": f"{o.seconds:.3f}"}
        one = ElementTree.SubElement(suite, "testcase", facts)
        if o.status != "ok":
            tag = "failure" if o.status == "failed" else "skipped"
            lines = [_xml(line) for line in o.why]
            ElementTree.SubElement(one, tag, message=lines[0]).text = "\n".join(lines)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)


def _update(path: Path, order: Sequence[Case], outcomes: Mapping[str, Outcome], say: Callable[[str], Any]) -> None:
    """Write the found results into the file of tolerances, of every case that gave one."""
    runs = {label: outcome.run for label, outcome in outcomes.items() if outcome.run}
    passing = [run.path.name for run in runs.values()]
    records = {label: run.manifest["result"] for label, run in runs.items()}
    tables = {
        case.label: expectations.updated(records[case.label], case.expect, passing)
        for case in order
        if records.get(case.label) is not None
    }
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    atomic_write(path, expectations.rewrite(text, tables, str(path)).encode())
    say(f"{path}: expectations of {', '.join(tables) or 'no notebook'} were written")
