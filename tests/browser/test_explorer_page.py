"""The explorer in JupyterLab: open, filter, select, hover, note, reload, deep link, both themes, two widths; text that
would like to run; and a curve that grows while a cell runs."""

import json

import polars as pl
import pytest
import synthetic_run

WIDE, NARROW = {"width": 1360, "height": 940}, {"width": 820, "height": 900}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
HOSTILE = (
    "<img src=x onerror=\"window.ran='img'\"><script>window.ran='script'</script>"
    "<a href=\"javascript:window.ran='link'\">click</a><style>*{display:none!important}</style>"
    "<iframe srcdoc=\"<script>parent.ran='frame'</script>\"></iframe>"
    "\u202e\u2066 ${window.ran='template'} </textarea></title>"
)
RUN = "import json\nfrom workbench.widgets import Explorer\nexplorer = Explorer({run!r}, height=680)\nexplorer"


class Notebook:
    """One notebook open in JupyterLab: what it shows, and its kernel."""

    def __init__(self, page, lab, name):
        self.page, self.lab, self.name, self.errors, self.cells = page, lab, name, [], ()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        lab.write(name, "")
        page.goto(lab.url(name))
        self.ready()

    def show(self, *cells):
        """Put these cells in the place of all others and run them, unless they are there already."""
        if cells == self.cells:
            return
        self.page.evaluate(
            """(cells) => {
                 const made = cells.map((source) => ({cell_type: "code", source, metadata: {}, outputs: []}));
                 const notebook = jupyterapp.shell.currentWidget.context.model.sharedModel;
                 const all = made.length + notebook.cells.length;
                 notebook.transact(() => {
                   notebook.insertCells(0, made);
                   notebook.deleteCellRange(made.length, all);
                 });
                 jupyterapp.commands.execute("notebook:run-all-cells");
               }""",
            cells,
        )
        self.cells = cells

    def ready(self):
        self.page.wait_for_selector(".jp-Notebook", timeout=90_000)
        ready = "window.jupyterapp?.shell.currentWidget?.sessionContext?.isReady"
        self.page.wait_for_function(ready, timeout=90_000)
        self.page.wait_for_function("jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")

    def wait(self, selector):
        self.page.wait_for_selector(selector, timeout=60_000)

    def kernel(self, code):
        """What the code prints, run in the notebook's own kernel."""
        return self.page.evaluate(
            """async (code) => {
                 const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                 const future = kernel.requestExecute({code, store_history: false});
                 let said = "";
                 future.onIOPub = (m) => { said += m.content.text ?? m.content.evalue ?? ""; };
                 await future.done;
                 return said;
               }""",
            code,
        )

    def locator(self, selector, **options):
        return self.page.locator(selector, **options)

    def prints(self, code, expected):
        """Wait until the kernel prints this: what the page sets reaches it a moment later."""
        for _ in range(50):
            said = self.kernel(code).strip()
            if said == expected:
                return
            self.page.wait_for_timeout(100)
        assert said == expected

    def keys(self, *keys):
        self.locator(".cw-explorer").focus()
        for key in keys:
            self.page.keyboard.press(key)

    def says(self, selector, text):
        """Wait until an element's text holds this."""
        self.page.wait_for_function(
            "([s, t]) => document.querySelector(s)?.innerText.includes(t)", arg=[selector, text], timeout=15_000
        )

    def at(self, ending):
        """Wait until the view's link ends like this."""
        self.page.wait_for_function(
            "(e) => document.querySelector('.cw-link').value.endsWith(e)", arg=ending, timeout=15_000
        )

    def fits(self, selector):
        """Wait until nothing in an element stands out at its right: a new width is drawn a moment later."""
        inside = "(s) => { const e = document.querySelector(s); return e.scrollWidth <= e.clientWidth + 1; }"
        self.page.wait_for_function(inside, arg=selector, timeout=15_000)

    def theme(self, name):
        self.page.evaluate("(theme) => jupyterapp.commands.execute('apputils:change-theme', {theme})", THEMES[name])
        self.page.wait_for_function(
            "(name) => document.querySelector('.cw-explorer')?.dataset.theme === name", arg=name, timeout=15_000
        )

    def shot(self, artifacts, name):
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=artifacts / f"jupyterlab-{name}.png")


@pytest.fixture(scope="module")
def run(lab):
    return synthetic_run.write(lab.folder / "runs", n_steps=4, groups=3)


@pytest.fixture(scope="module")
def notebook(browser, lab, run):
    page = browser.new_page(viewport=WIDE)
    made = Notebook(page, lab, "explore.ipynb")
    page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
    yield made
    assert made.errors == []
    page.close()


@pytest.fixture
def view(notebook, run):
    """The notebook with the view put back to a known place."""
    notebook.show(RUN.format(run=str(run.path)))
    notebook.wait(".cw-tok")
    notebook.kernel("explorer.filter = explorer.search = explorer.sort = ''\nexplorer.selection = 4, 0")
    notebook.at("step=4&episode=0")
    notebook.says(".cw-status", "72 episodes")
    return notebook


def test_it_opens_with_episodes_and_tokens(view, artifacts):
    assert view.locator(".cw-row").count() > 10 and view.locator(".cw-spark polyline").count() > 10
    assert view.locator(".cw-picks button").all_inner_texts() == ["best", "median", "worst", "most revised"]
    view.says(".cw-title", "step 4 · group 0 · episode 0")
    assert view.locator(".cw-bar").count() > 3, "the belief strip has a bar a turn"
    view.says(".cw-legend", "no unit")
    view.shot(artifacts, "open")


def test_only_rows_on_screen_are_in_the_page(view):
    assert view.locator(".cw-row").count() < 40
    view.locator(".cw-list").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    view.says(".cw-row:last-child", "4·2·17")
    assert view.locator(".cw-row").count() < 40


def test_filter_and_search_shape_the_list(view, run, artifacts):
    view.locator(".cw-filter").fill("return > 0.5 and n_turns <= 4")
    episodes = run.read("episodes").filter(pl.col("return") > 0.5, pl.col("n_turns") <= 4)
    view.says(".cw-status", f"{episodes.height} of 72 episodes")
    view.locator(".cw-search").fill("inventory")
    turns = run.read("turns").filter(pl.col("action") == "inventory").select("step", "episode").unique()
    both = episodes.join(turns, on=["step", "episode"])
    view.says(".cw-status", f"{both.height} of 72 episodes")
    view.prints("print(explorer.filter, explorer.episodes.height)", f"return > 0.5 and n_turns <= 4 {both.height}")
    view.shot(artifacts, "filter")
    view.locator(".cw-filter").fill("retrun > 1")
    view.says(".cw-status", "did you mean 'return'")
    view.locator(".cw-filter").fill("return 1")
    view.says(".cw-status", "filter: expected such as")
    view.locator(".cw-filter").fill("return > 99")
    view.says(".cw-empty", "Nothing passes")
    view.locator(".cw-empty button").click()
    view.says(".cw-status", "72 episodes")


def test_sorting_by_a_column_shows_its_top(view):
    view.locator(".cw-sort", has_text="turns").click()
    view.page.wait_for_function("document.querySelectorAll('.cw-row')[0].children[3].innerText === '6'")
    view.prints("print(explorer.sort)", "-n_turns")


def test_keys_walk_episodes_and_pivotal_turns(view, run):
    view.keys("j")
    view.at("step=4&episode=1")
    view.keys("k")
    view.at("step=4&episode=0")
    turns = run.read("turns").filter(pl.col("step") == 4, pl.col("episode") == 0, pl.col("pivotal"))["turn"].sort()
    view.keys("p")
    view.at(f"episode=0&turn={turns[0]}")
    assert view.locator(".cw-turn.cw-on .cw-pivot").count() == 1
    view.keys("Escape")
    view.at("step=4&episode=0")
    view.keys("?")
    assert view.locator(".cw-help").is_visible()
    view.keys("Escape", "/")
    assert view.page.evaluate("document.activeElement.className") == "cw-search"
    assert view.locator(".jp-Notebook .jp-Cell").count() == 1, "no key went to the notebook"


def test_what_is_selected_is_there_in_python(view, run, artifacts):
    view.locator(".cw-turn").nth(1).locator(".cw-tok").nth(0).click()
    view.locator(".cw-turn").nth(1).locator(".cw-tok").nth(1).click(modifiers=["Shift"])
    view.at("step=4&episode=0&turn=1&span=0-2")
    row = run.read("turns").filter(pl.col("step") == 4, pl.col("episode") == 0, pl.col("turn") == 1)
    chosen = f"{view.locator('.cw-link').input_value()} {row['token_ids'][0].to_list()[:2]}"
    view.prints("print(explorer.link, explorer.selection.tokens['token_id'].to_list())", chosen)
    assert view.locator(".cw-sel").count() == 2
    view.shot(artifacts, "selected")
    view.kernel("explorer.selection = 2, 7, 1")
    view.says(".cw-title", "step 2 · group 1 · episode 7")
    view.wait(".cw-turn.cw-on")


def test_hovering_tells_every_number_of_a_token(view, run, artifacts):
    view.locator(".cw-color").select_option("gap")
    view.says(".cw-legend", "nats")
    view.locator(".cw-turn").nth(0).locator(".cw-tok").nth(1).hover()
    tip = view.locator(".cw-tip")
    row = run.read("turns").filter(pl.col("step") == 4, pl.col("episode") == 0, pl.col("turn") == 0).row(0, named=True)
    said = tip.inner_text()
    assert f"id {row['token_ids'][1]}" in said and "token 1 of turn 0" in said
    assert f"{row['gap'][1]:+.3f}".replace("-", "−") in said and f"{row['entropy'][1]:.3f}" in said
    for name in (
        "advantage A",
        "gate g",
        "gradient dL/dlog p",
        "log ratio",
        "log p when sampled",
        "log p of the teacher",
    ):
        assert name in said
    view.shot(artifacts, "hover")
    view.locator(".cw-color").select_option("advantage")


def test_members_of_a_group_stand_side_by_side(view, artifacts):
    view.keys("c")
    view.wait(".cw-part")
    assert (
        "same state, different action" in view.locator(".cw-part").inner_text()
        or "differs" in view.locator(".cw-part").inner_text()
    )
    assert view.locator(".cw-colhead").count() == 2
    view.locator(".cw-chips button:not(.cw-on)").first.click()
    view.page.wait_for_function("document.querySelectorAll('.cw-colhead').length === 3")
    view.shot(artifacts, "compare")
    view.keys("c")
    view.page.wait_for_function("!document.querySelector('.cw-part')")


def test_a_note_and_the_place_survive_a_reload(view, run, artifacts):
    view.kernel("explorer.selection = 3, 5, 1")
    view.at("step=3&episode=5&turn=1")
    view.keys("n")
    view.page.keyboard.type(HOSTILE[:70] + " why here?")
    view.locator(".cw-form select").select_option("pivotal")
    view.locator(".cw-tags").fill("odd, teacher")
    view.locator(".cw-save").click()
    view.says(".cw-note", "why here?")
    line = json.loads((run.path / "notes.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["episode"], line["turn"], line["label"]) == (3, 5, 1, "pivotal")
    assert line["text"] == HOSTILE[:70] + " why here?" and line["tags"] == ["odd", "teacher"]
    view.shot(artifacts, "note")
    view.page.keyboard.press("Control+s")
    view.page.wait_for_function("!jupyterapp.shell.currentWidget.context.model.dirty")
    view.page.goto(view.lab.url(view.name).removesuffix("&reset"))
    view.ready()
    view.wait(".cw-tok")
    view.at("step=3&episode=5&turn=1")
    view.says(".cw-title", "episode 5")
    view.locator(".cw-right .cw-controls button", has_text="notes 1").click()
    view.says(".cw-note", "why here?")
    view.locator(".cw-note button", has_text="delete").click()
    view.page.wait_for_function("!document.querySelector('.cw-note')")
    view.keys("n")


def test_a_deep_link_opens_exactly_there(view, run):
    box = view.locator(".cw-link")
    link = f"run={run.path.name}&step=1&episode=9&turn=2&span=0-1"
    box.fill(link)
    box.press("Enter")
    view.says(".cw-title", "step 1 · group 1 · episode 9")
    view.wait(".cw-turn.cw-on .cw-sel")
    view.prints("print(explorer.link)", link)
    box.fill("run=elsewhere&step=1&episode=0")
    box.press("Enter")
    view.says(".cw-status", "the link names no episode of this run")
    assert box.input_value() == link


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_both_themes_and_widths_can_be_read(view, artifacts, theme, width):
    view.page.set_viewport_size(WIDE if width == "wide" else NARROW)
    view.theme(theme)
    for color in ("advantage", "gap", "entropy"):
        view.locator(".cw-color").select_option(color)
        view.page.wait_for_timeout(200)
        assert lowest_contrast(view) >= 4.5
    for part in (".cw-left", ".cw-right", ".cw-list"):
        view.fits(part)
    view.locator(".cw-color").select_option("gap")
    view.shot(artifacts, f"{theme}-{width}")
    view.theme("light")
    view.page.set_viewport_size(WIDE)


def lowest_contrast(view):
    """The lowest contrast ratio (WCAG 2) of a token's ink to its own background."""
    return view.page.evaluate(
        """() => {
          const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
          const linear = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
          const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
          const paper = rgb(getComputedStyle(document.querySelector('.cw-explorer')).backgroundColor);
          return Math.min(...[...document.querySelectorAll('.cw-tok')].map((token) => {
            const style = getComputedStyle(token), own = rgb(style.backgroundColor);
            const [a, b] = [rgb(style.color), own[3] === 0 ? paper : own].map(light);
            return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
          }));
        }"""
    )


def test_a_long_turn_comes_in_parts(notebook, tmp_path):
    made, n = synthetic_run.write(tmp_path, n_steps=1, groups=1, size=2), 9000
    turns = made.read("turns")
    lists = {c: turns[c].dtype for c in turns.columns if turns.schema[c].base_type() == pl.List and c != "pieces"}
    long = [pl.lit(pl.Series([[float(i % 7) for i in range(n)]]).cast(t)).first().alias(c) for c, t in lists.items()]
    pieces = pl.lit(pl.Series([[f"Ġw{i}" for i in range(n)]])).first().alias("pieces")
    made.write_table("turns", 1, turns.with_columns(pieces, *long, response=pl.lit("")))
    view, page = notebook, notebook.page
    view.show(RUN.format(run=str(made.path)))
    view.wait(".cw-tok")
    first = view.locator(".cw-agent").first
    tokens = "document.querySelector('.cw-agent').querySelectorAll('.cw-tok').length"
    assert page.evaluate(tokens) == 4096 and "4904 more tokens" in first.inner_text()
    for _ in range(3):
        end = "(main) => { const a = main.querySelector('.cw-agent'); main.scrollTop = a.offsetTop + a.offsetHeight; }"
        view.locator(".cw-main").evaluate(end)
        page.wait_for_timeout(400)
    assert page.evaluate(tokens) == n and "more tokens" not in first.inner_text()
    last = first.locator(".cw-tok").last
    last.scroll_into_view_if_needed()
    last.hover()
    view.says(".cw-tip", "token 8999 of turn 0")
    assert view.errors == []


def test_text_from_a_rollout_never_runs(notebook, tmp_path, artifacts):
    view, made = notebook, synthetic_run.write(tmp_path, n_steps=1, groups=1, size=4)
    bad = pl.lit(HOSTILE)
    turns, episodes = made.read("turns"), made.read("episodes")
    pieces = turns["pieces"].list.len().map_elements(lambda n: [HOSTILE] * n, return_dtype=pl.List(pl.String))
    columns = {name: bad.alias(name) for name in ("observation", "action", "response")}
    made.write_table("turns", 1, turns.with_columns(pieces.alias("pieces"), **columns))
    made.write_table("episodes", 1, episodes.with_columns(task=bad, kind=bad, stop_reason=bad))
    (made.path / "notes.jsonl").unlink(missing_ok=True)
    view.show(
        RUN.format(run=str(made.path))
        + f"\nexplorer.notes.add(1, 0, text={HOSTILE!r}, author={HOSTILE[:190]!r}, tags=[{HOSTILE[:60]!r}])\nexplorer",
    )
    view.wait(".cw-tok")
    view.kernel("explorer.selection = 1, 0, 0")
    view.at("episode=0&turn=0")
    view.locator(".cw-env").first.click()
    view.locator(".cw-tok").first.hover()
    view.keys("n", "Escape", "c")
    view.wait(".cw-colhead")
    view.keys("c", "g", "g")
    view.wait(".cw-note")
    found = view.page.evaluate(
        """() => ({ran: window.ran, made: document.querySelectorAll(
             '.cw-explorer :is(img, script, a, iframe, style, link, object, embed, base, form)').length,
             shown: document.querySelector('.cw-note .cw-text').textContent})"""
    )
    assert found.get("ran") is None and found["made"] == 0
    assert found["shown"].startswith("<img src=x onerror=") and "\u202e" not in found["shown"]
    view.shot(artifacts, "hostile")
    assert view.errors == []


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


def test_the_training_curve_grows_in_its_place_while_a_cell_runs(notebook, lab, artifacts):
    notebook.show(SETUP, GROW)
    for points in (1, 2, 3):
        notebook.page.wait_for_function(f"() => ({POINTS})().join() === '{points}'", timeout=90_000)
        notebook.shot(artifacts, f"live-{points}")
        (lab.folder / "next").touch()
