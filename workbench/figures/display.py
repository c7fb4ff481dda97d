"""Put a figure into a notebook so that it is seen live, in an exported page, and without a network.

One output carries two forms of the same figure: plotly's own mime type, which JupyterLab and VS Code prefer and draw,
and a small piece of HTML, which exporters take. The HTML holds only the figure; it needs plotly.js once in the page,
which `setup()` puts into the notebook (4.8 MB, never from a CDN) and a report may put into its head instead.
"""

import hashlib
import html as markup
import itertools
import json
import re

import plotly.graph_objects as go
from IPython.display import display
from plotly.offline import get_plotlyjs

from .style import WIDTH

MIME = "application/vnd.plotly.v1+json"
MARK = "data-workbench-figure"
CONFIG = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    "showSendToCloud": False,  # plotly.js 4 shows a button that uploads the data unless told not to
    "typesetMath": False,
    "toImageButtonOptions": {"scale": 2},
}

_shown = itertools.count(1)
_DRAW = """(function () {
  var box = document.getElementById("%(id)s"), spec = JSON.parse(document.getElementById("%(id)s-json").textContent);
  function draw() {
    if (!window.Plotly) return false;
    box.textContent = "";
    window.Plotly.newPlot(box, spec.data, spec.layout, spec.config);
    return true;
  }
  if (!draw()) window.addEventListener("load", draw);
})();"""


def script_json(value: object, allow_nan: bool = False) -> str:
    """JSON that can stand inside a script element: nothing in it can close the element or open another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=allow_nan)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def spec(fig: go.Figure) -> dict:
    """The figure as plain data: {"data", "layout", "config"}, every number finite or null."""
    plain = json.loads(fig.to_json())
    return {"data": plain["data"], "layout": plain["layout"], "config": CONFIG}


def title_of(fig: go.Figure) -> str:
    """The figure's title as plain text."""
    meta = fig.layout.meta or {}
    return markup.unescape(meta.get("title") or re.sub(r"<[^>]*>", "", fig.layout.title.text or "figure"))


def html(fig: go.Figure) -> str:
    """A piece of HTML that draws the figure where plotly.js is in the page, and says what is missing where not."""
    data = script_json(spec(fig))
    id_ = f"workbench-figure-{hashlib.sha256(data.encode()).hexdigest()[:8]}-{next(_shown)}"
    size = f"width:{fig.layout.width or 880}px;height:{fig.layout.height or 450}px"
    return (
        f'<div {MARK}="1" style="overflow-x:auto">'
        f'<div id="{id_}" style="{size};background:#fff;color:#66727f;font:13px sans-serif">'
        f"{markup.escape(title_of(fig))}: not drawn, as plotly.js is missing here: "
        "workbench.figures.setup() puts it into the page</div>"
        f'<script type="application/json" id="{id_}-json">{data}</script>'
        f"<script>{_DRAW % {'id': id_}}</script></div>"
    )


def bundle(fig: go.Figure) -> dict:
    """The mime bundle of one figure: plotly JSON, HTML and its title as text."""
    return {MIME: spec(fig), "text/html": html(fig), "text/plain": title_of(fig)}


def show(fig: go.Figure) -> None:
    """Display a figure: live in JupyterLab and VS Code, and in exported HTML without a network."""
    display(bundle(fig), raw=True)


def say(*sentences: str) -> None:
    """Display plain sentences, a paragraph each. They may quote what a rollout said: all markup in them is escaped."""
    if not sentences:
        return
    body = "".join(f'<p style="max-width:{WIDTH}px;margin:4px 0">{markup.escape(s)}</p>' for s in sentences)
    display({"text/html": f'<div {MARK}="text">{body}</div>', "text/plain": "\n".join(sentences)}, raw=True)


def setup() -> None:
    """Put plotly.js into the notebook once, for exported HTML. Call it in the cell that imports."""
    page = f'<div {MARK}="plotly.js"><script>if (!window.Plotly) {{\n{get_plotlyjs()}\n}}</script></div>'
    display({"text/html": page, "text/plain": "plotly.js, for figures in exported pages"}, raw=True)
