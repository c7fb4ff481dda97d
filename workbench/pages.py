"""Page-side code of the widgets as text, for a page that has no kernel: read from the files, never by their Python."""

import functools
import re
from pathlib import Path

from . import shipped

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const)\b)", re.MULTILINE)


def folder() -> Path:
    """Where the widgets' modules and stylesheets lie: beside the package in a checkout, inside it in a wheel."""
    return shipped.root("widgets")


@functools.cache
def module(name: str) -> str:
    """A widget's module ("explorer") as one ES module: its parts on disk, each once and after those that it imports,
    unchanged but for their imports and exports."""
    parts: dict[str, str] = {}

    def add(part: str) -> None:
        text = (folder() / f"{part}.js").read_text(encoding="utf-8")
        for needed in _IMPORT.findall(text):
            if needed not in parts:
                add(needed)
        parts[part] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(name)
    return "\n".join(parts.values())


@functools.cache
def stylesheet(name: str) -> str:
    """A widget's stylesheet."""
    return (folder() / f"{name}.css").read_text(encoding="utf-8")
