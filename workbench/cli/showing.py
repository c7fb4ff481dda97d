"""report, demo, methods: what there is to see."""

import argparse

from ..errors import WorkbenchError


def add(commands: "argparse._SubParsersAction") -> None:
    report = commands.add_parser("report", help="write a run as one HTML file to share", description=_report.__doc__)
    report.add_argument("run", metavar="RUN", help="a run folder")
    report.add_argument("--episodes", metavar="N|all", help="most episodes that it holds (default: 200)")
    report.add_argument("--redact", action="store_true", help="leave out all text and token ids, keep numbers")
    report.add_argument("--out", metavar="FILE", help="where to write (default: report.html in the run folder)")
    report.set_defaults(command=_report)

    demo = commands.add_parser("demo", help="the main job, small: train, record, show", description=_demo.__doc__)
    demo.add_argument("--env", help="the environment (default: twc, of TextWorldExpress)")
    demo.add_argument("--out", help="the folder runs go into (default: runs)")
    demo.add_argument("--steps", type=int, help="batches of rollouts of each run (default: 12 on twc)")
    demo.add_argument("--seeds", type=int, help="seeds of each method (default: 2 on twc)")
    demo.set_defaults(command=_demo)

    methods = commands.add_parser("methods", help="list the methods that train takes", description=_methods.__doc__)
    methods.add_argument("name", nargs="?", help="one method: what it sees, its options and their defaults")
    methods.set_defaults(command=_methods)


def _report(arguments: argparse.Namespace) -> None:
    """Write a run as one HTML file that needs nothing else: what it found, chosen episodes in the explorer (best,
    median, worst, most revised of each step, members of their groups, those with notes), notes, notebook and figures.
    Opened as report.html#run=NAME&step=10&episode=3&turn=5 it shows that turn."""
    from ..report import EPISODES, build_report
    from ..runs import RunFolder

    asked = arguments.episodes
    if asked not in (None, "all") and not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise WorkbenchError(f"--episodes takes a number from 1, or all; got {asked!r}")
    most = EPISODES if asked is None else None if asked == "all" else int(asked)
    path = build_report(RunFolder.open(arguments.run), episodes=most, redact=arguments.redact, out=arguments.out)
    print(f"{path}\n{path.stat().st_size / 1e6:.1f} MB")


def _demo(arguments: argparse.Namespace) -> None:
    """Train a small agent on a real text world and show where the credit went."""
    from ..demo import main as demo

    given = {name: getattr(arguments, name) for name in ("env", "out", "steps", "seeds")}
    demo(**{name: value for name, value in given.items() if value is not None})


def _methods(arguments: argparse.Namespace) -> None:
    """List the methods by name, with the paper each is from; of one, what its credit can see and its options."""
    from ..methods import METHODS, method, options

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
