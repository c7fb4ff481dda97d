"""Cells of an executed notebook as HTML that is safe whatever text a run holds.

Nothing a notebook put out is passed on as HTML: figures are drawn anew from their plotly JSON, marked tables and text
views keep an allow-list of tags, images become data URLs, and everything else is shown as plain text.
"""

import base64
import html
import json
import re
from collections.abc import Mapping
from typing import Any

from .figures.display import MARK as FIGURE_MARK
from .figures.display import MIME as PLOTLY_MIME
from .figures.display import script_json
from .runs import RESULT_MIME, recorded_result

_TITLES = r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b(?!\[[0-9;]*m)"
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
_CONTROL = re.compile(_TITLES + r"|[\x00-\x08\x0b-\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
_IMAGES = ("image/svg+xml", "image/png", "image/jpeg")
_TAGS = (
    "div span p pre code b strong i em small sub sup br hr ul ol li table caption thead tbody tr th td h2 h3 h4 h5 "
    "figure figcaption details summary mark"
).split()
_STYLES = (
    "color background-color font-weight font-style font-size font-family text-align text-decoration white-space border "
    "border-bottom border-top border-left border-right border-radius padding margin width max-width min-width height "
    "max-height overflow overflow-x overflow-y display line-height letter-spacing opacity vertical-align"
).split()


def visible(text: str) -> str:
    """Text in which marks that hide it or turn its direction show as U+FFFD."""
    return _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n").replace("\r", "\n"))


def cell_html(cell: Any) -> str:
    """A notebook's cell and what it put out, as the module's docstring says."""
    if cell.cell_type == "markdown":
        return f'<div class="text">{markdown(cell.source)}</div>'
    if cell.cell_type != "code":
        return _pre(cell.source)
    outputs = "".join(_output(output) for output in cell.outputs)
    return _code(cell.source) + (f'<div class="output">{outputs}</div>' if outputs else "")


def _code(source: str) -> str:
    from nbconvert.filters.highlight import Highlight2HTML

    source = visible(source)
    if not source.strip():
        return ""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("#")), lines[0])
    code = Highlight2HTML(pygments_lexer="ipython3")(source)
    return f'<details class="code"><summary>{html.escape(first)}</summary>{code}</details>'


def markdown(source: str, links: bool = True) -> str:
    """Markdown as HTML: raw HTML in it is escaped, links that run code are dropped, only data: images are kept.

    links=False keeps the text of links alone.

    Formulas stay as they were typed: drawing them would take a script from a network.
    """
    import mistune

    class Renderer(mistune.HTMLRenderer):
        def image(self, text: str, url: str, title: str | None = None) -> str:
            if url.startswith(("data:image/png;base64,", "data:image/jpeg;base64,")):
                return f'<img src="{html.escape(url)}" alt="{html.escape(text)}">'
            return f"[image: {html.escape(text or url)}]"

        def link(self, text: str, url: str, title: str | None = None) -> str:
            return super().link(text, url, title) if links else text

    renderer = Renderer(escape=True, allow_harmful_protocols=False)
    render = mistune.create_markdown(renderer=renderer, plugins=["table", "strikethrough", "math"])
    renderer.register("inline_math", lambda _, text: f"<code>{html.escape(text)}</code>")
    renderer.register("block_math", lambda _, text: f"<pre>{html.escape(text)}</pre>")
    return str(render(visible(source)))


def _output(output: Any) -> str:
    if output.output_type == "stream":
        return _pre(output.text, "stderr" if output.name == "stderr" else "")
    if output.output_type == "error":
        return _pre("\n".join(output.traceback) or f"{output.ename}: {output.evalue}", "error")
    data = output.get("data", {})
    marked = str(data.get("text/html", "")).lstrip()[:200].partition(">")[0] if "text/html" in data else ""
    if PLOTLY_MIME in data:
        return figure_html(data[PLOTLY_MIME])
    if f'{FIGURE_MARK}="plotly.js"' in marked:
        return ""
    if marked.startswith("<div") and FIGURE_MARK in marked and "<script" not in data["text/html"]:
        return f'<div class="kept">{kept_html(data["text/html"])}</div>'
    for kind in _IMAGES:
        if kind in data:
            return _image(kind, data[kind])
    if "text/markdown" in data:
        return f'<div class="text">{markdown(data["text/markdown"], links=False)}</div>'
    if RESULT_MIME in data:
        return _pre(json.dumps(recorded_result(output), indent=2, ensure_ascii=False))
    if "application/vnd.jupyter.widget-view+json" in data:
        return _pre("(an interactive view: open the notebook in JupyterLab)", "stderr")
    text = str(data.get("text/plain", ""))
    return _pre(text, "table" if text.startswith(("shape:", "┌")) else "") if text else ""


def kept_html(source: str) -> str:
    """The HTML of a marked output with nothing in it but layout and text: no script, no handler, no link, no load."""
    import bleach
    from bleach.css_sanitizer import CSSSanitizer

    styles = CSSSanitizer(allowed_css_properties=_STYLES, allowed_svg_properties=[])
    attributes = {"*": ["style", "title", "class"], "td": ["colspan", "rowspan"], "th": ["colspan", "rowspan"]}
    return bleach.clean(visible(source), tags=_TAGS, attributes=attributes, css_sanitizer=styles, protocols=[])


def figure_html(figure: Mapping[str, Any]) -> str:
    """The place of a plotly figure and its JSON, which widgets/static_figures.js draws."""
    kept = {name: figure[name] for name in ("data", "layout", "config") if name in figure}
    layout = kept.get("layout", {})
    size = f"width:{_pixels(layout.get('width'), 880)}px;height:{_pixels(layout.get('height'), 450)}px"
    data = f'<script type="application/json" data-figure>{script_json(kept, allow_nan=True)}</script>'
    return f'<div class="figure"><div style="{size}"></div>{data}</div>'


def _pixels(value: Any, default: int) -> int:
    return int(value) if isinstance(value, int | float) and 0 < value < 10_000 else default


def _image(kind: str, content: Any) -> str:
    text = "".join(content)
    if kind == "image/svg+xml":
        text = base64.b64encode(text.encode()).decode()
    return f'<img src="data:{kind};base64,{html.escape("".join(text.split()))}" alt="">'


def _pre(text: str, kind: str = "") -> str:
    from nbconvert.filters.ansi import ansi2html

    parts = re.split(r"(\x1b\[[0-9;]*m)", _CONTROL.sub("", text))  # colours stay; window titles, bells and the like go
    text = "".join(part if part.startswith("\x1b") else visible(part) for part in parts)
    return f'<pre class="{kind}">{ansi2html(text)}</pre>' if text.strip() else ""
