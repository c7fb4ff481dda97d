import signal
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal

from workbench import tables
from workbench.errors import WorkbenchError
from workbench.records import Batch
from workbench.reuse.dgg import Decision
from workbench.reuse.lm_head import IsolatedHead
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer
from workbench.update import Diverged, UpdateConfig, accumulate, teacher_logprobs

SMALL = {
    "steps": 2, "tasks_per_step": 2, "group_size": 4, "live_episodes": 8, "max_turns": 4, "eval_games": 1,
    "eval_panels": "heldout", "eval_every": 2, "checkpoint_every": 1, "seed": 3,
}  # fmt: skip
WHOLE = {"live_episodes": 5, "max_turns": 8, "eval_games": 3, "eval_panels": "all"}
TABLES = ("steps", "updates", "modules", "episodes", "turns", "evals")


def train(tmp_path, name="run", **changes):
    config = TrainConfig(**(SMALL | changes))
    folder = RunFolder.create(tmp_path, name, {"name": name})
    said = []
    trainer = Trainer(config, folder, said.append)
    trainer.run()
    return trainer, folder, said


@pytest.fixture(scope="module")
def opsd(tmp_path_factory):
    return train(tmp_path_factory.mktemp("opsd"), method="agent_opsd", **WHOLE)


def test_tables_hold_what_was_sampled_and_credited(opsd):
    trainer, folder, _ = opsd
    turns, episodes = folder.read("turns"), folder.read("episodes")
    assert folder.read("steps")["step"].to_list() == [0, 1]
    assert len(episodes) == 2 * 8 and set(episodes["outcome"]) <= {0, 1}
    for name in (
        "token_ids",
        "pieces",
        "old_logprobs",
        "teacher_logprobs",
        "gap",
        "gate",
        "advantage",
        "dloss_dlogp",
        "entropy",
    ):
        assert (turns[name].list.len() == turns["token_ids"].list.len()).all(), name
    flat = turns.select(
        "step", "old_logprobs", "teacher_logprobs", "gap", "gate", "turn_advantage", "advantage"
    ).explode("old_logprobs", "teacher_logprobs", "gap", "gate", "advantage")
    np.testing.assert_allclose(flat["gap"], flat["teacher_logprobs"] - flat["old_logprobs"], atol=1e-6)
    np.testing.assert_allclose(flat["gate"], 1 / (1 + np.exp(-5 * flat["gap"].to_numpy())), atol=1e-5)
    np.testing.assert_allclose(flat["advantage"], flat["turn_advantage"], atol=1e-6)
    by_turn = turns.with_columns(pl.col("gap").list.sum().alias("sum"))
    np.testing.assert_allclose(by_turn["sum"], by_turn["evidence"], atol=1e-4)
    counted = turns.group_by("step", "episode").agg(
        pl.col("token_ids").list.len().sum().alias("n"), pl.len().alias("k")
    )
    both = counted.join(episodes, on=["step", "episode"])
    assert (both["n"] == both["n_tokens"]).all() and (both["k"] == both["n_turns"]).all()
    assert set(folder.read("evals")["role"]) == {"student", "teacher"}
    assert trainer.updates == 2 and len(folder.read("updates")) == 2


def test_recorded_gradient_coefficients_are_those_of_the_loss(opsd, tmp_path):
    """dloss_dlogp on disk is what autograd gives for the loss with respect to each sampled token's log-prob."""
    trainer, folder, _ = opsd
    rows = folder.read("turns").filter(pl.col("step") == 0)
    n = rows["episode"].n_unique()
    lengths = rows.group_by("episode").agg(pl.col("token_ids").list.len().sum().alias("n"))
    joined = rows.join(lengths, on="episode")
    want = joined.with_columns(
        pl.struct("advantage", "n")
        .map_elements(lambda r: [-a / r["n"] / n for a in r["advantage"]], pl.List(pl.Float64))
        .alias("want")
    )
    np.testing.assert_allclose(want["dloss_dlogp"].explode(), want["want"].explode(), atol=1e-7)


def test_the_tables_hold_every_token_the_policy_saw(opsd):
    trainer, folder, _ = opsd
    played = trainer.rollout(0)  # of the weights after training, but with the first step's worlds
    turns = folder.read("turns").filter(pl.col("step") == 0).sort("episode", "turn")
    for e, rows in turns.group_by("episode", maintain_order=True):
        assert rows["continues"].to_list() == [False] + [True] * (rows.height - 1)
        first = played[e[0]].turns[0].prompt_ids.tolist()
        assert rows["context_ids"][0].to_list() == first
    batch = Batch.from_episodes(played, pad_id=trainer.policy.pad_id)
    credit = trainer.method.credit(trainer.batch(played))
    frame = tables.turns_frame(0, played, batch, credit, {}, lambda ids: [""] * len(ids))
    for e, rows in frame.group_by("episode", maintain_order=True):
        seen = [t for r in rows.iter_rows(named=True) for t in (*r["context_ids"], *r["token_ids"])]
        assert seen == batch.input_ids[e[0], : int(batch.lengths[e[0]])].tolist()


def test_sampled_logprobs_are_the_trained_ones(opsd):
    trainer, _, _ = opsd
    batch = Batch.from_episodes(trainer.rollout(7), pad_id=trainer.policy.pad_id)
    scored, _ = trainer.policy.score_rows(batch.input_ids, batch.lengths, batch.response_mask)
    assert torch.allclose(scored, batch.old_logprobs, atol=2e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"), method="grpo")


@pytest.mark.parametrize("method", ["agent_opsd", "sdar"])
def test_switched_off_it_is_grpo_bit_for_bit(tmp_path, plain, method):
    off = {"agent_opsd": {"lam": 0.0}, "sdar": {"coef": 0.0}}[method]
    grpo, grpo_folder, _ = plain
    assert grpo_folder.read("updates")["applied"].any()
    other, other_folder, _ = train(tmp_path, method=method, method_options=off)
    for a, b in zip(grpo.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for name in ("episodes", "modules", "evals"):
        assert_frame_equal(grpo_folder.read(name), other_folder.read(name), check_exact=True)


def test_layouts_and_micro_batches_give_one_gradient(opsd):
    trainer, _, _ = opsd
    episodes = trainer.rollout(0)
    head = IsolatedHead(trainer.policy.model)
    got = {}
    for layout in ("episode", "turn"):
        batch = Batch.from_episodes(episodes, layout, trainer.policy.pad_id)
        batch = batch.with_(teacher_logprobs=teacher_logprobs(batch, trainer.teacher_rows(batch, episodes)))
        advantages = trainer.method.credit(batch).advantages
        for micro in (300, 100_000):
            trainer.policy.model.zero_grad()
            head.clear()
            config = UpdateConfig(micro_tokens=micro)
            gradient = accumulate(trainer.policy, head, batch, advantages, trainer.method, config)
            head.merge()
            flat = torch.cat([p.grad.flatten() for p in trainer.policy.model.parameters()])
            got[layout, micro] = (flat, torch.tensor(gradient.loss))
    first_flat, first_loss = got["episode", 100_000]
    assert first_flat.norm() > 1e-4
    for flat, loss in got.values():
        assert torch.allclose(flat, first_flat, atol=1e-6, rtol=1e-4) and torch.allclose(loss, first_loss, atol=1e-6)


def test_a_gated_update_leaves_weights_and_moments_as_they_were(tmp_path):
    trainer = Trainer(TrainConfig(method="grpo_dgg", **SMALL), RunFolder.create(tmp_path, "run", {}), print)
    batches = (trainer.batch(trainer.rollout(step)) for step in range(20))
    batch = next(b for b in batches if bool((trainer.method.credit(b).advantages != 0).any()))
    decisions = iter([Decision(True, False), Decision(False, True, 1.0, 9.0)])
    trainer.gate.observe = lambda energy, reuse: next(decisions)
    states = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (step(), states.append(_state(trainer)))[0]
    _, rows, modules = trainer._reuse(9, batch, trainer.method.credit(batch).advantages)
    assert [r["applied"] for r in rows] == [True, False] and len(states) == 1
    after = _state(trainer)
    assert states[0].keys() == after.keys() and all(torch.equal(states[0][k], after[k]) for k in after)
    assert {m["reuse"] for m in modules} == {1}


def _state(trainer):
    out = {f"w{i}": p.detach().clone() for i, p in enumerate(trainer.policy.model.parameters())}
    for i, s in enumerate(trainer.optimizer.state.values()):
        out |= {f"{i}{name}": torch.as_tensor(v).clone() for name, v in s.items()}
    return out


def test_fixed_reuse_updates_that_often_and_drifts_off_policy(tmp_path):
    _, folder, _ = train(tmp_path, method="grpo_reuse", method_options={"max_reuse": 3}, steps=1)
    updates = folder.read("updates")
    assert updates["reuse"].to_list() == [1, 2, 3] and updates["applied"].all()
    assert abs(updates["chi2"][0]) < 1e-3 < abs(updates["kl"][2]) * 1e3


def test_groups_of_one_and_equal_groups_learn_nothing_and_say_so(tmp_path):
    trainer, folder, said = train(tmp_path, group_size=1, steps=1, method="agent_opsd")
    assert sum("groups of one" in line for line in said) == 1
    assert folder.read("steps")["zero_advantage_share"].to_list() == [1.0]
    assert not folder.read("updates")["applied"].any() and "modules" not in folder.tables
    assert folder.read("episodes")["advantage"].abs().max() == 0


def test_a_cut_response_is_marked_and_closed(tmp_path):
    trainer, folder, _ = train(tmp_path, max_response_tokens=2, steps=1)
    episode = next(e for e in trainer.rollout(0) if e.turns[0].truncated and len(e.turns) > 1)
    first, second = episode.turns[:2]
    assert second.prompt_ids[len(first.prompt_ids) + 2] == trainer.chat.end_id  # closed, by a token that does not train
    turns = folder.read("turns")
    assert turns["truncated"].any() and (turns.filter("truncated")["token_ids"].list.len() == 2).all()
    assert not turns.filter("truncated")["response"].str.contains("<end>").any()
    assert folder.read("episodes").filter(pl.col("stop_reason") == "invalid_actions").height > 0


def test_a_history_window_gives_rows_of_one_turn(tmp_path):
    trainer, folder, _ = train(tmp_path, history=1, steps=1, method="agent_opsd")
    assert not folder.read("turns")["continues"].any()
    batch = trainer.batch(trainer.rollout(0))
    assert len(batch.input_ids) == int(batch.turn_counts.sum())
    assert folder.read("turns").height == folder.read("episodes")["n_turns"].sum()


def test_kl_and_entropy_enter_the_loss(tmp_path):
    _, folder, _ = train(tmp_path, kl_coef=0.1, entropy_coef=0.01, layout="turn", tasks_per_step=1)
    steps = folder.read("steps")
    assert abs(steps["kl_reference"][0]) < 1e-6 and steps["kl_reference"][1] > 0
    assert not np.allclose(steps["loss"], steps["pg_loss"])


def test_divergence_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    config = TrainConfig(**SMALL)
    folder = RunFolder.create(tmp_path, "run", {})

    def poison(trainer):
        if trainer.step == 1:
            with torch.no_grad():
                trainer.policy.lm_head.weight[5] = float("nan")

    with pytest.raises(WorkbenchError) as error:
        Trainer(config, folder, lambda line: None).run(on_step=poison)
    assert "\n" not in str(error.value)
    assert folder.latest_checkpoint().name.startswith("step=000001") and not folder.is_complete
    with pytest.raises(Diverged, match="diverged"):
        trainer = Trainer(config, RunFolder.create(tmp_path, "again", {}), print)
        batch = Batch.from_episodes(trainer.rollout(0))
        accumulate(
            trainer.policy,
            IsolatedHead(trainer.policy.model),
            batch,
            batch.old_logprobs * float("inf"),
            trainer.method,
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "agent_opds"}, "did you mean 'agent_opsd'"),
        ({"method_options": {"lamm": 1}}, "unknown option"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"method_options": {"aggregation": "token_maen"}}, "did you mean 'token_mean'"),
        ({"skill_retrieval": "keywords"}, "did you mean 'keyword'"),
        ({"prompt": "chat"}, "plain or action"),
    ],
)
def test_bad_configuration_is_one_line(changes, said):
    with pytest.raises(WorkbenchError, match=said) as error:
        TrainConfig(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env": "tcw"}, "did you mean 'twc'"),
        ({"model": "./no/such/folder"}, "does not exist"),
        ({"skills": "./no/such/skills"}, "general.md"),
        ({"skill_position": "end"}, "front or user"),
        ({"env_options": {"params": "nonsense=1"}}, "nonsense"),
    ],
)
def test_what_a_run_needs_is_missed_before_it_starts(tmp_path, changes, said):
    with pytest.raises(WorkbenchError, match=said) as error:
        Trainer(TrainConfig(**(SMALL | changes)), RunFolder.create(tmp_path, "run", {}))
    assert "\n" not in str(error.value)


KILLED = {
    "method": "agent_opsd_dgg", "method_options": {"window": 2, "max_reuse": 2}, "steps": 4, "tasks_per_step": 1,
    "group_size": 4, "eval_games": 1, "eval_panels": "heldout", "eval_every": 4, "checkpoint_every": 2, "seed": 3,
    "live_episodes": 8, "max_turns": 4,
}  # fmt: skip
SCRIPT = f"""
import sys
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer
Trainer(TrainConfig(**{KILLED}), RunFolder.open(sys.argv[1]), lambda line: print(line, flush=True)).run()
"""


@pytest.mark.slow
def test_killed_and_resumed_in_another_process_the_tables_are_the_same(tmp_path):
    """SIGKILL after the first checkpoint; the same command goes on. test_run_killed.py kills at any moment."""
    whole, broken = (RunFolder.create(tmp_path, name, {}) for name in ("whole", "broken"))
    Trainer(TrainConfig(**KILLED), whole, lambda line: None).run()
    command = [sys.executable, "-c", SCRIPT, str(broken.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        next(line for line in process.stdout if line.startswith("step 3/4"))
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not broken.is_complete
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("resumed at step 2 of 4")
    for name in TABLES:
        assert_frame_equal(whole.read(name), broken.read(name), check_exact=True)


def test_resuming_with_other_parameters_is_refused(opsd):
    trainer, folder, _ = opsd
    other = TrainConfig(**(SMALL | WHOLE | {"method": "agent_opsd", "lr": 1e-3}))
    with pytest.raises(WorkbenchError, match="other parameters \\(lr\\)"):
        Trainer(other, folder, print).run()
