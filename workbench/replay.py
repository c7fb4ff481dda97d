"""A recorded step as a Batch again, and what each method would have made of it: credit without a model.

The tables hold the sampled tokens of every turn with their log-probs, so any rule that reads no more than those can be
computed from a run of any other method. It is the credit that a method gives to episodes another one played; what it
would have played itself nobody knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from . import loss as losses
from .composition import Method
from .credit import cast, gigpo
from .errors import WorkbenchError
from .methods import METHODS, method
from .records import Batch, Credit, Episode, Turn
from .tables import SOLVER

CONTEXT_ID = 0  # the token that stands before an episode's first sampled one, for credit, which reads no prompts
TURN_COLUMNS = ("episode", "turn", "token_ids")
EPISODE_COLUMNS = ("episode", "group", "outcome")
TOKEN_LISTS = ("old_logprobs", "teacher_logprobs", "entropy", "sampled_logprobs")


@dataclass(frozen=True)
class Replayed:
    """What one method makes of a batch, for the first update on it, where no ratio has moved and nothing is clipped.

    credit: as its rule returned it. push (B,T): the credit that a token has in the method's whole loss before tokens
    are averaged, pg_coef * advantage (times the engine weight where there is one) less the slope of its auxiliary loss.
    aux_slope (B,T): what that loss adds to dloss/dlogp, averaged over tokens, or None; slope (B,T): the whole
    dloss/dlogp. All 0 off the mask. A KL penalty has no slope at the first update and is left out.
    """

    method: Method
    credit: Credit
    push: Tensor
    aux_slope: Tensor | None
    slope: Tensor


def episodes_of(
    turns: pl.DataFrame, episodes: pl.DataFrame, step: int, contexts: bool = False, stand_ins: bool = False
) -> list[Episode]:
    """The episodes of a recorded step, in the order of their numbers, with tokens, log-probs, rewards and texts.

    turns, episodes: the run's tables (they may hold other steps). contexts: with the prompts that were recorded, so
    that a model can score the episodes; their log-probs are 0 where the step has none at all, for the scorer to
    replace. Without, each prompt is one placeholder token and the tokens that the episode sampled before: enough for
    credit. An outcome that is not recorded is the return, where all returns of the step are 0 or 1. stand_ins: where
    the source of an imported run does not say, an episode has outcome 0 and a group of its own, for use that reads
    neither. A return of which no turn is said to have earned a part is earned by the last turn.
    Raises WorkbenchError where the step, its tokens, or contexts, outcomes or groups that are needed were not recorded,
    where turns are missing, doubled or of no episode, where a list's length differs from its turn's tokens, or a value
    is not finite.
    """
    return _played(*_recorded(turns, episodes, step, contexts, stand_ins), contexts)


def batch_of(
    turns: pl.DataFrame, episodes: pl.DataFrame, step: int, reward: str = "outcome", stand_ins: bool = False
) -> tuple[Batch, list[tuple[int, int]]]:
    """The batch of a recorded step, and the (episode, turn) of each of its turns in the order its rows hold them.

    One row an episode: a placeholder token, then the sampled tokens of all turns, so the rows are for credit and not
    for scoring: what the policy read in between is left out. Log-probs, rewards and entropy are float64 of what was
    recorded in float32; teacher_logprobs, entropy, sampled_logprobs, prior_rate and solver_advantages are None where
    the run has none, anchors (equal observation texts inside a group) where it has no texts. reward: "outcome" or
    "return", as in Batch.from_episodes. stand_ins, and errors: as in `episodes_of`.
    """
    rows, heads = _recorded(turns, episodes, step, stand_ins=stand_ins)
    played = _played(rows, heads)
    batch = Batch.from_episodes(played, "episode", CONTEXT_ID, reward)
    changes = {name: getattr(batch, name).double() for name in ("outcome", "reward", "turn_rewards")}
    for name in TOKEN_LISTS:
        if _has(rows, name):
            changes[name] = _laid_out(rows, name, batch)
    if "prior_rate" in heads.columns and not heads["prior_rate"].null_count():
        changes["prior_rate"] = torch.from_numpy(heads["prior_rate"].to_numpy(writable=True))
    if any(turn.solver_advantage is not None for episode in played for turn in episode.turns):
        changes["solver_advantages"] = cast.solver_advantages(played)
    if _tells_states(played):
        changes["anchors"] = gigpo.anchors(played)
    return batch.with_(**changes), rows.select("episode", "turn").rows()


def recorded_values(turns: pl.DataFrame, step: int, name: str, batch: Batch) -> Tensor | None:
    """(B,T) float64 values of a token column in the rows of `batch_of`, 0 off the mask; None where no turn has any.

    Raises WorkbenchError where a turn has too few or too many, or one is not finite.
    """
    rows = turns.filter(pl.col("step") == step).sort("episode", "turn")
    if not _has(rows, name):
        return None
    _check(rows, name, step)
    return _laid_out(rows, name, batch)


def knows_outcomes(episodes: pl.DataFrame) -> bool:
    """Whether the episodes of a step say of each whether it succeeded, or their returns, all 0 or 1, do."""
    return not _with_told(episodes)["outcome"].null_count()


def check_columns(known: Sequence[str], table: str, columns: Sequence[str]) -> None:
    """Raise WorkbenchError where a table lacks the step or one of the columns that a replay needs."""
    if missing := [name for name in ("step", *columns) if name not in known]:
        raise WorkbenchError(f"{table}: no column {', '.join(missing)}, which a replay needs")


def lacking(batch: Batch, built: Method) -> str:
    """Which signal the batch lacks that the method reads, in words, or "" where it lacks none."""
    if built.needs_teacher and batch.teacher_logprobs is None:
        return "reads the log-probs of a privileged teacher, and the run was recorded without one"
    if built.anchors and batch.anchors is None:
        return "compares turns taken in the same state, and no observation texts were recorded to tell states by"
    if built.needs_solver and batch.solver_advantages is None:
        return "reads an exact solver's values, and the run was recorded without one (setting record_solver)"
    if built.reads_prior and batch.prior_rate is None:
        return "compares with a success rate expected beforehand, which the tables do not hold for every episode"
    if built.aux and built.aux.coef:
        if built.aux.divergence:
            return "compares whole distributions over the vocabulary, and only sampled tokens are recorded"
        if built.aux.gate and built.aux.gate.gate != "gap" and batch.entropy is None:
            return f"opens its gate by {built.aux.gate.gate}, and the policy's entropy was not recorded"
    return ""


def credit_of(batch: Batch, built: Method, step: int = 0, max_tokens: int | None = None) -> Replayed:
    """One method's credit and slopes on a batch, as the trainer records them.

    step: training step, for rules that depend on it; max_tokens: as in loss.token_weights. Raises WorkbenchError
    where the batch lacks a signal that the method reads.
    """
    if lack := lacking(batch, built):
        raise WorkbenchError(f"method {built.name} {lack}")
    own, aux, old = built.loss, built.aux, batch.old_logprobs
    credit = built.credit(batch, step)
    weights = losses.token_weights(batch, own.aggregation, max_tokens)
    advantages = losses.weighted(credit.advantages, batch, own)
    slope = losses.dloss_dlogp(old, old, advantages, weights, own, batch.turn_index, episode_index=batch.episode_index)
    push, added = own.pg_coef * advantages, None
    if aux and aux.coef and aux.gradient:
        each = torch.where(batch.response_mask, aux.gradient(old, batch.teacher_logprobs, old, batch.entropy), 0)
        added = losses.token_weights(batch, "token_mean") * each
        slope, push = slope + added, push - each
    return Replayed(built, credit, push, added, slope)


def credit_by_method(
    batch: Batch,
    names: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    step: int = 0,
    max_tokens: int | None = None,
    episodes: Sequence[Episode] | None = None,
) -> tuple[dict[str, Replayed], dict[str, str]]:
    """What every method makes of a batch, and of those whose signals the batch lacks, why: ({name: Replayed},
    {name: reason}), in the order of the names.

    names: default all of methods.METHODS. options: {name: {option: value}}, for methods among them. episodes: those
    of the batch, needed where an option changes how states are told apart. Raises WorkbenchError on an unknown name
    or option.
    """
    names, options = list(METHODS if names is None else names), options or {}
    if stray := [name for name in options if name not in names]:
        raise WorkbenchError(f"options are given for {stray[0]!r}, which is not among the methods {', '.join(names)}")
    done, left_out = {}, {}
    for name in names:
        built, own = method(name, **options.get(name, {})), batch
        if built.anchors and episodes is not None and _tells_states(episodes):
            own = batch.with_(anchors=built.anchors(episodes).to(batch.input_ids.device))
        elif "similarity" in options.get(name, {}):
            raise WorkbenchError(f"method {name}: option similarity labels states anew, which needs the episodes")
        if lack := lacking(own, built):
            left_out[name] = lack
        else:
            done[name] = credit_of(own, built, step, max_tokens)
    return done, left_out


def _tells_states(episodes: Sequence[Episode]) -> bool:
    return all(any(turn.observation for turn in episode.turns) for episode in episodes)


def _laid_out(rows: pl.DataFrame, name: str, batch: Batch) -> Tensor:
    out = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    out[batch.response_mask] = torch.from_numpy(rows[name].explode().cast(pl.Float64).to_numpy(writable=True))
    return out


def _has(rows: pl.DataFrame, name: str) -> bool:
    return name in rows.columns and rows[name].null_count() < rows.height


def _recorded(
    turns: pl.DataFrame, episodes: pl.DataFrame, step: int, contexts: bool = False, stand_ins: bool = False
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One step's rows of both tables in order, known to be whole."""
    rows, heads = _at(turns, "turns", TURN_COLUMNS, step), _at(episodes, "episodes", EPISODE_COLUMNS, step)
    rows, heads = rows.sort("episode", "turn"), heads.sort("episode")
    if rows["token_ids"].null_count():
        raise WorkbenchError(
            f"turns: step {step} was recorded without tokens, which credit is given to; they are not made from text"
        )
    if contexts:
        _check_contexts(rows, step)
        if not _has(rows, "old_logprobs"):
            zeros = pl.col("token_ids").list.eval(pl.element().cast(pl.Float32) * 0)
            rows = rows.with_columns(zeros.alias("old_logprobs"))
    elif not _has(rows, "old_logprobs"):
        raise WorkbenchError(
            f"turns: step {step} was recorded without old_logprobs, which a replay needs; `workbench score` adds them"
        )
    if twice := heads.filter(pl.col("episode").is_duplicated())["episode"].to_list():
        raise WorkbenchError(f"episodes: step {step} has episode {twice[0]} twice")
    if twice := rows.filter(pl.struct("episode", "turn").is_duplicated()).select("episode", "turn").rows():
        raise WorkbenchError(f"turns: step {step} has turn {twice[0][1]} of episode {twice[0][0]} twice")
    if alone := rows.filter(~pl.col("episode").is_in(heads["episode"].to_list()))["episode"].to_list():
        raise WorkbenchError(f"turns: step {step} has turns of episode {alone[0]}, which the table episodes lacks")
    numbers = dict(rows.group_by("episode", maintain_order=True).agg("turn").rows())
    for head in heads.to_dicts():
        found = numbers.get(head["episode"], [])
        count = head.get("n_turns") or max(found, default=0) + 1
        if found != list(range(count)):
            raise WorkbenchError(
                f"turns: step {step}, episode {head['episode']} should have turns 0 to {count - 1}, "
                f"recorded are {', '.join(map(str, found)) or 'none'}"
            )
    for name in TOKEN_LISTS:
        if _has(rows, name) or name == "old_logprobs":
            _check(rows, name, step)
    return rows, _judged(heads, step, stand_ins)


def _judged(heads: pl.DataFrame, step: int, stand_ins: bool) -> pl.DataFrame:
    """Episodes with an outcome and a group each, as `episodes_of` says."""
    heads = _with_told(heads)
    if stand_ins:
        alone = pl.col("group").max().fill_null(-1) + 1 + pl.int_range(pl.len())
        return heads.with_columns(pl.col("outcome").fill_null(0), pl.col("group").fill_null(alone))
    for name, what in (("outcome", "whether it succeeded"), ("group", "which others it is compared with")):
        if unknown := heads.filter(pl.col(name).is_null())["episode"].to_list():
            raise WorkbenchError(
                f"episodes: step {step}, episode {unknown[0]} has no {name}: the run does not say {what}"
            )
    return heads


def _with_told(heads: pl.DataFrame) -> pl.DataFrame:
    """Episodes, an outcome that is missing taken from the returns where all of them are 0 or 1."""
    if "return" not in heads.columns or not heads["return"].is_in([0.0, 1.0]).all(ignore_nulls=False):
        return heads
    return heads.with_columns(pl.coalesce("outcome", "return").cast(pl.Int64).alias("outcome"))


def _check_contexts(rows: pl.DataFrame, step: int) -> None:
    """Raise where a turn's context tokens were not recorded or cannot be put together."""
    why = "and a model scores a token by what stands before it"
    if missing := [name for name in ("context_ids", "continues") if name not in rows.columns]:
        raise WorkbenchError(f"turns: no column {', '.join(missing)}: context tokens were not recorded, {why}")
    absent = pl.col("context_ids").is_null() | pl.col("continues").is_null()
    torn = pl.col("continues") & (pl.col("turn") == 0)
    for bad, what in (
        (absent, f"its context tokens were not recorded, {why}"),
        (torn, "its context continues a turn before, and there is none"),
    ):
        if found := rows.filter(bad).select("episode", "turn").rows():
            raise WorkbenchError(f"turns: step {step}, episode {found[0][0]}, turn {found[0][1]}: {what}")


def _at(frame: pl.DataFrame, table: str, columns: Sequence[str], step: int) -> pl.DataFrame:
    check_columns(frame.columns, table, columns)
    rows = frame.filter(pl.col("step") == step)
    if rows.is_empty():
        known = ", ".join(map(str, frame["step"].unique().sort().to_list())) or "none"
        raise WorkbenchError(f"{table}: step {step} was not recorded; recorded: {known}")
    return rows


def _check(rows: pl.DataFrame, name: str, step: int) -> None:
    """Raise where a turn's list of token values is absent, of another length than its tokens, or not finite."""
    values, tokens = pl.col(name), pl.col("token_ids").list.len()
    fits = values.list.len().fill_null(0) == tokens
    finite = values.list.eval(pl.element().is_finite().fill_null(False)).list.all().fill_null(False)
    counted = values.list.len().fill_null(0).alias("n"), tokens.alias("m")
    for holds, what in ((fits, "{n} values for {m} tokens"), (finite, "a value that is not finite")):
        bad = rows.filter(~holds).select("episode", "turn", *counted)
        if not bad.is_empty():
            row = bad.row(0, named=True)
            where = f"turns: step {step}, episode {row['episode']}, turn {row['turn']}"
            raise WorkbenchError(f"{where}: {name} has {what.format(**row)}")


def _played(rows: pl.DataFrame, heads: pl.DataFrame, contexts: bool = False) -> list[Episode]:
    of_episode = rows.partition_by("episode", as_dict=True, maintain_order=True)
    return [_episode(head, of_episode[(head["episode"],)].to_dicts(), contexts) for head in heads.to_dicts()]


def _episode(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], contexts: bool) -> Episode:
    turns, total = [], float(head["outcome"] if head.get("return") is None else head["return"])
    rewards = [float(row.get("reward") or 0.0) for row in rows]
    if all(row.get("reward") is None for row in rows):
        rewards[-1] = total
    for row, reward, (prompt, response) in zip(rows, rewards, _tokens(rows, contexts), strict=True):
        valid = row.get("valid")
        try:
            turn = Turn(
                prompt, response, np.asarray(row["old_logprobs"]), row.get("observation") or "",
                row.get("action") or "", True if valid is None else valid, reward, bool(row.get("truncated")),
                {"response": row.get("response") or ""}, *(row.get(name) for name in SOLVER),
            )  # fmt: skip
        except WorkbenchError as error:
            raise WorkbenchError(
                f"turns: step {row['step']}, episode {row['episode']}, turn {row['turn']}: {error}"
            ) from None
        turns.append(turn)
    return Episode(
        tuple(turns),
        task=str(head.get("task") or ""),
        group=head["group"],
        seed=head.get("seed") or 0,
        outcome=head["outcome"],
        total_reward=total,
        stop_reason=head.get("stop_reason") or "",
        kind=head.get("kind") or "",
        split=head.get("split") or "",
    )


def _tokens(rows: Sequence[Mapping[str, Any]], contexts: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, response) of each turn, as views of the sequences that turns continue."""
    sequences: list[list[Any]] = []
    places = []
    for k, row in enumerate(rows):
        continues = row["continues"] if contexts else k > 0
        if not continues:
            sequences.append([])
            end = 0
        context = row["context_ids"] if contexts else [] if continues else [CONTEXT_ID]
        start = end + len(context)
        end = start + len(row["token_ids"])
        sequences[-1] += [context, row["token_ids"]]
        places.append((len(sequences) - 1, start, end))
    whole = [np.concatenate(parts).astype(np.int32) for parts in sequences]
    return [(whole[n][:start], whole[n][start:end]) for n, start, end in places]
