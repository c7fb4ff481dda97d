"""The trainer does what each method asks for: how often it draws, who reads the skill text, what a gate watches."""

import numpy as np
import polars as pl
import pytest
import torch

from workbench import shipped, tables
from workbench.composition import Method
from workbench.distill import opsd
from workbench.errors import WorkbenchError
from workbench.methods import method
from workbench.records import Batch
from workbench.reuse.lm_head import IsolatedHead
from workbench.runs import RunFolder
from workbench.skills import HEADING
from workbench.train import TrainConfig, Trainer
from workbench.update import UpdateConfig, accumulate

SMALL = {
    "steps": 1, "tasks_per_step": 2, "group_size": 4, "live_episodes": 8, "max_turns": 4, "eval_games": 1,
    "eval_panels": "heldout", "eval_every": 2, "checkpoint_every": 1, "seed": 3,
}  # fmt: skip
MODEL = str(shipped.data("models", "twc-small"))


def trainer_of(tmp_path, name, options=None, **changes):
    config = TrainConfig(method=name, method_options=options or {}, **(SMALL | changes))
    return Trainer(config, RunFolder.create(tmp_path, "run", {}), lambda line: None)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory):
    return trainer_of(tmp_path_factory.mktemp("sdar"), "sdar")


@pytest.fixture(scope="module")
def episodes(sdar):
    return sdar.rollout(0)


@pytest.fixture(scope="module")
def batch(sdar, episodes):
    return sdar.batch(episodes).with_(anchors=method("gigpo").anchors(episodes))


def gradient_of(trainer, batch, method: Method, teacher=None, micro_tokens=100_000):
    head = IsolatedHead(trainer.policy.model)
    trainer.policy.model.zero_grad()
    seen = accumulate(
        trainer.policy, head, batch, method.credit(batch).advantages, method, UpdateConfig(micro_tokens=micro_tokens),
        teacher,
    )  # fmt: skip
    head.merge()
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.policy.model.parameters()]
    return torch.cat([g.flatten() for g in flat]), seen


@pytest.fixture(scope="module")
def plain(sdar, batch):
    return gradient_of(sdar, batch, method("grpo"))[0]


NAMES = ["gspo", "dapo", "rlsd", "sdar", "skill_sd", "opd", "opsd"]


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_change_nothing_and_off_is_grpo(sdar, episodes, batch, plain, name):
    on, off = method(name), method(name, **method(name).off)
    teacher = sdar.teacher_rows(batch, episodes)
    whole, seen = gradient_of(sdar, batch, on, teacher)
    parts, again = gradient_of(sdar, batch, on, teacher, micro_tokens=300)
    torch.testing.assert_close(parts, whole, atol=2e-6, rtol=1e-3)
    assert again.loss == pytest.approx(seen.loss, abs=1e-6)
    if name != "gspo":  # on policy, a turn's ratio and a token's have one gradient but for the clip at exactly 1
        assert not torch.allclose(whole, plain, atol=1e-6)
    assert torch.equal(gradient_of(sdar, batch, off, teacher)[0], plain)


def test_the_divergence_is_taken_over_the_vocabulary_at_every_sampled_token(sdar, episodes, batch):
    """The loss and gradient of OPSD against whole logits of both contexts, computed here from the model alone."""
    m = method("opsd", beta=0.5)
    rows = sdar.teacher_rows(batch, episodes)
    got, seen = gradient_of(sdar, batch, m, rows)
    model = sdar.policy.model
    model.zero_grad()
    with torch.no_grad():
        teacher = model(input_ids=rows.input_ids).logits
    student = model(input_ids=batch.input_ids).logits
    b, t = torch.nonzero(batch.response_mask, as_tuple=True)
    per_token = opsd.divergence(student[b, t - 1], teacher[b, t + rows.shift[b] - 1], m.aux.divergence)
    per_token.mean().backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-3)
    assert seen.aux_loss == pytest.approx(per_token.mean().item(), rel=1e-4) and seen.aux_loss > 0
    with pytest.raises(WorkbenchError, match="needs the rows that the teacher reads"):
        gradient_of(sdar, batch, m)


def test_a_frozen_teacher_keeps_the_first_weights(tmp_path):
    for kind, moves in (("frozen", False), ("live", True)):
        trainer = trainer_of(tmp_path, "opsd", {"teacher": kind})
        before = [p.clone() for p in trainer.reader.model.parameters()]
        with torch.no_grad():
            for p in trainer.policy.model.parameters():
                p.add_(1)
        after = list(trainer.reader.model.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == moves


def test_dynamic_sampling_replaces_equal_groups_and_counts_what_it_drew(tmp_path):
    # A limit of one turn: no game of two items can be won, and every group is equal.
    hopeless = trainer_of(tmp_path, "dapo", {"max_batches": 3}, max_turns=1)
    episodes = hopeless.rollout(0)
    assert len(episodes) == 8 and len(hopeless.drawn) == 24
    trainer = trainer_of(tmp_path, "dapo", {"max_batches": 6}, tasks_per_step=1)
    plain = trainer_of(tmp_path, "grpo", tasks_per_step=1)
    for step in range(3):
        episodes = trainer.rollout(step)
        outcomes = [e.outcome for e in episodes]
        assert len(episodes) == 4 and len({e.group for e in episodes}) == 1 and len(trainer.drawn) % 4 == 0
        assert len(set(outcomes)) == 2 or len(trainer.drawn) == 24
        again = trainer.rollout(step)
        assert [e.turns[0].response_ids.tolist() for e in again] == [e.turns[0].response_ids.tolist() for e in episodes]
    assert len(plain.rollout(0)) == len(plain.drawn) == 4


def test_dynamic_sampling_is_recorded(tmp_path):
    trainer = trainer_of(tmp_path, "dapo", {"max_batches": 2}, max_turns=1)
    trainer.run()
    steps = trainer.folder.read("steps")
    assert steps["n_drawn"].to_list() == [16] and steps["n_episodes"].to_list() == [8]
    assert trainer.extra == 1  # the next step goes on with the next tasks
    # No game was won, so nothing was learnt and no gate was asked.
    updates = trainer.folder.read("updates")
    assert updates["signal"].to_list() == [False] and not updates["applied"].any() and steps["updates"][0] == 0
    assert steps["discarded"][0] == 0 and trainer.gate.previous is None


def test_success_is_of_all_that_was_drawn_and_every_task_gets_its_turn(tmp_path):
    trainer = trainer_of(tmp_path, "dapo", {"max_batches": 4}, tasks_per_step=3, group_size=2)
    for step in range(3):
        kept = trainer.rollout(step)
        tasks = [e.task for e in trainer.drawn[::2]]
        expected = [t.id for n in range(len(tasks) // 3) for t in trainer.tasks_of(step + trainer.extra + n)]
        assert tasks == expected
        batch = trainer.batch(kept)
        credit = trainer.method.credit(batch)
        facts = tables.rollout_summary(trainer.drawn, credit.advantages, batch.counted, batch)
        assert facts["success"] == pytest.approx(np.mean([e.outcome for e in trainer.drawn]))
        assert facts["n_drawn"] == len(trainer.drawn) and facts["n_episodes"] == len(kept)
        trainer.extra += len(tasks) // 3 - 1


def test_the_recorded_learning_rate_is_the_one_that_was_used(tmp_path):
    trainer = trainer_of(tmp_path, "grpo", steps=2, warmup_steps=10, lr=1e-3)
    used = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: used.append(trainer.optimizer.param_groups[0]["lr"]) or step()
    trainer.run()
    assert trainer.folder.read("steps")["lr"].to_list() == pytest.approx([1e-4, 2e-4]) and set(used) <= {1e-4, 2e-4}


def test_random_weights_derive_from_the_seed(tmp_path):
    trainers = [trainer_of(tmp_path, "opsd", model=MODEL, random_init=True, seed=seed) for seed in (1, 1, 2)]
    weights = [next(t.reader.model.parameters()) for t in trainers]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("name", "evaluated"), [("skill_grpo", False), ("skill_grpo_star", True)])
def test_the_student_reads_the_skill_while_training_and_perhaps_when_evaluated(tmp_path, name, evaluated):
    trainer = trainer_of(tmp_path, name)
    heading = trainer.policy.tokenizer.encode(HEADING, add_special_tokens=False)

    def reads(episode):
        ids = episode.turns[0].prompt_ids.tolist()
        return any(ids[i : i + len(heading)] == heading for i in range(len(ids)))

    played = []
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *given: played.append(evaluate(*given)) or played[-1]
    trainer.run()
    training = trainer.rollout(0)
    assert all(map(reads, training)) and trainer.batch(training).teacher_logprobs is None

    assert all(reads(e) == evaluated for e in played[0])  # the held-out games, as student
    assert trainer.folder.read("turns")["teacher_logprobs"].null_count() == trainer.folder.read("turns").height


@pytest.mark.parametrize("statistic", ["grad_norm", "kl", "chi2"])
def test_a_gate_can_watch_something_else(tmp_path, statistic, sdar, batch):
    trainer = trainer_of(tmp_path, "grpo_dgg", {"statistic": statistic, "window": 1, "threshold": -1e9, "max_reuse": 3})
    trainer.policy.model.load_state_dict(sdar.policy.model.state_dict())
    _, rows, _ = trainer._reuse(0, batch, trainer.method.credit(batch).advantages)
    assert [r["statistic"] for r in rows] == [statistic] * len(rows)
    assert [r["applied"] for r in rows] == [True, True, False]  # the window is full at the third use
    assert rows[1]["increment"] == pytest.approx(rows[1][statistic] - rows[0][statistic])


def test_random_skills_are_anothers_and_the_same_in_a_group(tmp_path):
    trainer = trainer_of(tmp_path, "sdar", skill_retrieval="random", tasks_per_step=6, group_size=2)
    episodes = trainer.rollout(0)
    bank = trainer.teacher.bank
    kinds = [bank.retrieve(e.kind, e.turns[0].observation, e.task) for e in episodes]
    assert kinds[::2] == kinds[1::2] and any(k != (e.kind,) for k, e in zip(kinds, episodes, strict=True))
    assert bool(torch.isfinite(trainer.batch(episodes).teacher_logprobs).all())


def test_adapters_train_and_the_frozen_head_still_has_its_gradient(tmp_path):
    pytest.importorskip("peft", reason="LoRA needs the package peft")
    trainer = trainer_of(tmp_path, "grpo_reuse", {"max_reuse": 2}, lora_rank=4)
    names = [n for n, p in trainer.policy.model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in n for n in names)
    head = trainer.policy.lm_head.weight.clone()
    trainer.run()
    updates, modules = trainer.folder.read("updates"), trainer.folder.read("modules")
    assert (updates["energy"] > 0).all() and torch.equal(trainer.policy.lm_head.weight, head)
    assert (modules.filter("is_head")["relative_change"] == 0).all()
    moved = modules.filter(pl.col("module").str.contains("lora_B"))
    assert moved.height and moved["relative_change"].is_not_nan().all()


def test_the_frozen_heads_energy_is_that_of_the_closed_form(sdar, batch):
    """||sum_i (dL/dlogits_i) h_i^T||_F^2 from hidden states and log-probs, for a head that does not train."""
    policy = sdar.policy
    policy.lm_head.weight.requires_grad_(False)
    try:
        m = method("grpo")
        head = IsolatedHead(policy.model)
        policy.model.zero_grad()
        advantages = m.credit(batch).advantages
        accumulate(policy, head, batch, advantages, m)
        b, t = torch.nonzero(batch.response_mask, as_tuple=True)
        with torch.no_grad():
            hidden = policy.hidden(batch.input_ids)[b, t - 1].double()
            logits = policy.logits(hidden.float()).double()
        coefficient = -(advantages / batch.episodes_to_tokens(batch.turn_tokens.sum(1).float()).clamp(min=1))[b, t]
        coefficient = coefficient.double() / len(batch.group_index)
        error = -logits.softmax(1)
        error[torch.arange(len(b)), batch.input_ids[b, t]] += 1
        gradient = (coefficient[:, None] * error).T @ hidden
        assert head.energy() == pytest.approx(float(gradient.square().sum()), rel=1e-3)
    finally:
        policy.lm_head.weight.requires_grad_(True)


def test_states_of_a_group_are_compared(sdar, episodes, batch):
    m = method("gigpo")
    labels = m.anchors(episodes)
    first = labels[:, 0]
    groups = np.array([e.group for e in episodes])
    assert len(set(first.tolist())) == len(set(groups.tolist()))  # all members of a group begin in one state
    step = m.credit(batch).turns["step_advantage"]
    assert bool((step != 0).any()) and bool((step[:, 0].abs() < 10).all())
    assert isinstance(batch, Batch)
