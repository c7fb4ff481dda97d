"""The picture of decisions and evidence: what is marked, from a record or from entropy, and what it refuses."""

import numpy as np
import polars as pl
import pytest
import synthetic_run
import torch

from workbench.distill import dear
from workbench.distill.dear import DEARConfig
from workbench.errors import WorkbenchError
from workbench.figures import decisions
from workbench.signals import SIGNALS, numbers
from workbench.tables import CHOSEN_LISTS


@pytest.fixture(scope="module")
def turns():
    return synthetic_run.tables(n_steps=3, groups=2, size=4)["turns"]


@pytest.fixture(scope="module")
def chosen(turns):
    """The same turns with columns as method dear records them: the first token decides, the second is evidence."""
    sizes = [len(ids) for ids in turns["token_ids"]]
    first = [[1.0] + [0.0] * (n - 1) for n in sizes]
    second = [[0.0, 1.0][:n] + [0.0] * (n - 2) for n in sizes]
    score = [[0.0, 1.5][:n] + [0.25] * (n - 2) for n in sizes]
    return turns.with_columns(decision=pl.Series(first), support=pl.Series(second), support_score=pl.Series(score))


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_decisions_of_other_runs_are_those_that_dear_would_take(turns, share):
    found = decisions.with_decisions(turns, share)
    assert found["decision"].list.len().equals(turns["entropy"].list.len())
    sizes = torch.tensor([len(e) for e in turns["entropy"]])
    entropy = torch.tensor(turns["entropy"].explode().to_list(), dtype=torch.float64)
    n = len(entropy)
    response = torch.arange(len(sizes)).repeat_interleave(sizes)
    want = dear.select(entropy, torch.zeros(n), torch.ones(n, 2), response, DEARConfig(decisions=share)).decisions
    assert np.array_equal(found["decision"].explode().to_numpy() > 0, want.numpy())


def test_of_equal_entropies_the_earlier_token_decides(turns):
    level = turns.with_columns(entropy=pl.Series([[0.5] * len(ids) for ids in turns["token_ids"]]))
    assert all(row[0] == 1 for row in decisions.with_decisions(level, 0.01)["decision"])
    assert decisions.with_decisions(level, 0.01)["decision"].list.sum().to_list() == [1.0] * turns.height


def test_marked_cells_are_coloured_by_what_was_recorded(chosen):
    fig = decisions.marked(chosen, 1, 2)
    bar = fig.data[0]
    mine = chosen.filter(pl.col("step") == 1, pl.col("episode") == 2)
    want = [
        "decision" if i == 0 else "evidence" if i == 1 else "left out" for p in mine["pieces"] for i in range(len(p))
    ]
    assert list(bar.customdata) == want
    colours = {"decision": decisions.DECISION, "evidence": decisions.EVIDENCE, "left out": decisions.OTHER}
    assert list(bar.marker.color) == [colours[kind] for kind in want]
    assert [t.name for t in fig.data[1:]] == [f"{kind} ({want.count(kind)})" for kind in colours]
    assert "evidence score 1.50 of 2" in bar.hovertext[1] and "evidence score" not in bar.hovertext[0]
    one = decisions.marked(chosen, 1, 2, turn=0)
    assert len(one.data[0].x) == len(mine["pieces"][0])
    assert "last 2 tokens are not drawn" in decisions.marked(chosen, 1, 2, limit=len(want) - 2).layout.meta["subtitle"]


def test_without_a_record_no_evidence_is_claimed(turns):
    fig = decisions.marked(turns, 1, 2)
    assert {"decision", "left out"} == set(fig.data[0].customdata) and len(fig.data) == 3
    assert "takes hidden states to tell" in fig.layout.meta["subtitle"].replace("<br>", " ")


def test_words_count(chosen, turns):
    said = decisions.words(chosen, pl.DataFrame({"mass_decisions": [0.3, 0.5], "mass_kept": [0.7, 0.8]}))
    n = chosen["pieces"].list.len().sum()
    assert said[0] == f"Of {n:,} recorded tokens {chosen.height:,} are decisions and {chosen.height:,} are evidence."
    firsts = chosen["pieces"].list.first().value_counts(sort=True)
    assert said[1].startswith("Most often decisions: “") and f"({firsts['count'][0]:,})" in said[1]
    assert said[3] == "Decisions carry 40 % of the distillation gradient's mass, with evidence 75 % (mean of steps)."
    assert len(decisions.words(turns)) == 2


def test_what_cannot_be_shown_is_one_line(turns):
    bare = turns.drop("entropy")
    assert not decisions.known(bare) and decisions.known(turns)
    for call, message in (
        (lambda: decisions.marked(bare, 1, 2), "no column entropy"),
        (lambda: decisions.with_decisions(turns, 0.0), r"share must lie in \(0, 1\]"),
        (lambda: decisions.marked(turns, 77, 2), "no step 77 here"),
    ):
        with pytest.raises(WorkbenchError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_they_are_signals_of_the_explorer(chosen):
    names = [signal.name for signal in SIGNALS]
    row = chosen.row(0, named=True)
    for name in CHOSEN_LISTS:
        assert name in names and numbers(row, name, 0, 2).tolist() == row[name][:2]
