"""A notebook with the explorer, exported by nbconvert: without a kernel the page shows the list and the transcript."""

import re

import nbformat
import polars as pl
import pytest
import synthetic_run
from nbconvert import HTMLExporter
from test_report import Page

from workbench.figures.display import MARK
from workbench.links import Link
from workbench.runs.execute import run_notebook

HOSTILE = "</span></div><script>window.ran=1</script><img src=x onerror=window.ran=2>"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(turns of the shown episode, the exported page) of explore.ipynb on a run with a hostile action."""
    out = tmp_path_factory.mktemp("runs")
    made = synthetic_run.write(out, n_steps=2, groups=2)
    turns = made.read("turns").filter(pl.col("step") == 2)
    at = (pl.col("episode") == 3) & (pl.col("turn") == 1)
    cells = pl.when(at).then(pl.lit(HOSTILE).repeat_by(pl.col("pieces").list.len())).otherwise("pieces")
    said = pl.when(at).then(pl.lit(HOSTILE)).otherwise("action")
    turns = turns.with_columns(cells.alias("pieces"), said.alias("action"))
    made.write_table("turns", 2, turns)
    link = str(Link(made.path.name, 2, 3, 1))
    parameters = {"run": str(made.path), "link": link, "color": "gap", "filter": "step = 2"}
    run = run_notebook("explore", parameters, out, progress=False)
    notebook = nbformat.read(run.path / "executed.ipynb", 4)
    page, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
    return turns.filter(pl.col("episode") == 3).sort("turn"), page


def test_the_transcript_is_there_with_its_colours(exported):
    turns, page = exported
    shown = page[page.index(f'{MARK}="text" style="max-width:880px"') :]
    assert "Step 2, episode 3" in shown and "coloured by gap" in shown
    for row in turns.iter_rows(named=True):
        if row["action"] != HOSTILE:
            spans = re.findall(r'<span style="background-color:#[0-9a-f]{6};color:[^"]*">([^<]*)</span>', shown)
            assert row["response"].removesuffix("<|end|>") in "".join(spans).replace("&lt;|end|&gt;", "")
        assert f">turn {row['turn']}" in shown
    flagged = [int(turn) for turn in re.findall(r">turn (\d+) ◆ pivotal:", shown)]
    assert flagged == turns.filter("pivotal")["turn"].to_list()


def test_the_list_is_there_and_the_figure_beside_it(exported):
    _, page = exported
    table = page[page.index(f'{MARK}="text" style="max-width:880px"') :].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    assert len(rows) == 13 and any("font-weight:bold" in row for row in rows)
    assert "Which of its turns would the rule call pivotal?" in page and 'type="application/json"' in page


def test_hostile_text_is_text_there(exported):
    _, page = exported
    assert "&lt;script&gt;window.ran=1" in page
    seen = Page(page)
    assert not any("window.ran=1" in text and "application" not in (a.get("type") or "") for a, text in seen.scripts)
    assert not [a for tag, a in seen.elements if tag == "img" and a.get("src") == "x"]
