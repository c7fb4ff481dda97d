"""Comparison of runs: what the tables say, when a winner is named, what is refused; a study from folders and saved."""

import json
import re

import made_study
import numpy as np
import polars as pl
import pytest
from test_figures import HOSTILE, assert_quoted

from workbench import collected, comparison, shipped, statistics
from workbench.cli import main
from workbench.collected import EVALS, RUNS, STEPS, Collected
from workbench.errors import WorkbenchError
from workbench.figures import compare, study


def evals_frame(
    rates: dict[str, list[float]], games: int = 96, steps=(0, 10), panel="dev", model="small", turns=5
) -> pl.DataFrame:
    """Runs whose success on the panel is exactly the given rate at every step, on the easiest games first."""
    rows = [
        (label, model, seed, f"{label}-{model}-{seed}", step, panel, "student", f"g{t}", "k", t,
         int(t < round(rate * games)), turns)
        for label, seeds in rates.items() for seed, rate in enumerate(seeds) for step in steps for t in range(games)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=EVALS, orient="row")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "made"
    path.mkdir()
    made_study.write(path, {"grpo": 0.5, "gigpo": 0.9, "grpo_reuse 2": 0.5, "grpo_reuse 4": 0.45})
    return path


@pytest.fixture(scope="module")
def data(folder):
    return collected.collect(folder)


# The verdict


def test_no_winner_is_named_where_the_interval_includes_zero():
    evals = evals_frame({"grpo": [0.50, 0.60, 0.55], "sdar": [0.62, 0.52, 0.57]})
    row = comparison.differences(evals).row(0, named=True)
    mean = {label: evals.filter(label=label)["outcome"].mean() for label in ("sdar", "grpo")}
    assert row["difference"] == pytest.approx(mean["sdar"] - mean["grpo"])
    assert row["low"] < 0 < row["high"] and not row["named"]
    (said,) = comparison.verdict(evals)
    assert "includes zero, so no winner is named" in said and "ahead" not in said and "wins" not in said


def test_a_clear_difference_over_enough_seeds_names_the_one_ahead():
    evals = evals_frame({"grpo": [0.40, 0.42, 0.38], "sdar": [0.80, 0.78, 0.82], "rloo": [0.10, 0.12, 0.08]})
    short, worse, better, note = comparison.verdict(evals)
    assert short == "sdar is ahead of grpo and rloo is behind grpo by more than chance."
    assert "aim to keep the chance of any wrong winner among them at 5 %" in note and "make it more" in note
    assert better.startswith("sdar") and "sdar is ahead" in better and "+40" in better
    assert worse.startswith("rloo") and "grpo is ahead" in worse
    assert "2 methods" in note and "Holm" in note
    fig = compare.difference_figure(evals)
    assert [t.x[0] for t in fig.data if t.mode == "markers"] == pytest.approx([-30, 40], abs=1.0)


def test_what_is_clear_alone_may_not_be_among_many():
    rates = {"grpo": [0.40, 0.42, 0.38, 0.41], "sdar": [0.47, 0.45, 0.47, 0.49]}
    (alone,) = comparison.verdict(evals_frame(rates))
    assert "sdar is ahead" in alone
    evals = evals_frame(rates | {f"other{i}": [0.40, 0.41, 0.39, 0.40] for i in range(19)})
    table = comparison.differences(evals, resamples=2000)
    row = table.filter(label="sdar").row(0, named=True)
    assert row["low"] > 0 > row["corrected_low"] and not row["named"]
    short, *rest = comparison.verdict(evals, table=table)
    assert short == "None of 20 methods is told apart from grpo: no winner is named."
    (said,) = [s for s in rest if s.startswith("sdar")]
    assert "corrected for the other comparisons it includes zero, so no winner is named" in said


@pytest.mark.parametrize(("seeds", "reason"), [(1, "with one seed"), (2, "2 seeds are too few")])
def test_few_seeds_never_name_a_winner(seeds, reason):
    evals = evals_frame({"grpo": [0.2] * seeds, "sdar": [0.9] * seeds})
    table = comparison.differences(evals)
    assert table["low"][0] > 0 and not table["named"][0]
    (said,) = comparison.verdict(evals)
    assert reason in said and "no winner is named" in said
    alone = comparison.verdict(evals_frame({"grpo": [0.5]}))
    assert alone == ["Only grpo was run, so there is nothing to compare it with."]


def test_warm_starts_far_apart_do_not_hide_a_difference_within_them():
    weak = evals_frame({"grpo": [0.2, 0.22, 0.24], "sdar": [0.34, 0.36, 0.38]}, games=192)
    strong = evals_frame({"grpo": [0.7, 0.72, 0.74], "sdar": [0.84, 0.86, 0.88]}, games=192, model="large")
    row = comparison.differences(pl.concat([weak, strong])).row(0, named=True)
    assert row["difference"] == pytest.approx(0.14, abs=0.02) and row["low"] > 0
    one = pl.concat([weak, strong]).with_columns(model=pl.lit("any"))
    assert comparison.differences(one)["low"][0] < 0, "runs of both mixed say nothing"


def test_warm_starts_that_only_one_method_has_are_left_out_and_said():
    shared = evals_frame({"grpo": [0.4] * 3, "sdar": [0.4] * 3})
    extra = evals_frame({"sdar": [1.0] * 3}, model="large")
    evals = pl.concat([shared, extra])
    row = comparison.differences(evals).row(0, named=True)
    assert (row["runs"], row["difference"]) == (3, 0)
    (said,) = comparison.unbalanced(evals, "grpo")
    assert "sdar has 3 runs of large, 3 runs of small, grpo 3 runs of small" in said


def test_comparisons_that_are_not_like_with_like_are_refused():
    evals = evals_frame({"grpo": [0.5], "sdar": [0.5]})
    with pytest.raises(WorkbenchError, match="unknown control 'gpro'; did you mean 'grpo'"):
        comparison.verdict(evals, control="gpro")
    with pytest.raises(WorkbenchError, match="unknown panel"):
        compare.curves(evals, panel="train")
    other = evals_frame({"rloo": [0.5]}, games=95)
    with pytest.raises(WorkbenchError, match="played different games"):
        comparison.verdict(pl.concat([evals, other]))
    late = evals_frame({"rloo": [0.5]}, steps=(3, 7))
    with pytest.raises(WorkbenchError, match="share no evaluated step"):
        comparison.verdict(pl.concat([evals, late]))
    with pytest.raises(WorkbenchError, match="no step 4 here; evaluated at 0, 10"):
        comparison.verdict(evals, step=4)
    with pytest.raises(WorkbenchError, match="no runs were given"):
        collected.collect_runs([])
    (said,) = comparison.differing([{"method": "a", "seed": 1, "lr": 1e-3}, {"method": "b", "seed": 2, "lr": 5e-4}])
    assert "differ in lr too (0.0005 / 0.001)" in said
    assert comparison.differing([{"method": "a", "seed": 1}, {"method": "b", "seed": 2}]) == []


# A study


def test_labels_of_study_json_tell_options_apart_and_saved_tables_say_the_same(folder, data, tmp_path):
    assert data.runs["label"].unique().sort().to_list() == ["gigpo", "grpo", "grpo_reuse 2", "grpo_reuse 4"]
    assert (data.evals.schema, data.steps.schema, data.runs.schema) == (EVALS, STEPS, RUNS)
    assert data.runs.height == 16 and data.runs["state"].unique().to_list() == ["complete"]
    paths = collected.save(data, tmp_path / "kept")
    again = collected.collect(tmp_path / "kept")
    assert all(getattr(again, n).equals(getattr(data, n)) for n in ("evals", "steps", "runs"))
    assert sum(p.stat().st_size for p in paths) < 40_000
    (tmp_path / "kept" / "steps.parquet").unlink()
    with pytest.raises(WorkbenchError, match="steps.parquet is missing"):
        collected.collect(tmp_path / "kept")
    plain = collected.collect_runs(sorted(c.parent for c in folder.glob("*/config.json")))
    assert plain.runs["label"].unique().sort().to_list() == ["gigpo", "grpo", "grpo_reuse"]


def test_runs_that_failed_repeat_or_were_not_evaluated_are_said_not_mixed_in(tmp_path):
    parameters = {"method": "grpo", "seed": 0, "model": "/somewhere/else/warm-1"}
    made_study.write_run(tmp_path, "grpo", parameters, 0.5, seed=1)
    made_study.write_run(tmp_path, "grpo", parameters, 0.5, seed=2)
    made_study.write_run(tmp_path, "grpo", parameters | {"seed": 1}, 0.5, seed=3, finished=False)
    path, _ = made_study.write_run(tmp_path, "grpo", parameters | {"seed": 2}, 0.5, seed=4)
    for file in (path / "tables" / "evals").iterdir():
        file.unlink()
    data = collected.collect(tmp_path)
    assert data.runs["seed"].sort().to_list() == [0, 1] and data.runs["model"].unique().to_list() == ["warm-1"]
    assert "/somewhere" not in data.runs["parameters"][0]
    repeated, absent = data.notes
    assert repeated.startswith("1 runs repeat") and "grpo seed 2" in absent
    kept = comparison.finished(data)
    assert kept.runs["seed"].to_list() == [0] and kept.evals["seed"].unique().to_list() == [0]
    assert "loss is nan" in kept.notes[-1] and "favours their methods" in kept.notes[-1]
    with pytest.raises(WorkbenchError, match="holds no run folders and no evals.parquet"):
        collected.collect(tmp_path / path.name / "tables")


def test_runs_of_an_earlier_form_of_the_study_are_left_out_and_said(tmp_path):
    """Same label and seed, other parameters: taken in, they would be counted as further seeds."""
    made_study.write(tmp_path, {"grpo": 0.5}, models=("small",), seeds=2)
    cells = json.loads((tmp_path / "study.json").read_text())["cells"]
    earlier, key = made_study.write_run(tmp_path, "grpo", cells[0]["parameters"] | {"lr": 0.1}, 0.9, seed=50)
    twin = earlier.with_name(f"20260101T000059Z-{cells[0]['digest']}")  # as two sets of parameters of one digest would
    earlier.rename(twin)
    head = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(head | {"digest": cells[0]["digest"]}))
    data = collected.collect(tmp_path)
    assert data.runs["seed"].to_list() == [0, 1] and twin.name not in data.runs["run"].to_list()
    assert data.notes == ("Left out, as no cells of the study: 1 runs with other parameters.",)
    both = collected.collect_runs([p.parent for p in sorted(tmp_path.glob("*/config.json"))])
    assert both.runs.height == 3 and not both.notes
    (tmp_path / "study.json").write_text(json.dumps({"cells": []}))
    with pytest.raises(WorkbenchError, match="none of the 3 runs is a cell of the study.json"):
        collected.collect(tmp_path)


def test_budgets_that_differ_are_said(data):
    table = comparison.budget(data)
    assert table.filter(label="grpo_reuse 4").row(0)[1:] == (4, 288.0, 6015.0, 24.0, 18.0)
    two, four = comparison.budget_sentences(table, "grpo")
    assert "grpo_reuse 2" in two and "2.00 times the updates, 1.33 times the seconds" in two
    assert "4.00 times the updates, 2.00 times the seconds" in four and "rollouts" not in four
    assert study.budget(table).layout.title.text.startswith("<b")


def test_cost_to_a_target_counts_what_came_before_the_evaluation_and_censors_the_rest():
    evals = pl.concat([
        evals_frame({"grpo": [0.2, 0.2, 0.2], "sdar": [0.2, 0.2, 0.2]}, steps=(0,)),
        evals_frame({"grpo": [0.3, 0.5, 0.3], "sdar": [0.6, 0.6, 0.2]}, steps=(4,)),
        evals_frame({"grpo": [0.3, 0.4, 0.3], "sdar": [0.6, 0.7, 0.5]}, steps=(8,)),
    ])  # fmt: skip
    runs = evals.select("label", "model", "seed", "run").unique(maintain_order=True)
    steps = runs.join(pl.DataFrame({"step": range(8)}), how="cross").with_columns(
        rollouts=pl.lit(10), tokens=pl.lit(100), updates=pl.lit(1), seconds=pl.lit(2.0)
    )
    data = Collected(evals, steps, runs)
    table = comparison.costs(data, 0.5)
    assert table["reached"].to_list() == [False, True, False, True, True, True]
    assert table["rollouts"].to_list() == [80, 40, 80, 40, 40, 80]
    assert table["seconds"].to_list() == [16, 8, 16, 8, 8, 16]
    found = comparison.to_target(data, 0.5)
    assert (found["grpo"].reached, found["grpo"].median) == (1, None)
    assert (found["sdar"].reached, found["sdar"].median, found["sdar"].low) == (3, 40, 40)
    summary = comparison.summary(data, "grpo", target=0.5)
    assert summary["rollouts"].to_list() == [None, 40] and summary["reached"].to_list() == [1, 3]
    fig = study.target(data, 0.5)
    crosses = [t for t in fig.data if t.mode == "markers"]
    assert [list(t.x) for t in crosses] == [[80, 80], []], "two runs of the control ended without"
    assert comparison.to_target(Collected(evals, steps.head(0), runs), 0.5) == {}
    with pytest.raises(WorkbenchError, match="target must be a success rate"):
        comparison.costs(data, 50)


def test_the_chance_to_end_above_is_within_a_warm_start():
    weak = evals_frame({"grpo": [0.1, 0.2], "sdar": [0.3, 0.2]})
    strong = evals_frame({"grpo": [0.8, 0.9], "sdar": [0.7, 0.6]}, model="large")
    evals = pl.concat([weak, strong])
    better = comparison.summary(Collected(evals, pl.DataFrame(schema=STEPS), evals), "grpo").row(1, named=True)
    assert better["better"] == pytest.approx((3.5 / 4 + 0) / 2)


def test_task_types_and_horizon_are_those_of_the_games():
    evals = evals_frame({"grpo": [0.5, 0.5], "sdar": [1.0, 1.0]}, games=4)
    evals = evals.with_columns(
        kind=pl.when(pl.col("episode") < 2).then(pl.lit("short")).otherwise(pl.lit("long")),
        turns=pl.col("episode") + 2 + (pl.col("label") == "grpo").cast(pl.Int32),
    )
    table = comparison.kinds(evals)
    assert table.filter(label="sdar").select("kind", "games", "success", "difference").rows() == [
        ("long", 2, 1.0, 1.0), ("short", 2, 1.0, 0.0)
    ]  # fmt: skip
    assert comparison.needed_turns(evals)["needed"].to_list() == [2, 3, 4, 5], "of the fastest, whichever method"
    slopes = dict(comparison.horizon(evals).select("label", "slope").rows())
    assert slopes["sdar"] == pytest.approx(0) and slopes["grpo"] == pytest.approx(-0.4)
    never = evals.with_columns(outcome=pl.when(pl.col("episode") == 3).then(0).otherwise("outcome"))
    assert comparison.needed_turns(never).height == 3 and comparison.horizon(never)["games"].unique().to_list() == [3]


def every_figure(data, control="grpo"):
    evals, summary = data.evals, comparison.summary(data, control)
    return {
        "curves": compare.curves(evals, "", control), "final": compare.final_figure(evals, "", control),
        "difference": compare.difference_figure(evals, "", control), "iqm": study.aggregates(summary, control),
        "improvement": study.improvement(summary, control), "runs": study.profiles(evals, "", control),
        "games": study.profiles(evals, "", control, of="games"), "rollouts": study.target(data, 0.5, "", control),
        "kinds": study.kinds(evals, "", control), "horizon": study.horizon(evals, "", control),
        "budget": study.budget(comparison.budget(data), control),
    }  # fmt: skip


def test_figures_ask_a_question_and_quote_labels(data):
    for name, fig in every_figure(data).items():
        assert fig.layout.meta["title"].endswith("?"), name
        assert len(fig.data) and fig.layout.height < 1400, name
    worse = [t.with_columns(label=pl.col("label").replace({"gigpo": HOSTILE})) for t in (data.steps, data.runs)]
    names = ("label", "panel", "kind", "model")
    evals = data.evals.with_columns(pl.lit(HOSTILE).alias(n) for n in names[1:])
    evals = evals.with_columns(label=pl.col("label").replace({"gigpo": HOSTILE}), task=pl.lit(HOSTILE) + pl.col("task"))
    quoted = Collected(evals, *worse)
    assert sum(assert_quoted(name, fig) for name, fig in every_figure(quoted, HOSTILE).items()) > 30


def test_where_no_game_was_ever_won_there_is_no_slope(data):
    never = data.evals.with_columns(outcome=pl.lit(0, pl.Int8))
    fig = study.horizon(never)
    assert [a.text for a in fig.layout.annotations if ": –" in a.text] and "0 of 64 games were won" in (
        fig.layout.meta["subtitle"]
    )


def test_the_step_that_is_compared_is_the_one_that_is_told(data):
    assert comparison.describe(data.evals)[0].endswith("compared at step 6.")
    assert comparison.describe(data.evals, step=3)[0].endswith("compared at step 3.")


def test_figures_of_one_method_and_of_runs_that_recorded_no_budget(data):
    alone = data.only(pl.col("label") == "gigpo")
    assert all(fig.layout.meta["title"].endswith("?") for fig in every_figure(alone, "gigpo").values())
    bare = Collected(data.evals, data.steps.head(0), data.runs)
    assert "recorded no budget" in study.budget(comparison.budget(bare)).layout.annotations[0].text
    (steps,) = study.targets(bare, 0.5)
    assert steps.layout.xaxis.title.text == "steps" and "How many steps" in steps.layout.meta["title"]
    assert "Not every run recorded rollouts, so steps stand in." in steps.layout.meta["subtitle"]
    assert any(a.text.endswith(" steps") and "half by" in a.text for a in steps.layout.annotations)
    assert [f.layout.xaxis.title.text for f in study.targets(data, 0.5)] == ["rollouts", "seconds of training"]
    (said,) = comparison.budget_sentences(comparison.budget(bare), "grpo")
    assert said.startswith("None of the runs recorded what it spent")
    some = data.only(pl.lit(True))
    some = Collected(some.evals, some.steps.filter(pl.col("label") != "grpo"), some.runs)
    (said,) = comparison.budget_sentences(comparison.budget(some), "grpo")
    assert said.startswith("The budget of grpo was not recorded")


def test_methods_stand_in_one_order_whatever_their_success(data):
    summary = comparison.summary(data, "grpo")
    order = ["grpo", "gigpo", "grpo_reuse 2", "grpo_reuse 4"]
    assert summary["label"].to_list() == order
    found = {"iqm": study.aggregates(summary), "better": study.improvement(summary)}
    rows = {name: [t.strip() for t in fig.layout.yaxis.ticktext] for name, fig in found.items()}
    assert rows == {"iqm": order, "better": order[1:]}


def test_profiles_are_shares_of_runs(data):
    runs = comparison.matrices(comparison.at_step(data.evals))
    fig = study.profiles(data.evals)
    lines = [t for t in fig.data if t.mode == "lines" and t.hovertemplate]
    assert len(lines) == 6 and len(fig.layout.annotations) == 3, "a panel a method, the control in each"
    scores = runs["gigpo"][0].mean(1)
    line = next(t for t in lines if t.hovertemplate.startswith("gigpo"))
    assert line.line.shape == "hv" and max(line.x) == 1, "steps that fall at the next threshold, shares as on y"
    assert list(line.y) == [(scores > t + 1e-9).mean() for t in study.THRESHOLDS]


# The command


def test_command_prints_table_verdict_and_how_to_see_more(folder, tmp_path, capsys):
    assert main(["compare", str(folder), "--target", "0.6", "--save", str(tmp_path / "kept")]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("gigpo  "))
    assert re.search(r"\s4\s+9\d\.\d %\s+9\d\.\d %\s+\d+\.\d to \d+\.\d\s+100 %", row) and "4 of 4" in row
    assert "not by half" in next(line for line in said.splitlines() if line.startswith("grpo_reuse 4 "))
    assert "gigpo is ahead on this panel" in said and "grpo_reuse 4 did not train at grpo's budget" in said
    assert f"workbench run compare -p folder {folder} -p target 0.6" in said
    assert main(["compare", str(tmp_path / "kept"), "--control", "gigpo"]) == 0
    assert "The control is gigpo." in capsys.readouterr().out
    for command in ("compare", "status"):
        assert main([command, "s3://bucket//made"]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "s3://bucket//made is a URL: copy the study to a folder here" in said.err
    assert main(["compare", str(folder), "--target", "45"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "--target must be a success rate above 0 and at most 1, got 45" in said.err
    for wrong in (["--out", "page.pdf"], ["--control", "gpro"], ["--target", "0"]):
        assert main(["compare", str(folder), *wrong]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("workbench: ") for line in errors)


def test_environments_are_compared_apart(tmp_path, capsys):
    folder, envs = tmp_path / "made", {1: "one", 2: "two"}
    folder.mkdir()
    made_study.write(folder, {"grpo 1": 0.4, "gigpo 1": 0.9, "grpo 2": 0.6, "gigpo 2": 0.6}, ("small",), seeds=4)
    cells = []
    for config in sorted(folder.glob("*/config.json")):
        head = json.loads(config.read_text())
        env = head["config"]["env"] = envs[head["config"].pop("method_options")["updates"]]
        config.write_text(json.dumps(head))
        cells.append({"label": f"{head['config']['method']} env={env}", "parameters": head["config"]})
        for table in config.parent.glob("tables/evals/*.parquet"):
            pl.read_parquet(table).with_columns(pl.lit(f"{env}/") + pl.col("task")).write_parquet(table)
    (folder / "study.json").write_text(json.dumps({"cells": cells}))
    parts = collected.collect(folder).by_env()
    assert sorted(parts) == ["one", "two"]
    for part in parts.values():
        assert part.runs.height == part.evals["run"].n_unique() == part.steps["run"].n_unique() == 8
        assert set(part.evals["label"]) == set(part.steps["label"]) == set(part.runs["label"]) == {"grpo", "gigpo"}
    assert main(["compare", str(folder)]) == 0
    said = capsys.readouterr().out
    first, second = said.split("\ntwo\n")
    assert "gigpo is ahead on this panel" in first and "no winner is named" in second
    assert f"workbench run games -p study {folder}" in second
    assert main(["compare", str(folder), "--out", str(tmp_path / "page.html")]) == 2
    assert "--out writes the figures of one environment" in capsys.readouterr().err


def test_shipped_runs_are_read_without_steps():
    if not shipped.data("recorded_compare").is_dir():
        pytest.skip("no recorded runs are shipped in data/recorded_compare")
    data = collected.collect(shipped.data("recorded_compare"))
    games, models = comparison.matrices(comparison.at_step(data.evals))["grpo"]
    assert games.shape == (2, 64) and statistics.iqm(games.mean(1)) == pytest.approx(np.mean(games))
    assert data.steps.is_empty() and list(models) == ["default"] * 2
