"""Turn, Episode and Batch: the only things that flow between rooms.

Tokens are the ids that were sampled, with the log-probs they were sampled at; text is kept beside them for reading
and is never tokenised again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import WorkbenchError
from .segments import Runs, runs_of, segment_sum, spread


def _ids(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32).reshape(-1)


@dataclass(frozen=True, eq=False)
class Turn:
    """One action of the policy.

    prompt_ids (P,) int32: every token in context when the response began; response_ids (L,) int32: the sampled
    tokens, end-of-turn token included when it was sampled; logprobs (L,) float32, nats, under the behaviour policy.
    observation: the environment's text this turn answers; action: the command the environment was given;
    valid: whether the environment accepted it; truncated: the response was cut by the token limit.
    solver_before, solver_after: fewest actions to a win before and after the turn, inf where none is left;
    solver_advantage: the turn's CAST advantage by those. None where no solver was asked, or it ran over its limit.
    Raises WorkbenchError where lengths differ, a turn has no tokens, a log-prob is positive or not finite, or a
    solver's value is impossible.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    observation: str = ""
    action: str = ""
    valid: bool = True
    reward: float = 0.0
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    solver_before: float | None = None
    solver_after: float | None = None
    solver_advantage: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "prompt_ids", _ids(self.prompt_ids))
        object.__setattr__(self, "response_ids", _ids(self.response_ids))
        object.__setattr__(self, "logprobs", np.asarray(self.logprobs, dtype=np.float32).reshape(-1))
        if len(self.response_ids) == 0 or len(self.prompt_ids) == 0:
            raise WorkbenchError("turn: prompt_ids and response_ids must each hold at least one token")
        if len(self.response_ids) != len(self.logprobs):
            raise WorkbenchError(
                f"turn: {len(self.response_ids)} response tokens but {len(self.logprobs)} log-probs; one each expected"
            )
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-4).any():
            raise WorkbenchError("turn: log-probs must be finite and at most 0")
        for name in ("solver_before", "solver_after"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise WorkbenchError(f"turn: {name} must be at least 0, or inf for a dead state, got {value}")
        if self.solver_advantage is not None and not math.isfinite(self.solver_advantage):
            raise WorkbenchError(f"turn: solver_advantage must be finite, got {self.solver_advantage}")


@dataclass(frozen=True, eq=False)
class Episode:
    """One played game. `outcome` is 1 for success else 0; `total_reward` is on the environment's own scale.

    group: episodes of one group started from the same task and seed and are compared with each other.
    stop_reason: "won", "lost", "max_turns", "invalid_actions" or "context_full".
    fidelity: "token" when ids and log-probs are the sampled ones, "text" when only text was recorded.
    """

    turns: tuple[Turn, ...]
    task: str
    group: int
    seed: int
    outcome: int
    total_reward: float
    stop_reason: str = ""
    kind: str = ""
    split: str = ""
    fidelity: str = "token"

    def __post_init__(self):
        object.__setattr__(self, "turns", tuple(self.turns))
        if self.outcome not in (0, 1):
            raise WorkbenchError(f"episode of {self.task}: outcome must be 0 or 1, got {self.outcome!r}")
        if not self.turns:
            raise WorkbenchError(f"episode of {self.task}: no turns")

    @property
    def contiguous(self) -> bool:
        """Whether each prompt extends the sequence before it, so that the episode is one row of tokens."""
        seen = np.empty(0, np.int32)
        for turn in self.turns:
            if len(turn.prompt_ids) < len(seen) or not np.array_equal(turn.prompt_ids[: len(seen)], seen):
                return False
            seen = np.concatenate([turn.prompt_ids, turn.response_ids])
        return True


def _is_logprob(values: Tensor) -> bool:
    """Whether all values are finite and at most 0, but for rounding. Reads them once and keeps no copy."""
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & (high <= 1e-3))


@dataclass(frozen=True, eq=False)
class Batch:
    """Right-padded rows of tokens, and the episodes they belong to. B rows, T columns, E episodes, K turns.

    input_ids (B,T) long; lengths (B,) long: tokens in a row, the rest is padding; response_mask (B,T) bool: sampled
    tokens; turn_index (B,T) long: turn of each sampled token, -1 elsewhere; episode_index (B,) long: episode of each
    row; group_index (E,), outcome (E,) in {0,1}, reward (E,): what the advantage compares; old_logprobs (B,T): of
    token t given all before it, under the policy that the update starts from; teacher_logprobs and
    reference_logprobs: the same tokens under the privileged teacher and the KL reference, or None. Off the mask they
    mean nothing; where something there is not finite or above 0, all of it becomes 0;
    entropy (B,T): of the policy at each sampled token, nats, or None; turn_rewards (E,K): what each turn earned, on the
    scale of reward, or None; anchors (E,K) long: label of the state each turn acted in, equal for equal states, or
    None; solver_advantages (E,K): of each turn by an exact solver, NaN where it has none, or None;
    prior_rate (E,): success rate that was expected of the episode's task before it was played, or None;
    sampled_logprobs (B,T): as the engine that sampled recorded them, where old_logprobs were scored anew, else None.
    Raises WorkbenchError where shapes, masks, indices or log-probs do not fit.
    """

    input_ids: Tensor
    lengths: Tensor
    response_mask: Tensor
    turn_index: Tensor
    episode_index: Tensor
    group_index: Tensor
    outcome: Tensor
    reward: Tensor
    old_logprobs: Tensor
    teacher_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    turn_rewards: Tensor | None = None
    anchors: Tensor | None = None
    solver_advantages: Tensor | None = None
    prior_rate: Tensor | None = None
    sampled_logprobs: Tensor | None = None

    def __post_init__(self):
        shape = self.input_ids.shape
        if len(shape) != 2 or 0 in shape or self.group_index.dim() != 1:
            raise WorkbenchError(
                f"batch: input_ids must be (B,T) and group_index (E,), got {tuple(shape)} and "
                f"{tuple(self.group_index.shape)}"
            )
        for name in ("lengths", "episode_index"):
            if getattr(self, name).shape != shape[:1]:
                raise WorkbenchError(f"batch: {name} must have one value for each of {shape[0]} rows")
        if bool((self.lengths > shape[1]).any()):
            raise WorkbenchError(f"batch: a length exceeds the {shape[1]} columns of input_ids")
        for name in (
            "response_mask",
            "turn_index",
            "old_logprobs",
            "teacher_logprobs",
            "reference_logprobs",
            "entropy",
            "sampled_logprobs",
        ):
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise WorkbenchError(f"batch: {name} has shape {tuple(value.shape)}, input_ids {tuple(shape)}")
        E = len(self.group_index)
        for name in ("outcome", "reward", "prior_rate"):
            value = getattr(self, name)
            if value is not None and value.shape != (E,):
                raise WorkbenchError(f"batch: {name} must have one value for each of {E} episodes")
        mask = self.response_mask
        if mask.dtype != torch.bool:
            raise WorkbenchError(f"batch: response_mask must be bool, got {mask.dtype}")
        if not torch.equal(mask, self.turn_index >= 0):
            raise WorkbenchError("batch: turn_index must be >= 0 exactly where response_mask is set")
        runs = self._runs
        sampled = runs.labels >= 0
        rows, columns, ends = (x[sampled] for x in (runs.rows, runs.columns, runs.columns + runs.lengths))
        filled = torch.zeros(shape[:1], dtype=torch.bool, device=mask.device).index_fill(0, rows, True)
        if not bool(filled.all()):
            raise WorkbenchError(f"batch: row {int((~filled).nonzero()[0])} has an empty response mask")
        if bool((ends > self.lengths[rows]).any()) or bool((columns == 0).any()):
            raise WorkbenchError("batch: response_mask covers padding or the first token, which has no context")
        if not bool(((self.episode_index >= 0) & (self.episode_index < E)).all()):
            raise WorkbenchError(f"batch: episode_index must lie in 0..{E - 1}")
        if not bool(((self.outcome == 0) | (self.outcome == 1)).all()):
            raise WorkbenchError("batch: outcome must be 0 or 1; put other scales in reward")
        for name in ("old_logprobs", "teacher_logprobs", "reference_logprobs", "sampled_logprobs"):
            value = getattr(self, name)
            if value is None or _is_logprob(value):
                continue
            # Weights of 0 do not silence what is not finite off the mask.
            sampled_only = torch.where(mask, value, 0)
            if not _is_logprob(sampled_only):
                raise WorkbenchError(f"batch: {name} must be finite and at most 0 on sampled tokens")
            object.__setattr__(self, name, sampled_only)
        if not bool((self.turn_tokens > 0)[self.turn_mask].all()) or not bool((self.turn_counts > 0).all()):
            raise WorkbenchError("batch: an episode has no turns, or a gap in its turn numbers")
        for name in ("turn_rewards", "anchors", "solver_advantages"):
            value = getattr(self, name)
            if value is not None and value.shape != self.turn_mask.shape:
                raise WorkbenchError(
                    f"batch: {name} has shape {tuple(value.shape)}, the turns are {tuple(self.turn_mask.shape)}"
                )

    @cached_property
    def _runs(self) -> Runs:
        """Stretches of one turn's tokens in a row, and the stretches between them."""
        return runs_of(self.turn_index)

    @cached_property
    def turn_counts(self) -> Tensor:
        """(E,) number of turns of each episode."""
        counts = torch.zeros(len(self.group_index), dtype=torch.long, device=self.input_ids.device)
        return counts.scatter_reduce(0, self.episode_index[self._runs.rows], self._runs.labels + 1, "amax")

    @cached_property
    def turn_mask(self) -> Tensor:
        """(E,K) bool, which turns exist."""
        steps = torch.arange(int(self.turn_counts.max()), device=self.input_ids.device)
        return steps < self.turn_counts[:, None]

    @cached_property
    def _run_turns(self) -> Tensor:
        """(R,) each run's turn in a flat (E*K,) table; E*K where a run belongs to no turn."""
        labels, K = self._runs.labels, self.turn_mask.shape[1]
        turns = self.episode_index[self._runs.rows] * K + labels
        return torch.where(labels >= 0, turns, self.turn_mask.numel())

    @cached_property
    def _counted_runs(self) -> Tensor:
        """(R,) bool: runs of sampled tokens, each turn in the first row that holds it."""
        rows, turns, none = self._runs.rows, self._run_turns, self.turn_mask.numel()
        first = torch.full((none + 1,), len(self.lengths), dtype=torch.long, device=rows.device)
        first = first.scatter_reduce(0, turns, rows, "amin")
        return (turns < none) & (rows == first[turns])

    @cached_property
    def _turn_runs(self) -> tuple[Tensor, Tensor]:
        """Indices of the counted runs in the order of their turns, and (E*K,) how many of them each turn has."""
        index = self._counted_runs.nonzero()[:, 0]
        turns = self._run_turns[index]
        if bool((turns[1:] < turns[:-1]).any()):
            index = index[turns.argsort(stable=True)]
        return index, turns.bincount(minlength=self.turn_mask.numel())

    @cached_property
    def counted(self) -> Tensor:
        """(B,T) bool: sampled tokens, each turn once. A turn that a second row repeats counts in the first row only.

        Some trainers pad a batch with copies of rows; counted twice, their evidence would be too.
        """
        if torch.equal(self._counted_runs, self._runs.labels >= 0):
            return self.response_mask
        return spread(self._counted_runs, self._runs)

    def turn_sum(self, values: Tensor) -> Tensor:
        """Sum token values (B,T) into turns (E,K), each turn counted once; what lies off the mask is left out."""
        index, counts = self._turn_runs
        sums = segment_sum(values.reshape(-1), self._runs.lengths)
        return segment_sum(sums[index], counts).view(self.turn_mask.shape)

    def turn_mean(self, values: Tensor) -> Tensor:
        """Mean of token values (B,T) over each turn (E,K), each turn counted once; 0 where there is no turn."""
        return self.turn_sum(values) / self.turn_tokens.clamp(min=1)

    @cached_property
    def turn_tokens(self) -> Tensor:
        """(E,K) number of sampled tokens in each turn."""
        index, counts = self._turn_runs
        return segment_sum(self._runs.lengths[index].long(), counts).view(self.turn_mask.shape)

    def tokens_by_turn(self) -> tuple[Tensor, Tensor, Tensor]:
        """The N sampled tokens, one turn after the other: (N,) long their places in a flattened (B,T), and of each
        turn (S,) long its place in a flat (E*K,) table and (S,) its number of tokens.

        A turn that several rows hold comes once for each, the row that counts first.
        """
        runs, T = self._runs, self.input_ids.shape[1]
        index = (runs.labels >= 0).nonzero()[:, 0]
        index = index[self._run_turns[index].argsort(stable=True)]
        turns, rows, lengths = self._run_turns[index], runs.rows[index], runs.lengths[index]
        first = torch.ones_like(turns, dtype=torch.bool)
        first[1:] = (turns[1:] != turns[:-1]) | (rows[1:] != rows[:-1])
        sizes = segment_sum(lengths.long(), torch.diff(first.nonzero()[:, 0], append=turns.new_tensor([len(turns)])))
        ends = lengths.cumsum(0)
        total = int(ends[-1])
        places = torch.arange(total, device=index.device)
        places += (rows * T + runs.columns[index] - ends + lengths).repeat_interleave(lengths, output_size=total)
        return places, turns[first], sizes

    def to_tokens(self, turn_values: Tensor, out: Tensor | None = None) -> Tensor:
        """Give every sampled token its turn's value: (E,K) -> (B,T), 0 off the mask.

        out: a contiguous (B,T) tensor of that dtype, no longer needed, whose memory the result takes over.
        """
        flat = torch.cat([turn_values.reshape(-1), turn_values.new_zeros(1)])
        return spread(flat[self._run_turns], self._runs, out)

    def episodes_to_tokens(self, values: Tensor) -> Tensor:
        """Give every sampled token its episode's value: (E,) -> (B,T), 0 off the mask."""
        return torch.where(self.response_mask, values[self.episode_index][:, None], 0)

    def with_(self, **changes: Any) -> "Batch":
        """A copy with some tensors replaced (validated again)."""
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> "Batch":
        moved = {k: v.to(device) for k, v in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        return {k: getattr(self, k) for k in self.__dataclass_fields__ if getattr(self, k) is not None}

    @classmethod
    def from_episodes(
        cls, episodes: Sequence[Episode], layout: str = "auto", pad_id: int = 0, reward: str = "outcome"
    ) -> "Batch":
        """Lay episodes out as rows.

        layout: "episode" one row an episode (each prompt must extend the last), "turn" one row a turn, "auto" the
        first where it fits and else the second, episode by episode. reward: "outcome", which the last turn earns, or
        "return", which each turn earns its part of.
        """
        if layout not in ("auto", "episode", "turn"):
            raise WorkbenchError(f"layout must be auto, episode or turn, got {layout!r}")
        if reward not in ("outcome", "return"):
            raise WorkbenchError(f"reward must be outcome or return, got {reward!r}")
        if not episodes:
            raise WorkbenchError("batch: no episodes to lay out")
        rows: list[tuple[int, list[tuple[int, Turn]]]] = []
        for e, episode in enumerate(episodes):
            if episode.fidelity != "token":
                raise WorkbenchError(
                    f"episode of {episode.task}: only text was recorded, so it has no tokens to train on"
                )
            whole = layout != "turn" and episode.contiguous
            if layout == "episode" and not whole:
                raise WorkbenchError(f"episode of {episode.task}: prompts do not extend each other; use layout='turn'")
            turns = list(enumerate(episode.turns))
            rows += [(e, turns)] if whole else [(e, [kt]) for kt in turns]
        widths = [len(turns[-1][1].prompt_ids) + len(turns[-1][1].response_ids) for _, turns in rows]
        shape = (len(rows), max(widths))
        ids, turn_index = np.full(shape, pad_id, np.int64), np.full(shape, -1, np.int64)
        logprobs = np.zeros(shape, np.float32)
        for b, (_, turns) in enumerate(rows):
            last = turns[-1][1]
            ids[b, : widths[b]] = np.concatenate([last.prompt_ids, last.response_ids])
            for k, turn in turns:
                span = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids))
                turn_index[b, span], logprobs[b, span] = k, turn.logprobs
        _, groups = np.unique([e.group for e in episodes], return_inverse=True)
        outcome = torch.tensor([float(e.outcome) for e in episodes])
        returns = torch.tensor([float(e.total_reward) for e in episodes])
        turn_rewards = torch.zeros(len(episodes), max(len(e.turns) for e in episodes))
        for e, episode in enumerate(episodes):
            if reward == "outcome":
                turn_rewards[e, len(episode.turns) - 1] = outcome[e]
            else:
                turn_rewards[e, : len(episode.turns)] = torch.tensor([float(t.reward) for t in episode.turns])
        return cls(
            input_ids=torch.from_numpy(ids),
            lengths=torch.tensor(widths),
            response_mask=torch.from_numpy(turn_index >= 0),
            turn_index=torch.from_numpy(turn_index),
            episode_index=torch.tensor([e for e, _ in rows]),
            group_index=torch.from_numpy(groups.astype(np.int64)),
            outcome=outcome,
            reward=outcome.clone() if reward == "outcome" else returns,
            old_logprobs=torch.from_numpy(logprobs),
            turn_rewards=turn_rewards,
        )


@dataclass(frozen=True)
class Credit:
    """What a credit rule returns: advantages (B,T), 0 off the mask, and what it knows of turns, each (E,K)."""

    advantages: Tensor
    turns: dict[str, Tensor] = field(default_factory=dict)
