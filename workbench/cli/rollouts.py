"""import, audit, score, replay: rollouts of a run or of another system."""

import argparse
import json
import sys

from .. import shipped
from ..errors import WorkbenchError


def add(commands: "argparse._SubParsersAction") -> None:
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


def _import(arguments: argparse.Namespace) -> None:
    """Read rollouts of another system, say what is in them and what is missing, and write them as a run folder."""
    from ..formats.write import import_run
    from ..runs.files import read_json

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

    from ..audit import audit
    from ..formats import open_source
    from ..runs import RunFolder

    tokenizer = None
    if arguments.tokenizer:
        from ..policy import load_tokenizer

        tokenizer = load_tokenizer(arguments.tokenizer)
    path = Path(arguments.path)
    own = (path / "config.json").is_file() and (path / "tables").is_dir()
    report = audit(RunFolder.open(path) if own else open_source(path), name=str(path), tokenizer=tokenizer)
    print(report.text())
    return report.exit_status


def _score(arguments: argparse.Namespace) -> None:
    """Score a run's sampled tokens with a model, and with the same model reading a skill text, into a new run."""
    from ..runs import RunFolder
    from ..score import score_run

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
    from ..compare_credit import compare, text, write_turns
    from ..runs import RunFolder

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
