"""The explorer without a page: what it reads, what it answers, and the link between its view and Python."""

import json
import re

import nbformat
import numpy as np
import polars as pl
import pytest
import synthetic_run

from workbench import shipped, summaries
from workbench.errors import WorkbenchError
from workbench.pages import module
from workbench.runs.execute import run_notebook
from workbench.signals import SIGNALS
from workbench.tables import CHOSEN_LISTS, TOKEN_LISTS
from workbench.widgets import Explorer, filters
from workbench.widgets.data import RunData


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return synthetic_run.write(tmp_path_factory.mktemp("runs"), n_steps=3, groups=2)


@pytest.fixture
def data(run):
    return RunData(run)


@pytest.fixture
def explorer(run, monkeypatch):
    sent = []
    monkeypatch.setattr(Explorer, "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    made = Explorer(run)
    made.sent = sent
    return made


def ask(explorer, request, **arguments):
    """An answer or an error as the page would get it."""
    explorer._handle_custom_msg({"id": "q", "request": request, "args": arguments}, [])
    content, buffers = explorer.sent.pop()
    assert content["id"] == "q" and json.dumps(content, allow_nan=False)
    return content.get("answer"), content.get("error"), buffers


# Summaries and rows


def test_summaries_open_no_token_column_and_no_text(data):
    plan = summaries.turn_numbers(data.run).explain()
    opened = re.search(r"PROJECT (\d+)/(\d+) COLUMNS", plan)
    assert opened and int(opened[1]) <= 14 < int(opened[2])
    names = set(summaries.turn_numbers(data.run).collect_schema().names())
    assert not names & {*TOKEN_LISTS, "token_ids", "pieces", "observation", "action", "response"}


def test_a_summary_is_what_the_turns_say(data, run):
    turns = run.read("turns")
    for row in data.summaries.iter_rows(named=True):
        mine = turns.filter(pl.col("step") == row["step"], pl.col("episode") == row["episode"]).sort("turn")
        assert row["path"] == [mine["belief_before"][0], *mine["belief"]]
        assert row["revised"] == mine["revision"].abs().max() and row["pivotal"] == mine["pivotal"].sum()
        assert row["invalid"] == (~mine["valid"]).sum() and row["recorded"] == mine.height


@pytest.mark.parametrize("sort", ["", "return", "revised", "n_tokens"])
@pytest.mark.parametrize("text", ["", "MILK Carton"])
def test_rows_are_filtered_sorted_and_cut_as_asked(data, run, sort, text):
    where = filters.parse("n_turns >= 4 and step != 1")
    got = data.rows(where, text, sort, True, start=2, count=5)
    turns = run.read("turns").to_dicts()
    hits = {
        (t["step"], t["episode"])
        for t in turns
        if text.lower() in "\n".join((t["observation"], t["action"], t["response"])).lower()
    }
    rows = [r for r in run.read("episodes").sort("step", "group", "episode").to_dicts()]
    rows = [r for r in rows if r["n_turns"] >= 4 and r["step"] != 1 and (r["step"], r["episode"]) in hits]
    if sort:
        revised = {(r["step"], r["episode"]): r["revised"] for r in data.summaries.to_dicts()}
        rows.sort(key=lambda r: -(revised[r["step"], r["episode"]] if sort == "revised" else r[sort]))
    assert got["total"] == len(rows) > 7
    assert [(r["step"], r["episode"]) for r in got["rows"]] == [(r["step"], r["episode"]) for r in rows[2:7]]
    place = got["rows"][1]
    found = data.rows(where, text, sort, True, at=[place["step"], place["episode"]])
    assert found["index"] == 3


def test_hits_name_the_first_turn(data, run):
    row = data.rows(text="inventory")["rows"][0]
    turns = run.read("turns").filter(pl.col("step") == row["step"], pl.col("episode") == row["episode"])
    found = turns.filter(pl.col("action") == "inventory")["turn"].sort()
    assert row["hits"] == len(found) and row["first_hit"] == found[0]


def test_picks_are_best_median_worst_and_most_revised(data):
    picks, rows = data.rows()["picks"], {(r["step"], r["episode"]): r for r in data.summaries.to_dicts()}
    returns = sorted(r["return"] for r in rows.values())
    assert rows[tuple(picks["best"])]["return"] == returns[-1]
    assert rows[tuple(picks["worst"])]["return"] == returns[0]
    assert rows[tuple(picks["median"])]["return"] == returns[(len(returns) - 1) // 2]
    assert rows[tuple(picks["most revised"])]["revised"] == max(r["revised"] for r in rows.values())
    assert data.rows(filters.parse("step > 99")) == {"total": 0, "rows": [], "picks": {}, "index": None}


def test_groups_count_their_members(data):
    got = data.groups(filters.parse("step = 2"))
    assert [(r["step"], r["group"], r["n"]) for r in got["rows"]] == [(2, 0, 6), (2, 1, 6)]
    won = data.summaries.filter(pl.col("step") == 2, pl.col("group") == 1)["outcome"].sum()
    assert got["rows"][1]["won"] == won


@pytest.mark.parametrize(
    ("line", "clauses"),
    [
        ("", []),
        ("return > .5", [("return", ">", 0.5)]),
        ("n_turns<=6 AND return == -1e-2, kind = fridge",
         [("n_turns", "<=", 6), ("return", "=", -0.01), ("kind", "=", "fridge")]),
        ('kind != "washing machine" & step>=3', [("kind", "!=", "washing machine"), ("step", ">=", 3)]),
    ],
)  # fmt: skip
def test_the_filter_line_is_read(line, clauses):
    assert [(c["column"], c["op"], c["value"]) for c in filters.parse(line)] == clauses


@pytest.mark.parametrize(
    "line", ["return", "return >", "> 3", "return > 3 n_turns < 2", "return > 3 and", "a.b = 1; x"]
)
def test_a_torn_filter_is_one_clear_line(line):
    with pytest.raises(WorkbenchError, match="filter: expected such as") as caught:
        filters.parse(line)
    assert "\n" not in str(caught.value)


def test_filters_that_cannot_be_asked_are_told(data):
    for line, told in (
        ("retur > 1", "did you mean 'return'"),
        ("kind > 1", "kind is compared with a text"),
        ("kind > a", "compared by = or !="),
        ("step = a", "step is compared with a number"),
    ):
        with pytest.raises(WorkbenchError, match=told):
            data.rows(filters.parse(line))


# Tokens


def collected(data, step, episode, most):
    """All tokens of an episode by following `next`: {turn: (text, ids, {signal: values})}."""
    out, at, last = {}, [0, 0], data.episode(step, episode)["turns"][-1]["turn"]
    while at:
        answer, (ids, values) = data.window(step, episode, at[0], last, at[1], most)
        ids, values = np.frombuffer(ids, "<i4"), np.frombuffer(values, "<f4").reshape(len(answer["signals"]), -1)
        assert len(ids) <= max(most, 8)
        for turn in answer["turns"]:
            text, had, signals = out.setdefault(turn["turn"], ("", [], {}))
            assert turn["first"] == len(had), "a window goes on where the last one ended"
            part = slice(turn["offset"], turn["offset"] + turn["count"])
            for name, row in zip(answer["signals"], values, strict=True):
                signals.setdefault(name, []).extend(row[part].tolist())
            out[turn["turn"]] = (text + "".join(turn["cells"]), had + ids[part].tolist(), signals)
        at = answer["next"]
    return out


@pytest.mark.parametrize("most", [3, 4096])
def test_windows_hold_every_token_once(data, run, most):
    turns = run.read("turns").filter(pl.col("step") == 2, pl.col("episode") == 4).sort("turn")
    got = collected(data, 2, 4, most)
    assert list(got) == turns["turn"].to_list()
    for row in turns.iter_rows(named=True):
        text, ids, signals = got[row["turn"]]
        assert text == row["response"] and ids == row["token_ids"]
        for name in ("gap", "gate", "advantage", "dloss_dlogp", "entropy"):
            assert signals[name] == pytest.approx(row[name])
        ratio = np.array(row["teacher_logprobs"]) - np.array(row["old_logprobs"])
        assert signals["log_ratio"] == pytest.approx(ratio, abs=1e-6)


def test_a_character_over_tokens_is_one_cell_and_is_never_cut(run, tmp_path):
    pieces = ["Ġgo", "ĠðŁ", "ĺ", "Ģ", "Ġto", "ĠcafÃ", "©"]
    made = synthetic_run.write(tmp_path, n_steps=1, groups=1, size=2)
    n = len(pieces)
    lists = {name: pl.lit(pl.Series([[0.5] * n], dtype=pl.List(pl.Float32))).first() for name in TOKEN_LISTS}
    ids = pl.lit(pl.Series([list(range(n))])).first().alias("token_ids")
    turns = made.read("turns").with_columns(
        pl.lit(pl.Series([pieces])).first().alias("pieces"), ids, pl.lit("go 😀 to café").alias("response"), **lists
    )
    made.write_table("turns", 1, turns)
    data = RunData(made)
    answer, _ = data.window(1, 0, 0, 0)
    assert answer["turns"][0]["cells"] == [" go", " 😀", " to", " café"]
    assert answer["turns"][0]["starts"] == [0, 1, 4, 5] and answer["turns"][0]["count"] == n
    assert [text for text, *_ in collected(data, 1, 0, 2).values()][0] == " go 😀 to café"
    assert data.tokens_frame(1, 0, 0, (1, 4))["text"].to_list() == [" 😀"] * 3


def test_what_a_run_without_teacher_lacks_is_null(tmp_path):
    data = RunData(synthetic_run.write(tmp_path, "plain", "grpo", teacher=False, n_steps=2, groups=1))
    assert data.scale("gap")["limit"] is None and data.scale("advantage")["limit"] > 0
    answer, (_, values) = data.window(1, 0, 0, 0)
    assert np.isnan(
        np.frombuffer(values, "<f4").reshape(len(answer["signals"]), -1)[answer["signals"].index("gap")]
    ).all()
    assert data.tokens_frame(1, 0)["gap"].null_count() == data.tokens_frame(1, 0).height > 0
    assert not data.overview()["beliefs"] and "most revised" not in data.rows()["picks"]


def test_the_colour_limit_is_the_98th_centile(data, run):
    gaps = run.read("turns")["gap"].explode().abs()
    assert data.scale("gap")["limit"] == pytest.approx(gaps.quantile(0.98))
    assert data.scale("gate")["limit"] == 0.5
    with pytest.raises(WorkbenchError, match="did you mean 'gate'"):
        data.scale("gates")


def test_members_part_where_what_they_did_differs(data, run):
    turns = run.read("turns").filter(pl.col("step") == 3, pl.col("group") == 1)
    played = {e: part.sort("turn").to_dicts() for (e,), part in turns.group_by("episode")}
    first = min(played)
    got = data.compare(3, first)["members"]
    assert got[0]["episode"] == first and {m["episode"] for m in got} == set(played)
    for member in got[1:]:
        mine, theirs = played[first], played[member["episode"]]
        k = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False))
                 if (a["observation"], a["action"]) != (b["observation"], b["action"]))  # fmt: skip
        assert member["differs"] == k and member["same_state"] == (mine[k]["observation"] == theirs[k]["observation"])
        assert member["other_credit"] == pytest.approx(theirs[k]["turn_advantage"], abs=1e-5)


def test_same_state_different_action_opposite_credit():
    if not shipped.data("recorded_run", "config.json").is_file():
        pytest.skip("no recorded run is shipped in data/recorded_run")
    from workbench.runs import RunFolder

    members = RunData(RunFolder.open(shipped.data("recorded_run"))).compare(9, 3)["members"]
    other = next(m for m in members[1:] if m["outcome"] == 1)
    assert other["differs"] == 3 and other["same_state"] and other["credit"] < 0 < other["other_credit"]


def test_episodes_whose_turns_were_not_kept_are_left_out_at_first(tmp_path):
    made = synthetic_run.write(tmp_path, n_steps=3, groups=1)
    (made.path / "tables" / "turns" / "step=000002.parquet").unlink()
    explorer = Explorer(made)
    assert explorer.filter == "recorded > 0" and explorer.episodes["step"].unique().sort().to_list() == [1, 3]
    explorer.filter = ""
    assert explorer.episodes.height == 18
    explorer.selection = 2, 0
    assert explorer.selection.turns.is_empty() and explorer.selection.tokens.is_empty()
    assert explorer.answer("episode", step=2, episode=0)[0]["turns"] == []


# The widget


def test_it_opens_at_the_most_revised_episode(explorer, data):
    step, episode = data.rows()["picks"]["most revised"]
    assert explorer.link == f"run={explorer.run.path.name}&step={step}&episode={episode}"
    assert explorer.selection.episode.height == 1 and explorer.selection.turns["episode"].unique().to_list() == [
        episode
    ]


def test_link_and_selection_go_both_ways(explorer, run):
    explorer.set_state({"link": f"run={run.path.name}&step=2&episode=5&turn=1&span=1-3"})  # as the page does
    chosen = explorer.selection
    row = run.read("turns").filter(pl.col("step") == 2, pl.col("episode") == 5, pl.col("turn") == 1)
    assert chosen.turns.equals(row) and chosen.episode["n_turns"][0] >= 2
    assert chosen.tokens["position"].to_list() == [1, 2]
    assert chosen.tokens["token_id"].to_list() == row["token_ids"][0].to_list()[1:3]
    assert chosen.tokens["gap"].to_list() == pytest.approx(row["gap"][0].to_list()[1:3])
    explorer.selection = 1, 3, 0
    assert explorer.link.endswith("step=1&episode=3&turn=0") and explorer.selection.turns.height == 1
    explorer.selection = f"#run={run.path.name}&step=2&episode=0"
    assert explorer.selection.tokens.height == explorer.selection.episode["n_tokens"][0]


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("run=other&step=1&episode=0", "the link is about run 'other'"),
        ("step=1", "names no run"),
        ("{run}&step=1&episode=99", "no episode 99 here"),
        ("{run}&step=9&episode=0", "no step 9 here"),
        ("{run}&step=1&episode=0&turn=40", "so no turn 40"),
        ("{run}&step=1&episode=0&turn=0&span=0-999", "so no span 0-999"),
    ],
)
def test_a_link_to_nothing_is_refused_and_the_view_stays(explorer, run, link, told):
    before = explorer.link
    with pytest.raises(WorkbenchError, match=told):
        explorer.link = link.format(run=f"run={run.path.name}")
    assert explorer.link == before


@pytest.mark.parametrize("place", [None, 5, float("nan"), (), (1, 2, 3, 4, 5, 6, 7), {"step": 1}, b"x"])
def test_a_selection_that_is_no_place_is_one_line(explorer, place):
    before = explorer.link
    with pytest.raises(WorkbenchError, match="a selection is a link or") as caught:
        explorer.selection = place
    assert "\n" not in str(caught.value) and explorer.link == before


def test_bad_traits_are_refused(explorer):
    with pytest.raises(WorkbenchError, match="did you mean 'gap'"):
        explorer.color = "gaps"
    with pytest.raises(WorkbenchError, match="unknown column"):
        explorer.filter = "retrun > 1"
    with pytest.raises(WorkbenchError, match="no column|unknown table"):
        Explorer(shipped.data("recorded_compare", "grpo-0"))


def test_filter_search_and_sort_shape_the_episodes(explorer):
    explorer.filter, explorer.search, explorer.sort = "n_turns < 6", "milk", "-return"
    assert (explorer.episodes["n_turns"] < 6).all() and explorer.episodes["return"].is_sorted(descending=True)


def test_the_page_is_answered(explorer, data):
    answer, error, _ = ask(explorer, "open")
    assert error is None and answer["episodes"] == 36 and answer["labels"][0] == "pivotal" and answer["notes"] is True
    assert [s["name"] for s in answer["signals"]] == [s.name for s in SIGNALS if s.name not in CHOSEN_LISTS]
    answer, _, _ = ask(explorer, "rows", where=[], text="", sort="return", descending=True, start=0, count=3, at=[1, 2])
    assert len(answer["rows"]) == 3 and answer["total"] == 36
    _, _, buffers = ask(explorer, "window", step=1, episode=2, first=0, last=1, start=0)
    assert len(buffers) == 2
    assert ask(explorer, "text", step=1, episode=2, turn=0)[0]["observation"].startswith("You are in the")


@pytest.mark.parametrize(
    ("request_", "arguments", "told"),
    [
        ("opne", {}, "did you mean 'open'"),
        ("window", {"step": 1}, "window: "),
        ("episode", {"step": 7, "episode": 0}, "no step 7 here"),
        ("window", {"step": 1, "episode": 0, "first": 90, "last": 99}, "no turns 90 to 99"),
        ("rows", {"sort": "task"}, "column to sort by"),
        ("rows", {"where": [{"column": "__class__", "op": ">", "value": 1}]}, "unknown column"),
        ("note_add", {"step": 1, "episode": 0, "label": "great"}, "label of a note"),
    ],
)
def test_a_question_without_an_answer_is_told_in_one_line(explorer, request_, arguments, told):
    answer, error, _ = ask(explorer, request_, **arguments)
    assert answer is None and told in error and "\n" not in error


def test_notes_are_written_changed_and_deleted_from_the_page(tmp_path, monkeypatch):
    made = Explorer(synthetic_run.write(tmp_path, n_steps=1, groups=1))
    text = "<img src=x onerror=alert(1)> why?"
    added, _ = made.answer("note_add", step=1, episode=2, turn=0, span=[1, 3], text=text, tags=["odd"], label="pivotal")
    (note,) = added["notes"]
    assert (note["text"], note["start"], note["end"], note["tags"]) == (text, 1, 3, ("odd",))
    changed, _ = made.answer("note_edit", note=note["id"], text="again", label=None, tags=[])
    assert changed["notes"][0]["text"] == "again" and changed["notes"][0]["label"] is None
    assert made.notes.notes()[0].turn == 0
    assert made.answer("note_delete", note=note["id"])[0]["notes"] == []
    assert len((made.run.path / "notes.jsonl").read_text().splitlines()) == 3


UNSAFE = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( :// fetch( XMLHttp import( srcdoc href"


def test_the_page_is_one_module_without_network_or_markup():
    text = module("explorer")
    assert text.count("export default") == 1 and not re.search(r"^(import|export) (?!default)", text, re.MULTILINE)
    text = text.replace("http://www.w3.org/2000/svg", "")
    for unsafe in UNSAFE.split():
        assert unsafe not in text, unsafe
    assert "asked = waiting.get(message.id)" in text and text.index("function h(") < text.index("class View")


# The notebook


def test_the_notebook_is_clean_on_disk():
    notebook = json.loads(shipped.notebook("explore").read_text())
    nbformat.validate(notebook)
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    assert code[0]["metadata"]["tags"] == ["parameters"] and code[-1]["metadata"]["tags"] == ["result"]


def test_the_notebook_says_something_without_a_page(tmp_path, run):
    made = run_notebook(
        "explore", {"run": str(run.path), "filter": "n_turns <= 4", "color": "gap"}, tmp_path, progress=False
    )
    result = made.manifest["result"]
    explorer = Explorer(run, filter="n_turns <= 4")
    assert result["link"] == explorer.link and result["shown"] == explorer.episodes.height
    text = (made.path / "executed.ipynb").read_text()
    assert "application/vnd.jupyter.widget-view+json" in text and "text/html" in text
    report = (made.path / "report.html").read_text()
    assert "coloured by gap" in report and "turn 0" in report and "<script>alert" not in report
