"""DORA's loss, and the importance ratio of a whole trajectory, by itself and in the trainer."""

import math
from dataclasses import replace

import pytest
import torch
from make_batch import by_token, make_batch, make_episodes, make_gaps, take_rows
from test_train_methods import trainer_of
from tiny_models import tiny_model

from workbench import loss, replay, shipped
from workbench.errors import WorkbenchError
from workbench.loss import PolicyLossConfig
from workbench.methods import method
from workbench.policy import Policy, load_tokenizer
from workbench.records import Batch
from workbench.reuse.lm_head import IsolatedHead
from workbench.update import UpdateConfig, _groups, accumulate

T_MAX = 50


def tokens(n=400):
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(n, generator=generator, dtype=torch.float64)

    old = -draw().abs() - 3
    return (old + draw()).requires_grad_(), old, (old + 0.8 * draw()).clamp(max=0), draw()


def objective(logp, old, sampled, advantage, config):
    """Equation 4 for one token, from numbers alone: what is maximised."""
    r, engine = math.exp(logp - old), min(math.exp(old - sampled), config.engine_cap)
    clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
    value = min(r * advantage, clipped * advantage)
    return engine * (max(value, config.dual_clip * advantage) if advantage < 0 else value)


def dora_loss(logp, old, sampled, advantages, config):
    weight = loss.engine_weight(old, sampled, config.engine_cap)
    return loss.surrogate(logp, old, advantages * weight, **config.clip)


def test_loss_is_the_equation_with_the_outer_bound_for_negative_advantages_alone():
    config = method("dora").loss
    logp, old, sampled, advantages = tokens()
    got = dora_loss(logp, old, sampled, advantages, config)
    rows = zip(*(x.tolist() for x in (logp.detach(), old, sampled, advantages)), strict=True)
    torch.testing.assert_close(-got.detach(), torch.tensor([objective(*row, config) for row in rows]).double())
    gradient = torch.autograd.grad(got.sum(), logp)[0]
    closed = loss.surrogate_gradient(
        logp.detach(), old, advantages * loss.engine_weight(old, sampled, config.engine_cap), **config.clip
    )
    torch.testing.assert_close(gradient, closed)
    r = (logp.detach() - old).exp()
    negative, positive = advantages < 0, advantages > 0
    for name, held in {
        "far up": negative & (r > config.dual_clip),
        "down": negative & (r < 1 - config.clip_low),
        "up": positive & (r > 1 + config.clip_high),
    }.items():
        assert bool(held.any()) and bool((gradient[held] == 0).all()), name
    free = positive & (r < 1 + config.clip_high) | negative & (r > 1 - config.clip_low) & (r < config.dual_clip)
    assert bool((gradient[free] != 0).all())
    # Taken literally, the outer maximum is all that a positive advantage would see.
    literal = torch.maximum(-got.detach()[positive], config.dual_clip * advantages[positive] * 1.0)
    assert not torch.allclose(literal, -got.detach()[positive])


def test_the_engine_weight_is_capped_and_carries_no_gradient():
    old, sampled = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True), torch.tensor([-1.0, -3.0, -0.5, -99.0])
    weight = loss.engine_weight(old, sampled, 2.0)
    torch.testing.assert_close(weight, torch.tensor([1.0, 2.0, math.exp(-0.5), 2.0]))
    assert not weight.requires_grad
    assert loss.engine_weight(old, None, 2.0) is None and loss.engine_weight(old, sampled, 0.0) is None


@pytest.fixture
def batches():
    episodes = make_episodes()
    gaps = make_gaps(episodes)
    return {layout: make_batch(episodes, gaps, layout) for layout in ("episode", "turn")}


@pytest.mark.parametrize("layout", ["episode", "turn"])
def test_on_policy_with_equal_engines_it_is_reinforce_over_one_normaliser(batches, layout):
    m, batch = method("dora"), batches[layout]
    batch = batch.with_(sampled_logprobs=batch.old_logprobs.clone())
    advantages = m.credit(batch).advantages
    weighted = loss.weighted(advantages, batch, m.loss)
    assert torch.equal(weighted, advantages)
    weights = loss.token_weights(batch, m.loss.aggregation, T_MAX)
    old = batch.old_logprobs
    slope = loss.dloss_dlogp(old, old, weighted, weights, m.loss, batch.turn_index)
    torch.testing.assert_close(slope, -advantages / (len(batch.group_index) * T_MAX))


def test_without_its_parts_it_is_grpo(batches):
    m, plain = method("dora", **method("dora").off), method("grpo")
    batch = batches["turn"]
    apart = batch.with_(sampled_logprobs=batch.teacher_logprobs)
    advantages = plain.credit(batch).advantages
    assert m.loss == plain.loss and loss.weighted(advantages, apart, m.loss) is advantages
    on = loss.weighted(advantages, apart, method("dora").loss)
    ratio = (batch.old_logprobs - batch.teacher_logprobs).exp().clamp(max=2)
    torch.testing.assert_close(on, advantages * ratio)
    assert not torch.equal(on, advantages)


def test_a_batch_refuses_sampled_log_probs_that_cannot_be(batches):
    batch = batches["turn"]
    with pytest.raises(WorkbenchError, match="sampled_logprobs must be finite and at most 0"):
        batch.with_(sampled_logprobs=batch.old_logprobs + 9)
    with pytest.raises(WorkbenchError, match="sampled_logprobs has shape"):
        batch.with_(sampled_logprobs=batch.old_logprobs[:1])


@pytest.mark.parametrize("cap", [0.5, -1.0, math.nan])
def test_an_impossible_cap_is_refused(cap):
    with pytest.raises(WorkbenchError, match="engine_cap must be at least 1, or 0 for none"):
        PolicyLossConfig(engine_cap=cap)


def test_the_ratio_of_a_trajectory_is_the_mean_over_its_tokens_in_both_layouts(batches):
    found = []
    for batch in batches.values():
        old, logp = batch.old_logprobs, batch.teacher_logprobs.clone().requires_grad_()
        form = loss.sequence_form(logp, old, batch.turn_index, "episode", batch.episode_index)
        ratio = loss.ratio(form, old)
        gradient = torch.autograd.grad(ratio[batch.response_mask].sum(), logp)[0]
        found.append((by_token(batch, ratio.detach()), by_token(batch, gradient)))
        for e in range(len(batch.group_index)):
            own = batch.response_mask & (batch.episode_index == e)[:, None]
            s = (logp - old).detach()[own].mean().exp()
            for values in (ratio.detach(), gradient):
                torch.testing.assert_close(values[own], s.expand(int(own.sum())))
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("layout", ["episode", "turn"])
def test_turns_that_rows_repeat_count_once_in_the_ratio_of_a_trajectory(batches, layout):
    batch = batches[layout]
    repeated = take_rows(batch, [1, 0, 0, *range(len(batch.input_ids)), 2])
    forms = []
    for b in (batch, repeated):
        form = loss.sequence_form(b.teacher_logprobs, b.old_logprobs, b.turn_index, "episode", b.episode_index)
        forms.append(by_token(b, form))
    assert forms[0] == pytest.approx(forms[1], rel=1e-12)


@pytest.mark.parametrize("layout", ["episode", "turn"])
def test_the_gradient_with_the_ratio_of_a_trajectory_is_gspos(batches, layout):
    """With a mean over an episode's tokens: that of s_i A_i, s_i = exp(mean log-ratio) of episode i, clipped as one."""
    batch, config = batches[layout], PolicyLossConfig(ratio="episode", clip_low=0.05, clip_high=0.05, dual_clip=0)
    advantages = method("grpo").credit(batch).advantages
    logp = batch.teacher_logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for e in range(len(batch.group_index)):
        own = batch.response_mask & (batch.episode_index == e)[:, None]
        s, a = (logp - batch.old_logprobs)[own].mean().exp(), advantages[own][0]
        total = total - torch.minimum(s * a, s.clamp(0.95, 1.05) * a) / len(batch.group_index)
    want = torch.autograd.grad(total, logp)[0]
    weights = loss.token_weights(batch)
    got = loss.dloss_dlogp(
        logp.detach(), batch.old_logprobs, advantages, weights, config, batch.turn_index,
        episode_index=batch.episode_index,
    )  # fmt: skip
    torch.testing.assert_close(got, want)
    clipped = loss.ratio_metrics(
        logp, batch.old_logprobs, batch.response_mask, advantages, config, batch.turn_index, batch.episode_index
    )["clip_fraction"]
    held = (got == 0) & (advantages != 0) & batch.response_mask
    assert 0 < clipped < 1 and clipped == pytest.approx(float(held.sum() / batch.response_mask.sum()))


def test_the_ratio_of_a_trajectory_needs_to_know_whose_a_row_is(batches):
    batch, config = batches["turn"], PolicyLossConfig(ratio="episode")
    old = batch.old_logprobs
    with pytest.raises(WorkbenchError, match="per episode needs episode_index"):
        loss.dloss_dlogp(old, old, old, old, config, batch.turn_index)


@pytest.mark.parametrize("most", [1, 30, 60, 10_000])
def test_micro_batches_hold_whole_episodes(most):
    generator = torch.Generator().manual_seed(1)
    episode = torch.randint(0, 8, (40,), generator=generator)
    lengths = torch.randint(3, 12, (40,), generator=generator)
    signal = (episode != 2) & (torch.rand(40, generator=generator) < 0.5)
    groups = [rows for rows, _ in _groups(None, lengths, signal, most, episode)]
    assert sorted(torch.cat(groups).tolist()) == list(range(40))
    labels = [set(episode[g].tolist()) for g in groups]
    assert sum(map(len, labels)) == len(set(episode.tolist()))
    for group, members in zip(groups, labels, strict=True):
        assert len(group) * int(lengths[group].max()) <= most or len(members) == 1
        alone = {e for e in members if not bool(signal[episode == e].any())}
        assert alone in (set(), members)


@pytest.fixture(scope="module")
def policy():
    tokenizer = load_tokenizer(shipped.data("models", "twc-small"))
    return Policy(tiny_model(tokenizer), tokenizer)


@pytest.fixture(scope="module")
def scored(policy):
    """Rows of turns whose log-probs lie some way from the policy's, and further from the sampling engine's."""
    batch = Batch.from_episodes(make_episodes(), layout="turn")
    now, _ = policy.score_rows(batch.input_ids, batch.lengths, batch.response_mask)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *now.shape, generator=generator)
    old = torch.where(batch.response_mask, now + 0.5 * noise[0], 0).clamp(max=0)
    return batch.with_(old_logprobs=old, sampled_logprobs=(old + noise[1]).clamp(max=0))


@pytest.mark.parametrize("options", [{}, {"ratio": "episode", "clip_low": 0.1, "clip_high": 0.1}])
def test_micro_batches_change_nothing_in_the_trainer_and_off_is_grpo(policy, scored, options):
    assert len(scored.input_ids) > len(scored.group_index)
    m, seen = method("dora", **options), {}
    gradients = {size: gradient_of(policy, scored, m, size, seen) for size in (100_000, 60)}
    torch.testing.assert_close(*gradients.values(), atol=2e-6, rtol=1e-3)
    assert seen[60].loss == pytest.approx(seen[100_000].loss, abs=1e-6)
    for change in ({"engine_cap": 0.0}, {"ratio": "token" if options else "episode"}):
        other = gradient_of(policy, scored, method("dora", **(options | change)))
        assert float((gradients[60] - other).norm() / other.norm()) > 0.05
    off = gradient_of(policy, scored, method("dora", **method("dora").off))
    assert torch.equal(off, gradient_of(policy, scored, method("grpo")))


@pytest.mark.parametrize("silent", ["first", "last"])
def test_an_episode_whose_first_row_has_no_credit_is_trained_on_the_others(policy, scored, silent):
    m = method("dora", ratio="episode", clip_low=0.9, clip_high=9.0, dual_clip=0.0)
    turn = scored.turn_index.amax(1)
    last = scored.turn_counts[scored.episode_index] - 1
    quiet = (turn == (0 if silent == "first" else last)) & (last > 0)
    advantages = torch.where(quiet[:, None], 0, torch.where(scored.response_mask, 1.0, 0))
    whole = gradient_of(policy, scored, m, advantages=advantages)
    parts = gradient_of(policy, scored, m, micro_tokens=1, advantages=advantages)
    assert bool(quiet.any()) and float(whole.norm()) > 0
    torch.testing.assert_close(parts, whole, atol=2e-6, rtol=1e-3)


def gradient_of(policy, batch, m, micro_tokens=100_000, seen=None, advantages=None):
    head = IsolatedHead(policy.model)
    policy.model.zero_grad()
    advantages = m.credit(batch).advantages if advantages is None else advantages
    found = accumulate(policy, head, batch, advantages, m, UpdateConfig(micro_tokens=micro_tokens))
    head.merge()
    if seen is not None:
        seen[micro_tokens] = found
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def test_the_trainers_gradient_is_that_of_the_equation(policy, scored):
    m = method("dora")
    batch, model, own = scored, policy.model, m.loss
    got = gradient_of(policy, batch, m)
    model.zero_grad()
    logits = model(input_ids=batch.input_ids).logits[:, :-1].log_softmax(-1)
    logp = torch.nn.functional.pad(logits.gather(2, batch.input_ids[:, 1:, None])[..., 0], (1, 0))
    advantages = m.credit(batch).advantages
    engine = (batch.old_logprobs - batch.sampled_logprobs).exp().clamp(max=own.engine_cap)
    r = (logp - batch.old_logprobs).exp()
    value = torch.minimum(r * advantages, r.clamp(1 - own.clip_low, 1 + own.clip_high) * advantages)
    value = torch.where(advantages < 0, torch.maximum(value, own.dual_clip * advantages), value)
    longest = int(batch.turn_tokens.sum(1).max())
    (-(engine * value)[batch.response_mask].sum() / (len(batch.group_index) * longest)).backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-3)


def test_the_trainer_keeps_what_was_sampled_where_it_scores_anew(tmp_path):
    trainer = trainer_of(tmp_path, "dora", {"ratio": "episode"}, layout="turn", old_logprobs="scored", max_turns=2)
    trainer._train_step()
    row = trainer.folder.read("updates").row(0, named=True)
    assert math.isfinite(row["loss"]) and trainer.folder.read("turns")["dloss_dlogp"].null_count() == 0
    episodes = trainer.drawn
    batch = trainer.batch(episodes)
    assert torch.equal(batch.sampled_logprobs[0][batch.response_mask[0]],
                       torch.from_numpy(episodes[0].turns[0].logprobs))  # fmt: skip
    assert not torch.equal(batch.sampled_logprobs, batch.old_logprobs)
    turns, heads = (trainer.folder.read(name) for name in ("turns", "episodes"))
    again, _ = replay.batch_of(turns, heads, 0)
    assert not torch.equal(again.sampled_logprobs, again.old_logprobs)
    trainer.config = replace(trainer.config, old_logprobs="sampled")
    assert trainer.batch(episodes).sampled_logprobs is None


def test_options_are_those_of_the_policy_loss():
    assert method("dora").loss == PolicyLossConfig(clip_high=0.28, engine_cap=2.0, aggregation="token_sum_norm")
    assert replace(method("dora", ratio="episode").loss, ratio="token") == method("dora").loss
