"""What a report holds of a run: which episodes, their numbers as they were, and nothing of its text where redacted."""

import base64
import gzip
import json
import re

import nbformat
import numpy as np
import polars as pl
import pytest
import synthetic_run
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_notebook, new_output
from test_report import Page, code_of, policy

from workbench import share, summaries
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.figures import curves, display
from workbench.notes import NoteBook
from workbench.report import build_report
from workbench.runs import RunFolder

HOSTILE = (
    "</script><script>window.ran=1</script><img src=x onerror=\"window.ran=2\"><svg onload='window.ran=3'>"
    '<a href="javascript:window.ran=4">x</a><style>*{display:none}</style>`${window.ran=5}`<!--\u202e\u2066 -->'
    "<base href=//x>"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = synthetic_run.write(tmp_path_factory.mktemp("run"), n_steps=4, groups=3)
    NoteBook(made.path).add(2, 7, 1, (0, 2), "why <b>here</b>?", ["odd"], "pivotal", "Ada")
    return made


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr("workbench.figures.overview.views", lambda tables: [])


def unpacked(block: bytes) -> tuple[dict, bytes]:
    data = gzip.decompress(block)
    size = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + size]), data[4 + size :]


def array(head: dict, planes: bytes, name: str) -> np.ndarray:
    """As the page puts an array together."""
    at = head["arrays"][name]
    places, length = ((8, 16, 24) if at["float"] else (0, 8, 16, 24)), at["length"]
    words = np.zeros(length, "<u4")
    for k, place in enumerate(places):
        part = planes[at["offset"] + k * length : at["offset"] + (k + 1) * length]
        words |= np.frombuffer(part, np.uint8).astype("<u4") << place
    return words.view("<f4") if at["float"] else words


# Which episodes


def table(rows) -> pl.DataFrame:
    columns = {"step": 0, "group": 1, "episode": 2, "return": 3, "n_turns": 4, "recorded": 5, "revised": 6}
    kinds = {n: pl.Float64 if n in ("return", "revised") else pl.Int64 for n in columns}
    return pl.DataFrame({n: [row[i] for row in rows] for n, i in columns.items()}, schema=kinds)


row = st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 9), st.integers(1, 5), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(row, min_size=1, max_size=60), st.integers(1, 40), st.data())
def test_the_choice_is_bounded_and_holds_what_matters_first(rows, limit, data):
    frame = table([(s, g, i, r, n, k, r / 2) for i, (s, g, r, n, k) in enumerate(rows)])
    recorded = set(frame.filter(pl.col("recorded") > 0).select("step", "episode").iter_rows())
    noted = data.draw(st.lists(st.sampled_from(sorted(recorded)), max_size=3)) if recorded else []
    chosen = list(summaries.choose(frame, limit, noted).iter_rows())
    assert len(chosen) == len(set(chosen)) == min(limit, len(chosen)) and set(chosen) <= recorded
    assert set(dict.fromkeys(noted).keys()) <= set(chosen) or len(set(noted)) > limit
    if limit >= len(recorded):
        assert set(chosen) == recorded
    steps = {s for s, _ in recorded}
    if limit >= len(set(noted)) + 4 * len(steps):
        for step in steps:
            assert set(summaries.picks(frame.filter(pl.col("step") == step)).values()) <= set(chosen)
    assert set(summaries.choose(frame).iter_rows()) == recorded


def test_few_episodes_are_spread_over_the_run_and_room_goes_to_their_groups(run):
    frame = summaries.episodes(run)
    few = summaries.choose(frame, 8)
    assert few.height == 8 and few["step"].unique().to_list() == [1, 4]
    some = summaries.choose(frame, 40).join(frame, on=["step", "episode"])
    whole = some.group_by("step", "group").len().filter(pl.col("len") == 6)
    assert some.height == 40 and some["step"].n_unique() == 4 and whole.height >= 4
    assert (2, 7) in set(share.gather(run, 1).episodes.select("step", "episode").iter_rows()), "it has a note"


# What is packed


def test_a_pack_holds_the_numbers_as_they_were(run):
    shared = share.gather(run, 40)
    head, planes = unpacked(share.pack(shared))
    turns = run.read("turns").join(shared.episodes, on=["step", "episode"], how="semi").sort("step", "episode", "turn")
    assert head["turns"]["count"] == turns["token_ids"].list.len().to_list()
    assert array(head, planes, "ids").tolist() == turns["token_ids"].explode().to_list()
    for name in ("advantage", "gap", "gate", "dloss_dlogp", "entropy", "old_logprobs", "teacher_logprobs"):
        got, true = array(head, planes, name), turns[name].explode().to_numpy().astype(np.float32)
        assert np.abs(got - true).max() <= 2e-5 * np.abs(true).max(), name
    texts = [head["cells"][i] for i in array(head, planes, "words")]
    assert "".join(texts) == "".join(turns["pieces"].explode()) and "log_ratio" not in head["arrays"]
    assert head["derived"] == {"log_ratio": ["teacher_logprobs", "old_logprobs"]}
    assert [n["text"] for n in head["notes"]] == ["why <b>here</b>?"] and head["recorded"] == 72
    whole = run.read("episodes").group_by("step", "group").agg(pl.col("outcome").sum())
    won = {(s, g): w for s, g, w in whole.iter_rows()}
    groups = head["groups"]
    assert [won[key] for key in zip(groups["step"], groups["group"], strict=True)] == groups["won"]
    assert share.pack(shared) == share.pack(share.gather(run, 40))


def test_numbers_survive_their_24_bits():
    values = np.array([0.0, -0.0, 1.0, -1e-7, 3.14159274, 65504.0, np.nan, -2.5e30, np.inf], "<f4")
    planes = share._planes(values)
    got = array({"arrays": {"x": {"length": len(values), "offset": 0, "float": True}}}, planes, "x")
    assert len(planes) == 3 * len(values) and np.isnan(got[6]) and got[8] == np.inf
    at = np.isfinite(values)
    assert (np.abs(got[at] - values[at]) <= 1.6e-5 * np.abs(values[at])).all()


def test_cells_of_several_tokens_and_turns_without_tokens(tmp_path):
    made = synthetic_run.write(tmp_path, n_steps=1, groups=1, size=2)
    turns = made.read("turns")
    split = ["Ð", "¿", "Ġok"]  # one character of two bytes, then a word
    first = pl.int_range(pl.len()) == 0
    lists = {c: t for c, t in turns.schema.items() if isinstance(t, pl.List) and c != "pieces"}
    values = {c: pl.lit(pl.Series([[1, 2, 3]]).cast(t)).first() for c, t in lists.items()}
    three = [pl.when(first).then(value).otherwise(c).alias(c) for c, value in values.items()]
    pieces = pl.when(first).then(pl.lit(pl.Series([split])).first()).otherwise("pieces").alias("pieces")
    said = pl.when(first).then(pl.lit("п ok")).otherwise("response").alias("response")
    turns = turns.with_columns(pieces, *three, said)
    bare = pl.int_range(pl.len()) == 1
    turns = turns.with_columns(pl.when(~bare).then(c).alias(c) for c in [*lists, "pieces"])
    made.write_table("turns", 1, turns)
    head, planes = unpacked(share.pack(share.gather(made)))
    assert [head["cells"][i] for i in array(head, planes, "words")[:2]] == ["п", " ok"]
    assert array(head, planes, "widths")[:2].tolist() == [2, 1]
    assert head["turns"]["count"][:2] == [3, 0] and head["n_cells"][:2] == [2, 0]


# The page


def test_a_run_without_a_notebook_has_a_report_of_its_tables(run):
    text = build_report(run).read_text()
    assert "All episodes whose turns the run kept" in text
    assert "step 2, episode 7, turn 1, tokens 0 to 1" in text and "[pivotal] · #odd" in text
    for title in ("Curves", "Beliefs", "Pivotal turns", "Token gates", "Output head"):
        assert f"<h2>{title}</h2>" in text
    assert "why &lt;b&gt;here&lt;/b&gt;?" in text
    assert f'href="#run={run.path.name}&amp;step=2&amp;episode=7&amp;turn=1&amp;span=0-2"' in text
    seen = Page(text)
    assert len(code_of(seen)) == 2 and seen.loads() == [] and seen.handlers() == []
    assert policy(seen).count("sha256-") == 3 and "unsafe-eval" not in policy(seen)


def test_what_a_notebook_draws_is_not_drawn_again(tmp_path):
    made = synthetic_run.write(tmp_path, n_steps=2, groups=1)
    fig = display.bundle(curves.success(made.read("evals"), made.read("steps")))
    shown = new_code_cell("show()", outputs=[new_output("display_data", data=fig)])
    nbformat.write(new_notebook(cells=[shown]), made.path / "executed.ipynb")
    text = build_report(made).read_text()
    assert text.count("Does the agent win more games") == 2, "the title in the figure and in its meta"
    assert text.count("Did training stay healthy?") == 2
    assert text.index("Does the agent win") < text.index("<h2>Curves</h2>") < text.index("Did training stay")


def test_other_tables_by_these_names_do_not_break_a_report(tmp_path):
    made = RunFolder.create(tmp_path, "other", {})
    made.write_table("turns", 1, pl.DataFrame({"what": ["a"]}))
    made.write_table("episodes", 1, pl.DataFrame({"episode": ["a"]}))
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), made.path / "executed.ipynb")
    assert 'id="explorer-view"' not in build_report(made).read_text()
    with pytest.raises(WorkbenchError, match="holds no recorded episodes"):
        build_report(made, redact=True)


def test_more_sections_and_an_audit_come_last(run, tmp_path):
    out = tmp_path / "folder" / "shared.html"
    text = build_report(run, sections=["<section>AUDIT</section>"], out=out).read_text()
    assert text.index("<h2>Notes</h2>") < text.index("<h2>Curves</h2>") < text.index("<section>AUDIT</section>")
    assert text.index("<section>AUDIT</section>") < text.index("groups_without_variance")  # the run's own audit
    with pytest.raises(WorkbenchError, match="may hold text"):
        build_report(run, sections=["x"], redact=True)
    with pytest.raises(WorkbenchError, match="must be 1 or more"):
        build_report(run, episodes=0)


def test_the_command_line_chooses_episodes(run, tmp_path, capsys, no_figures):
    out = tmp_path / "few.html"
    assert main(["report", str(run.path), "--episodes", "9", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == str(out) and re.fullmatch(r"\d+\.\d MB", printed[1])
    assert "9 of the 72 episodes" in out.read_text()
    assert main(["report", str(run.path), "--episodes", "all", "--out", str(out)]) == 0
    assert "All episodes" in out.read_text()
    capsys.readouterr()
    for wrong in ("0", "-1", "many", "²"):
        assert main(["report", str(run.path), f"--episodes={wrong}"]) == 2
    assert "--episodes takes a number from 1, or all" in capsys.readouterr().err


# Text that would like to run, and text that must not be there


def spoiled(out, text, **options) -> RunFolder:
    """A run whose every text is `text`, in each place that holds one."""
    made = synthetic_run.write(out, n_steps=2, groups=2, size=3, **options)
    for name in made.tables:
        for (step,), frame in made.read(name).group_by("step", maintain_order=True):
            texts = [pl.lit(text).alias(c) for c, kind in frame.schema.items() if kind == pl.String]
            frame = frame.with_columns(texts)
            if name == "turns":
                lists = frame["pieces"].list.len().map_elements(lambda n: [text] * n, return_dtype=pl.List(pl.String))
                frame = frame.with_columns(lists.alias("pieces"), thoughts=pl.lit(text))
                frame = frame.with_columns(plans=pl.concat_list("thoughts"), deep=pl.struct("thoughts"))
            if name == "episodes":
                frame = frame.with_columns(pl.lit(text).alias("info"), pl.concat_list(pl.lit(text)).alias("path_taken"))
            made.write_table(name, step, frame)
    book = NoteBook(made.path)
    book.add(1, 0, 0, text=text, author=text[:150], tags=[text[:60]], label="wrong credit")
    config = json.loads((made.path / "config.json").read_text())
    config["config"]["method"] = text
    (made.path / "config.json").write_text(json.dumps(config))
    made.update_manifest(
        status=text, error=text, notebook=text, device=text,
        parameters={text: text, "method": text, "lr": 0.5, text[:9]: 3},
        result={text: 1.0, "a": text, "b": [text], "success": 0.25}, versions={text: text},
        git={"commit": text, "dirty": True}, attempts=[{"status": text}], seconds=3.0,
    )  # fmt: skip
    stream = new_output("stream", name="stdout", text=text)
    nbformat.write(new_notebook(cells=[new_code_cell(text, outputs=[stream])]), made.path / "executed.ipynb")
    return made


def test_hostile_text_adds_no_element(tmp_path):
    plain = Page(build_report(spoiled(tmp_path / "a", "plain words")).read_text())
    bad = Page(build_report(spoiled(tmp_path / "b", HOSTILE)).read_text())

    def shape(seen: Page) -> list:
        kept = [(tag, sorted(attrs)) for tag, attrs in seen.elements]
        return [k for k in kept if k[0] not in ("span", "p", "code")]  # highlighted code has a span a word

    assert shape(bad) == shape(plain)
    assert bad.handlers() == [] and bad.loads() == []
    assert [a["href"][:5] for tag, a in bad.elements if tag == "a"] == ["#run="]
    assert not any("window.ran" in text for text in code_of(bad))
    assert "\u202e" not in bad.text and policy(bad) == policy(plain)


CANARY = "zyxwvCanary"


def everything(text: str) -> str:
    """A page's text with all that is packed in it."""
    blocks = re.findall(r'type="application/octet-stream"[^>]*>([^<]*)<', text)
    return text + "".join(gzip.decompress(base64.b64decode(b)).decode("latin-1") for b in blocks)


def test_a_redacted_report_holds_no_text_and_no_token_id(tmp_path):
    made = spoiled(tmp_path, CANARY)
    turns = made.read("turns")
    marked = pl.lit(pl.Series([[0x41424344] * 2])).first()
    for (step,), frame in turns.group_by("step", maintain_order=True):
        ids = pl.lit(0x41424344, pl.Int32).repeat_by(pl.col("token_ids").list.len()).alias("token_ids")
        made.write_table("turns", step, frame.with_columns(ids, marked.alias("context_ids"), marked.alias("other")))
    whole = everything(build_report(made).read_text())
    assert CANARY in whole and "DDDD" in whole, "the canary would be seen"
    path = build_report(made, redact=True)
    assert path.name == "report-redacted.html"
    text = path.read_text()
    assert CANARY.lower() not in everything(text).lower()
    head, planes = unpacked(base64.b64decode(re.search(r'id="explorer-data">([^<]*)<', text)[1]))
    assert "ids" not in head["arrays"] and head["cells"] == [share.COVER] and "DDDD" not in json.dumps(head)
    assert b"DDDD" not in planes and "1094861636" not in everything(text)
    assert set(head["turns"]["observation"]) == {""} and head["method"] == ""
    note = head["notes"][0]
    assert (note["text"], note["author"], note["tags"], note["label"]) == ("", "", [], "wrong credit")
    true = turns.sort("step", "episode", "turn")["gap"].explode().to_numpy()
    assert np.allclose(array(head, planes, "gap"), true, rtol=2e-5)
    assert head["turns"]["belief"] and "<td>0.5</td>" in text
    for title in ("Curves", "Beliefs", "Pivotal turns", "Token gates", "Output head"):
        assert f"<h2>{title}</h2>" in text


def test_the_comparison_of_members_outlives_redaction(run):
    plain, covered = (unpacked(share.pack(share.gather(run, redact=r)))[0]["turns"] for r in (False, True))
    assert covered["seen"] == plain["seen"] and covered["did"] == plain["did"]
    same = {}
    for code, text in zip(plain["seen"], plain["observation"], strict=True):
        assert same.setdefault(code, text) == text
    assert len(set(same.values())) == len(same)
