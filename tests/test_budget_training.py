"""V0.5, CoBA-RL and V0 in the Trainer: off they are GRPO, tables say what was drawn, and a resumed run is the same."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from workbench.credit.grpo import group_advantage
from workbench.errors import WorkbenchError
from workbench.methods import method
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

SMALL = {
    "steps": 2, "tasks_per_step": 2, "group_size": 4, "live_episodes": 8, "eval_games": 1, "eval_every": 2,
    "checkpoint_every": 1, "seed": 3, "max_turns": 4, "teacher": False,
}  # fmt: skip
GROW = {"first": 2, "most": 6}


class Killed(Exception):
    pass


def train(tmp_path, name, options=None, folder=None, stop=None, **changes):
    config = TrainConfig(method=name, method_options=options or {}, **(SMALL | changes))
    folder = folder or RunFolder.create(tmp_path, name, {})
    trainer = Trainer(config, folder, lambda line: None)

    def halt(trainer):
        if trainer.step == stop:
            raise Killed

    trainer.run(on_step=halt)
    return trainer, folder


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    return train(tmp_path_factory.mktemp("grpo"), "grpo")


@pytest.mark.parametrize("name", ["v05", "coba", "v0"])
def test_switched_off_it_is_grpo_bit_for_bit(tmp_path, grpo, name):
    trainer, folder = train(tmp_path, name, method(name).off)
    for a, b in zip(grpo[0].policy.model.parameters(), trainer.policy.model.parameters(), strict=True):
        assert a.equal(b)
    for table in ("steps", "updates", "episodes", "modules", "turns", "evals"):
        assert_frame_equal(grpo[1].read(table), folder.read(table), check_exact=True)
    assert folder.tables == grpo[1].tables and "budget" not in folder.tables


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    ("v05", GROW), ("v05", GROW | {"prior": "v0"}), ("coba", {"lo": 1, "tau": 3.0}), ("v0", {"lo": 1, "context": 12}),
])  # fmt: skip
def test_tables_say_what_was_drawn_and_a_resumed_run_is_the_same(tmp_path, name, options):
    _, whole = train(tmp_path, name, options)
    broken = RunFolder.create(tmp_path, "broken", {})
    with pytest.raises(Killed):
        train(tmp_path, name, options, broken, stop=1)
    resumed, _ = train(tmp_path, name, options, broken)
    for table in ("steps", "updates", "episodes", "budget", "evals"):
        assert_frame_equal(whole.read(table), broken.read(table), check_exact=True)
    assert len(resumed.history.success) == SMALL["steps"]

    budget, episodes, steps = (whole.read(table) for table in ("budget", "episodes", "steps"))
    drawn = budget.group_by("step").agg(pl.col("rollouts").sum()).sort("step")["rollouts"]
    assert drawn.to_list() == steps["n_drawn"].to_list() == steps["n_episodes"].to_list()
    assert (drawn == 8).all() if name in ("coba", "v0") else (drawn <= 8).all()
    found = episodes.group_by("step", "group").agg(pl.len().alias("n"), pl.col("outcome").mean().alias("won"))
    both = budget.join(found, on=["step", "group"])
    assert both.height == budget.height and (both["n"] == both["rollouts"]).all()
    assert both["won"].to_list() == pytest.approx(both["success"].to_list())
    by_task = both.group_by("step").agg(pl.col("won").mean()).sort("step")["won"]
    assert steps["success_tasks"].to_list() == pytest.approx(by_task.to_list())
    for (_,), part in episodes.group_by("step"):
        want = group_advantage(part["outcome"].to_torch().double(), part["group"].to_torch())
        assert part["advantage"].to_list() == pytest.approx(want.tolist(), abs=1e-6)
    if name == "v05":
        rates = dict(budget.select(pl.struct("step", "group").alias("at"), "rate").with_columns(
            pl.col("at").struct.json_encode()).rows())  # fmt: skip
        told = episodes.select(pl.struct("step", "group").struct.json_encode().alias("at"), "prior_rate").rows()
        assert all(rates[at] == rate for at, rate in told)
    else:
        assert episodes["prior_rate"].null_count() == episodes.height
        assert budget.filter(pl.col("step") == 0)["why"].to_list() == ["equal", "equal"]
        later = budget.filter(pl.col("step") > 0)
        assert later["alpha"].null_count() == (0 if name == "coba" else later.height)
        assert set(later["why"]) == {"allocated"}
    if resumed.method.values:
        kept = 256 if name == "v05" else 12
        assert [won for _, won in resumed.history.recent] == episodes["outcome"].to_list()[-kept:]
        assert len({text for text, _ in resumed.history.recent}) > 1 and not resumed.history.values
        assert set(budget.filter(pl.col("step") == 0)["rate"]) == {0.5}


def test_what_cannot_be_drawn_is_refused_before_a_run_begins():
    equal = {"reward": "return", "method_options": {"dynamic": False}}
    for name, given in (
        ("coba", {"group_size": 1}), ("v05", {"group_size": 3}), ("v05", {"reward": "return"}), ("v05", equal),
    ):  # fmt: skip
        with pytest.raises(WorkbenchError) as caught:
            TrainConfig(method=name, **(SMALL | given))
        assert "\n" not in str(caught.value)
    TrainConfig(method="v05", **(SMALL | {"reward": "return", "method_options": method("v05").off}))
