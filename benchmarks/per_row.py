"""The credit rules as loops over rows and tokens, at their papers' settings: what benchmarks/credit.py compares with.

Each takes a batch in the episode layout, reads its tensors as lists, computes in float64 and gives advantages (B,T).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.records import Batch

Columns = dict[int, list[int]]
Values = dict[int, list[float]]


def rows(batch: Batch) -> Iterator[tuple[int, int, Columns]]:
    """Of each row its number, its episode, and the columns of each turn's tokens."""
    owners = batch.episode_index.tolist()
    for b in range(len(owners)):
        mask, turns = batch.response_mask[b].tolist(), batch.turn_index[b].tolist()
        columns: Columns = {}
        for t in range(len(mask)):
            if mask[t]:
                columns.setdefault(turns[t], []).append(t)
        yield b, owners[b], columns


def gaps(batch: Batch, b: int, columns: Columns) -> Values:
    """Teacher minus student log-prob of each turn's tokens in row b."""
    old, teacher = batch.old_logprobs[b].tolist(), batch.teacher_logprobs[b].tolist()
    gap = {k: [teacher[t] - old[t] for t in own] for k, own in columns.items()}
    if not all(math.isfinite(value) for values in gap.values() for value in values):
        raise ValueError(f"row {b}: a gap is not finite")
    return gap


def write(batch: Batch, columns: Columns, values: Values) -> list[float]:
    """One row of advantages from those of each turn's tokens."""
    row = [0.0] * batch.input_ids.shape[1]
    for k, own in columns.items():
        for t, value in zip(own, values[k], strict=True):
            row[t] = value
    return row


def constant(columns: Columns, turns: list[float]) -> Values:
    return {k: [turns[k]] * len(own) for k, own in columns.items()}


def members(labels: list) -> dict:
    out: dict = {}
    for i, label in enumerate(labels):
        out.setdefault(label, []).append(i)
    return out


def against_group(values: list[float], labels: list, std: bool = True) -> list[float]:
    """Each value less its group's mean, over the sample deviation; 0 where all are equal."""
    out = [0.0] * len(values)
    for same in members(labels).values():
        rewards = [values[i] for i in same]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1))
        for i in same:
            if max(rewards) > min(rewards):
                out[i] = (values[i] - mean) / (deviation + 1e-6 if std else 1.0)
    return out


def success_rates(outcomes: list[float], groups: list[int], eps: float = 1e-4) -> list[float]:
    out = [0.0] * len(outcomes)
    for same in members(groups).values():
        rate = sum(outcomes[i] for i in same) / len(same)
        for i in same:
            out[i] = min(max(rate, eps), 1 - eps)
    return out


def recursion(evidence: list[float], prior: float, advantage: float) -> list[float]:
    """AgentOPSD's reshaped advantages of one sequence of evidence."""
    base = math.log(prior / (1 - prior))
    total, before, revisions = 0.0, prior, []
    for value in evidence:
        total = 0.95 * total + value
        after = 1 / (1 + math.exp(-(base + total)))
        revisions.append(after - before)
        before = after
    mean = sum(revisions) / len(revisions)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in revisions) / len(revisions))
    sign = (advantage > 0) - (advantage < 0)
    out = []
    for revision in revisions:
        z = sign * (revision - mean) / (deviation + 1e-4)
        weight = min(max(1 + 0.2 * z, 0.8), 1.2)
        out.append(advantage * (0.5 + 0.5 * weight))
    return out


def agent_opsd(batch: Batch, by_token: bool = False) -> Tensor:
    groups = batch.group_index.tolist()
    advantages = against_group(batch.reward.tolist(), groups)
    priors = success_rates(batch.outcome.tolist(), groups)
    out = []
    for b, e, columns in rows(batch):
        gap = gaps(batch, b, columns)
        if by_token:
            values = {k: recursion(gap[k], priors[e], advantages[e]) for k in columns}
        else:
            evidence = [sum(gap[k]) for k in range(len(gap))]
            values = constant(columns, recursion(evidence, priors[e], advantages[e]))
        out.append(write(batch, columns, values))
    return torch.tensor(out)


def shaped(batch: Batch, by_step: bool) -> Tensor:
    """RLSD's token weights, divided by their mean in the turn for StepOPSD."""
    advantages = against_group(batch.reward.tolist(), batch.group_index.tolist())
    out = []
    for b, e, columns in rows(batch):
        a, values = advantages[e], {}
        sign = (a > 0) - (a < 0)
        for k, gap in gaps(batch, b, columns).items():
            weights = [min(max(math.exp(sign * value), 0.8), 1.2) for value in gap]
            mean = sum(weights) / len(weights) if by_step else 1.0
            values[k] = [a * (0.5 + 0.5 * weight / mean) for weight in weights]
        out.append(write(batch, columns, values))
    return torch.tensor(out)


def per_episode(batch: Batch, rule: str) -> Tensor:
    """GRPO, RLOO or REINFORCE++-baseline: one advantage a trajectory."""
    groups = batch.group_index.tolist()
    advantages = against_group(batch.reward.tolist(), groups, std=rule == "grpo")
    found = list(rows(batch))
    if rule == "rloo":
        for same in members(groups).values():
            for i in same:
                advantages[i] *= len(same) / max(len(same) - 1, 1)
    if rule == "reinforce_pp":
        tokens = [advantages[e] for _, e, columns in found for own in columns.values() for _ in own]
        mean = sum(tokens) / len(tokens)
        variance = sum((a - mean) ** 2 for a in tokens) / (len(tokens) - 1)
        advantages = [(a - mean) / math.sqrt(variance + 1e-8) for a in advantages]
    values = [{k: [advantages[e]] * len(own) for k, own in columns.items()} for _, e, columns in found]
    return torch.tensor([write(batch, columns, v) for (_, _, columns), v in zip(found, values, strict=True)])


def gigpo(batch: Batch) -> Tensor:
    groups = batch.group_index.tolist()
    advantages = against_group(batch.reward.tolist(), groups)
    found = list(rows(batch))
    anchors, earned = batch.anchors.tolist(), batch.turn_rewards.tolist()
    returns, states = [], []
    for _, e, columns in found:
        ahead, own = 0.0, []
        for k in reversed(range(len(columns))):
            ahead = earned[e][k] + 0.95 * ahead
            own.insert(0, ahead)
        returns += own
        states += [(groups[e], anchors[e][k]) for k in range(len(columns))]
    steps = iter(against_group(returns, states))
    out = []
    for _, e, columns in found:
        turns = [advantages[e] + next(steps) for _ in range(len(columns))]
        out.append(write(batch, columns, constant(columns, turns)))
    return torch.tensor(out)
