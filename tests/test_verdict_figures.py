"""Figure of self-verification: shares and counts are those of the table, a row an answer."""

import polars as pl
import pytest

from workbench.errors import WorkbenchError
from workbench.figures import display, verdicts
from workbench.verifying import VERIFICATIONS


def answers(step, loop, question, truth, said):
    return [
        dict.fromkeys(VERIFICATIONS) | {
            "step": step, "loop": loop, "question": question, "truth": truth, "verdict": verdict, "advantage": 0.0,
        }
        for verdict in said
    ]  # fmt: skip


@pytest.fixture
def table():
    rows = [
        *answers(1, 0, 0, True, [True, True]), *answers(1, 0, 1, False, [False, True]),
        *answers(1, 1, 0, True, [None, False]), *answers(1, 1, 1, False, [False, False]),
        *answers(3, 0, 0, True, [True, False]), *answers(3, 0, 1, False, [None, True]),
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=VERIFICATIONS)


def test_shares_count_what_cannot_be_read_as_not_said(table):
    found = verdicts.frame(table.sample(fraction=1, shuffle=True, seed=1))
    assert found.select("step", "loop").rows() == [(1, 0), (1, 1), (3, 0)]
    assert found["right"].to_list() == [0.75, 0.5, 0.25] and found["unread"].to_list() == [0, 0.25, 0.25]
    assert found["of_success"].to_list() == [1, 0, 0.5] and found["of_failure"].to_list() == [0.5, 0, 0.5]
    assert found.select("all", "mixed", "none").rows() == [(1, 1, 0), (1, 0, 1), (0, 1, 1)]


def test_the_figure_draws_those_and_the_sentences_say_them(table):
    fig = verdicts.figure(table)
    assert [list(t.x) for t in fig.data] == [[1.0, 1.5, 3.0]] * 6 and display.title_of(fig).endswith("?")
    assert [list(t.y) for t in fig.data[3:]] == [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    first, last = verdicts.sentences(table)
    assert first.startswith("Of 12 answers 50 % were right") and verdicts.right(table) == 0.5
    assert "of 50 % where there was one and of 50 % where there was none; 1 of 2 questions" in last


def test_a_table_without_answers_is_refused_in_one_line(table):
    for bad, said in ((table.head(0), "no rows to draw; a run of method self_verification"),
                      (table.drop("truth"), "no column truth")):  # fmt: skip
        with pytest.raises(WorkbenchError, match=said) as caught:
            verdicts.figure(bad)
        assert "\n" not in str(caught.value)
