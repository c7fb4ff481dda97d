"""The report: one file that loads nothing, shows every figure, and never runs what an agent wrote."""

import base64
import gzip
import hashlib
import html
import json
import re
from html.parser import HTMLParser

import nbformat
import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from plotly.offline import get_plotlyjs

from workbench.errors import WorkbenchError
from workbench.notebook_html import kept_html, markdown
from workbench.report import build_report, page
from workbench.runs import RESULT_MIME, RunFolder, account, record_result

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script><!-- --><svg onload=alert(3)>"
IMG = "<img src=x onerror=alert(1)>"
MARKED = "<div data-workbench-figure='1' onclick='alert(1)'>"
PLOTLY = "application/vnd.plotly.v1+json"


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """A stand-in for plotly.js: 4.8 MB are slow to parse."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js v0 */")


def test_a_result_stands_as_it_was_recorded_with_its_verdict_first(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata, raw: shown.append((data, metadata)))
    record_result({"steps": 2, "by": {"z": 1, "a": None}, "none": None, "verdict": ["One is ahead.", "Two is not."]})
    data, metadata = json.loads(json.dumps(shown[0], sort_keys=True))  # as notebooks are stored
    notebook = new_notebook(cells=[new_code_cell(outputs=[new_output("display_data", data, metadata=metadata)])])
    found = account.result(notebook)
    assert list(found) == ["steps", "by", "none", "verdict"] and list(found["by"]) == ["z", "a"]
    text = page((notebook, {"status": "complete", "result": found}, "r"))
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", text, re.DOTALL)
    assert rows == [("verdict", "One is ahead.\nTwo is not."), ("steps", "2"), ("by", "z  1\na  –"), ("none", "–")]
    many = page((notebook, {"status": "complete", "result": {"verdict": ["In short.", *"abcd"]}}, "r"))
    assert "<td><details><summary>In short. <i>and 4 more</i></summary>a\nb\nc\nd</details></td>" in many
    told = html.unescape(text)
    assert told.index('"z"') < told.index('"a"')


class Page(HTMLParser):
    """The elements a browser would see."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles, self.text = "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data):
        tag, attrs = self.elements[-1] if self.elements else ("", {})
        if tag == "script" and self.scripts[-1][1] == "":
            self.scripts[-1] = (attrs, data)
        elif tag == "style":
            self.styles += data
        self.text += data

    def loads(self) -> list[str]:
        """Everything the page would fetch."""
        found = [a[k] for _, a in self.elements for k in ("src", "data", "poster", "srcset", "background") if a.get(k)]
        found += [a["href"] for tag, a in self.elements if tag in ("link", "base", "use", "image") and a.get("href")]
        found += [a["style"] for _, a in self.elements if "url(" in (a.get("style") or "")]
        return found + re.findall(r"@import[^;]*|url\([^)]*\)", self.styles)

    def handlers(self) -> list[str]:
        return [name for _, attrs in self.elements for name in attrs if name.startswith("on")]


def code_of(seen: Page) -> list[str]:
    """The scripts that run; others are data."""
    return [text for attrs, text in seen.scripts if attrs.get("type") in (None, "module", "text/javascript")]


def library_of(seen: Page) -> str:
    (packed,) = (text for attrs, text in seen.scripts if attrs.get("id") == "plotly")
    return gzip.decompress(base64.b64decode(packed)).decode()


def policy(seen: Page) -> str:
    return next(a["content"] for _, a in seen.elements if a.get("http-equiv") == "Content-Security-Policy")


def digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def output(data, **metadata):
    return new_output("display_data", data=data, metadata=metadata)


def figure(fig: go.Figure):
    shown = f"<div data-workbench-figure='1'>{HOSTILE}</div>"
    return output({PLOTLY: json.loads(fig.to_json()), "text/html": shown, "text/plain": "figure"})


def built(*outputs, manifest=None, source="show()") -> Page:
    notebook = new_notebook(cells=[new_code_cell(source, outputs=list(outputs))])
    facts = manifest or {"experiment": "train", "status": "complete"}
    return Page(page((notebook, facts, "20261130T110201Z-0155e210")))


def test_the_real_library_is_embedded_once(monkeypatch):
    monkeypatch.undo()
    notebook = new_notebook(cells=[new_code_cell("", outputs=[figure(go.Figure(go.Bar(y=[1])))] * 2)])
    text = page((notebook, {}, "x"))
    seen = Page(text)
    assert library_of(seen) == get_plotlyjs() and len(text) < 0.45 * len(get_plotlyjs())
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)
    assert digest(get_plotlyjs()) in policy(seen)


def test_every_figure_is_drawn_from_one_embedded_library():
    fig = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], text=[HOSTILE, "b"], name=HOSTILE), layout={"title": HOSTILE})
    seen = built(figure(fig), figure(go.Figure(go.Heatmap(z=[[1, 2], [3, 4]]), layout={"height": 300, "width": 500})))
    assert library_of(seen) == "/* plotly.js v0 */"
    assert ["Plotly.newPlot" in text for text in code_of(seen)] == [True]
    data = [json.loads(text) for attrs, text in seen.scripts if attrs.get("type") == "application/json"]
    assert [d["data"][0]["type"] for d in data] == ["scatter", "heatmap"]
    assert data[0]["data"][0]["text"][0] == HOSTILE
    boxes = [a["style"] for tag, a in seen.elements if tag == "div" and "px" in (a.get("style") or "")]
    assert boxes == ["width:880px;height:450px", "width:500px;height:300px"]


def test_the_policy_lets_only_these_scripts_run():
    seen = built(figure(go.Figure(go.Bar(y=[1]))))
    sources = re.search(r"script-src ([^;]*)", policy(seen))[1].split()
    assert sources == [digest(text) for text in (*code_of(seen), library_of(seen))]
    assert policy(seen).startswith("default-src 'none'; ")
    assert "script-src 'none'" in policy(built()) and built().scripts == []
    assert "'unsafe-eval'" in policy(built(figure(go.Figure(go.Scattergl(y=[1])))))


@pytest.mark.parametrize(
    "hostile",
    [
        new_output("stream", name="stdout", text=HOSTILE + "\x1b[31mred\x1b[0m\x1b]0;title\x07"),
        new_output("error", ename="E", evalue=HOSTILE, traceback=["\x1b[31m" + HOSTILE]),
        output({"text/html": HOSTILE, "text/plain": HOSTILE}),
        output({"text/html": MARKED + HOSTILE + "</div>", "text/plain": HOSTILE}),
        output({"text/html": MARKED + HOSTILE.replace("<script>", "<SCRIPT >") + "<p onclick=alert(1)>x</p></div>"}),
        output({"text/markdown": HOSTILE + "\n\n" + HOSTILE + " ![x](http://a.example/b.png)", "text/plain": ""}),
        output({"text/markdown": f"${IMG}$\n\n$$\n{IMG}\n$$\n\n```mermaid\n{HOSTILE}\n```\n\n|a|\n|-|\n|{IMG}|"}),
        output({"text/latex": HOSTILE, "text/plain": HOSTILE}),
        output({"application/javascript": "alert(1)", "text/plain": HOSTILE}),
        output({"image/svg+xml": f"<svg>{HOSTILE}</svg>"}),
        output({"image/png": f'AAAA" onerror="alert(1){HOSTILE}'}),
        output({RESULT_MIME: {"text": HOSTILE}}),
        output({"application/vnd.jupyter.widget-view+json": {"model_id": HOSTILE}, "text/plain": HOSTILE}),
        figure(go.Figure(go.Scatter(y=[1], text=HOSTILE), layout={"title": HOSTILE})),
        output({PLOTLY: {"data": [], "layout": {"width": '1"><script>alert(1)</script>', "height": HOSTILE}}}),
    ],
)
def test_nothing_hostile_becomes_an_element(hostile):
    manifest = {"experiment": HOSTILE, "status": HOSTILE, "error": HOSTILE, "parameters": {HOSTILE: HOSTILE}}
    seen = built(hostile, manifest=manifest | {"result": {"a": [HOSTILE]}, "notebook": HOSTILE}, source=HOSTILE)
    assert seen.handlers() == []
    assert all(load.startswith("data:image/") for load in seen.loads()), seen.loads()
    assert not {tag for tag, _ in seen.elements} & {"svg", "iframe", "object", "embed", "base", "form", "link"}
    figures = [attrs for attrs, _ in seen.scripts if "data-figure" in attrs]
    assert len(seen.scripts) == (len(figures) + 2 if figures else 0)
    assert not any("alert" in text for attrs, text in seen.scripts if "data-figure" not in attrs)
    assert "alert(2)" in seen.text
    assert "\x1b" not in seen.text


def test_text_views_that_are_marked_keep_their_layout():
    view = '<div data-workbench-figure="text"><span style="background-color: #7fb8dc" title="gate 0.9">cup</span></div>'
    seen = built(output({"text/html": view, "text/plain": "cup"}))
    assert ("span", {"style": "background-color: #7fb8dc;", "title": "gate 0.9"}) in seen.elements
    unmarked = built(output({"text/html": view.replace("data-workbench-figure", "data-other"), "text/plain": "cup"}))
    assert not any(tag == "span" and a.get("title") for tag, a in unmarked.elements) and "cup" in unmarked.text
    assert "url" not in kept_html('<p style="background: url(http://a.example/b.png); color: red">x</p>')
    assert Page(kept_html('<a href="http://a.example">x</a><img src="http://a.example">')).loads() == []


def test_plotly_js_in_the_notebook_is_not_repeated():
    library = "<div data-workbench-figure=\"plotly.js\"><script>var library = 'x'.repeat(9);</script></div>"
    seen = built(output({"text/html": library, "text/plain": "plotly.js, for figures"}))
    assert "library" not in seen.text and seen.scripts == []


def test_markdown_is_drawn_and_raw_html_in_it_shown():
    table = "| a | b |\n|---|---|\n| 1 | **2** |"
    line = "$a_1 < b_2$ and `code` [x](javascript:alert(1)) <b onclick=x>raw</b>"
    seen = Page(markdown(f"# Title\n\n{table}\n\n{line}"))
    tags = [tag for tag, _ in seen.elements]
    assert {"h1", "table", "td", "strong", "code", "a"} <= set(tags) and "b" not in tags
    assert "a_1 < b_2" in seen.text and "<b onclick=x>" in seen.text
    assert not any("javascript" in (a.get("href") or "") for _, a in seen.elements)


def test_the_report_of_a_run(tmp_path):
    run = RunFolder.create(tmp_path, "train", {"method": "agent_opsd", "lr": 1e-4})
    with pytest.raises(WorkbenchError, match="holds no executed.ipynb"):
        build_report(run)
    fig = figure(go.Figure(go.Scatter(y=[1, 2])))
    code = new_code_cell("# first\nshow()", outputs=[fig])
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Beliefs"), code]), run.path / "executed.ipynb")
    run.update_manifest(
        status="failed", error="ValueError: loss", result={"success": 2 / 3}, parameters=run.config, notebook="train",
        git={"commit": "a" * 40, "dirty": True}, versions={"python": "3.11.7", "torch": None}, device="cuda: H200",
        seconds=125.4, attempts=[{}, {}],
    )  # fmt: skip
    path = build_report(run)
    assert path == run.path / "report.html"
    seen = Page(path.read_text())
    for text in ("failed", "ValueError: loss", "0.666667", "agent_opsd", "aaaaaaaaaaaa with uncommitted changes",
                 "python 3.11.7", "cuda: H200", "2 min 5 s", "Beliefs", "show()"):  # fmt: skip
        assert text in seen.text, text
    assert seen.loads() == [] and seen.handlers() == []
    first = path.read_bytes()
    assert build_report(run).read_bytes() == first

    beliefs = RunFolder.create(tmp_path, "beliefs", {"group": 3})
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Pivots"), code]), beliefs.path / "executed.ipynb")
    beliefs.update_manifest(notebook="beliefs", parameters=beliefs.config)
    run.update_manifest(artifacts=[{"path": "report.html", "bytes": 1, "sha256": "old"}])
    run.complete()
    both = Page(build_report(run, [beliefs]).read_text())
    assert both.text.index("Beliefs") < both.text.index(f"beliefs · {beliefs.path.name}") < both.text.index("Pivots")
    assert len([tag for tag, a in both.elements if "data-figure" in a]) == 2
    recorded = {a["path"]: a["sha256"] for a in run.manifest["artifacts"]}
    assert recorded["report.html"] == hashlib.sha256(path.read_bytes()).hexdigest()

    (run.path / "executed.ipynb").write_text("{torn")
    with pytest.raises(WorkbenchError, match="cannot be read as a notebook"):
        build_report(run)
