"""Small random episodes and batches for the tests, with chosen teacher gaps."""

from collections.abc import Sequence

import numpy as np
import torch

from workbench.records import Batch, Episode, Turn

Spec = Sequence[tuple[int, int, Sequence[int]]]

SPEC: Spec = (
    (0, 1, (3, 1, 4, 2)),
    (0, 0, (2, 5)),
    (0, 1, (1,)),
    (0, 0, (4, 2, 2, 3, 1, 2)),
    (1, 1, (2, 2, 2)),
    (1, 1, (3, 3)),
    (2, 0, (2, 1, 2)),
)


def make_episodes(spec: Spec = SPEC, seed: int = 0, scale: float = 10.0) -> list[Episode]:
    """One episode for each (group, outcome, tokens of each turn); every prompt extends the sequence before it."""
    rng = np.random.default_rng(seed)
    episodes = []
    for i, (group, outcome, lengths) in enumerate(spec):
        context, turns = np.empty(0, int), []
        for length in lengths:
            prompt = np.concatenate([context, rng.integers(5, 99, rng.integers(1, 4))])
            response = rng.integers(5, 99, length)
            turns.append(Turn(prompt, response, -rng.uniform(3.0, 6.0, length)))
            context = np.concatenate([prompt, response])
        episodes.append(Episode(tuple(turns), f"task-{group}", group, i, outcome, scale * outcome))
    return episodes


def make_gaps(episodes: Sequence[Episode], seed: int = 1, spread: float = 0.7) -> dict[tuple[int, int], np.ndarray]:
    """Teacher minus student log-prob of every sampled token, by (episode, turn)."""
    rng = np.random.default_rng(seed)
    return {
        (e, k): rng.normal(0, spread, len(turn.response_ids)).clip(-2.9, 2.9)
        for e, episode in enumerate(episodes)
        for k, turn in enumerate(episode.turns)
    }


def make_batch(
    episodes: Sequence[Episode],
    gaps: dict[tuple[int, int], np.ndarray] | None = None,
    layout: str = "episode",
    **options,
) -> Batch:
    """A float64 batch whose teacher log-probs lie `gaps` above the student's."""
    batch = Batch.from_episodes(episodes, layout=layout, **options)
    doubled = {name: getattr(batch, name).double() for name in ("old_logprobs", "reward", "turn_rewards")}
    batch = batch.with_(**doubled)
    if gaps is None:
        return batch
    teacher = batch.old_logprobs.clone()
    for b in range(len(teacher)):
        for k in batch.turn_index[b].unique().tolist():
            if k >= 0:
                teacher[b, batch.turn_index[b] == k] += torch.from_numpy(gaps[int(batch.episode_index[b]), k])
    return batch.with_(teacher_logprobs=teacher)


ROWS = ("input_ids", "lengths", "response_mask", "turn_index", "episode_index", "old_logprobs", "teacher_logprobs")


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """The batch with its rows in that order, repeats allowed; the episodes stay."""
    index = torch.tensor(rows)
    return batch.with_(**{n: getattr(batch, n)[index] for n in ROWS if getattr(batch, n) is not None})


def take_episodes(batch: Batch, order: Sequence[int]) -> Batch:
    """The batch with its episodes renumbered: episode i is what was episode order[i]; the rows stay where they are."""
    index = torch.tensor(order)
    names = ("group_index", "outcome", "reward", "turn_rewards", "anchors")
    moved = {n: getattr(batch, n)[index] for n in names if getattr(batch, n) is not None}
    return batch.with_(episode_index=torch.argsort(index)[batch.episode_index], **moved)


def with_states(batch: Batch, states: int = 3, seed: int = 2) -> Batch:
    """The batch with random state labels and small random rewards of turns, whatever its layout and order of rows."""
    rng = np.random.default_rng(seed)
    shape = tuple(batch.turn_mask.shape)
    labels, earned = rng.integers(states, size=shape), rng.integers(-8, 9, size=shape) / 64
    rewards = torch.where(batch.turn_mask, batch.turn_rewards + torch.from_numpy(earned), 0)
    return batch.with_(anchors=torch.from_numpy(labels), turn_rewards=rewards)


def as_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its rewards and log-probs in that precision."""
    names = ("old_logprobs", "teacher_logprobs", "reward", "turn_rewards")
    return batch.with_(**{n: getattr(batch, n).to(dtype) for n in names if getattr(batch, n) is not None})


def pad(batch: Batch, columns: int) -> Batch:
    """The batch with more padding columns at its right."""
    wide = {}
    for name in ("input_ids", "response_mask", "turn_index", "old_logprobs", "teacher_logprobs"):
        if (value := getattr(batch, name)) is not None:
            fill = {"turn_index": -1}.get(name, 0)
            wide[name] = torch.nn.functional.pad(value, (0, columns), value=fill)
    return batch.with_(**wide)


def by_token(batch: Batch, values: torch.Tensor) -> dict[tuple[int, int, int], float]:
    """Token values by (episode, turn, place in the turn), whatever the layout; rows that repeat a turn must agree."""
    out: dict[tuple[int, int, int], float] = {}
    for b in range(len(values)):
        for k in batch.turn_index[b].unique().tolist():
            if k < 0:
                continue
            for place, value in enumerate(values[b, batch.turn_index[b] == k].tolist()):
                key = (int(batch.episode_index[b]), k, place)
                assert out.setdefault(key, value) == value
    return out
