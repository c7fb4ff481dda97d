"""A widget's page as one ES module: its parts are modules of their own on disk, joined unchanged but for imports."""

import functools
import re
from pathlib import Path

_HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const)\b)", re.MULTILINE)


@functools.cache
def module(name: str) -> str:
    """The module of a widget ("explorer"): what it imports from its neighbours comes first, each part once."""
    parts: dict[str, str] = {}

    def add(part: str) -> None:
        text = (_HERE / f"{part}.js").read_text(encoding="utf-8")
        for needed in _IMPORT.findall(text):
            if needed not in parts:
                add(needed)
        parts[part] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(name)
    return "\n".join(parts.values())


@functools.cache
def stylesheet(name: str) -> str:
    """The stylesheet of a widget."""
    return (_HERE / f"{name}.css").read_text(encoding="utf-8")
