"""The training curve is drawn again in the same place while a cell runs."""

SETUP = "from workbench import figures\nfigures.setup()"
GROW = """
import shutil, time
from pathlib import Path
from workbench import shipped
from workbench.figures.live import Live
from workbench.runs import RunFolder

source = RunFolder.open(shipped.data("recorded_run"))
folder = RunFolder.create("runs", "live", {})
shutil.copytree(source.path / "tables" / "steps", folder.path / "tables" / "steps")
(folder.path / "tables" / "evals").mkdir(parents=True)
live = Live(folder)
for file in source.table_files("evals")[:3]:
    shutil.copy(file, folder.path / "tables" / "evals")
    live()
    print("drawn", flush=True)
    while not Path("next").exists():
        time.sleep(0.05)
    Path("next").unlink()
"""
POINTS = """() => {
  const plots = [...document.querySelectorAll('.js-plotly-plot')].filter(p => p.offsetParent);
  const held = t => (t.name || '').startsWith('heldout (') && t.x;
  return plots.map(p => Math.max(...p.data.filter(held).map(t => t.x.length)));
}"""


def test_the_curve_grows_in_its_place(browser, lab, artifacts):
    lab.write("live.ipynb", SETUP, GROW)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(lab.url("live.ipynb"))
    page.get_by_text("Run", exact=True).first.wait_for(timeout=90_000)
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=90_000)
    page.get_by_text("Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    for points in (1, 2, 3):
        page.wait_for_function(f"() => ({POINTS})().join() === '{points}'", timeout=90_000)
        page.screenshot(path=artifacts / f"live-{points}.png")
        (lab.folder / "next").touch()
    page.close()
