"""Agreement with a person's labels: what counts as a label, the numbers, and the notebook that shows them."""

import json
import shutil

import numpy as np
import polars as pl
import pytest
import synthetic_run
from hypothesis import given
from hypothesis import strategies as st

from workbench import shipped
from workbench.errors import WorkbenchError
from workbench.figures import agreement, display, style
from workbench.figures.display import MIME
from workbench.links import parse
from workbench.notes import NoteBook
from workbench.runs.execute import run_notebook

TURN = agreement.TURN


@pytest.fixture(scope="module")
def run():
    return synthetic_run.tables(size=8)


@pytest.fixture(scope="module")
def flagged(run):
    return agreement.flags(run["turns"], run["episodes"])


@pytest.fixture
def book(tmp_path):
    (tmp_path / "run").mkdir()
    return NoteBook(tmp_path / "run")


def as_labels(rows, person):
    return rows.select(*TURN).with_columns(pl.Series("person", person, pl.Boolean), people=pl.lit(1, pl.Int64))


# Labels


def test_each_persons_last_label_counts_and_the_majority_decides(book):
    def note(turn, label, author, **more):
        return book.add(1, 0, turn, label=label, author=author, **more)

    note(0, "pivotal", "ada"), note(0, "not pivotal", "ada")
    note(1, "pivotal", "ada", span=(0, 2)), note(1, "pivotal", "ben"), note(1, "not pivotal", "cyd")
    note(2, "pivotal", "ada"), note(2, "not pivotal", "ben")
    note(3, "wrong credit", "ada"), note(None, "pivotal", "ada"), note(4, None, "ada", text="words alone")
    found = agreement.labels(book.frame())
    assert found.rows() == [(1, 0, 0, False, 1), (1, 0, 1, True, 3)], "a tie, a doubt and a whole episode are no label"
    assert agreement.labels(book.frame(), "ben").rows() == [(1, 0, 1, True, 1), (1, 0, 2, False, 1)]
    turns = pl.DataFrame({"step": 1, "episode": [0] * 6 + [1], "turn": [*range(6), 0]})
    rest = agreement.labels(book.frame(), turns=turns)
    assert rest["turn"].to_list() == [0, 1, 4, 5] and rest["people"].to_list() == [1, 3, 0, 0]
    with pytest.raises(WorkbenchError, match="did you mean 'ada'"):
        agreement.labels(book.frame(), "adda")


def test_no_notes_are_no_labels(book):
    found = agreement.labels(book.frame())
    assert found.is_empty() and found.columns == [*TURN, "person", "people"]
    assert agreement.between_people(book.frame()).is_empty()


def test_people_are_compared_on_the_turns_both_labelled(book):
    for turn, (ada, ben) in enumerate([(1, 1), (1, 0), (0, 0), (0, 0), (1, None)]):
        for author, value in (("ada", ada), ("ben", ben)):
            if value is not None:
                book.add(1, 0, turn, label="pivotal" if value else "not pivotal", author=author)
    row = agreement.between_people(book.frame()).row(0, named=True)
    assert (row["author"], row["other"], row["turns"], row["kappa"]) == ("ada", "ben", 4, pytest.approx(0.5))


# Flags and numbers


def test_every_signal_flags_as_many_turns_of_an_episode_as_the_rule(run, flagged):
    sums = flagged.group_by("step", "episode").agg(pl.col(list(agreement.SIGNALS)).sum())
    for name in agreement.SIGNALS:
        assert np.allclose(sums[name], sums["pivotal"]), name
    assert 0 < sums["pivotal"].sum() < flagged.height
    rows = flagged.join(run["turns"], on=TURN, suffix="_recorded")
    assert (rows["pivotal"] == rows["pivotal_recorded"]).all()
    for (_, _), part in rows.group_by("step", "episode"):
        for name, value in (
            ("revision", part["revision_recorded"].abs()),
            ("gap", part["gap_recorded"].list.eval(pl.element().abs()).list.sum()),
            ("last", part["turn"]),
        ):
            on, off = value.filter(part[name] == 1), value.filter(part[name] == 0)
            assert on.is_empty() or off.is_empty() or on.min() >= off.max(), name


def test_a_run_without_beliefs_is_flagged_by_the_papers_rule_and_one_without_teacher_refused(run, flagged):
    bare = run["turns"].drop(
        "evidence", "belief_before", "belief", "revision", "z", "weight", "turn_advantage", "pivotal"
    )
    assert agreement.flags(bare, run["episodes"])["pivotal"].equals(flagged["pivotal"])
    plain = synthetic_run.tables(n_steps=2, teacher=False)
    with pytest.raises(WorkbenchError, match="without a teacher"):
        agreement.flags(plain["turns"], plain["episodes"])


def test_kappa_is_the_textbook_one():
    # 20 and 15 agreed of 50, Wikipedia's example of Cohen's kappa
    assert agreement.kappa(*map(np.float64, (20, 10, 5, 15))) == pytest.approx(0.4)
    assert agreement.kappa(*map(np.float64, (4, 0, 0, 6))) == pytest.approx(1)
    assert agreement.kappa(*map(np.float64, (0, 5, 5, 0))) == pytest.approx(-1)
    for counts in ((5, 0, 0, 0), (0, 0, 0, 5), (0, 0, 0, 0)):
        assert np.isnan(agreement.kappa(*map(np.float64, counts)))


@given(st.tuples(*[st.integers(0, 30)] * 4))
def test_kappa_is_symmetric_and_at_most_one(counts):
    tp, fp, fn, tn = map(np.float64, counts)
    value = agreement.kappa(tp, fp, fn, tn)
    for other in (agreement.kappa(tp, fn, fp, tn), agreement.kappa(tn, fp, fn, tp)):
        assert np.isclose(value, other, equal_nan=True)
    assert np.isnan(value) or (-1 - 1e-9 <= value <= 1 + 1e-9 and (fp + fn > 0 or np.isclose(value, 1)))


def test_labels_made_from_a_signal_agree_with_it_and_not_with_chance(flagged):
    frame = agreement.agree(as_labels(flagged, flagged["gap"] == 1), flagged, resamples=400)
    rows = {r["signal"]: r for r in frame.to_dicts()}
    gap, chance = rows["gap"], rows["random"]
    assert (gap["kappa"], gap["precision"], gap["recall"]) == (1, 1, 1) and gap["kappa_low"] == gap["kappa_high"] == 1
    assert all(r["precision"] == pytest.approx(r["recall"]) for r in rows.values()), "as many flags as labels"
    assert abs(chance["kappa"]) < 0.2 and chance["gain"] == chance["gain_low"] == chance["gain_high"] == 0
    assert gap["gain"] == 1 - chance["kappa"] and gap["gain_low"] > 0.5
    for name in ("pivotal", "revision", "last"):
        row = rows[name]
        both = (flagged[name] * flagged["gap"]).sum()
        assert (row["tp"], row["fp"], row["fn"]) == (both, flagged[name].sum() - both, flagged["gap"].sum() - both)
        assert row["tp"] + row["fp"] + row["fn"] + row["tn"] == flagged.height == row["turns"]
        assert row["kappa_low"] <= row["kappa"] <= row["kappa_high"]
    assert not agreement.too_few(frame)


def test_an_interval_covers_what_whole_episodes_differ_by(flagged):
    whole = agreement.agree(as_labels(flagged, flagged["pivotal"] == 1), flagged, resamples=400)
    assert whole.equals(agreement.agree(as_labels(flagged, flagged["pivotal"] == 1), flagged, resamples=400))
    # right in half of the episodes, wrong in the others: counted by turn it would look surer than it is
    half = pl.col("episode") % 2 == 0
    person = flagged.select(pl.when(half).then(pl.col("pivotal") == 1).otherwise(pl.col("pivotal") == 0)).to_series()
    row = agreement.agree(as_labels(flagged, person), flagged, resamples=400).row(0, named=True)
    by_turn = 1.96 * np.sqrt(row["precision"] * (1 - row["precision"]) / (row["tp"] + row["fp"]))
    assert row["precision_high"] - row["precision_low"] > 1.8 * by_turn


def test_few_labels_and_one_sided_ones_are_said_to_be_so(flagged):
    few = agreement.agree(as_labels(flagged.head(3), [True, False, False]), flagged)
    words = agreement.sentences(few, as_labels(flagged.head(3), [True, False, False]))
    assert "Too few labels" in agreement.too_few(few) and "1 pivotal and 2 not pivotal in 1 episode;" in " ".join(words)
    assert "Too few labels" in agreement.agreement(few).layout.meta["subtitle"]
    assert not [w for w in words if "random" in w], "no verdict from too few"
    ones = flagged.filter(pl.col("pivotal") == 1)
    sided = agreement.agree(as_labels(ones, [True] * ones.height), flagged)
    assert sided["kappa"][0] is None and "Kappa is not defined" in " ".join(agreement.sentences(sided, ones))
    assert agreement.too_few(sided) and agreement.agreement(sided)


def test_labels_on_turns_the_run_does_not_hold_are_counted_and_alone_refused(flagged):
    stray = as_labels(flagged.head(1).with_columns(episode=pl.lit(999, pl.Int64)), [True])
    with pytest.raises(WorkbenchError, match="no turn of this run"):
        agreement.agree(stray, flagged)
    mixed = pl.concat([stray, as_labels(flagged.head(4), [True, False, True, False])])
    assert "1 more labels are on turns" in " ".join(agreement.sentences(agreement.agree(mixed, flagged), mixed))


def test_the_figure_draws_the_frames_numbers(flagged):
    person = (flagged["pivotal"] == 1) ^ (flagged["turn"] == 0)
    frame = agreement.agree(as_labels(flagged, person), flagged, resamples=200)
    fig = agreement.agreement(frame)
    drawn = {(t.meta["signal"], t.meta["metric"]): t for t in fig.data}
    assert len(drawn) == len(agreement.SIGNALS) * len(agreement.METRICS)
    for row in frame.to_dicts():
        for metric in agreement.METRICS:
            trace = drawn[row["signal"], metric]
            assert trace.x[0] == row[metric]
            assert trace.x[0] + trace.error_x.array[0] == pytest.approx(row[f"{metric}_high"])
            assert trace.x[0] - trace.error_x.arrayminus[0] == pytest.approx(row[f"{metric}_low"])
    assert fig.layout.width == style.WIDTH and fig.layout.meta["title"].endswith("?")
    json.dumps(display.spec(fig), allow_nan=False)
    with pytest.raises(WorkbenchError, match="one row for each"):
        agreement.agreement(frame.head(2))


def test_disagreements_lead_there(run, flagged):
    labelled = as_labels(flagged.head(12), flagged["pivotal"].head(12) == 0)
    apart = agreement.disagreements(labelled, flagged, run["turns"], "run-1")
    assert apart.height == 12
    link = parse(apart["link"][3])
    assert (link.run, link.step, link.episode, link.turn) == ("run-1", *apart.select(TURN).row(3))
    words = agreement.listed(apart)
    assert len(words) == 9 and "4 more turns differ" in words[-1]
    assert "every labelled turn the same" in agreement.listed(apart.head(0))[0]


# The notebook


def shown(run):
    notebook = json.loads((run.path / "executed.ipynb").read_text())
    data = [o["data"] for c in notebook["cells"] for o in c.get("outputs", []) if "data" in o]
    return [d for d in data if MIME in d], " ".join("".join(d.get("text/plain", "")) for d in data)


def test_notebook_on_disk_is_clean():
    notebook = json.loads(shipped.notebook("annotate").read_text())
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    assert code[0]["metadata"]["tags"] == ["parameters"] and code[-1]["metadata"]["tags"] == ["result"]
    parameters = "".join(code[0]["source"]).splitlines()
    assert all(": " in p.split("=")[0] and "  # " in p for p in parameters)


@pytest.mark.usefixtures("in_process")
def test_the_shipped_run_has_no_labels_and_the_notebook_says_so(tmp_path):
    run = run_notebook("annotate", {}, tmp_path, progress=False)
    figures, text = shown(run)
    assert figures == [] and "No turn of recorded_run is labelled" in text
    assert run.manifest["result"]["labelled_turns"] == 0 and run.manifest["result"]["kappa"] is None
    assert (run.path / "executed.ipynb").stat().st_size < 6_000_000


@pytest.mark.usefixtures("in_process")
def test_labels_make_a_figure(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(shipped.data("recorded_run"), copy)
    book = NoteBook(copy)
    turns = pl.read_parquet(copy / "tables" / "turns" / "step=000009.parquet").filter(pl.col("episode") < 12)
    for row in turns.select(*TURN, "pivotal").to_dicts():
        called = row["pivotal"] ^ (row["turn"] == 1)
        place = [row[name] for name in TURN]
        book.add(*place, label="pivotal" if called else "not pivotal", author="made for a test")
    run = run_notebook("annotate", {"run": str(copy), "author": "made for a test"}, tmp_path, progress=False)
    figures, text = shown(run)
    result = run.manifest["result"]
    assert len(figures) == 1 and result["labelled_turns"] == turns.height and result["enough_labels"] is True
    labelled = agreement.labels(book.frame())
    assert result["called_pivotal"] == labelled["person"].sum()
    episodes = pl.read_parquet(copy / "tables" / "episodes" / "step=000009.parquet")
    frame = agreement.agree(labelled, agreement.flags(turns, episodes))
    assert result["kappa_by_signal"] == pytest.approx(dict(frame.select("signal", "kappa").rows()))
    assert "agrees with the person" in text and "run=copy&step=9&episode=" in text
