"""GiGPO (arXiv 2505.10978): the group advantage plus, at states that several turns met, how each turn fared from there.

Equation numbers are those the released code names (github langfengQ/verl-agent, gigpo/core_gigpo.py, read in the copies
of ZethWang/AgentOPSD, jinyangwu/OPID and langfengQ/DrMAS); the paper's text was not read. Where we depart from it:

* its episode part runs over turn rows, so long trajectories weigh more, and keeps the raw reward of a group of one;
  ours is `grpo`, 0 there, with `GRPOConfig(per="turn")` for rows;
* rows that were copied to fill a batch count again in both of its parts; a turn counts once here;
* its one mode sets both parts; here `mode` is the step part's and `grpo.std` the episode part's. Its ALFWorld and
  Search scripts divide both by the deviation, as the defaults here do, its WebShop scripts neither;
* a step group of equal returns is exactly 0; there, a rounding residue divided by eps;
* clusters of similar states are built from a group's distinct texts in alphabetical order, so that the order of rows
  never matters; there, in the order of the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown
from ..records import Batch, Credit, Episode
from .grpo import GRPOConfig, group_advantage, turn_advantages


@dataclass(frozen=True)
class GiGPOConfig:
    weight: float = 1.0  # of the step advantage beside the episode's; 0 is GRPO
    gamma: float = 0.95  # discount per turn of the return that steps are compared by
    mode: str = "mean_std_norm"  # step returns are centred, "mean_norm", and divided by the deviation, "mean_std_norm"
    grpo: GRPOConfig = field(default_factory=GRPOConfig)  # the episode advantage; its eps and ddof serve steps as well

    def __post_init__(self):
        if self.mode not in ("mean_norm", "mean_std_norm"):
            raise unknown("GiGPO mode", str(self.mode), ("mean_norm", "mean_std_norm"))
        if not 0 <= self.weight < float("inf"):
            raise WorkbenchError(f"GiGPO: weight must be finite and at least 0, got {self.weight}")
        if not 0 <= self.gamma <= 1:
            raise WorkbenchError(f"GiGPO: gamma must lie in [0, 1], got {self.gamma}")


def anchors(episodes: Sequence[Episode], similarity: float = 1.0) -> Tensor:
    """Label (E,K) long of the state each turn acted in, by its observation text; -1 where there is no turn.

    similarity 1: states are equal where their texts are. Below 1, each distinct text of a group, in alphabetical order,
    joins the first cluster whose first member is that similar (difflib's ratio); the released default is .95. States
    are equal inside a group only. Raises WorkbenchError where an episode has no observation texts at all.
    """
    if not 0 < similarity <= 1:
        raise WorkbenchError(f"anchors: similarity must lie in (0, 1], got {similarity}")
    if not episodes:
        raise WorkbenchError("anchors: no episodes to label")
    texts_of: dict[int, set[str]] = {}
    for e, episode in enumerate(episodes):
        texts = {turn.observation for turn in episode.turns}
        if not any(texts):
            raise WorkbenchError(f"anchors: episode {e} of {episode.task} has no observation texts to tell states by")
        texts_of.setdefault(episode.group, set()).update(texts)
    first_of = {group: _first_members(sorted(texts), similarity) for group, texts in texts_of.items()}
    labels = torch.full((len(episodes), max(len(e.turns) for e in episodes)), -1, dtype=torch.long)
    label_of: dict[tuple[int, str], int] = {}
    for e, episode in enumerate(episodes):
        for k, turn in enumerate(episode.turns):
            state = (episode.group, first_of[episode.group][turn.observation])
            labels[e, k] = label_of.setdefault(state, len(label_of))
    return labels


def _first_members(texts: Sequence[str], similarity: float) -> dict[str, str]:
    """The first member of the cluster of each text: the first that is similar enough, else the text itself."""
    if similarity == 1:
        return {text: text for text in texts}
    first_of, clusters = {}, []
    for text in texts:
        for first, matcher in clusters:
            matcher.set_seq1(text)
            # Each is an upper bound of the next and cheaper.
            if all(ratio() >= similarity for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
                first_of[text] = first
                break
        else:
            # A matcher keeps what it learnt of its second text.
            clusters.append((text, SequenceMatcher(None, "", text)))
            first_of[text] = text
    return first_of


def discounted_returns(rewards: Tensor, turn_mask: Tensor, gamma: float) -> Tensor:
    """(E,K) what each turn earned -> (E,K) `G_k = r_k + gamma G_{k+1}` (eq. 5) within each episode; 0 off the mask.

    Raises WorkbenchError on shapes that do not fit or a reward that is not finite.
    """
    if rewards.shape != turn_mask.shape or rewards.dim() != 2:
        raise WorkbenchError(
            f"discounted_returns: rewards {tuple(rewards.shape)} and mask {tuple(turn_mask.shape)} must be (E,K) both"
        )
    rewards = torch.where(turn_mask, rewards, 0)
    if not bool(torch.isfinite(rewards).all()):
        raise WorkbenchError("GiGPO: a turn's reward is not finite")
    returns, ahead = torch.empty_like(rewards), rewards.new_zeros(len(rewards))
    for k in range(rewards.shape[1] - 1, -1, -1):
        ahead = rewards[:, k] + gamma * ahead
        returns[:, k] = ahead
    return returns


def step_advantages(
    returns: Tensor, anchors: Tensor, groups: Tensor, *, mode: str, eps: float = 1e-6, ddof: int = 1
) -> Tensor:
    """(N,) returns against those of equal (group, anchor), each label (N,) -> (N,) (eq. 6-7).

    Centred, and divided by the deviation with mode="mean_std_norm"; exactly 0 for a state met once or whose returns are
    equal. Raises WorkbenchError on an unknown mode, on shapes that do not fit or a return that is not finite.
    """
    if mode not in ("mean_norm", "mean_std_norm"):
        raise unknown("GiGPO mode", str(mode), ("mean_norm", "mean_std_norm"))
    if not returns.shape == anchors.shape == groups.shape or returns.dim() != 1:
        raise WorkbenchError(
            f"step_advantages: returns {tuple(returns.shape)}, anchors {tuple(anchors.shape)} and groups "
            f"{tuple(groups.shape)} must be (N,) all"
        )
    if returns.numel() == 0:
        return returns.clone()
    states, state = torch.unique(anchors, return_inverse=True)
    group = torch.unique(groups, return_inverse=True)[1]
    return group_advantage(returns, group * len(states) + state, std=mode == "mean_std_norm", eps=eps, ddof=ddof)


def credit(batch: Batch, config: GiGPOConfig = GiGPOConfig()) -> Credit:
    """Every sampled token of a turn gets `A_episode + weight A_step` (eq. 8); of each turn step_return, step_advantage
    and turn_advantage. Raises WorkbenchError where the batch has no anchors or turn_rewards."""
    for name, hint in (("anchors", "label the states with gigpo.anchors"), ("turn_rewards", "state what turns earned")):
        if getattr(batch, name) is None:
            raise WorkbenchError(f"GiGPO: the batch has no {name}; {hint}")
    mask = batch.turn_mask
    # In double: what rounding alone sets apart in single precision is not small once divided by eps.
    returns = discounted_returns(batch.turn_rewards.double(), mask, config.gamma)
    groups = batch.group_index[:, None].expand(mask.shape)[mask]
    step = torch.zeros_like(returns)
    step[mask] = step_advantages(
        returns[mask], batch.anchors[mask], groups, mode=config.mode, eps=config.grpo.eps, ddof=config.grpo.ddof
    )
    episode = turn_advantages(batch, config.grpo)
    step = step.to(episode.dtype)
    turns = episode + config.weight * step
    table = {"step_return": returns.to(step.dtype), "step_advantage": step, "turn_advantage": turns}
    return Credit(batch.to_tokens(turns), table)
