"""CAST (arXiv 2607.25308): an exact solver's judgement of every turn, added to the outcome's advantage.

The paper's text was not read; the formulas are those of the released code and its README (github Wloner0809/CAST,
rllm/trainer/verl/oracle_advantage_mapping.py). alpha is .1 as in its launch scripts; the mapping's own default is .3.

A solver advantage is Q - V + 1 at a cost of 1 an action: actions to the goal before the turn, less those after it.

Over a limit the released solvers fall back on searches that are not exact, or a value network. Here an episode of which
a state is unsolved keeps the outcome's advantage alone, in every turn, and its turns do not count in the batch's root
mean square. It stays in its group, as leaving it out would shift the mean that the others are compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import WorkbenchError
from ..records import Batch, Credit, Episode
from . import grpo
from .grpo import GRPOConfig, group_advantage, turn_advantages

FLOOR = 1e-6  # a group whose rewards deviate by less has no outcome advantage
OUTCOME = GRPOConfig(eps=0.0)


@dataclass(frozen=True)
class CASTConfig:
    alpha: float = 0.1  # weight of the normalised solver advantage; 0 is GRPO
    eps: float = 1e-8  # added to the batch's root mean square
    grpo: GRPOConfig = OUTCOME  # the outcome advantage: sample deviation, nothing added to it

    def __post_init__(self):
        for name in ("alpha", "eps"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise WorkbenchError(f"CAST: {name} must be finite and at least 0, got {getattr(self, name)}")


def _distances(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    before, after = torch.broadcast_tensors(before, after)
    for name, value in (("before", before), ("after", after)):
        if not bool((value >= 0).all()):
            raise WorkbenchError(f"CAST: distances {name} a turn must be at least 0, inf where no win is left")
    return before, after


def solver_advantage(before: Tensor, after: Tensor) -> Tensor:
    """Fewest actions to a win before and after each turn, inf for a deadlock -> solver advantages of the same shape.

    before - after: 1 for progress, 0 for a wasted action, negative for a harmful one. A turn that enters a deadlock
    costs all of `before`; in a deadlock every turn is worth 0. `after` may be an expectation over random transitions.
    For Sokoban and Rush Hour. Raises WorkbenchError on a distance that is negative or not a number.
    """
    before, after = _distances(before, after)
    change = torch.where(torch.isinf(after), -before, before - after)
    return torch.where(torch.isinf(before), 0, change)


def reveal_advantage(before: Tensor, after: Tensor, won: Tensor, lost: Tensor, valid: Tensor, safe: Tensor) -> Tensor:
    """Minesweeper: reveals a solver still needs before and after each turn, inf where it would have to guess and die.

    won, lost (a mine was hit) and valid: bool, same shape; safe: safe cells of the board. A win is worth `before`, or
    all safe cells where the solver had no way left; a mine costs `before`, or 0 there; a turn that finds a way again is
    worth `after`; an invalid action 0; else as `solver_advantage`. Every safe cell that the player has flagged adds 1
    to a distance, which is the caller's to count. Raises WorkbenchError as `solver_advantage`, and where a turn is both
    won and lost.
    """
    before, after = _distances(before, after)
    if bool((won & lost).any()):
        raise WorkbenchError("CAST: a turn is both won and lost")
    stuck = torch.isinf(before)
    value = torch.where(stuck & torch.isfinite(after), after, solver_advantage(before, after))
    value = torch.where(lost, torch.where(stuck, 0, -before), value)
    value = torch.where(won, torch.where(stuck, safe.to(before.dtype), before), value)
    return torch.where(valid, value, 0)


def normalise(solver: Tensor, turn_mask: Tensor, eps: float = 1e-8) -> tuple[Tensor, Tensor]:
    """(E,K) solver advantages -> asinh(x) / (rms + eps), 0 off the mask; and the root mean square of asinh, a scalar.

    It runs over every turn of the batch, zeros included, so a batch of mostly wasted turns makes the others large.
    Raises WorkbenchError on a shape that does not fit, or a turn whose advantage is not finite.
    """
    if solver.shape != turn_mask.shape or solver.dim() != 2:
        raise WorkbenchError(
            f"CAST: solver advantages {tuple(solver.shape)} and turns {tuple(turn_mask.shape)} must be (E,K) both"
        )
    if not bool(torch.isfinite(solver[turn_mask]).all()):
        raise WorkbenchError("CAST: a turn's solver advantage is not finite; a deadlock costs the distance before it")
    squashed = torch.asinh(torch.where(turn_mask, solver, 0))
    rms = (squashed.square().sum() / turn_mask.sum().clamp(min=1)).sqrt()
    return squashed / (rms + eps), rms


def outcome_advantage(rewards: Tensor, groups: Tensor, config: GRPOConfig = OUTCOME) -> Tensor:
    """(E,) rewards and group labels -> (E,) z-scores; 0 in groups of one and where the deviation is under FLOOR."""
    options = {"eps": config.eps, "ddof": config.ddof}
    scaled = group_advantage(rewards, groups, std=config.std, **options)
    return _floored(scaled, group_advantage(rewards, groups, std=False, **options))


def _floored(scaled: Tensor, centred: Tensor) -> Tensor:
    return torch.where(centred.abs() < FLOOR * scaled.abs(), 0, scaled)


def combine(solver: Tensor, turn_mask: Tensor, outcome: Tensor, config: CASTConfig = CASTConfig()) -> dict[str, Tensor]:
    """Solver advantages (E,K) and outcome advantages (E,) or (E,K) -> tensors by name, (E,K) and 0 off the mask.

    solver_share: alpha times the normalised solver advantage; turn_advantage: outcome plus that. And rms, a scalar.
    A turn that the solver calls wasted keeps the plain outcome advantage. Raises WorkbenchError as `normalise`.
    """
    share, rms = normalise(solver, turn_mask, config.eps)
    outcome = outcome[:, None] if outcome.dim() == 1 else outcome
    share = (config.alpha * share).to(outcome.dtype)
    return {"solver_share": share, "turn_advantage": torch.where(turn_mask, outcome + share, 0), "rms": rms}


def solver_advantages(episodes: Sequence[Episode]) -> Tensor:
    """(E,K) float64 solver advantages of the episodes' turns, 0 where there is no turn.

    NaN in every turn of an episode of which one has none: a part of an episode is not credited as if it were all.
    """
    table = torch.zeros(len(episodes), max(len(e.turns) for e in episodes), dtype=torch.float64)
    for e, episode in enumerate(episodes):
        values = [turn.solver_advantage for turn in episode.turns]
        known = all(value is not None for value in values)
        table[e, : len(values)] = torch.tensor(values if known else torch.nan, dtype=torch.float64)
    return table


def credit(batch: Batch, config: CASTConfig = CASTConfig()) -> Credit:
    """Every sampled token of a turn gets the outcome's advantage plus the turn's share of the solver's.

    Reads `batch.solver_advantages`; a turn where it is NaN keeps the outcome's advantage and counts in no mean. Turn
    boundaries are the batch's, never guessed from values. At alpha 0 it is `grpo.credit` with the same configuration,
    and no solver is needed. Raises WorkbenchError where the batch has no solver advantages, and as `normalise`.
    """
    if config.alpha == 0:
        return grpo.credit(batch, config.grpo)
    solver = batch.solver_advantages
    if solver is None:
        raise WorkbenchError("CAST: the batch has no solver advantages; they are recorded while an episode is played")
    centred = turn_advantages(batch, replace(config.grpo, std=False))
    outcome = _floored(turn_advantages(batch, config.grpo), centred)
    share = combine(solver, batch.turn_mask & ~solver.isnan(), outcome, config)["solver_share"]
    advantage = torch.where(batch.turn_mask, outcome + share, 0)
    return Credit(batch.to_tokens(advantage), {"solver_share": share, "turn_advantage": advantage})
