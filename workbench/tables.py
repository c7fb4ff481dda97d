"""Frames of a run: what a training step and an evaluation leave on disk."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from .loss import masked_mean
from .records import Batch, Credit, Episode

TURN_SCALARS = (
    "evidence", "belief_before", "belief", "revision", "z", "weight", "solver_share", "turn_advantage", "pivotal",
)  # fmt: skip
SOLVER = ("solver_before", "solver_after", "solver_advantage")  # of a run that asked an exact solver, null elsewhere
TOKEN_LISTS = ("old_logprobs", "teacher_logprobs", "gap", "gate", "advantage", "dloss_dlogp", "entropy")
CHOSEN_LISTS = ("decision", "support", "support_score")  # of a method that distils some tokens and not others


def episodes_frame(
    step: int, episodes: Sequence[Episode], advantage: Tensor, prior: Tensor, prior_rate: Tensor | None = None
) -> pl.DataFrame:
    """One row an episode. advantage, prior: (E,), the group-relative advantage and the group's success rate;
    prior_rate: (E,), what was expected of the task before, or None."""
    rows = [
        {
            "step": step,
            "episode": i,
            "group": e.group,
            "task": e.task,
            "kind": e.kind,
            "split": e.split,
            "seed": e.seed,
            "outcome": e.outcome,
            "return": e.total_reward,
            "advantage": advantage[i].item(),
            "prior": prior[i].item(),
            "prior_rate": None if prior_rate is None else prior_rate[i].item(),
            "n_turns": len(e.turns),
            "n_tokens": sum(len(t.response_ids) for t in e.turns),
            "stop_reason": e.stop_reason,
        }
        for i, e in enumerate(episodes)
    ]
    return pl.DataFrame(rows, schema_overrides={"prior_rate": pl.Float64})


def turns_frame(
    step: int,
    episodes: Sequence[Episode],
    batch: Batch,
    credit: Credit,
    tokens: dict[str, Tensor | None],
    pieces: Callable[[np.ndarray], list[str]],
) -> pl.DataFrame:
    """One row a turn, its sampled tokens as lists.

    context_ids: the tokens that came before the response; where `continues`, only those after the turn before, so that
    the rows of an episode one after another are what the policy saw. tokens: (B,T) tensors named as TOKEN_LISTS, None
    where the method has none; a column of CHOSEN_LISTS, or sampled_logprobs, is there only where given. pieces: token
    ids -> their strings.
    """
    turns = [(i, k, turn) for i, e in enumerate(episodes) for k, turn in enumerate(e.turns)]
    contexts = [context for e in episodes for context in _contexts(e)]
    ids, sizes = np.concatenate([t.response_ids for _, _, t in turns]), [len(t.response_ids) for _, _, t in turns]
    before = np.concatenate([new for new, _ in contexts])
    columns: dict[str, Any] = {
        "step": [step] * len(turns),
        "episode": [i for i, _, _ in turns],
        "group": [episodes[i].group for i, _, _ in turns],
        "turn": [k for _, k, _ in turns],
        "observation": [t.observation for _, _, t in turns],
        "action": [t.action for _, _, t in turns],
        "response": [t.info.get("response", "") for _, _, t in turns],
        "valid": [t.valid for _, _, t in turns],
        "truncated": [t.truncated for _, _, t in turns],
        "reward": [float(t.reward) for _, _, t in turns],
        **{name: pl.Series([getattr(t, name) for _, _, t in turns], dtype=pl.Float64) for name in SOLVER},
        "context_ids": cut(pl.Series(before, dtype=pl.Int32), [len(new) for new, _ in contexts]),
        "continues": [continues for _, continues in contexts],
        "token_ids": cut(pl.Series(ids, dtype=pl.Int32), sizes),
        "pieces": cut(pl.Series(pieces(ids), dtype=pl.String), sizes),
    }
    columns |= token_lists(batch, {name: tokens.get(name) for name in TOKEN_LISTS})
    rare = (*CHOSEN_LISTS, "sampled_logprobs")
    columns |= token_lists(batch, {name: tokens[name] for name in rare if tokens.get(name) is not None})
    columns |= turn_scalars(batch, credit.turns)
    return pl.DataFrame(columns)


def token_lists(batch: Batch, values: dict[str, Tensor | None]) -> dict[str, pl.Series]:
    """Token values (B,T) as columns of one list a turn, in order of episode and turn; nulls where there are none."""
    places, owners, sizes = batch.tokens_by_turn()
    # A turn that a second row repeats comes again, after the row that counts.
    counts = np.diff(owners.cpu().numpy(), prepend=-1) != 0
    sizes = sizes.cpu().numpy()
    places = places[torch.from_numpy(np.repeat(counts, sizes)).to(places.device)]
    sizes = sizes[counts].tolist()

    def column(tensor: Tensor | None) -> pl.Series:
        if tensor is None:
            return pl.Series([None] * len(sizes), dtype=pl.List(pl.Float32))
        return cut(pl.Series(tensor.reshape(-1)[places].float().cpu().numpy()), sizes)

    return {name: column(tensor) for name, tensor in values.items()}


def cut(flat: pl.Series, sizes: Sequence[int | None]) -> pl.Series:
    """Lists of these sizes, null for None, from their values end to end; a third of the time of a Series of arrays."""
    counts = np.array([size or 0 for size in sizes], dtype=np.int64)
    row = pl.Series("row", np.repeat(np.arange(len(sizes)), counts)).set_sorted()
    lists = pl.DataFrame([row, flat.alias("list")]).group_by("row", maintain_order=True).agg("list")
    if (counts > 0).all():
        return lists["list"]
    places = pl.DataFrame({"row": np.arange(len(sizes)), "size": pl.Series(sizes, dtype=pl.Int64)})
    spread = places.join(lists, on="row", how="left", maintain_order="left")
    empty = pl.when(pl.col("size") == 0).then(pl.lit([], dtype=pl.List(flat.dtype)))
    return spread.select(empty.otherwise(pl.col("list")).alias("list"))["list"]


def turn_scalars(batch: Batch, table: dict[str, Tensor]) -> dict[str, pl.Series]:
    """The columns TURN_SCALARS from a credit's turn table, in order of episode and turn; nulls where it has none."""
    columns = {}
    for name in TURN_SCALARS:
        got = table[name][batch.turn_mask].tolist() if name in table else [None] * int(batch.turn_counts.sum())
        columns[name] = pl.Series(got, dtype=pl.Boolean if name == "pivotal" else pl.Float64)
    return columns


def _contexts(episode: Episode) -> list[tuple[np.ndarray, bool]]:
    """Of each turn the context tokens that the turn before does not hold, and whether it holds the others."""
    out, seen = [], np.empty(0, np.int32)
    for k, turn in enumerate(episode.turns):
        continues = k > 0 and np.array_equal(turn.prompt_ids[: len(seen)], seen)
        out.append((turn.prompt_ids[len(seen) :] if continues else turn.prompt_ids, continues))
        seen = np.concatenate([turn.prompt_ids, turn.response_ids])
    return out


def evals_frame(step: int, panel: str, role: str, episodes: Sequence[Episode]) -> pl.DataFrame:
    """One row an evaluation episode."""
    rows = [
        {
            "step": step,
            "panel": panel,
            "role": role,
            "task": e.task,
            "kind": e.kind,
            "seed": e.seed,
            "episode": i,
            "outcome": e.outcome,
            "return": e.total_reward,
            "n_turns": len(e.turns),
            "stop_reason": e.stop_reason,
            "invalid": sum(not t.valid for t in e.turns),
        }
        for i, e in enumerate(episodes)
    ]
    return pl.DataFrame(rows)


def rollout_summary(drawn: Sequence[Episode], advantages: Tensor, mask: Tensor, batch: Batch) -> dict[str, Any]:
    """Facts of a step's rollouts: rates over all that were drawn, the rest over the batch that was kept for training.

    success is a mean over episodes, success_tasks over groups, each of which counts alike however many episodes it has.
    zero_advantage_share: of the batch's sampled tokens, those that the policy loss ignores. n_unsolved: episodes drawn
    that a solver has no values for, None where none was asked.
    """
    turns = [t for e in drawn for t in e.turns]
    outcomes: dict[int, list[int]] = {}
    for e in drawn:
        outcomes.setdefault(e.group, []).append(e.outcome)
    groups = batch.group_index.unique()
    mixed = sum(len(batch.reward[batch.group_index == g].unique()) > 1 for g in groups)
    picked = advantages[mask]
    unsolved = sum(any(turn.solver_advantage is None for turn in e.turns) for e in drawn)
    return {
        "n_drawn": len(drawn),
        "n_episodes": len(batch.outcome),
        "n_groups": len(groups),
        "n_mixed_groups": mixed,
        "success": float(np.mean([e.outcome for e in drawn])),
        "success_tasks": float(np.mean([np.mean(own) for own in outcomes.values()])),
        "return_mean": float(np.mean([e.total_reward for e in drawn])),
        "turns_mean": len(turns) / len(drawn),
        "response_tokens": int(mask.sum()),
        "invalid_rate": sum(not t.valid for t in turns) / len(turns),
        "truncated_rate": sum(t.truncated for t in turns) / len(turns),
        "advantage_std": float(picked.std(correction=0)),
        "zero_advantage_share": float((picked == 0).float().mean()),
        "n_unsolved": None if batch.solver_advantages is None else unsolved,
    }


def gap_summary(gap: Tensor | None, gates: Tensor | None, mask: Tensor) -> dict[str, float | None]:
    """Mean and spread of the teacher-student gap (nats), mean gate and the share of tokens with a gate above .5."""
    out: dict[str, float | None] = dict.fromkeys(("gap_mean", "gap_std", "gate_mean", "gate_active"))
    if gap is not None:
        out |= {"gap_mean": float(masked_mean(gap, mask)), "gap_std": float(gap[mask].std(correction=0))}
    if gates is not None:
        out |= {"gate_mean": float(masked_mean(gates, mask)), "gate_active": float((gates[mask] > 0.5).float().mean())}
    return out
