"""Our Trainer, the TRL subclass and a loop by hand, on the same rollouts: credit, loss and every gradient."""

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here; `make crosscheck` installs it")

from engine_cases import GATED, adam_steps, credit_trainer, ours, prepare, weights_of  # noqa: E402
from polars.testing import assert_frame_equal  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from workbench.credit import agent_opsd  # noqa: E402
from workbench.distill import sdar  # noqa: E402
from workbench.engines.trl import CreditTrainer  # noqa: E402
from workbench.skills import skill_ids  # noqa: E402
from workbench.update import UpdateConfig, accumulate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = {
    "grpo": {"dual_clip": 0.0},
    "agent_opsd": {},
    "sdar": {"coef": 0.5},
    "grpo_dgg": GATED,
    "gspo": {},  # of a policy loss that TRL has not
    "dr_grpo": {},
    "dapo": {"max_batches": 1},
}


class Watched(CreditTrainer):
    """Keeps the gradients that the first update has before they are clipped."""

    gradients = None

    def _clip_grad_norm(self, model):
        if self.gradients is None:
            self.gradients = {name: p.grad.clone() for name, p in self.bare.named_parameters()}
        return super()._clip_grad_norm(model)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("engines")
    prepare(path, tokenizer)
    return path


def under_trl(folder, name):
    trainer = credit_trainer(folder, name, kind=Watched, **METHODS[name])
    trainer.train()
    return trainer


def by_hand(folder, trainer, name):
    """Loss and gradients from the whole logits of a model with nothing around it, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    step, batch = trainer.step, trainer.step.batch
    tokenizer, at = trainer.processing_class, trainer.teacher.insert_at
    skills = skill_ids(trainer.teacher.bank, tokenizer, step.episodes)

    def logprobs(ids):
        ids = torch.as_tensor(ids).long()
        logits = model(ids[None]).logits[0, :-1]
        logp = torch.log_softmax(logits, -1)
        return logp.gather(1, ids[1:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    rows, teachers = [], []
    for b, n in enumerate(batch.lengths.tolist()):
        ids, mask = batch.input_ids[b, :n], batch.response_mask[b, :n]
        logp, entropy = logprobs(ids)
        rows.append((logp[mask[1:]], entropy[mask[1:]]))
        told = torch.cat([ids[:at], torch.as_tensor(skills[b]).long(), ids[at:]])
        with torch.no_grad():
            teachers.append(logprobs(told)[0][-(n - at) :][mask[at:]] if at else None)
    old = torch.zeros(batch.input_ids.shape)
    teacher = torch.zeros(batch.input_ids.shape)
    for b, (own, other) in enumerate(zip(rows, teachers, strict=True)):
        old[b, batch.response_mask[b]] = own[0].detach()
        teacher[b, batch.response_mask[b]] = other
    given = batch.with_(old_logprobs=old, teacher_logprobs=teacher)
    reward, per = batch.outcome, 4
    groups = reward.view(-1, per)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).nan_to_num(0).view(-1)
    if name == "agent_opsd":
        tokens = agent_opsd.credit(given).advantages
    else:
        tokens = torch.where(batch.response_mask, advantage[:, None], 0)
    loss = 0
    for b, (logp, _) in enumerate(rows):
        ratio = (logp - logp.detach()).exp()
        loss = loss - (ratio * tokens[b, batch.response_mask[b]]).mean() / len(rows)
    if name == "sdar":
        gap = torch.cat([t - logp.detach() for (logp, _), t in zip(rows, teachers, strict=True)])
        difference = torch.cat([t - logp for (logp, _), t in zip(rows, teachers, strict=True)])
        beta = sdar.SDARConfig().beta
        loss = loss + 0.5 * (torch.sigmoid(beta * gap) * difference).mean()
    loss.backward()
    return given, tokens, loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", METHODS)
def test_advantages_loss_and_gradients_agree(folder, name):
    own = ours(folder, name, **METHODS[name])
    episodes = own.rollout(0)
    batch = own.batch(episodes)
    credit = own.method.credit(batch, 0)
    assert credit.advantages.any()
    update = UpdateConfig(max_tokens=own.update.max_tokens)
    gradient = accumulate(own.policy, own.head, batch, credit.advantages, own.method, update)
    own.head.merge()

    trl = under_trl(folder, name)
    step = trl.step
    assert [[t.response_ids.tolist() for t in e.turns] for e in step.episodes] == [
        [t.response_ids.tolist() for t in e.turns] for e in episodes
    ]
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(step.batch.old_logprobs, batch.old_logprobs, **close)
    torch.testing.assert_close(step.batch.teacher_logprobs, batch.teacher_logprobs, **close)
    torch.testing.assert_close(step.credit.advantages, credit.advantages, **close)
    row = step.updates[0]
    assert row["loss"] == pytest.approx(gradient.loss, abs=1e-6)
    assert row["pg_loss"] == pytest.approx(gradient.pg_loss, abs=1e-6)
    parameters = dict(own.policy.model.named_parameters())
    assert set(parameters) == set(trl.gradients)
    scale = max(float(p.grad.abs().max()) for p in parameters.values())
    for key, parameter in parameters.items():
        torch.testing.assert_close(trl.gradients[key], parameter.grad, rtol=0, atol=1e-5 * scale, msg=key)

    if name in ("grpo", "agent_opsd", "sdar", "grpo_dgg"):
        given, advantages, loss, gradients = by_hand(folder, trl, name)
        torch.testing.assert_close(given.teacher_logprobs, step.batch.teacher_logprobs, **close)
        torch.testing.assert_close(advantages, step.credit.advantages, **close)
        assert float(loss) == pytest.approx(row["loss"], abs=1e-6)
        for key, value in gradients.items():
            torch.testing.assert_close(trl.gradients[key], value, rtol=0, atol=1e-5 * scale, msg=key)


@pytest.fixture(scope="module")
def tied(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tied")
    prepare(path, tokenizer, tied=True)
    return path


@pytest.mark.parametrize(("name", "model"), (("grpo_dgg", "tied"), ("agent_opsd_dgg", "folder")))
def test_a_gated_run_is_that_of_our_trainer(request, name, model):
    """Every update of three steps: energies, decisions, Adam's steps and the weights at the end; with a head that is
    tied to the embedding, too."""
    folder = request.getfixturevalue(model)
    own = ours(folder, name, steps=3, **GATED)
    for number in range(3):
        own.step = number
        own._train_step()
    mine = own.folder.read("updates")
    trips = mine.filter(~mine["applied"]).height
    assert trips and mine["signal"].all()
    trl = credit_trainer(folder, name, steps=mine.height, **GATED)
    trl.train()
    theirs = trl.folder.read("updates")
    assert_frame_equal(theirs.select(mine.columns), mine, rel_tol=2e-3, abs_tol=2e-5, check_dtypes=False)
    assert set(adam_steps(trl.optimizer)) == {mine.height - trips}
    for key, value in weights_of(own.policy.model).items():
        torch.testing.assert_close(weights_of(trl.bare)[key], value, rtol=0, atol=1e-4, msg=key)
    for table in ("steps", "episodes", "turns", "modules"):
        left, right = trl.folder.read(table), own.folder.read(table)
        assert left.columns == right.columns and left.height == right.height, table
    turns = [f.read("turns").drop("sampled_logprobs", strict=False) for f in (trl.folder, own.folder)]
    assert_frame_equal(*turns, rel_tol=1e-2, abs_tol=1e-3, check_dtypes=False)
