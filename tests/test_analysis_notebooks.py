"""The analysis notebooks: clean on disk, and what they conclude is what the tables say."""

import json

import nbformat
import polars as pl
import pytest
import synthetic_run

from workbench import collected, compare_credit, comparison, replay, shipped
from workbench.figures import beliefs, credit_compare, credit_map, evidence, gates, lm_head, replayed
from workbench.figures.display import MARK, MIME
from workbench.runs.execute import RunFailed, run_notebook

NAMES = ("beliefs", "gates", "lm_head", "compare", "methods", "replay", "budget", "fidelity")
FIGURES = {"beliefs": 7, "gates": 6, "lm_head": 5, "compare": 11, "methods": 4, "replay": 3, "budget": 9, "fidelity": 4}


@pytest.mark.parametrize("name", NAMES)
def test_notebook_on_disk_is_clean_and_tagged(name):
    notebook = json.loads(shipped.notebook(name).read_text())
    nbformat.validate(notebook)
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code), "outputs are stripped"
    tags = [t for c in code for t in c["metadata"].get("tags", [])]
    assert tags.count("parameters") == tags.count("result") == 1
    assert code[0]["metadata"]["tags"] == ["parameters"] and code[-1]["metadata"]["tags"] == ["result"]
    assert tags.count("figure") == FIGURES[name]
    parameters = "".join(code[0]["source"]).splitlines()
    assert all(": " in p.split("=")[0] and "  # " in p for p in parameters), "each has a plain type and a comment"
    assert notebook["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook["cells"][0]["source"][0].startswith("# ") and "?" in notebook["cells"][0]["source"][0]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recorded(out):
    return synthetic_run.write(out, n_steps=4, groups=2)


def executed(name, out, figures=None, **parameters):
    """The result record of a notebook, after a check that all its figures are there in both forms."""
    run = run_notebook(name, parameters, out, progress=False)
    notebook = json.loads((run.path / "executed.ipynb").read_text())
    shown = [o["data"] for c in notebook["cells"] for o in c.get("outputs", []) if MIME in o.get("data", {})]
    assert len(shown) == (figures or FIGURES[name])
    assert all(MARK in "".join(data["text/html"]) for data in shown)
    text = (run.path / "executed.ipynb").read_text()
    assert text.count("plotly.js v") == 1, "the library is there once"
    assert (run.path / "report.html").is_file()
    return run.manifest["result"]


@pytest.mark.usefixtures("in_process")
def test_beliefs(out, recorded):
    result = executed("beliefs", out, run=str(recorded.path))
    turns, episodes = recorded.read("turns"), recorded.read("episodes")
    step, group, episode = beliefs.choose(turns, episodes)
    assert (result["step"], result["group"], result["episode"]) == (step, group, episode)
    mine = turns.filter(pl.col("step") == step, pl.col("episode") == episode).sort("turn")
    pivotal = mine.filter(pl.col("z").abs() > 1)
    assert result["pivotal_turn"] == pivotal.sort(pl.col("revision").abs())["turn"][-1] + 1
    last = evidence.saturation_frame(turns, episodes).row(-1, named=True)
    assert (result["saturated_last"], result["pivotal_share_last"]) == (last["saturated"], last["pivotal"])
    assert result["same_top_by_rule"]["sum"] == 1 and set(result["saturated_by_rule"]) == {"sum", "mean", "centred"}


@pytest.mark.usefixtures("in_process")
def test_gates(out, recorded):
    result = executed("gates", out, run=str(recorded.path), beta=2.0, step=4, episode=1, turn=2)
    assert (result["step"], result["episode"], result["turn"]) == (4, 1, 2)
    over = gates.over_training_frame(recorded.read("turns"), recorded.read("episodes"), 2.0)
    assert result["gate_active_last"] == over["gate_active"][-1] and result["tokens"] == over["tokens"].sum()
    assert result["gap_mean_first"] == pytest.approx(over["gap_mean"][0])


@pytest.mark.usefixtures("in_process")
def test_lm_head(out, recorded):
    result = executed("lm_head", out, run=str(recorded.path), last_update=9)
    updates = recorded.read("updates").filter(pl.col("update") <= 9)
    modules = recorded.read("modules").filter(pl.col("update") <= 9)
    assert result["gradients"] == 9 and result["discarded"] == (~updates["applied"]).sum() and result["tied"] is True
    assert result["head_over_median"] == pytest.approx(lm_head.head_ratio(modules)["ratio"].median())


@pytest.mark.usefixtures("in_process")
def test_compare(out):
    for method, seeds in (("grpo", (11, 12, 13)), ("sdar", (1, 2, 3))):
        for seed in seeds:
            synthetic_run.write(out, "compared", method, seed=seed, n_steps=2, groups=1, size=2)
    result = executed("compare", out, folder=str(out / "compared"), panel="unseen")
    evals = collected.collect(out / "compared").evals
    assert result["runs"] == 6 and result["control"] == "grpo"
    assert result["verdict"] == comparison.verdict(evals, "grpo", "unseen")
    row = comparison.differences(evals, "grpo", "unseen").row(0, named=True)
    assert result["difference"] == {"sdar": pytest.approx(row["difference"])}
    assert result["low"] == {"sdar": pytest.approx(row["low"])}


@pytest.mark.usefixtures("in_process")
def test_methods_of_a_run_without_teacher(out):
    plain = synthetic_run.write(out, "unread", "grpo", teacher=False, n_steps=2, groups=2)
    names = ["grpo", "dr_grpo", "gigpo", "rlsd"]
    given = {"methods": names, "options": {"gigpo": {"gamma": 0.5}}, "step": 1}
    result = executed("methods", out, run=str(plain.path), **given)
    turns, episodes = plain.read("turns"), plain.read("episodes")
    step, episode = credit_map.choose(turns, episodes, 1)
    assert (result["step"], result["episode"]) == (step, episode) and result["left_out"] == ["rlsd"]
    batch, order = replay.batch_of(turns, episodes, step)
    done, _ = replay.credit_by_method(batch, names, given["options"])
    assert result["gives"] == credit_compare.counts(credit_compare.kinds(batch, done))
    assert result["favoured_turn"] == credit_compare.favoured(batch, done, credit_map.place(order, episode))
    assert set(result["favoured_turn"]) == {"gigpo"} and result["least_agreement"] is None


@pytest.mark.usefixtures("in_process")
def test_replay_against_the_record_and_another_method(out, recorded):
    given = {"method": "opd", "options": {"coef": 0.5}, "steps": [1, 3]}
    result = executed("replay", out, run=str(recorded.path), **given)
    found = compare_credit.compare(recorded, **given)
    assert (result["step"], result["episode"]) == replayed.choose(found) and result["against"] == "recorded"
    assert result["flips"] == found.turns["flipped"].sum() > 0 and result["turns"] == found.turns.height
    assert result["rank_correlation"] == found.episodes["rank_correlation"].drop_nulls().mean()
    assert result["slope_ratio"] > 0 and result["top_token"] == found.tokens["link"][0]
    plain = executed("replay", out, run=str(recorded.path), method="dr_grpo", against="grpo", step=2, episode=5)
    assert (plain["step"], plain["episode"], plain["against"]) == (2, 5, "grpo")
    assert (plain["ranked"], plain["rank_correlation"], plain["flips"]) == (0, None, 0)


def test_a_run_without_teacher_fails_with_one_clear_line(out):
    plain = synthetic_run.write(out, "plain", "grpo", teacher=False, n_steps=2, groups=1)
    with pytest.raises(RunFailed) as caught:
        run_notebook("gates", {"run": str(plain.path)}, out, progress=False)
    assert "teacher's log-probs" in str(caught.value)


@pytest.mark.parametrize("name", ["beliefs", "lm_head", "methods", "replay"])
@pytest.mark.usefixtures("in_process")
def test_the_shipped_run_is_the_default(out, name):
    default(out, name)


def test_the_shipped_run_is_the_default_in_a_kernel(out):
    default(out, "gates")


def default(out, name):
    if not shipped.data("recorded_run", "config.json").is_file():
        pytest.skip("no recorded run is shipped in data/recorded_run")
    assert executed(name, out)


@pytest.mark.usefixtures("in_process")
def test_the_shipped_runs_are_compared_by_default(out):
    if not shipped.data("recorded_compare").is_dir():
        pytest.skip("no recorded runs are shipped in data/recorded_compare")
    result = executed("compare", out, figures=10)  # these recorded no costs: steps to the target, and no budget
    assert result["runs"] > 1 and list(result)[:2] == ["verdict", "control"]
