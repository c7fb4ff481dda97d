"""Figures of rollout budgets: what is drawn is what the tables and the rules say, and texts of runs do not get out."""

import json
import math

import polars as pl
import pytest
import torch

from workbench import shipped
from workbench.budget import v05
from workbench.budget.v05 import V05Config
from workbench.errors import WorkbenchError
from workbench.figures import budget, display, values, verdicts
from workbench.runs import RunFolder
from workbench.runs.execute import run_notebook

CONFIG = V05Config()


@pytest.fixture(scope="module")
def grown():
    run = RunFolder.open(shipped.data("recorded_budget", "v05"))
    return run.read("budget"), run.read("episodes"), run.config


@pytest.fixture(scope="module")
def allocated():
    return RunFolder.open(shipped.data("recorded_budget", "coba")).read("budget")


def test_the_recorded_groups_stop_where_the_rule_says(grown):
    groups, episodes, config = grown
    assert budget.config_of(config) == CONFIG and budget.equal(config) == 64
    for step in groups["step"].unique():
        frame = budget.growth_frame(groups, episodes, step, CONFIG)
        spent = frame.height
        assert spent == groups.filter(pl.col("step") == step)["rollouts"].sum() <= 64
        for (_,), rows in frame.group_by("group"):
            *before, last = rows.sort("k").to_dicts()
            assert all(r["drop"] > CONFIG.cost for r in before[CONFIG.first - 1 :])
            stops = last["drop"] <= CONFIG.cost or last["k"] == CONFIG.most
            assert last["why"] == ("budget" if not stops else "most" if last["k"] == CONFIG.most else "cost")
            assert last["why"] != "budget" or spent == 64
        ends = frame.group_by("group").agg(pl.col("baseline").sort_by("k").last()).sort("group")["baseline"]
        recorded = groups.filter(pl.col("step") == step).sort("group")["baseline"]
        assert (2 * ends - 1).to_list() == pytest.approx(recorded.to_list())


def test_growth_draws_every_rollout_and_every_reason(grown):
    groups, episodes, _ = grown
    step = budget.pick_step(groups)
    assert step > 0
    fig = budget.growth(groups, episodes, step, CONFIG)
    drawn = {t.name: len(t.x) for t in fig.data if t.name and t.name in ("success", "failure")}
    frame = budget.growth_frame(groups, episodes, step, CONFIG)
    assert drawn == {"success": frame["outcome"].sum(), "failure": (frame["outcome"] == 0).sum()}
    ends = [t for t in fig.data if t.name and t.name.startswith("stopped")]
    assert sum(len(t.x) for t in ends) == frame["group"].n_unique()
    assert display.title_of(fig).endswith("?")


def test_texts_of_a_run_are_escaped(grown, allocated):
    bad = pl.lit("<b>$x$ %{y}").alias("kind")
    groups, episodes, _ = grown
    figures = [
        budget.growth(groups.with_columns(bad), episodes, 1, CONFIG), budget.expected_figure(groups.with_columns(bad)),
        budget.allocation(allocated.with_columns(bad)),
    ]  # fmt: skip
    for fig in figures:
        text = json.dumps(display.spec(fig))
        assert "&lt;b&gt;&#36;x&#36; &#37;{y}" in text and "<b>$x" not in text


def test_allocation_shows_every_allocated_task_and_the_density_of_its_step(allocated):
    fig = budget.allocation(allocated)
    points = [t for t in fig.data if t.mode == "lines+markers"]
    steps = allocated.drop_nulls("alpha")["step"].unique().sort().to_list()
    assert [t.name for t in points] == [f"step {s}" for s in steps]
    for step, trace in zip(steps, points, strict=True):
        rows = allocated.filter(pl.col("step") == step)
        assert sorted(trace.y) == sorted(rows["rollouts"]) and sum(trace.y) == 64
    density = [t for t in fig.data if t.mode == "lines"][0]
    assert sum(density.y) / 200 == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("mu", "prior", "k"), [(0, 0, 4), (0, 0.3, 4), (0, 1, 4), (0.5, -0.5, 4), (0, 0.5, 16)])
def test_exact_errors_are_those_of_a_simulation(mu, prior, k):
    generator = torch.Generator().manual_seed(7)
    wins = (torch.rand(20000, k, generator=generator, dtype=torch.float64) < (1 + mu) / 2).sum(1)
    mean = 2 * wins / k - 1
    fused = v05.fuse(torch.full_like(mean, prior), mean, torch.full_like(mean, k)).baseline
    frame = budget.baseline_errors(k)
    row = frame.filter(
        ((2 * pl.col("true") - 1) - mu).abs() < 1e-9, ((2 * pl.col("expected") - 1) - prior).abs() < 1e-9
    )
    if row.is_empty():  # .3 is no point of the grid
        frame = budget.baseline_errors(k, 21)
        row = frame.filter((pl.col("true") == 0.5), ((2 * pl.col("expected") - 1) - prior).abs() < 1e-9)
    row = row.row(0, named=True)
    assert row["plain"] == pytest.approx((mean - mu).square().mean().item(), abs=5e-3)
    assert row["fused"] == pytest.approx((fused - mu).square().mean().item(), abs=1e-2)
    assert row["prior"] == pytest.approx((prior - mu) ** 2)


def test_fused_is_worse_where_the_prior_is_far_off_and_better_where_it_is_near():
    for k in (4, 16):
        found = budget.fused_worse(k)
        assert 0.3 < found["share"] < 0.9 and 0.5 / math.sqrt(k) < found["distance"] < 1.5 / math.sqrt(k)
    frame = budget.baseline_errors(4).filter(pl.col("true") == 0.5).sort("expected")
    near, far = frame.filter(pl.col("expected") == 0.5), frame.filter(pl.col("expected") == 1.0)
    assert near["fused"][0] < near["plain"][0] / 3 and far["fused"][0] > 1.5 * far["plain"][0]
    fig = budget.fusion(4, 16)
    assert [t.type for t in fig.data].count("heatmap") == 2 and display.title_of(fig).endswith("?")
    assert budget.fusion_sentences(1, 4)[1].endswith("33 points off on.")


def test_sentences_say_what_the_tables_hold(grown, allocated):
    said = budget.sentences(grown[0], allocated, 64)
    assert said[0].startswith(
        f"V0.5 drew {grown[0]['rollouts'].sum()} rollouts in 4 steps, equal groups would have drawn 256."
    )
    assert f"as many as {allocated['rollouts'].max()} of a step's 64" in said[1]
    assert sum(budget.stops(grown[0]).values()) == grown[0].height


def test_tables_of_another_method_are_refused_in_one_line(grown, allocated):
    groups, episodes, _ = grown
    for draw, said in (
        (lambda: budget.allocation(groups), "a run of method coba fills it"),
        (lambda: budget.growth(allocated, episodes, 1, CONFIG), "a run of method v05 fills it"),
        (lambda: budget.growth(groups, episodes, 9, CONFIG), "no step 9"),
        (lambda: budget.growth(groups, episodes.filter(pl.col("episode") > 0), 1, CONFIG), "but the table budget says"),
        (lambda: budget.expected_figure(groups.drop("rate")), "no column rate"),
        (lambda: budget.baseline_errors(0), "at least 1 rollout"),
    ):
        with pytest.raises(WorkbenchError, match=said) as caught:
            draw()
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("in_process")
def test_the_notebook_concludes_what_the_tables_say(grown, allocated, tmp_path):
    valued = RunFolder.open(shipped.data("recorded_budget", "v0")).read("budget")
    run = run_notebook("budget", {"step": 3, "staleness": [0, 2]}, tmp_path, progress=False)
    result = run.manifest["result"]
    assert result["step"] == 3 and result["rollouts"] == grown[0]["rollouts"].sum()
    assert result["stopped"] == budget.stops(grown[0]) and result["most_for_a_task"] == allocated["rollouts"].max()
    assert result["fused_worse"]["4"] == budget.fused_worse(4)["share"] and set(result["speedup"]) == {"0", "2"}
    text = (run.path / "executed.ipynb").read_text()
    assert result["order_of_values"] == values.order(valued) and text.count(display.MIME) == 9
    judge = RunFolder.open(shipped.data("recorded_budget", "self_verification")).read("verifications")
    assert result["verdicts_right"] == verdicts.right(judge)
