"""The tensors on which our losses and another library's are compared, and our side of the comparison."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from make_batch import make_batch, make_episodes
from torch import Tensor

from workbench.loss import PolicyLossConfig, dloss_dlogp, kl_k3, sequence_form, surrogate, token_weights
from workbench.records import Batch

# Two groups of four; the third episode is one token long.
SPEC = (
    (0, 1, (3, 1, 4, 2)),
    (0, 0, (2, 5)),
    (0, 1, (1,)),
    (0, 0, (4, 2, 2, 3, 1, 2)),
    (1, 1, (2, 2, 2)),
    (1, 1, (3, 3)),
    (1, 0, (2, 1, 2)),
    (1, 0, (6,)),
)
REWARDS = (1.0, 0.0, 0.9, 0.25, 1.0, 1.0, -0.5, 0.1)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-7}


@dataclass(frozen=True, eq=False)
class Case:
    """A batch, log-probs (B,T) that have moved from it, a KL reference (B,T), and one advantage a row (B,)."""

    batch: Batch
    logp: Tensor
    reference: Tensor
    row_advantages: Tensor

    layout: str

    @property
    def advantages(self) -> Tensor:
        """(B,T), 0 off the mask."""
        return torch.where(self.batch.response_mask, self.row_advantages[:, None], 0)


def make_case(layout: str = "episode", dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """Ratios on both sides of every clip, and advantages of both signs."""
    batch = make_batch(make_episodes(SPEC, seed=seed), layout=layout)
    batch = batch.with_(
        old_logprobs=batch.old_logprobs.to(dtype), reward=torch.tensor(REWARDS, dtype=dtype), teacher_logprobs=None
    )
    generator = torch.Generator().manual_seed(seed)
    mask = batch.response_mask

    def moved(by: float) -> Tensor:
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64).mul(by).to(dtype)

    logp = torch.where(mask, batch.old_logprobs + moved(0.6), 0)
    reference = torch.where(mask, logp + moved(0.7), 0)
    row_advantages = torch.randn(len(mask), generator=generator, dtype=torch.float64).to(dtype)
    row_advantages[0] = -1.5
    logp[0] += 0.6 * mask[0]
    first = int(mask[0].int().argmax())
    logp[0, first] = batch.old_logprobs[0, first] + 1.4
    return Case(batch, logp, reference, row_advantages, layout)


def row_aggregation(how: str, case: Case, width: int) -> dict[str, str | float]:
    """Our name, and max_tokens, for what libraries that know rows alone do with them.

    mean, sum: of a row's tokens, then mean over rows; token_mean: mean over all tokens; sum_norm: sum / width, then
    mean over rows. Where rows are turns we divide by episodes still, so the width is taken times rows an episode.
    """
    if how == "token_mean":
        return {"aggregation": "token_mean"}
    if how == "mean":
        return {"aggregation": "episode_mean" if case.layout == "episode" else "turn_mean"}
    if how == "sum" and case.layout == "turn":
        return {"aggregation": "turn_sum"}
    width = width if how == "sum_norm" else 1
    return {"aggregation": "token_sum_norm", "max_tokens": width * len(case.logp) / len(case.batch.group_index)}


def our_loss(
    case: Case,
    config: PolicyLossConfig,
    aggregation: str,
    advantages: Tensor | None = None,
    kl_coef: float = 0.0,
    max_tokens: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its gradient (B,T) for the log-probs by autograd, and the same in closed form."""
    batch, old = case.batch, case.batch.old_logprobs
    advantages = case.advantages if advantages is None else advantages
    weights = token_weights(batch, aggregation, max_tokens)

    def loss(logp: Tensor) -> Tensor:
        per_token = surrogate(sequence_form(logp, old, batch.turn_index, config.ratio), old, advantages, **config.clip)
        return (weights * (per_token + kl_coef * kl_k3(logp, case.reference))).sum()

    closed = dloss_dlogp(case.logp, old, advantages, weights, config, batch.turn_index, case.reference, kl_coef)
    return *value_and_gradient(loss, case.logp), closed


def value_and_gradient(loss: Callable[[Tensor], Tensor], logp: Tensor) -> tuple[Tensor, Tensor]:
    logp = logp.clone().requires_grad_()
    value = loss(logp)
    return value.detach(), torch.autograd.grad(value, logp)[0]


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal to the tolerance of their dtype, relative to the largest value."""
    assert ours.dtype == theirs.dtype, f"{ours.dtype} against {theirs.dtype}"
    scale = float(theirs.abs().max())
    assert scale > 0, "nothing to compare: all zero"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[theirs.dtype] * scale)


def assert_same_loss(ours: tuple[Tensor, Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Value and gradient of `our_loss`, the gradient by autograd and in closed form, against theirs."""
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
    assert_same(ours[2], theirs[1])
