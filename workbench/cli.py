"""The command line: `workbench run | runs | report | import | audit | score | replay | demo | methods`.

Exit codes: 0 done, 1 a run failed, 2 bad input (one line on stderr), 130 stopped by Ctrl-C.
"""

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Sequence

from . import __version__, shipped
from .errors import WorkbenchError, printable

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given, rest = _split(list(sys.argv[1:] if argv is None else argv))
    arguments = _parser().parse_args(rest)
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is as good as Ctrl-C
    try:
        arguments.parameters = given
        return arguments.command(arguments) or 0
    except WorkbenchError as error:
        print(f"workbench: {printable(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # `workbench runs | head`
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, terminate)


def _split(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Each `-p NAME VALUE` of the run command, and the rest. argparse takes a VALUE such as -1e-3 for an option."""
    given, rest = [], []
    while argv:
        head, *argv = argv
        if head == "-p" and rest[:1] == ["run"] and len(argv) >= 2:
            given.append((argv[0], argv[1]))
            argv = argv[2:]
        else:
            rest.append(head)
    return given, rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workbench", description="A workbench for credit signals in agentic RL.")
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="execute a notebook as a reproducible run", description=_run.__doc__)
    names = ", ".join(shipped.notebooks())
    run.add_argument("notebook", nargs="?", help=f"a path, or the name of a shipped notebook: {names}")
    run.add_argument("-p", nargs=2, action="append", metavar=("NAME", "VALUE"), help="set a parameter (repeatable)")
    run.add_argument("--out", default="runs", help="the folder runs go into (default: runs)")
    run.add_argument("--resume", metavar="RUN", help="go on with an interrupted or failed run folder")
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.set_defaults(command=_run)

    runs = commands.add_parser("runs", help="list runs", description=_runs.__doc__)
    runs.add_argument("--out", default="runs", help="the folder runs went into (default: runs)")
    runs.set_defaults(command=_runs)

    report = commands.add_parser("report", help="write a run as one HTML file to share", description=_report.__doc__)
    report.add_argument("run", metavar="RUN", help="a run folder")
    report.add_argument("--episodes", metavar="N|all", help="most episodes that it holds (default: 200)")
    report.add_argument("--redact", action="store_true", help="leave out all text and token ids, keep numbers")
    report.add_argument("--out", metavar="FILE", help="where to write (default: report.html in the run folder)")
    report.set_defaults(command=_report)

    read = commands.add_parser("import", help="turn another system's rollouts into a run", description=_import.__doc__)
    read.add_argument("path", metavar="PATH", help="a file or folder of rollouts; the format is found by looking")
    read.add_argument("--out", required=True, metavar="RUN", help="the run folder to write; it must not be there yet")
    read.set_defaults(command=_import)

    audit = commands.add_parser("audit", help="look for silent errors in rollouts", description=_audit.__doc__)
    audit.add_argument("path", metavar="PATH", help="a run folder, or a file or folder of another system's rollouts")
    audit.add_argument("--tokenizer", help="a tokenizer's folder or hub name, to hold texts against their tokens")
    audit.set_defaults(command=_audit)

    score = commands.add_parser("score", help="score a run's tokens under a model", description=_score.__doc__)
    score.add_argument("run", metavar="RUN", help="a run folder whose turns hold tokens and their context")
    score.add_argument("--model", required=True, help="a hub name or folder")
    score.add_argument("--skills", required=True, help="a folder of skill texts, or the name of a shipped one")
    score.add_argument("--position", default="user", help="where the skill text goes: user (default) or front")
    score.add_argument("--retrieval", default="kind", help="texts a task gets: kind (default), keyword, random, all")
    score.add_argument("--temperature", type=float, default=1.0, help="of the log-probs (default: 1)")
    score.add_argument("--device", default="auto", help="cuda where there is one")
    score.add_argument("--out", default="runs", help="the folder runs go into (default: runs)")
    score.set_defaults(command=_score)

    replay = commands.add_parser(
        "replay", help="credit a run's rollouts by another method", description=_replay.__doc__
    )
    replay.add_argument("run", metavar="RUN", help="a run folder whose turns hold tokens")
    replay.add_argument("--method", required=True, help="the method whose credit is computed; see `workbench methods`")
    replay.add_argument("--option", action="append", metavar="NAME=VALUE", help="of that method (repeatable)")
    replay.add_argument("--against", metavar="METHOD", help="compare with this method's credit, not the recorded one")
    replay.add_argument("--step", type=int, action="append", help="a training step (repeatable; default: all)")
    replay.add_argument("--reward", help="what groups compare: outcome or return (default: as the run was trained)")
    replay.add_argument("--out", metavar="FILE.parquet", help="write one row a turn, with both credits, to this file")
    replay.set_defaults(command=_replay)

    demo = commands.add_parser("demo", help="the main job, small: train, record, show", description=_demo.__doc__)
    demo.add_argument("--env", help="the environment (default: twc, of TextWorldExpress)")
    demo.add_argument("--out", help="the folder runs go into (default: runs)")
    demo.add_argument("--steps", type=int, help="batches of rollouts of each run (default: 12 on twc)")
    demo.add_argument("--seeds", type=int, help="seeds of each method (default: 2 on twc)")
    demo.set_defaults(command=_demo)

    methods = commands.add_parser("methods", help="list the methods that train takes", description=_methods.__doc__)
    methods.add_argument("name", nargs="?", help="one method: what it sees, its options and their defaults")
    methods.set_defaults(command=_methods)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Execute a notebook into a new run folder: names and types of parameters are checked before anything starts."""
    from .runs.execute import RunFailed, RunInterrupted, run_notebook, shown

    given = dict(arguments.parameters)
    if len(given) < len(arguments.parameters):
        twice = next(name for name, _ in arguments.parameters if [n for n, _ in arguments.parameters].count(name) > 1)
        raise WorkbenchError(f"parameter {twice} is given more than once")
    try:
        run = run_notebook(arguments.notebook, given, arguments.out, arguments.resume, progress=not arguments.quiet)
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        return FAILED
    except RunInterrupted as stop:
        print(stop, file=sys.stderr)
        return INTERRUPTED
    print(f"run     {shown(run.path)}\nreport  {shown(run.path / 'report.html')}")
    return 0


def _runs(arguments: argparse.Namespace) -> None:
    """List the runs in a folder, oldest first."""
    from .runs import list_runs

    rows = list_runs(arguments.out).to_dicts()
    if not rows:
        print(f"no runs under {arguments.out}")
        return
    width = max(len(row["path"]) for row in rows)
    for row in rows:
        seconds = "" if row["seconds"] is None else f"{row['seconds']:8.0f} s"
        print(f"{row['path']:<{width}}  {row['state']:<11} {seconds:>10}  {row['error'] or ''}".rstrip())


def _report(arguments: argparse.Namespace) -> None:
    """Write a run as one HTML file that needs nothing else: what it found, chosen episodes in the explorer (best,
    median, worst, most revised of each step, members of their groups, those with notes), notes, notebook and figures.
    Opened as report.html#run=NAME&step=10&episode=3&turn=5 it shows that turn."""
    from .report import EPISODES, build_report
    from .runs import RunFolder

    asked = arguments.episodes
    if asked not in (None, "all") and not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise WorkbenchError(f"--episodes takes a number from 1, or all; got {asked!r}")
    most = EPISODES if asked is None else None if asked == "all" else int(asked)
    path = build_report(RunFolder.open(arguments.run), episodes=most, redact=arguments.redact, out=arguments.out)
    print(f"{path}\n{path.stat().st_size / 1e6:.1f} MB")


def _import(arguments: argparse.Namespace) -> None:
    """Read rollouts of another system, say what is in them and what is missing, and write them as a run folder."""
    from .formats.write import import_run
    from .runs.files import read_json

    run = import_run(arguments.path, arguments.out, progress=lambda line: print(line, file=sys.stderr))
    facts = read_json(run.path / "source.json")
    print(f"format   {facts['format']}: {facts['description']}")
    print(f"read     {facts['episodes']} episodes, {facts['turns']} turns, fidelity {_counted(facts['fidelity'])}")
    if facts["missing"]:
        print(f"missing  {_counted(facts['missing'])}")
    for note in facts["notes"]:
        print(f"note     {note}")
    print(f"run      {run.path}")


def _counted(facts: object) -> str:
    """What a source lacks or holds, by name and count."""
    if isinstance(facts, dict):
        return ", ".join(f"{name} ({count})" for name, count in facts.items())
    return ", ".join(map(str, facts)) if isinstance(facts, list) else str(facts)


def _audit(arguments: argparse.Namespace) -> int:
    """Look for silent errors in rollouts; exit status 1 when one of them would corrupt training."""
    from pathlib import Path

    from .audit import audit
    from .formats import open_source
    from .runs import RunFolder

    tokenizer = None
    if arguments.tokenizer:
        from .policy import load_tokenizer

        tokenizer = load_tokenizer(arguments.tokenizer)
    path = Path(arguments.path)
    own = (path / "config.json").is_file() and (path / "tables").is_dir()
    report = audit(RunFolder.open(path) if own else open_source(path), name=str(path), tokenizer=tokenizer)
    print(report.text())
    return report.exit_status


def _score(arguments: argparse.Namespace) -> None:
    """Score a run's sampled tokens with a model, and with the same model reading a skill text, into a new run."""
    from .runs import RunFolder
    from .score import score_run

    skills = shipped.data("skills", arguments.skills)
    names = ("position", "retrieval", "temperature", "device")
    run = score_run(
        RunFolder.open(arguments.run), arguments.out, arguments.model, skills if skills.is_dir() else arguments.skills,
        **{name: getattr(arguments, name) for name in names}, message=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    print(f"run     {run.path}")


def _replay(arguments: argparse.Namespace) -> None:
    """Another method's credit on the rollouts of a run, beside what was recorded: how far the orders of turns agree,
    turns whose sign flips, and tokens whose gradient coefficient changes most."""
    from .compare_credit import compare, text, write_turns
    from .runs import RunFolder

    if arguments.out and not arguments.out.endswith(".parquet"):
        raise WorkbenchError(f"--out {arguments.out}: a file that ends in .parquet is expected")
    options = _options(arguments.option or [])
    run = RunFolder.open(arguments.run)
    found = compare(run, arguments.method, options, arguments.step, arguments.against, reward=arguments.reward)
    print(text(found), end="")
    if arguments.out:
        print(f"\nturns   {write_turns(found, arguments.out)}")


def _options(given: list[str]) -> dict[str, object]:
    """NAME=VALUE arguments as {name: value}: what reads as JSON (0.5, true) is that, and text otherwise."""
    options: dict[str, object] = {}
    for argument in given:
        name, equals, value = argument.partition("=")
        if not equals or not name:
            raise WorkbenchError(f"--option {argument}: NAME=VALUE is expected, such as gamma=0.5")
        if name in options:
            raise WorkbenchError(f"option {name} is given more than once")
        try:
            options[name] = json.loads(value)
        except ValueError:
            try:
                options[name] = float(value)  # .8 is no JSON
            except ValueError:
                options[name] = value
    return options


def _demo(arguments: argparse.Namespace) -> None:
    """Train a small agent on a real text world and show where the credit went."""
    from .demo import main as demo

    given = {name: getattr(arguments, name) for name in ("env", "out", "steps", "seeds")}
    demo(**{name: value for name, value in given.items() if value is not None})


def _methods(arguments: argparse.Namespace) -> None:
    """List the methods by name, with the paper each is from; of one, what its credit can see and its options."""
    from .methods import METHODS, method, options

    if arguments.name:
        one, known = method(arguments.name), options(arguments.name)
        print(f"{one.name}  {one.paper}\n{one.description}\n{one.sees}")
        print("\nmethod_options:")
        width = max(map(len, known))
        for name, default in known.items():
            print(f"  {name:<{width}}  {default!r}")
        if one.off:
            print(f"\nGRPO exactly with {one.off!r}")
        return
    rows = [method(name) for name in METHODS]
    name_width, paper_width = (max(len(getattr(row, field)) for row in rows) for field in ("name", "paper"))
    for row in rows:
        print(f"{row.name:<{name_width}}  {row.paper:<{paper_width}}  {row.description}")


if __name__ == "__main__":
    sys.exit(main())
