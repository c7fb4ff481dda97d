import math

import numpy as np
import pytest
import torch
from make_batch import by_token, make_batch, make_episodes, make_gaps, take_rows

from workbench import loss
from workbench.errors import WorkbenchError


@pytest.fixture
def tokens():
    """Log-probs whose ratios reach well past both clips and the dual clip, and advantages of both signs and zero."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(6, 40, generator=generator, dtype=torch.float64) - 2
    logp = (old + 1.2 * torch.randn(6, 40, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    advantages[:, ::7] = 0
    reference = logp.detach() + 2 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    return logp, old, advantages, reference


def by_hand(logp, old, advantage, low, high, dual):
    rho = math.exp(logp - old)
    value = max(-advantage * rho, -advantage * min(max(rho, 1 - low), 1 + high))
    return min(-dual * advantage, value) if advantage < 0 and dual is not None else value


CLIPS = [(0.2, 0.2, 3.0), (0.2, 0.28, None), (0.1, 0.4, 2.0)]


@pytest.mark.parametrize("clips", CLIPS)
def test_surrogate_is_the_formula_and_its_gradient_the_autograd_one(tokens, clips):
    logp, old, advantages, _ = tokens
    got = loss.surrogate(logp, old, advantages, *clips)
    flat = zip(*(x.detach().flatten().tolist() for x in (logp, old, advantages)), strict=True)
    np.testing.assert_allclose(got.detach().flatten(), [by_hand(*x, *clips) for x in flat], atol=1e-12)
    want = torch.autograd.grad(got.sum(), logp)[0]
    gradient = loss.surrogate_gradient(logp.detach(), old, advantages, *clips)
    torch.testing.assert_close(gradient, want)
    held = (want == 0) & (advantages != 0)
    assert bool(held.any()) and bool((~held).any())


def test_kl_is_k3_bounded_by_value_with_its_gradient(tokens):
    logp, _, _, reference = tokens
    got = loss.kl_k3(logp, reference)
    d = (reference - logp).detach()
    torch.testing.assert_close(got.detach(), (d.exp() - d - 1).clamp(max=10))
    assert bool((got >= 0).all()) and bool((got == 10).any())
    want = torch.autograd.grad(got.sum(), logp)[0]
    torch.testing.assert_close(loss.kl_k3_gradient(logp.detach(), reference), want)


@pytest.mark.parametrize("jump", [200.0, -200.0])
def test_a_huge_jump_of_the_log_prob_stays_finite(jump):
    logp = torch.tensor([-250.0 + jump, -250.0], requires_grad=True)
    old, advantages = torch.full((2,), -250.0), torch.tensor([1.0, -1.0])
    for advantage, dual in ((advantages, 3.0), (-advantages, 3.0), (advantages, None), (-advantages, None)):
        total = loss.surrogate(logp, old, advantage, dual_clip=dual) + loss.kl_k3(logp, old)
        gradient = torch.autograd.grad(total.sum(), logp)[0]
        assert bool(torch.isfinite(total).all()) and bool(torch.isfinite(gradient).all())
        closed = loss.surrogate_gradient(logp.detach(), old, advantage, dual_clip=dual)
        torch.testing.assert_close(closed + loss.kl_k3_gradient(logp.detach(), old), gradient)


@pytest.fixture
def batches():
    episodes = make_episodes()
    gaps = make_gaps(episodes)
    return {layout: make_batch(episodes, gaps, layout) for layout in ("episode", "turn")}


def aggregated_by_hand(batch, per_token, how, max_tokens):
    turns = {}
    for (episode, turn, _), value in by_token(batch, per_token).items():
        turns.setdefault((episode, turn), []).append(value)
    episodes = [[v for (e, _), values in turns.items() if e == i for v in values] for i in range(len(batch.reward))]
    longest = max(map(len, episodes)) if max_tokens is None else max_tokens
    return {
        "episode_mean": np.mean([np.mean(v) for v in episodes]),
        "token_mean": np.mean(np.concatenate(episodes)),
        "turn_mean": np.mean([np.mean(v) for v in turns.values()]),
        "turn_sum": np.mean([np.sum(v) for v in turns.values()]),
        "token_sum_norm": sum(map(sum, episodes)) / (len(episodes) * longest),
    }[how]


@pytest.mark.parametrize("layout", ["episode", "turn"])
@pytest.mark.parametrize(
    ("how", "max_tokens"),
    [*((how, None) for how in loss.AGGREGATIONS), ("token_sum_norm", 50)],
)
def test_weights_are_the_aggregation_aggregated_by_hand(batches, layout, how, max_tokens):
    batch = batches[layout]
    per_token = batch.old_logprobs.square()
    got = (loss.token_weights(batch, how, max_tokens) * per_token).sum()
    assert float(got) == pytest.approx(aggregated_by_hand(batch, per_token, how, max_tokens), rel=1e-12)


def test_episode_mean_weighs_episodes_alike_in_both_layouts(batches):
    episodes = make_episodes()
    want = np.mean([np.mean(np.concatenate([t.logprobs for t in e.turns]).astype(float) ** 2) for e in episodes])
    for batch in batches.values():
        got = (loss.token_weights(batch) * batch.old_logprobs.square()).sum()
        assert float(got) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("how", loss.AGGREGATIONS)
def test_token_weights_agree_between_layouts(batches, how):
    one, other = (by_token(batch, loss.token_weights(batch, how)) for batch in batches.values())
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("how", loss.AGGREGATIONS)
@pytest.mark.parametrize("layout", ["episode", "turn"])
def test_repeated_rows_change_no_loss_and_micro_batches_add_up(batches, how, layout):
    batch = batches[layout]
    weights = loss.token_weights(batch, how)
    assert bool((weights >= 0).all()) and bool((weights[~batch.response_mask] == 0).all())
    want = float((weights * batch.old_logprobs.square()).sum())
    repeated = take_rows(batch, [1, 0, 0, *range(len(batch.input_ids)), 2])
    got = (loss.token_weights(repeated, how) * repeated.old_logprobs.square()).sum()
    assert float(got) == pytest.approx(want, rel=1e-12)
    for size in (1, 2, 5):
        per_token = batch.old_logprobs.square()
        parts = zip(weights.split(size), per_token.split(size), strict=True)
        assert float(sum((w * x).sum() for w, x in parts)) == pytest.approx(want, rel=1e-12)


def test_unknown_aggregation_names_the_nearest(batches):
    with pytest.raises(WorkbenchError, match="did you mean 'token_mean'"):
        loss.token_weights(batches["turn"], "tokenmean")
    with pytest.raises(WorkbenchError, match="must be positive"):
        loss.token_weights(batches["turn"], "token_sum_norm", 0)


CONFIGS = [
    loss.PolicyLossConfig(clip_high=0.24),
    loss.PolicyLossConfig(pg_coef=0.5, dual_clip=0),
    loss.PolicyLossConfig(clip_low=0.03, clip_high=0.04, ratio="turn", dual_clip=0),
    loss.PolicyLossConfig(clip_low=0.1, clip_high=0.1, ratio="row"),
]


@pytest.mark.parametrize("how", loss.AGGREGATIONS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.ratio)
def test_dloss_dlogp_is_the_autograd_gradient_of_the_loss(batches, how, config):
    batch = batches["episode"]
    generator = torch.Generator().manual_seed(2)
    moved = torch.randn(batch.old_logprobs.shape, generator=generator, dtype=torch.float64)
    logp = (batch.old_logprobs + 0.8 * moved).requires_grad_()
    reference = batch.old_logprobs + 0.3 * moved.flip(0)
    advantages = torch.where(batch.response_mask, moved.flip(1), 0)
    weights = loss.token_weights(batch, how)
    ratio_logp = loss.sequence_form(logp, batch.old_logprobs, batch.turn_index, config.ratio)
    per_token = config.pg_coef * loss.surrogate(ratio_logp, batch.old_logprobs, advantages, **config.clip)
    total = (weights * (per_token + 0.01 * loss.kl_k3(logp, reference))).sum()
    want = torch.autograd.grad(total, logp)[0]
    got = loss.dloss_dlogp(
        logp.detach(), batch.old_logprobs, advantages, weights, config, batch.turn_index, reference, kl_coef=0.01
    )
    torch.testing.assert_close(got, want)
    on_policy = loss.dloss_dlogp(
        batch.old_logprobs, batch.old_logprobs, advantages, weights, config, batch.turn_index
    )
    torch.testing.assert_close(on_policy, -config.pg_coef * weights * advantages)


def test_a_sequence_ratio_without_its_turns_is_refused(batches):
    logp, config = batches["episode"].old_logprobs, loss.PolicyLossConfig(ratio="turn")
    for call in (lambda: loss.dloss_dlogp(logp, logp, logp, logp, config),
                 lambda: loss.ratio_metrics(logp, logp, logp < 0, logp, config)):  # fmt: skip
        with pytest.raises(WorkbenchError, match="per turn needs turn_index"):
            call()


@pytest.mark.parametrize("per", ["turn", "row"])
def test_sequence_form_has_the_mean_ratio_and_its_gradient(batches, per):
    batch = batches["episode"]
    noise = torch.randn(batch.old_logprobs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logp = (batch.old_logprobs + 0.3 * noise).requires_grad_()
    got = loss.ratio(loss.sequence_form(logp, batch.old_logprobs, batch.turn_index, per), batch.old_logprobs)
    gradient = torch.autograd.grad(got[batch.response_mask].sum(), logp)[0]
    for b in range(len(logp)):
        turns = batch.turn_index[b].unique().tolist() if per == "turn" else [None]
        for k in turns:
            own = batch.response_mask[b] if k is None else batch.turn_index[b] == k
            if k == -1:
                continue
            s = (logp - batch.old_logprobs)[b][own].mean().exp().detach()
            torch.testing.assert_close(got[b][own].detach(), s.expand(int(own.sum())))
            torch.testing.assert_close(gradient[b][own], s.expand(int(own.sum())))
    assert bool((gradient[~batch.response_mask] == 0).all())


def test_the_ratio_of_a_turn_is_the_same_in_both_layouts_and_that_of_tokens_untouched(batches):
    per_layout = []
    for batch in batches.values():
        teacher = loss.sequence_form(batch.teacher_logprobs, batch.old_logprobs, batch.turn_index)
        per_layout.append(by_token(batch, teacher - batch.old_logprobs))
        assert loss.sequence_form(teacher, batch.old_logprobs, batch.turn_index, "token") is teacher
    assert per_layout[0] == pytest.approx(per_layout[1], rel=1e-12)
    with pytest.raises(WorkbenchError, match="importance ratio"):
        loss.sequence_form(teacher, teacher, batch.turn_index, "sequence")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "tokens"}, "did you mean 'token'"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"clip_low": 1.5}, "clip_low must lie"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"pg_coef": -1.0}, "pg_coef must be finite"),
    ],
)
def test_an_impossible_policy_loss_is_refused(options, message):
    with pytest.raises(WorkbenchError, match=message):
        loss.PolicyLossConfig(**options)


def test_metrics_are_their_definitions(tokens):
    logp, old, advantages, _ = tokens
    mask = torch.ones_like(old, dtype=torch.bool)
    mask[:, 30:] = False
    got = loss.ratio_metrics(logp, old, mask, advantages)
    rho = (logp - old).detach()[mask].exp().numpy()
    gradient = loss.surrogate_gradient(logp.detach(), old, advantages)[mask]
    want = {
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "ratio_min": rho.min(),
        "chi2": (rho**2).mean() - 1,
        "approx_kl": (rho - 1 - np.log(rho)).mean(),
        "clip_fraction": float(((gradient == 0) & (advantages[mask] != 0)).double().mean()),
    }
    assert got == pytest.approx(want)
    same = loss.ratio_metrics(old, old, mask, advantages)
    assert same["chi2"] == same["approx_kl"] == same["clip_fraction"] == 0 and same["ratio_max"] == 1
    with pytest.raises(WorkbenchError, match="mask is empty"):
        loss.ratio_metrics(logp, old, mask & False, advantages)
