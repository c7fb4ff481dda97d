"""A world small enough that the truth is known: a walk on a line, and the ideal teacher, which is told of the success.

An episode takes a fixed number of steps of +1 or -1 from 0 and succeeds where it ends at the goal or higher. Every
value is exact, by dynamic programming. The teacher is the policy conditioned on success, pi+(a|s) = pi(a|s) Q(s,a) /
V(s), so a turn's evidence is log Q/V: what AgentOPSD (arXiv 2608.05987, App. A.1) assumes of a self-teacher.

Scope: an action determines the next state, Q(s_k, a_k) = V(s_{k+1}). Only so is the belief V(s_0) exp(e_1 + .. + e_k)
the value of the state reached, and its revision the true advantage Q - V; where the world itself is random, what is
observed carries news that no evidence sees. And a language model that reads a skill text need not be such a teacher.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import WorkbenchError

DOWN, UP = 0, 1


@dataclass(frozen=True, eq=False)
class Walk:
    """up (S, 2S+1): probability of a step up at time t from x, which is column x + S; goal: lowest x that succeeds."""

    up: Tensor
    goal: int

    def __post_init__(self):
        steps = self.up.shape[0]
        if self.up.dim() != 2 or self.up.shape[1] != 2 * steps + 1 or not bool(((self.up > 0) & (self.up < 1)).all()):
            raise WorkbenchError(
                f"walk: up must be (S, 2S + 1) probabilities strictly between 0 and 1, got shape {tuple(self.up.shape)}"
            )
        if not -steps < self.goal <= steps:
            raise WorkbenchError(f"walk: goal must lie in {1 - steps}..{steps}, got {self.goal}")

    @property
    def steps(self) -> int:
        return self.up.shape[0]


def random_walk(goal: int, steps: int = 14, seed: int = 0, low: float = 0.1, high: float = 0.9) -> Walk:
    """A policy drawn at random: in every state the probability of a step up is uniform in [low, high]."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(steps, 2 * steps + 1, generator=generator, dtype=torch.float64)
    return Walk(low + (high - low) * uniform, goal)


def policy(walk: Walk) -> Tensor:
    """(S, 2S+1, 2) probability of DOWN and UP."""
    return torch.stack([1 - walk.up, walk.up], -1)


def state_values(walk: Walk) -> Tensor:
    """(S+1, 2S+1) V: probability of success from each state; the last row is 0 or 1."""
    values = [(torch.arange(-walk.steps, walk.steps + 1) >= walk.goal).to(walk.up.dtype)]
    for up in walk.up.flip(0):
        lower, higher = _neighbours(values[0])
        values.insert(0, (1 - up) * lower + up * higher)
    return torch.stack(values)


def action_values(walk: Walk) -> Tensor:
    """(S, 2S+1, 2) Q: probability of success after DOWN and after UP."""
    return torch.stack(_neighbours(state_values(walk)[1:]), -1)


def _neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values one cell down and one up. They wrap around at the ends, which no walk leaves: it takes S steps to
    get there."""
    return values.roll(1, -1), values.roll(-1, -1)


def success_rate(walk: Walk) -> float:
    """V(s_0)."""
    return float(state_values(walk)[0, walk.steps])


def with_success_rate(walk: Walk, rate: float) -> Walk:
    """The walk with the log-odds of every step up shifted by one amount, so that V(s_0) = rate to nine digits."""
    if not 0 < rate < 1:
        raise WorkbenchError(f"walk: a success rate must lie strictly between 0 and 1, got {rate}")
    odds, low, high = torch.logit(walk.up), -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        moved = Walk(torch.sigmoid(odds + middle).clamp(1e-12, 1 - 1e-12), walk.goal)
        low, high = (low, middle) if success_rate(moved) > rate else (middle, high)
    return moved


def teacher(walk: Walk) -> Tensor:
    """(S, 2S+1, 2) the policy conditioned on success; the policy itself where success is out of reach."""
    value = state_values(walk)[:-1, :, None]
    return torch.where(value > 0, policy(walk) * action_values(walk) / value.clamp(min=1e-300), policy(walk))


@dataclass(frozen=True, eq=False)
class Trajectories:
    """E episodes of K = S turns, all of one task. evidence (E,K): teacher minus student log-prob, nats; turn_mask (E,K)
    bool; prior (E,): the sample's success rate, which is what a group of rollouts knows; advantage (E,K): the true
    Q - V; outcome (E,) in {0, 1}; actions (E,K) DOWN or UP; logprobs (E,K): of the actions under the policy."""

    evidence: Tensor
    turn_mask: Tensor
    prior: Tensor
    advantage: Tensor
    outcome: Tensor
    actions: Tensor
    logprobs: Tensor


def sample(walk: Walk, episodes: int, seed: int = 0, cut: float = 8.0) -> Trajectories:
    """Episodes of the policy. Evidence is cut at +-cut nats: a step after which success is out of reach has -inf."""
    if episodes < 1:
        raise WorkbenchError(f"walk: at least one episode must be sampled, got {episodes}")
    generator = torch.Generator().manual_seed(seed)
    chance, values, quality = policy(walk), state_values(walk), action_values(walk)
    evidence = (teacher(walk) / chance).log().clamp(-cut, cut)
    column = torch.full((episodes,), walk.steps)
    found: dict[str, list[Tensor]] = {"evidence": [], "advantage": [], "actions": [], "logprobs": []}
    for t in range(walk.steps):
        action = (torch.rand(episodes, generator=generator, dtype=torch.float64) < walk.up[t, column]).long()
        found["evidence"].append(evidence[t, column, action])
        found["advantage"].append(quality[t, column, action] - values[t, column])
        found["actions"].append(action)
        found["logprobs"].append(chance[t, column, action].log())
        column = column + 2 * action - 1
    outcome = values[-1, column]
    table = {name: torch.stack(columns, 1) for name, columns in found.items()}
    mask = torch.ones_like(table["actions"], dtype=torch.bool)
    return Trajectories(turn_mask=mask, prior=outcome.mean().expand(episodes).clone(), outcome=outcome, **table)


def posterior_revisions(evidence: Tensor, value: float) -> Tensor:
    """(E,K) evidence and the value of the first state -> revisions of the exact belief, value exp(e_1 + .. + e_k)."""
    beliefs = value * torch.nn.functional.pad(evidence.cumsum(1), (1, 0)).exp()
    return beliefs.diff(dim=1)


def _ranks(values: Tensor, mask: Tensor) -> Tensor:
    """(E,K) ranks within each row's own masked entries, ties averaged."""
    one, other = values[:, :, None], values[:, None, :]
    beside = mask[:, None, :]
    return ((one > other) & beside).sum(-1) + (((one == other) & beside).sum(-1) + 1) / 2


def rank_correlation(one: Tensor, other: Tensor, mask: Tensor, digits: int = 12) -> Tensor:
    """(E,) Spearman's correlation of two (E,K) tables within each episode; nan where either is constant there.

    Values are rounded to `digits` places first, so that equal ones that differ by rounding tie.
    """
    centred = []
    for values in (one, other):
        ranks = _ranks(values.double().round(decimals=digits), mask)
        mean = torch.where(mask, ranks, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        centred.append(torch.where(mask, ranks - mean, 0))
    a, b = centred
    return (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()
