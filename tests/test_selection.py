"""DEAR in training: what a policy and its teacher choose in a batch, the loss on it, and what a run records of it."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from workbench.distill import dear, opsd
from workbench.distill.dear import DEARConfig
from workbench.distill.opsd import OPSDConfig
from workbench.errors import WorkbenchError
from workbench.methods import method
from workbench.policy import Policy
from workbench.reuse.lm_head import IsolatedHead
from workbench.runs import RunFolder
from workbench.selection import choose
from workbench.train import TrainConfig, Trainer
from workbench.update import UpdateConfig, accumulate

SMALL = {
    "steps": 1, "tasks_per_step": 2, "group_size": 3, "live_episodes": 6, "eval_games": 1, "eval_panels": "heldout",
    "seed": 3,
}  # fmt: skip


def trainer_of(folder, options=None, **changes):
    config = TrainConfig(method="dear", method_options=options or {}, **(SMALL | changes))
    return Trainer(config, RunFolder.create(folder, "run", {}), lambda line: None)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return trainer_of(tmp_path_factory.mktemp("dear"))


@pytest.fixture(scope="module")
def batch(trainer):
    episodes = trainer.rollout(0)
    batch = trainer.batch(episodes)
    return batch, trainer.teacher_rows(batch, episodes)


@pytest.fixture(scope="module")
def logits(trainer, batch):
    """States and logits of student and teacher at every sampled token, from whole passes of the model."""
    batch, rows = batch
    b, t = torch.nonzero(batch.response_mask, as_tuple=True)
    with torch.no_grad():
        own = trainer.policy.model(input_ids=batch.input_ids, output_hidden_states=True)
        theirs = rows.policy.model(input_ids=rows.input_ids).logits
    return own.hidden_states[-1][b, t - 1], own.logits[b, t - 1], theirs[b, t + rows.shift[b] - 1]


def gradient_of(trainer, batch, of, teacher, micro_tokens=100_000):
    head = IsolatedHead(trainer.policy.model)
    trainer.policy.model.zero_grad()
    advantages = of.credit(batch).advantages
    config = UpdateConfig(micro_tokens=micro_tokens)
    seen = accumulate(trainer.policy, head, batch, advantages, of, config, teacher)
    head.merge()
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.policy.model.parameters()]
    return torch.cat([g.flatten() for g in flat]), seen


@pytest.mark.parametrize("within", ["turn", "row"])
def test_the_choice_is_made_on_what_each_token_was_predicted_from(trainer, batch, logits, within):
    batch, rows = batch
    states, student, teacher = logits
    config = DEARConfig(within=within)
    got = choose(trainer.policy, batch, rows, config)
    b, t = torch.nonzero(batch.response_mask, as_tuple=True)
    response = b * 100 + (batch.turn_index[b, t] if within == "turn" else 0)
    logp = student.log_softmax(1)
    kl = opsd.divergence(student, teacher, OPSDConfig(beta=1.0))
    want = dear.select(-(logp.exp() * logp).sum(1), kl, states, response, config)
    assert torch.equal(got.decisions[b, t], want.decisions) and torch.equal(got.evidence[b, t], want.evidence)
    torch.testing.assert_close(got.score[b, t], want.score, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got.mass[b, t], dear.gradient_mass(student, teacher), atol=1e-5, rtol=1e-3)
    assert int(got.keep.sum()) == int(want.keep.sum()) and not bool(got.keep[~batch.response_mask].any())


def test_neither_micro_batches_nor_chunks_of_logits_change_it(trainer, batch):
    batch, rows = batch
    whole = choose(trainer.policy, batch, rows, DEARConfig())
    parts = choose(trainer.policy, batch, rows, DEARConfig(), max_tokens=200, chunk=4000)
    assert torch.equal(whole.decisions, parts.decisions) and torch.equal(whole.evidence, parts.evidence)


def test_the_loss_is_the_mean_reverse_kl_over_the_kept(trainer, batch, logits):
    batch, rows = batch
    chosen = choose(trainer.policy, batch, rows, DEARConfig())
    rows = replace(rows, keep=chosen.keep)
    got, seen = gradient_of(trainer, batch, method("dear"), rows)
    parts, _ = gradient_of(trainer, batch, method("dear"), rows, micro_tokens=300)
    torch.testing.assert_close(parts, got, atol=2e-6, rtol=1e-3)
    model = trainer.policy.model
    model.zero_grad()
    b, t = torch.nonzero(batch.response_mask, as_tuple=True)
    loss = dear.loss(model(input_ids=batch.input_ids).logits[b, t - 1], logits[2], chosen.keep[b, t])
    loss.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-3)
    both, _ = gradient_of(trainer, batch, method("dear", pg_coef=1.0), rows)
    plain, _ = gradient_of(trainer, batch, method("grpo"), None)
    torch.testing.assert_close(both - plain, want, atol=2e-6, rtol=1e-3)
    assert seen.aux_loss == pytest.approx(loss.item(), rel=1e-4)
    with pytest.raises(WorkbenchError, match="none were chosen"):
        gradient_of(trainer, batch, method("dear"), replace(rows, keep=None))


def test_all_decisions_is_plain_distillation_and_off_is_grpo_bit_for_bit(trainer, batch):
    batch, rows = batch
    every = replace(rows, keep=choose(trainer.policy, batch, rows, DEARConfig(decisions=1.0)).keep)
    got, seen = gradient_of(trainer, batch, method("dear", decisions=1.0), every)
    want, plain = gradient_of(trainer, batch, method("opsd", beta=1.0), rows)
    assert torch.equal(got, want) and seen.aux_loss == plain.aux_loss
    off, _ = gradient_of(trainer, batch, method("dear", **method("dear").off), rows)
    assert torch.equal(off, gradient_of(trainer, batch, method("grpo"), None)[0])


def test_a_run_records_what_was_chosen(tmp_path, trainer):
    trainer.run()
    turns, steps = trainer.folder.read("turns"), trainer.folder.read("steps")
    for row in turns.iter_rows(named=True):
        n, decisions, evidence = len(row["token_ids"]), sum(row["decision"]), sum(row["support"])
        assert (decisions, evidence) == tuple(int(c) for c in dear.counts(torch.tensor(n)))
        assert len(row["support_score"]) == n
    kept = turns["decision"].explode() + turns["support"].explode()
    row = steps.row(0, named=True)
    assert row["kept_share"] == pytest.approx(kept.mean()) and kept.max() == 1
    assert 0 < row["mass_decisions"] < row["mass_kept"] <= 1 and row["aux_loss"] > 0
    off = trainer_of(tmp_path, method("dear").off)
    off.run()
    assert "decision" not in off.folder.read("turns").columns and "mass_kept" not in off.folder.read("steps").columns


def test_a_teacher_with_another_vocabulary_is_refused(trainer, batch, tokenizer):
    batch, rows = batch
    other = replace(rows, policy=Policy(tiny_model(tokenizer), tokenizer))
    with pytest.raises(WorkbenchError, match="another tokenizer") as caught:
        choose(trainer.policy, batch, other, DEARConfig())
    assert "\n" not in str(caught.value)
