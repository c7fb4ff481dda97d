"""One HTML file that shows a run: readable offline, for ever, by anyone, and safe whatever the run's text holds.

What an agent was told and what it wrote is text from elsewhere. Nothing a notebook put out is passed on as HTML:
figures are drawn anew from their plotly JSON, marked tables and text views keep an allow-list of tags, images become
data URLs, and everything else is shown as plain text. As a second fence the page's security policy lets only the
scripts of this file run (by their hash) and loads nothing from anywhere.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import WorkbenchError
from .figures.display import MARK as FIGURE_MARK
from .figures.display import MIME as PLOTLY_MIME
from .figures.display import script_json
from .runs import RESULT_MIME, RunFolder
from .runs.files import atomic_write
from .runs.manifest import artifacts

_TITLES = r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b(?!\[[0-9;]*m)"
_CONTROL = re.compile(_TITLES + r"|[\x00-\x08\x0b-\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
_IMAGES = ("image/svg+xml", "image/png", "image/jpeg")
_WEBGL = {"scattergl", "heatmapgl", "splom", "parcoords", "scatter3d", "surface", "mesh3d", "scatterpolargl"}
_TAGS = (
    "div span p pre code b strong i em small sub sup br hr ul ol li table caption thead tbody tr th td h2 h3 h4 h5 "
    "figure figcaption details summary mark"
).split()
_STYLES = (
    "color background-color font-weight font-style font-size font-family text-align text-decoration white-space border "
    "border-bottom border-top border-left border-right border-radius padding margin width max-width min-width height "
    "max-height overflow overflow-x overflow-y display line-height letter-spacing opacity vertical-align"
).split()

_DRAW = """
for (const source of document.querySelectorAll('script[type="application/json"][data-figure]')) {
  const box = source.previousElementSibling, figure = JSON.parse(source.textContent);
  const config = Object.assign({}, figure.config, {displaylogo: false, showSendToCloud: false, typesetMath: false});
  Plotly.newPlot(box, figure.data, figure.layout, config).catch(error => { box.textContent = "not drawn: " + error; });
}
"""

_STYLE = """
:root { --ink: #1f2933; --muted: #66727f; --line: #dfe4e9; --soft: #f6f8f9; --blue: #0072b2; --red: #b3261e; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 980px; padding: 40px 32px 80px; color: var(--ink); background: #fff;
       font: 16px/1.6 "Inter", "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
h1, h2, h3, h4 { line-height: 1.25; margin: 1.8em 0 .5em; font-weight: 650; }
h1 { font-size: 28px; margin-top: .6em; } h2 { font-size: 21px; } h3 { font-size: 17px; }
a { color: var(--blue); }
code, pre { font-family: "JetBrains Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 13px; }
pre { margin: .6em 0; line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
pre.table { white-space: pre; overflow-x: auto; line-height: 1.25; }
header { border-bottom: 1px solid var(--line); padding-bottom: 20px; margin-bottom: 28px; }
header h1 { margin: 0 0 4px; }
header .sub { color: var(--muted); margin: 0 0 18px; overflow-wrap: anywhere; }
.state { display: inline-block; padding: 1px 9px; border-radius: 10px; font-size: 13px; font-weight: 600;
         background: #e3f1ea; color: #13643f; vertical-align: 4px; margin-left: 8px; }
.state.bad { background: #fbe9e7; color: var(--red); }
.facts { display: grid; grid-template-columns: 1fr 1fr; gap: 4px 36px; }
.facts h2 { margin: 12px 0 4px; font-size: 14px; color: var(--muted); font-weight: 600; }
.facts table, .kept table, .text table { border-collapse: collapse; font-size: 14px; }
.facts table { width: 100%; table-layout: fixed; }
.facts td { padding: 3px 8px 3px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere;
            white-space: pre-line; }
.facts td:first-child { color: var(--muted); width: 42%; }
.kept td, .kept th, .text td, .text th { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: left; }
.text blockquote { margin: 0; padding-left: 16px; border-left: 3px solid var(--line); color: var(--muted); }
.text code { background: var(--soft); padding: 1px 4px; border-radius: 3px; }
details.code { margin: 14px 0 4px; }
details.code > summary { cursor: pointer; color: var(--muted); font: 12px "DejaVu Sans Mono", Consolas, monospace;
                         overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
details.code > pre, .highlight pre { background: var(--soft); padding: 10px 14px; border-radius: 6px; }
.error { background: #fdf3f2; padding: 10px 14px; border-radius: 6px; }
.stderr { color: var(--muted); }
.part { color: var(--muted); border-top: 1px solid var(--line); margin: 64px 0 0; padding-top: 24px; font-size: 14px; }
.figure { margin: 12px 0; overflow-x: auto; } .figure > div { min-height: 40px; }
.output img { max-width: 100%; }
@media (max-width: 720px) { .facts { grid-template-columns: 1fr; } body { padding: 20px 14px; } }
@media print { details.code { display: none; } body { max-width: none; padding: 0; } }
"""


def build_report(run: RunFolder, also: Sequence[RunFolder] = ()) -> Path:
    """Write report.html into the run folder from executed.ipynb and the manifest, and return its path.

    also: runs whose notebooks follow in the same page, such as the analyses of this one.
    Raises WorkbenchError where a run holds no executed notebook.
    """
    parts = [(_executed(part), part.manifest, part.path.name) for part in (run, *also)]
    report = run.path / "report.html"
    atomic_write(report, page(*parts).encode("utf-8", errors="replace"))
    if run.is_complete:
        run.update_manifest(artifacts=artifacts(run.path))
    return report


def _executed(run: RunFolder) -> Any:
    import nbformat

    path = run.path / "executed.ipynb"
    if not path.is_file():
        raise WorkbenchError(f"{run.path} holds no executed.ipynb, so there is nothing to report")
    try:
        return nbformat.read(path, as_version=4)
    except ValueError as error:
        raise WorkbenchError(f"{path} cannot be read as a notebook: {error}") from None


def page(*parts: tuple[Any, Mapping[str, Any], str]) -> str:
    """The whole page, as one string; a part is a notebook, the manifest of its run and the name of its folder."""
    from plotly.offline import get_plotlyjs
    from pygments.formatters import HtmlFormatter

    body = "\n".join(
        (_header(manifest, name) if number == 0 else _section(manifest, name))
        + "\n".join(_cell(cell) for cell in notebook.cells)
        for number, (notebook, manifest, name) in enumerate(parts)
    )
    figures = [figure for notebook, *_ in parts for figure in _figures(notebook)]
    scripts = [get_plotlyjs(), _DRAW] if figures else []
    allowed = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    if any(str(trace.get("type")) in _WEBGL for figure in figures for trace in figure.get("data", [])):
        allowed.append("'unsafe-eval'")  # plotly compiles their shader programs
    sources = " ".join(allowed) or "'none'"
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    loaded, drawn = (f"<script>{scripts[0]}</script>", f"<script>{scripts[1]}</script>") if scripts else ("", "")
    colours = HtmlFormatter(style="default").get_style_defs(".highlight")
    _, manifest, name = parts[0]
    title = html.escape(f"{manifest.get('experiment', 'run')} {name}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{colours}{_STYLE}</style>\n{loaded}\n</head>\n<body>\n{body}\n{drawn}\n</body>\n</html>\n"
    )


def _section(manifest: Mapping[str, Any], name: str) -> str:
    origin = html.escape(f"{manifest.get('notebook') or manifest.get('experiment', 'run')} · {name}")
    changed = f'<div class="facts"><div>{_table(manifest["parameters"])}</div></div>'
    return f'<p class="part">{origin}</p>' + (changed if manifest.get("parameters") else "")


def _header(manifest: Mapping[str, Any], name: str) -> str:
    status = str(manifest.get("status", "unknown"))
    git, versions = manifest.get("git"), manifest.get("versions") or {}
    commit = git and git["commit"][:12] + (" with uncommitted changes" if git["dirty"] else "")
    facts = {
        "notebook": manifest.get("notebook"),
        "started": str(manifest.get("started") or "")[:19].replace("T", " ") + " UTC",
        "duration": _duration(manifest.get("seconds")),
        "attempts": len(manifest.get("attempts") or []),
        "device": manifest.get("device"),
        "commit": commit or "none (outside a checkout)",
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items() if version),
        "digest": manifest.get("digest"),
    }
    error = manifest.get("error")
    columns = (("Result", manifest.get("result")), ("Run", facts)), (("Parameters", manifest.get("parameters")),)
    tables = "".join(
        "<div>" + "".join(f"<h2>{title}</h2>{_table(rows)}" for title, rows in column if rows) + "</div>"
        for column in columns
    )
    return (
        f"<header><h1>{html.escape(str(manifest.get('experiment', 'run')))}"
        f'<span class="state{"" if status == "complete" else " bad"}">{html.escape(status)}</span></h1>'
        f'<p class="sub">{html.escape(name)}</p>'
        + (f'<pre class="error">{html.escape(str(error))}</pre>' if error else "")
        + f'<div class="facts">{tables}</div></header>\n'
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(float(seconds), 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


def _table(rows: Mapping[str, Any]) -> str:
    cells = ((html.escape(str(name)), html.escape(_shown(value))) for name, value in rows.items())
    return "<table>" + "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in cells) + "</table>"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict) and value:
        return "\n".join(f"{name}  {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list) and value and not any(isinstance(inner, dict | list) for inner in value):
        return ", ".join(map(_shown, value))
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return f'<div class="text">{markdown(cell.source)}</div>'
    if cell.cell_type != "code":
        return _pre(cell.source)
    outputs = "".join(_output(output) for output in cell.outputs)
    return _code(cell.source) + (f'<div class="output">{outputs}</div>' if outputs else "")


def _code(source: str) -> str:
    from nbconvert.filters.highlight import Highlight2HTML

    if not source.strip():
        return ""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("#")), lines[0])
    code = Highlight2HTML(pygments_lexer="ipython3")(source)
    return f'<details class="code"><summary>{html.escape(first)}</summary>{code}</details>'


def markdown(source: str) -> str:
    """Markdown as HTML: raw HTML in it is escaped, links that run code are dropped, only data: images are kept.

    Formulas stay as they were typed: drawing them would take a script from a network.
    """
    import mistune

    class Renderer(mistune.HTMLRenderer):
        def image(self, text: str, url: str, title: str | None = None) -> str:
            if url.startswith(("data:image/png;base64,", "data:image/jpeg;base64,")):
                return f'<img src="{html.escape(url)}" alt="{html.escape(text)}">'
            return f"[image: {html.escape(text or url)}]"

    renderer = Renderer(escape=True, allow_harmful_protocols=False)
    render = mistune.create_markdown(renderer=renderer, plugins=["table", "strikethrough", "math"])
    renderer.register("inline_math", lambda _, text: f"<code>{html.escape(text)}</code>")
    renderer.register("block_math", lambda _, text: f"<pre>{html.escape(text)}</pre>")
    return str(render(source))


def _output(output: Any) -> str:
    if output.output_type == "stream":
        return _pre(output.text, "stderr" if output.name == "stderr" else "")
    if output.output_type == "error":
        return _pre("\n".join(output.traceback) or f"{output.ename}: {output.evalue}", "error")
    data = output.get("data", {})
    marked = str(data.get("text/html", "")).lstrip()[:200].partition(">")[0] if "text/html" in data else ""
    if PLOTLY_MIME in data:
        return _figure(data[PLOTLY_MIME])
    if f'{FIGURE_MARK}="plotly.js"' in marked:
        return ""
    if marked.startswith("<div") and FIGURE_MARK in marked and "<script" not in data["text/html"]:
        return f'<div class="kept">{kept_html(data["text/html"])}</div>'
    for kind in _IMAGES:
        if kind in data:
            return _image(kind, data[kind])
    if "text/markdown" in data:
        return f'<div class="text">{markdown(data["text/markdown"])}</div>'
    if RESULT_MIME in data:
        return _pre(json.dumps(data[RESULT_MIME], indent=2, ensure_ascii=False))
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
    return bleach.clean(source, tags=_TAGS, attributes=attributes, css_sanitizer=styles, protocols=[])


def _figure(figure: Mapping[str, Any]) -> str:
    kept = {name: figure[name] for name in ("data", "layout", "config") if name in figure}
    layout = kept.get("layout", {})
    size = f"width:{_pixels(layout.get('width'), 880)}px;height:{_pixels(layout.get('height'), 450)}px"
    data = f'<script type="application/json" data-figure>{script_json(kept, allow_nan=True)}</script>'
    return f'<div class="figure"><div style="{size}"></div>{data}</div>'


def _pixels(value: Any, default: int) -> int:
    return int(value) if isinstance(value, int | float) and 0 < value < 10_000 else default


def _figures(notebook: Any) -> Iterable[Mapping[str, Any]]:
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if PLOTLY_MIME in output.get("data", {}):
                yield output.data[PLOTLY_MIME]


def _image(kind: str, content: Any) -> str:
    text = "".join(content)
    if kind == "image/svg+xml":
        text = base64.b64encode(text.encode()).decode()
    return f'<img src="data:{kind};base64,{html.escape("".join(text.split()))}" alt="">'


def _pre(text: str, kind: str = "") -> str:
    from nbconvert.filters.ansi import ansi2html

    text = _CONTROL.sub("", text)  # colours stay; window titles, cursor moves and bells go
    return f'<pre class="{kind}">{ansi2html(text)}</pre>' if text.strip() else ""
