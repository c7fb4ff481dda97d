"""Figures of V0's values: bins and orders are those of the table, and other methods' tables are refused."""

import polars as pl
import pytest

from workbench import shipped
from workbench.errors import WorkbenchError
from workbench.figures import values
from workbench.runs import RunFolder
from workbench.sampling import budget_frame


def group(step, i, rate, won, rollouts, why="allocated"):
    return {"group": i, "task": f"t{i}", "kind": "k", "rate": rate, "success": won / rollouts, "rollouts": rollouts,
            "why": why}  # fmt: skip


@pytest.fixture
def budget():
    steps = [
        [group(0, 0, 0.5, 1, 4, "equal"), group(0, 1, 0.5, 0, 4, "equal")],
        [group(1, 0, 0.1, 0, 6), group(1, 1, 0.9, 2, 2)],
        [group(2, 0, 0.1, 1, 2), group(2, 1, 0.3, 3, 3), group(2, 2, 0.9, 0, 3)],
        [group(3, 0, 0.1, 0, 4), group(3, 1, 0.3, 0, 4)],
    ]
    return pl.concat([budget_frame(rows).insert_column(0, pl.lit(n).alias("step")) for n, rows in enumerate(steps)])


def test_bins_hold_every_allocated_group_and_its_rollouts(budget):
    bins = values.calibration_frame(budget)
    assert bins["bin"].to_list() == [0, 1, 4]
    assert bins["tasks"].to_list() == [3, 2, 2] and bins["rollouts"].to_list() == [12, 7, 5]
    assert bins["success"].to_list() == pytest.approx([1 / 12, 3 / 7, 2 / 5])
    assert bins["value"].to_list() == pytest.approx([0.1, 0.3, 0.9])


def test_order_is_that_of_pairs_of_two_tasks_alone(budget):
    order = values.auc_frame(budget)
    # Step 2: the win at .1 is behind 3 losses; of the 3 at .3 each is ahead of 1 loss and behind 3.
    assert order["pairs"].to_list() == [12, 15, 0] and order["auc"].to_list()[:2] == pytest.approx([1.0, 3 / 15])
    assert values.order(budget) == pytest.approx(15 / 27)
    assert values.sentences(budget)[1].startswith("Within a step they put 56 % of 27 pairs")
    lost = budget.filter(pl.col("step") == 3)
    assert values.order(lost) is None and "cannot be judged" in values.sentences(lost)[1]


def test_figures_draw_those_and_say_their_counts(budget):
    fig = values.calibration(budget)
    assert list(fig.data[1].text) == ["3 / 12", "2 / 7", "2 / 5"] and list(fig.data[2].y) == pytest.approx([1.0, 0.2])
    drawn = values.allocation(budget)
    assert [list(t.y) for t in drawn.data] == [[6, 2], [2, 3, 3], [4, 4]]


def test_a_run_of_another_method_is_refused_in_one_line():
    other = RunFolder.open(shipped.data("recorded_budget", "coba")).read("budget")
    with pytest.raises(WorkbenchError, match="a run of method v0 does so") as caught:
        values.calibration(other)
    assert "\n" not in str(caught.value)
