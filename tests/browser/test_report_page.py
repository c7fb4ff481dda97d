"""A report opened as a file: the explorer without a kernel and a network, at a deep link; and text that would like to
run."""

import base64
import json

import nbformat
import numpy as np
import polars as pl
import pytest
import synthetic_run
from nbformat.v4 import new_code_cell, new_notebook, new_output

from workbench import pages, share
from workbench.notes import NoteBook
from workbench.report import build_report
from workbench.widgets import Explorer

WIDE, NARROW = {"width": 1360, "height": 940}, {"width": 820, "height": 900}
WATCH = """
  window.refused = [];
  const refused = (event) => window.refused.push(`${event.violatedDirective} ${event.blockedURI}`);
  document.addEventListener("securitypolicyviolation", refused);
"""
PAYLOADS = (
    "</script><script>window.ran='script'</script>",
    "<img src=x onerror=\"window.ran='img'\">",
    "<svg onload=\"window.ran='svg'\"><animate onbegin=\"window.ran='animate'\"></svg>",
    "[a](javascript:window.ran='markdown') <a href=\"javascript:window.ran='link'\">click</a>",
    "<a href='https://a.example/'>named</a> [web](https://a.example/) ![i](https://a.example/i.png)",
    "`${window.ran='template'}` {{constructor.constructor('window.ran=1')()}} ${alert(1)}",
    "<style>*{display:none!important}</style><p style='background:url(https://a.example/x.png)'>",
    "}</style><link rel=stylesheet href=https://a.example/x.css><base href=https://a.example/>",
    "<meta http-equiv=refresh content='0;url=https://a.example/'><form action=https://a.example/><input name=x>",
    "<iframe srcdoc=\"<script>parent.ran='frame'</script>\"></iframe><object data=x></object><embed src=x>",
    "<!--<script>--><![CDATA[ ]]>\u202e\u2066\u200b\u2028 \ufeff&lt;script&gt;window.ran='entity'&lt;/script&gt;",
    "\"' onmouseover=\"window.ran='attribute'\" x='",
)
HOSTILE = " ".join(PAYLOADS)
MADE = "img, iframe, object, embed, base, form, link, svg a, [onload], [onerror], [onmouseover], a[href^=java]"


class Report:
    """A page that shows a report, and whatever it did that it should not."""

    def __init__(self, browser, path, link="", **options):
        self.context = browser.new_context(**{"viewport": WIDE, "color_scheme": "light"} | options)
        self.page, self.bad, self.requests = self.context.new_page(), [], []
        self.page.add_init_script(WATCH)
        self.page.on("pageerror", lambda error: self.bad.append(f"error: {error}"))
        self.page.on("console", lambda message: self.bad.append(message.text) if message.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.bad.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url.split("#")[0]))
        self.context.on("page", lambda page: self.bad.append(f"another page: {page.url}"))
        self.url = path.as_uri()
        self.page.goto(f"{self.url}#{link}" if link else self.url)

    def open(self):
        self.page.wait_for_selector(".cw-tok", timeout=30_000)
        return self

    def at(self, ending):
        self.page.wait_for_function(
            "(e) => document.querySelector('.cw-link').value.endsWith(e) && location.hash.endsWith(e)", arg=ending
        )

    def says(self, selector, text):
        self.page.wait_for_function(
            "([s, t]) => document.querySelector(s)?.innerText.includes(t)", arg=[selector, text], timeout=15_000
        )

    def keys(self, *keys):
        self.page.locator(".cw-explorer").focus()
        for key in keys:
            self.page.keyboard.press(key)

    def draw_figures(self):
        for box in self.page.locator(".figure").all():
            box.scroll_into_view_if_needed()
            box.locator(".main-svg").first.wait_for(timeout=60_000)

    def shot(self, artifacts, name):
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=artifacts / f"report-{name}.png")

    def close(self):
        refused = self.page.evaluate("window.refused")
        ran = self.page.evaluate("window.ran ?? null")
        self.context.close()
        assert (self.bad, refused, ran) == ([], [], None)
        assert set(self.requests) == {self.url}, "it loads nothing but itself"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = synthetic_run.write(tmp_path_factory.mktemp("run"), n_steps=4, groups=3)
    NoteBook(made.path).add(3, 5, 1, (0, 2), "why *here*?", ["odd"], "pivotal", "Ada")
    return made


@pytest.fixture(scope="module")
def path(run):
    return build_report(run)


@pytest.fixture
def view(browser, path):
    shown = Report(browser, path).open()
    yield shown
    shown.close()


def test_it_opens_with_its_episodes(view, run, artifacts):
    view.says(".cw-status", f"72 episodes, {run.path.name}")
    assert view.page.locator(".cw-picks button").all_inner_texts() == ["best", "median", "worst", "most revised"]
    assert view.page.locator(".cw-bar").count() > 3 and view.page.locator(".cw-spark polyline").count() > 10
    assert "notes 1" in view.page.locator(".cw-controls").inner_text()
    view.shot(artifacts, "open")


def test_a_deep_link_opens_at_its_turn(browser, run, path, artifacts):
    link = f"run={run.path.name}&step=3&episode=5&turn=1&span=0-2"
    view = Report(browser, path, link).open()
    view.at("step=3&episode=5&turn=1&span=0-2")
    view.says(".cw-title", "step 3 · group 0 · episode 5")
    view.page.wait_for_selector(".cw-turn.cw-on .cw-sel")
    inside = """() => {
      const box = document.querySelector(".cw-explorer").getBoundingClientRect();
      const turn = document.querySelector(".cw-turn.cw-on").getBoundingClientRect();
      const main = document.querySelector(".cw-main").getBoundingClientRect();
      return box.top >= 0 && box.bottom <= innerHeight && turn.top >= main.top && turn.bottom <= main.bottom;
    }"""
    assert view.page.evaluate(inside), "the explorer and the turn are on screen"
    view.shot(artifacts, "link")
    view.page.evaluate("(link) => { location.hash = link; }", f"run={run.path.name}&step=1&episode=2&turn=2")
    view.at("step=1&episode=2&turn=2")
    view.says(".cw-title", "step 1 · group 0 · episode 2")
    view.page.locator(".note a").click()
    view.at("step=3&episode=5&turn=1&span=0-2")
    view.page.locator(".cw-turn").nth(0).locator(".cw-tok").nth(1).click()
    view.at("step=3&episode=5&turn=0&span=1-2")
    view.page.reload()
    view.open().at("step=3&episode=5&turn=0&span=1-2")
    view.close()


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("run=another&step=1&episode=0", "another run than this report"),
        ("run={run}&step=1&episode=99", "step 1, episode 99, which is not among the 72 episodes"),
        ("run={run}&step=1&episode=0&turn=50", "names turn 50 of step 1, episode 0, which has"),
        ("run=%3Cimg src=x onerror=alert(1)%3E&step=1", "another run than this report"),
        ("something-else", ""),
    ],
)
def test_a_link_to_what_is_not_here_says_so(browser, run, path, link, said):
    view = Report(browser, path, link.format(run=run.path.name)).open()
    view.says("#explorer-said", said) if said else None
    assert (view.page.locator("#explorer-said").inner_text() == "") is (said == "")
    view.close()


def test_the_keyboard_and_the_lists_work(view, run, artifacts):
    view.page.evaluate("(link) => { location.hash = link; }", f"run={run.path.name}&step=4&episode=0")
    view.at("step=4&episode=0")
    view.page.keyboard.press("j")
    view.at("step=4&episode=1")
    view.keys("k")
    view.at("step=4&episode=0")
    turns = run.read("turns").filter(pl.col("step") == 4, pl.col("episode") == 0, pl.col("pivotal"))["turn"].sort()
    view.keys("p")
    view.at(f"episode=0&turn={turns[0]}")
    view.keys("?")
    assert view.page.locator(".cw-help").is_visible()
    view.keys("Escape", "/")
    view.page.keyboard.type("inventory")
    found = run.read("turns").filter(pl.col("action") == "inventory").select("step", "episode").unique()
    view.says(".cw-status", f"{found.height} of 72 episodes")
    view.page.locator(".cw-filter").fill("return > 0.5 and n_turns <= 4")
    short = run.read("episodes").filter(pl.col("return") > 0.5, pl.col("n_turns") <= 4)
    both = short.join(found, on=["step", "episode"])
    view.says(".cw-status", f"{both.height} of 72 episodes")
    view.page.locator(".cw-filter").fill("retrun > 1")
    view.says(".cw-status", "unknown column to filter by 'retrun'")
    for field in (".cw-filter", ".cw-search"):
        view.page.locator(field).fill("")
    view.says(".cw-status", "72 episodes")
    view.page.locator(".cw-sort", has_text="turns").click()
    view.page.wait_for_function("() => document.querySelectorAll('.cw-row')[0].children[3].innerText === '6'")
    view.keys("c")
    view.page.wait_for_selector(".cw-part")
    assert view.page.locator(".cw-colhead").count() == 2
    view.shot(artifacts, "compare")
    view.keys("c", "g")
    view.says(".cw-mode", "episodes")
    view.says(".cw-status", "12 groups")


def test_hovering_tells_a_token_and_notes_are_read_only(view, run):
    view.page.evaluate("(link) => { location.hash = link; }", f"run={run.path.name}&step=3&episode=5")
    view.says(".cw-title", "episode 5")
    view.page.locator(".cw-turn").nth(0).locator(".cw-tok").nth(1).hover()
    row = run.read("turns").filter(pl.col("step") == 3, pl.col("episode") == 5, pl.col("turn") == 0).row(0, named=True)
    said = view.page.locator(".cw-tip").inner_text()
    assert f"id {row['token_ids'][1]}" in said and f"{row['gap'][1]:+.3f}".replace("-", "−") in said
    view.keys("n")
    view.says(".cw-note", "why *here*?")
    assert view.page.locator(".cw-notes textarea, .cw-note button:has-text('delete')").count() == 0


def test_figures_are_drawn_when_they_are_reached(view, artifacts):
    assert view.page.evaluate("!window.Plotly"), "plotly.js does not keep the explorer waiting"
    view.draw_figures()
    titles = view.page.locator(".gtitle").all_inner_texts()
    assert len(titles) == view.page.locator(".figure").count() == 10
    view.shot(artifacts, "figures")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_both_schemes_and_widths_can_be_read(browser, run, path, artifacts, scheme, width):
    size = WIDE if width == "wide" else NARROW
    link = f"run={run.path.name}&step=4&episode=0&turn=1"
    view = Report(browser, path, link, viewport=size, color_scheme=scheme).open()
    assert view.page.locator(".cw-explorer").get_attribute("data-theme") == scheme
    for color in ("advantage", "gap", "entropy"):
        view.page.locator(".cw-color").select_option(color)
        view.page.wait_for_timeout(150)
        assert lowest_contrast(view.page, ".cw-tok", ".cw-explorer") >= 4.5
    assert lowest_contrast(view.page, "h1, h2, .sub, td, .note a, .note pre", "body") >= 4.5
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert view.page.evaluate(wide), "nothing makes the page scroll sideways"
    view.shot(artifacts, f"{scheme}-{width}")
    view.page.locator("h1").scroll_into_view_if_needed()
    view.shot(artifacts, f"{scheme}-{width}-head")
    if (scheme, width) == ("dark", "narrow"):  # drawing takes seconds; light and wide ones are drawn above
        view.draw_figures()
        view.shot(artifacts, f"{scheme}-{width}-figures")
    view.close()


def lowest_contrast(page, selector, paper):
    """The lowest contrast ratio (WCAG 2) of text to its own background, else to that of `paper`."""
    return page.evaluate(
        """([selector, paper]) => {
          const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
          const linear = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
          const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
          const back = rgb(getComputedStyle(document.querySelector(paper)).backgroundColor);
          return Math.min(...[...document.querySelectorAll(selector)].map((element) => {
            const style = getComputedStyle(element), own = rgb(style.backgroundColor);
            const [a, b] = [rgb(style.color), own[3] === 0 ? back : own].map(light);
            return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
          }));
        }""",
        [selector, paper],
    )


def test_a_redacted_report_shows_numbers_alone(browser, run, artifacts):
    view = Report(browser, build_report(run, redact=True), f"run={run.path.name}&step=3&episode=5&turn=1").open()
    assert set(view.page.locator(".cw-tok").all_inner_texts()) == {share.COVER}
    view.page.locator(".cw-tok").nth(1).hover()
    row = run.read("turns").filter(pl.col("step") == 3, pl.col("episode") == 5, pl.col("turn") == 0).row(0, named=True)
    said = view.page.locator(".cw-tip").inner_text()
    assert f"{row['gap'][1]:+.3f}".replace("-", "−") in said and str(row["token_ids"][1]) not in said.split("\n")[1]
    assert "[pivotal]" in view.page.locator(".note").inner_text()
    view.keys("c")
    view.page.wait_for_selector(".cw-part")
    view.keys("c")
    view.draw_figures()
    words = {w for t in ("observation", "action") for line in run.read("turns")[t] for w in line.split() if len(w) > 6}
    text = view.page.evaluate("document.documentElement.innerHTML").split("</header>")[1]
    assert not [word for word in words - {"Your"} if f" {word} " in text.replace("<", " ").replace(">", " ")]
    view.shot(artifacts, "redacted")
    view.close()


def test_a_browser_that_cannot_unpack_is_told_so(browser, path):
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(path.as_uri())
    page.wait_for_function("() => document.querySelector('#explorer-view').innerText.includes('one of 2023 or later')")
    context.close()


# What the page answers, beside what a kernel does


@pytest.fixture(scope="module")
def answers(browser, run):
    """Ask the page's archive and the explorer's Python the same; returns (theirs, mine), buffers as arrays."""
    context = browser.new_context()
    page, explorer = context.new_page(), Explorer(run)
    code = pages.module("unpack") + pages.module("archive")
    page.evaluate(
        """([code, data]) => new Function("data",
             `${code}; return unpack(data).then((buffer) => { window.archive = new Archive(buffer); });`)(data)""",
        [code, base64.b64encode(share.pack(share.gather(run, None))).decode()],
    )

    def ask(request, **arguments):
        theirs, buffers = explorer.answer(request, **arguments)
        arrays = [np.frombuffer(b, t) for b, t in zip(buffers, ("<i4", "<f4"), strict=False)]
        theirs = json.loads(json.dumps(theirs)), arrays
        mine, numbers = page.evaluate(
            """([request, args]) => {
              const [answer, buffers] = archive.answer(request, args);
              const kinds = [Int32Array, Float32Array];
              return [answer, buffers.map((b, i) => Array.from(new kinds[i](b), (v) => Number.isFinite(v) ? v : null))];
            }""",
            [request, arguments],
        )
        return theirs, (mine, [np.array([np.nan if v is None else v for v in part]) for part in numbers])

    yield ask
    context.close()


WHERE = [{"column": "return", "op": ">", "value": 0.5}, {"column": "kind", "op": "!=", "value": "fridge"}]


@pytest.mark.parametrize(
    ("request_", "arguments"),
    [
        ("rows", {}),
        ("rows", {"sort": "revised", "descending": True, "start": 5, "count": 9, "at": [2, 4]}),
        ("rows", {"sort": "n_turns", "where": WHERE, "at": [1, 0]}),
        ("rows", {"text": " Look ", "where": WHERE[:1]}),
        ("rows", {"text": "nowhere to be found"}),
        ("groups", {"start": 1, "count": 5}),
        ("text", {"step": 2, "episode": 3, "turn": 1}),
        ("compare", {"step": 3, "episode": 8}),
        ("notes", {}),
    ],
)
def test_the_page_answers_as_a_kernel_does(answers, request_, arguments):
    (theirs, _), (mine, _) = answers(request_, **arguments)
    assert mine == theirs


def test_the_page_opens_an_episode_as_a_kernel_does(answers):
    (theirs, _), (mine, _) = answers("open")
    assert mine == theirs | {"notes": False}
    (theirs, _), (mine, _) = answers("episode", step=3, episode=8)
    assert mine["episode"] == theirs["episode"]
    assert mine["turns"] == [{n: v for n, v in turn.items() if n in mine["turns"][0]} for turn in theirs["turns"]]
    assert set(theirs["turns"][0]) == set(mine["turns"][0])
    for arguments in ({"first": 0, "last": 9}, {"first": 1, "last": 1, "start": 1}, {"first": 2, "last": 3}):
        (theirs, (ids, values)), (mine, (my_ids, my_values)) = answers("window", step=3, episode=8, **arguments)
        assert mine == theirs and my_ids.tolist() == ids.tolist()
        np.testing.assert_allclose(my_values, values, rtol=3e-5, atol=5e-5)
    for signal in ("advantage", "gate", "log_ratio"):
        (theirs, _), (mine, _) = answers("scale", signal=signal)
        assert mine["limit"] == pytest.approx(theirs["limit"], rel=0.05)


# Text that would like to run


def spoiled(out):
    """A run with payloads in every text, and a notebook that printed them."""
    made = synthetic_run.write(out, n_steps=2, groups=2, size=3)
    for name in made.tables:
        for (step,), frame in made.read(name).group_by("step", maintain_order=True):
            texts = [pl.lit(HOSTILE).alias(c) for c, kind in frame.schema.items() if kind == pl.String]
            frame = frame.with_columns(texts)
            if name == "turns":
                n = pl.col("pieces").list.len()
                frame = frame.with_columns(pieces=pl.lit(HOSTILE).repeat_by(n))
            if name == "episodes":
                frame = frame.with_columns(pl.lit(1.5).alias(PAYLOADS[1]))
            made.write_table(name, step, frame)
    book = NoteBook(made.path)
    book.add(1, 0, text=HOSTILE, author=HOSTILE[:190], tags=[p[:60] for p in PAYLOADS], label="pivotal")
    config = json.loads((made.path / "config.json").read_text())
    config["config"]["method"] = HOSTILE
    (made.path / "config.json").write_text(json.dumps(config))
    made.update_manifest(status=HOSTILE, error=HOSTILE, parameters={HOSTILE: HOSTILE}, result={"a": [HOSTILE]})
    outputs = [
        new_output("stream", name="stdout", text=HOSTILE),
        new_output("display_data", data={"text/html": HOSTILE, "text/plain": HOSTILE}),
        new_output("display_data", data={"text/markdown": HOSTILE, "text/plain": ""}),
        new_output("display_data", data={"text/html": f"<div data-workbench-figure='text'>{HOSTILE}</div>"}),
    ]
    nbformat.write(new_notebook(cells=[new_code_cell(HOSTILE, outputs=outputs)]), made.path / "executed.ipynb")
    return made


def test_text_from_a_rollout_never_runs(browser, tmp_path, artifacts):
    made = spoiled(tmp_path)
    view = Report(browser, build_report(made), f"run={made.path.name}&step=1&episode=0&turn=0").open()
    view.page.locator(".cw-env").first.click()
    view.page.locator(".cw-tok").first.hover()
    view.page.locator(".cw-tip").wait_for()
    view.keys("n", "c")
    view.page.wait_for_selector(".cw-colhead")
    view.keys("c", "g", "g", "n")
    view.page.locator(".cw-search").fill(PAYLOADS[1])
    view.says(".cw-status", "12 episodes")
    view.shot(artifacts, "hostile")
    for summary in view.page.locator("details.code summary").all():
        summary.click()
    view.draw_figures()
    for point in view.page.locator(".figure .points path, .figure .point path").all()[:12]:
        point.hover(force=True)
    view.shot(artifacts, "hostile-figures")
    found = view.page.evaluate(
        """(made) => ({
          made: [...document.querySelectorAll(made)].map((e) => e.outerHTML.slice(0, 80)),
          links: [...document.querySelectorAll("a")].map((a) => a.getAttribute("href")),
          scripts: [...document.scripts].map((s) => s.id || s.type || "library"),
          styles: document.querySelectorAll("body style").length,
          metas: document.querySelectorAll("meta").length,
          note: document.querySelector(".note pre").textContent,
          tokens: document.querySelector(".cw-tok").textContent,
        })""",
        MADE,
    )
    figures = view.page.locator(".figure").count()
    assert found["made"] == [] and found["styles"] == 0 and found["metas"] == 3
    assert [link for link in found["links"] if link is not None] == [f"#run={made.path.name}&step=1&episode=0"]
    assert sorted(set(found["scripts"])) == ["application/json", "explorer-data", "library", "module", "plotly"]
    assert len(found["scripts"]) == figures + 5
    assert "<img src=x onerror=" in found["note"] and "\u202e" not in found["note"] + found["tokens"]
    assert view.page.url.startswith(made.path.as_uri())
    view.close()
