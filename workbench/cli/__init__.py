"""The command line, `workbench COMMAND`: one module a family of commands.

Exit codes: 0 done, 1 a run failed, 2 bad input (one line on stderr), 130 stopped by Ctrl-C.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import WorkbenchError, printable
from . import checking, comparing, crediting, evaluating, rollouts, running, showing, sweeping
from .codes import BAD_INPUT, INTERRUPTED

FAMILIES = (running, sweeping, comparing, checking, crediting, rollouts, evaluating, showing)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given, rest = _split(list(sys.argv[1:] if argv is None else argv))
    arguments = _parser().parse_args(rest)
    # A scheduler's stop and a closed terminal are as good as Ctrl-C; what is ignored, as under nohup, stays ignored.
    stops = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    stops = {n: handler for n, handler in stops.items() if handler is not signal.SIG_IGN}
    for number in stops:
        signal.signal(number, signal.default_int_handler)
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
        for number, handler in stops.items():
            signal.signal(number, handler)


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
    for family in FAMILIES:
        family.add(commands)
    return parser
