"""V0.5 (arXiv 2603.10848): a value model's guess as the baseline of a few rollouts, unless they contradict it.

Formulas as quoted by public write-ups of the paper; neither its full text nor any code was available. Rewards and
priors lie in [-1, 1], so that a reward's variance is at most 1 and the mean of k rollouts has one of at most 1/k.

The weight is a plug-in estimate: with the true bias and variance the fused baseline is never worse than either part,
with the estimated ones it is worse than the plain mean where the prior is off by about one deviation or more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError
from ..records import Batch, Credit


@dataclass(frozen=True)
class V05Config:
    first: int = 4  # rollouts that every task gets
    most: int = 16  # rollouts that no task exceeds
    cost: float = 0.0039  # of one more rollout, in squared reward; 1/256 stops at 16 whatever the prior
    dynamic: bool = True  # False gives every task the same number, and changes the baseline alone

    def __post_init__(self):
        if not 1 <= self.first <= self.most:
            raise WorkbenchError(f"V0.5: first and most must be 1 <= first <= most, got {self.first} and {self.most}")
        if not 0 <= self.cost < float("inf"):
            raise WorkbenchError(f"V0.5: cost must be finite and at least 0, got {self.cost}")


@dataclass(frozen=True)
class Fusion:
    """bias2: estimated squared error of the prior; weight of the empirical mean; baseline; error: its mean square."""

    bias2: Tensor
    weight: Tensor
    baseline: Tensor
    error: Tensor


def prior_from_rate(rate: Tensor) -> Tensor:
    """Success rates in [0, 1] -> priors on the scale of rewards in {-1, 1}. Raises WorkbenchError on other rates."""
    within = (rate >= 0) & (rate <= 1)
    if not bool(within.all()):
        raise WorkbenchError(f"V0.5: a success rate must lie in [0, 1], got {float(rate[~within][0])}")
    return 2 * rate - 1


def _within(values: Tensor, what: str) -> None:
    if not bool((values.abs() <= 1).all()):
        raise WorkbenchError(f"V0.5: {what} must lie in [-1, 1], got {float(values[~(values.abs() <= 1)][0])}")


def fuse(prior: Tensor, mean: Tensor, count: Tensor) -> Fusion:
    """Prior, mean reward and number of rollouts of each task, of one shape -> Fusion of that shape.

    bias2 = max(0, (mean - prior)^2 - 1/k), weight = bias2 / (bias2 + 1/k). Within one deviation, |mean - prior| <=
    1/sqrt(k), the baseline is the prior alone. Raises WorkbenchError on values outside [-1, 1] or a task without
    rollouts.
    """
    _within(prior, "a prior")
    _within(mean, "a mean reward")
    if not bool((count >= 1).all()):
        raise WorkbenchError("V0.5: every task needs at least one rollout")
    noise = 1 / count.to(mean.dtype)
    bias2 = ((mean - prior).square() - noise).clamp(min=0)
    weight = bias2 / (bias2 + noise)
    return Fusion(bias2, weight, weight * mean + (1 - weight) * prior, weight * noise)


def expected_drop(bias2: Tensor, count: Tensor) -> Tensor:
    """How much one more rollout lowers the baseline's expected squared error, were the estimated bias true.

    The error with k rollouts is bias2 / (k bias2 + 1).
    """
    inverse = 1 / bias2
    return 1 / ((count + inverse) * (count + 1 + inverse))


def wants_more(bias2: Tensor, count: Tensor, config: V05Config = V05Config()) -> Tensor:
    """Bool of the same shape: whether a task gets another rollout. The rule looks one step ahead: it does while the
    expected drop exceeds the cost, and always up to `first`, never beyond `most`."""
    worth = expected_drop(bias2, count) > config.cost
    return (count < config.first) | ((count < config.most) & worth)


def next_wave(
    prior: Tensor, mean: Tensor, count: Tensor, left: int, config: V05Config = V05Config()
) -> tuple[list[int], list[str]]:
    """Prior, mean reward and rollouts so far of each of M tasks -> who gets one more, and (M,) why the others do not.

    At most `left` tasks get one, those whose expected error drops most, of equals the first. Why: "" for those that
    do, "most" at the most rollouts a task may have, "cost" where the drop is not worth it, "budget" where it is but
    none were left. Raises WorkbenchError as `fuse`.
    """
    bias2 = fuse(prior, mean, count).bias2
    wants = wants_more(bias2, count, config)
    # Those below the first rollouts come before all others.
    drop = expected_drop(bias2, count).masked_fill(count < config.first, float("inf"))
    ranked = [i for i in drop.sort(descending=True, stable=True).indices.tolist() if wants[i]]
    chosen = set(ranked[: max(left, 0)])
    why = [
        "" if i in chosen else "budget" if wants[i] else "most" if count[i] >= config.most else "cost"
        for i in range(len(count))
    ]
    return sorted(chosen), why


def advantage(rewards: Tensor, groups: Tensor, prior: Tensor) -> tuple[Tensor, Fusion]:
    """(N,) rewards in [-1, 1], group labels and priors, equal within a group -> (N,) reward less the fused baseline.

    Also the Fusion of the groups, in order of their labels. Nothing divides by a deviation: whether the paper does is
    not known. Raises WorkbenchError as `fuse`, on shapes that differ, or where a group has several priors.
    """
    if not rewards.shape == groups.shape == prior.shape or rewards.dim() != 1:
        raise WorkbenchError(
            f"V0.5: rewards {tuple(rewards.shape)}, groups {tuple(groups.shape)} and priors {tuple(prior.shape)} "
            "must be (N,) all"
        )
    rewards = rewards if rewards.is_floating_point() else rewards.to(prior.dtype)
    _within(rewards, "a reward")
    labels, index = torch.unique(groups, return_inverse=True)
    zeros = rewards.new_zeros(len(labels))
    count = zeros.index_add(0, index, torch.ones_like(rewards))
    of_group = zeros.index_copy(0, index, prior.to(rewards.dtype))
    if not torch.equal(of_group[index], prior.to(rewards.dtype)):
        raise WorkbenchError("V0.5: rollouts of one group must have one prior")
    fused = fuse(of_group, zeros.index_add(0, index, rewards) / count, count)
    return rewards - fused.baseline[index], fused


def credit(batch: Batch, config: V05Config = V05Config()) -> Credit:
    """Every sampled token of a trajectory gets its outcome, as -1 or 1, less its group's fused baseline.

    The prior of a group is `batch.prior_rate`; groups may be of any size, one included. Raises WorkbenchError where the
    batch has no prior rates, or as `advantage`.
    """
    if batch.prior_rate is None:
        raise WorkbenchError("V0.5: the batch has no prior_rate, the success rate expected of each episode's task")
    signed = prior_from_rate(batch.outcome.to(batch.prior_rate.dtype))
    values, _ = advantage(signed, batch.group_index, prior_from_rate(batch.prior_rate))
    turns = torch.where(batch.turn_mask, values.to(batch.reward.dtype)[:, None], 0)
    return Credit(batch.to_tokens(turns), {"turn_advantage": turns})
