"""Another rule's credit on the rollouts of a run, beside the credit that was recorded: where do the two part?

Both are credit for episodes that the run's own policy played; what another method's policy would have played nobody
knows. The credit of a token is the push of a method's whole loss on its log-prob before tokens are averaged, as in
workbench/replay.py; that of a turn is the mean of its tokens'.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from . import loss as losses
from . import methods, replay
from .audit.report import plain
from .composition import Method
from .errors import WorkbenchError
from .links import Link
from .loss import PolicyLossConfig
from .records import Batch
from .runs import RunFolder
from .runs.files import atomic_write
from .toy_world import rank_correlation

RECORDED = "recorded"
SAME = 1e-6  # share of the largest credit: what lies closer is rounding, of which the tables' float32 has some
KEY = ("step", "episode", "turn")
TEACHER = "`workbench score` makes a run with a teacher's log-probs"


@dataclass(frozen=True, eq=False)
class ReplayComparison:
    """What `compare` found. The baseline is what was recorded, or the method `against`; other is the method replayed.

    episodes: one row an episode: step, episode, group, task, outcome, return, n_turns, n_tokens; rank_correlation,
    Spearman's of its turns' credit, null where either side gives all turns the same; flips, how many of its turns are
    flipped; baseline_credit and other_credit, means over its tokens.
    turns: one row a turn: step, episode, turn (from 0), action; baseline_credit, other_credit, change; flipped, whether
    one side raises and the other lowers its tokens; link.
    tokens: those whose dloss/dlogp changes most, the largest change first: step, episode, turn, position (from 0 in the
    turn), token_id, piece (null where not recorded); baseline_slope, other_slope, change, per nat; link.
    summary: one row a step: step, episodes, turns, tokens; ranked, episodes that have a rank_correlation, and its mean;
    flips; and sums of |dloss/dlogp|: baseline_slope, other_slope, change.
    notes: what to know before numbers are compared, a sentence each.
    """

    run: str
    method: str
    against: str
    episodes: pl.DataFrame
    turns: pl.DataFrame
    tokens: pl.DataFrame
    summary: pl.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> str:
        """The baseline's name for a reader."""
        return "what was recorded" if self.against == RECORDED else self.against

    @property
    def flips(self) -> pl.DataFrame:
        """The turns that are flipped, the largest change first."""
        return _largest(self.turns.filter("flipped"), KEY)


@dataclass(frozen=True)
class _Credit:
    """One side's credit and dloss/dlogp at a step, both (B,T)."""

    push: Tensor
    slope: Tensor


def compare(
    run: RunFolder,
    method: str,
    options: Mapping[str, Any] | None = None,
    steps: Sequence[int] | None = None,
    against: str | None = None,
    *,
    against_options: Mapping[str, Any] | None = None,
    reward: str | None = None,
    top: int = 100,
) -> ReplayComparison:
    """The credit of `method` on the rollouts of a run, against what was recorded or against another method.

    options, against_options: of the two methods. steps: default all whose turns were recorded. reward: what groups
    compare, "outcome" or "return"; default: as the run was trained, and the return where its source does not say which
    episodes succeeded. top: how many tokens to list. Where advantages were recorded and dloss/dlogp was not, the
    baseline's is that of a plain clipped loss whose tokens are averaged as the method's are. Raises WorkbenchError in
    one line where the run holds text alone, lacks a signal that a method reads, or recorded no credit.
    """
    rule = methods.method(method, **(options or {}))
    other = None if against in (None, RECORDED) else methods.method(against, **(against_options or {}))
    if against_options and other is None:
        raise WorkbenchError(f"options {', '.join(against_options)} are of no method: name one to compare against")
    if "turns" not in run.tables:
        raise WorkbenchError(f"{run.path}: no turns are recorded in it, so there is nothing to replay")
    for table, columns in (("turns", replay.TURN_COLUMNS), ("episodes", replay.EPISODE_COLUMNS)):
        replay.check_columns(run.scan(table).collect_schema().names(), table, columns)
    config, parts, rewards = run.config, [], set()
    for step in _steps(run, steps):
        turns, heads = (run.scan(name).filter(pl.col("step") == step).collect() for name in ("turns", "episodes"))
        reward_here = _reward(heads, config) if reward is None else reward
        batch, _ = replay.batch_of(turns, heads, step, reward_here, stand_ins=True)
        unknown = _unknown(heads, reward_here)
        new = _replayed(batch, turns, heads, step, rule, config, unknown)
        if other is None:
            old = _recorded(batch, turns, step, rule, config)
        else:
            old = _replayed(batch, turns, heads, step, other, config, unknown)
        parts.append(_frames(run.path.name, step, batch, turns, heads, old, new, top))
        rewards.add(reward_here)
    frames = [pl.concat(frame, how="vertical_relaxed") for frame in zip(*parts, strict=True)]
    frames[2] = _largest(frames[2], (*KEY, "position")).head(top)
    name = RECORDED if other is None else other.name
    notes = _notes(config, name, reward is None and "return" in rewards)
    return ReplayComparison(run.path.name, rule.name, name, *frames, notes)


def sentences(comparison: ReplayComparison) -> list[str]:
    """What a comparison says, in plain sentences."""
    c, total = comparison, comparison.summary.sum()
    turns, flips, ranked = total["turns"][0], total["flips"][0], c.episodes["rank_correlation"].drop_nulls()
    out = [
        f"{c.method} against {c.baseline}, on {_count(total['episodes'][0], 'episode')} and {_count(turns, 'turn')} of "
        f"{_count(c.summary.height, 'step')}."
    ]
    if ranked.is_empty():
        out.append("In no episode do both tell turns apart, so there is no order of turns to compare.")
    else:
        out.append(
            f"In {_count(len(ranked), 'episode')} both tell turns apart: the rank correlation of the turns' credit is "
            f"{ranked.mean():+.2f} in the mean and {ranked.median():+.2f} in the median, and below 0 in "
            f"{(ranked < 0).sum()} of them."
        )
    where = _count(c.episodes.filter(pl.col("flips") > 0).height, "episode")
    out.append(f"The sign of the credit flips in {flips} of {turns} turns ({flips / turns:.1%}), in {where}.")
    base, other, change = (total[name][0] for name in ("baseline_slope", "other_slope", "change"))
    if base:
        out.append(
            f"Summed over tokens, |dloss/dlogp| is {other / base:.3g} times the baseline's, and the change of it "
            f"{change / base:.3g} times."
        )
    return [*out, *c.notes]


def text(comparison: ReplayComparison, limit: int = 10) -> str:
    """Plain text for a terminal, safe whatever the rollouts' text holds. limit: turns and tokens to list."""
    flips, tokens = comparison.flips, comparison.tokens
    lines = [plain(sentence, None) for sentence in sentences(comparison)]
    for title, rows, value in (
        ("turns whose sign flips, the largest change of credit first", flips, "credit"),
        ("tokens whose dloss/dlogp changes most", tokens, "slope"),
    ):
        lines += ["", title] if rows.height else []
        for row in rows.head(limit).to_dicts():
            values = f"{row[f'baseline_{value}']:+.3g} -> {row[f'other_{value}']:+.3g}"
            said = row["action"] or "" if value == "credit" else _piece(row)
            lines.append(f"  {values:<22} {row['link']}  {plain(said, 60)}".rstrip())
    if flips.height > limit:
        lines.append(f"\n{flips.height - limit} more turns flip")
    return "\n".join(lines) + "\n"


def write_turns(comparison: ReplayComparison, path: str | Path) -> Path:
    """Write `turns` to a parquet file, whole or not at all. Raises WorkbenchError where the disk does not take it."""
    buffer, path = io.BytesIO(), Path(path).expanduser().resolve()
    comparison.turns.write_parquet(buffer, compression="zstd", statistics=True)
    atomic_write(path, buffer.getvalue())
    return path


def _piece(row: Mapping[str, Any]) -> str:
    return f"token {row['token_id']}" if row["piece"] is None else repr(row["piece"])


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _largest(frame: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    return frame.sort(pl.col("change").abs(), *key, descending=[True, *[False] * len(key)])


def _steps(run: RunFolder, steps: Sequence[int] | None) -> list[int]:
    known = run.scan("turns").select("step").unique().collect()["step"].sort().to_list()
    chosen = known if steps is None else sorted(set(steps))
    if missing := [step for step in chosen if step not in known]:
        raise WorkbenchError(f"turns: step {missing[0]} was not recorded; recorded: {', '.join(map(str, known))}")
    if not chosen:
        raise WorkbenchError(f"{run.path}: no step to replay")
    return chosen


def _setting(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field of the training configuration, which notebooks/train.ipynb takes by name or in `more`."""
    more = config.get("more")
    return config.get(name, more.get(name, default) if isinstance(more, dict) else default)


def _reward(heads: pl.DataFrame, config: Mapping[str, Any]) -> str:
    return _setting(config, "reward", "outcome") if replay.knows_outcomes(heads) else "return"


def _unknown(heads: pl.DataFrame, reward: str) -> dict[str, tuple[str, ...]]:
    """What the run does not say of all of a step's episodes, in words, and which fields of the batch only stand in."""
    rewards, unknown = ("reward", "turn_rewards"), {}
    if heads["group"].null_count():
        unknown["which episodes are of one group"] = ("group_index",)
    if not replay.knows_outcomes(heads):
        unknown["which episodes succeeded"] = ("outcome", *(rewards if reward == "outcome" else ()))
    if reward == "return" and ("return" not in heads.columns or heads["return"].null_count()):
        unknown["what episodes earned"] = rewards
    return unknown


def _replayed(
    batch: Batch,
    turns: pl.DataFrame,
    heads: pl.DataFrame,
    step: int,
    rule: Method,
    config: Mapping[str, Any],
    unknown: Mapping[str, tuple[str, ...]],
) -> _Credit:
    """A method's credit. Raises where it reads a signal that the run does not hold."""
    if rule.anchors and batch.anchors is not None:
        batch = batch.with_(anchors=rule.anchors(replay.episodes_of(turns, heads, step, stand_ins=True)))
    if lack := replay.lacking(batch, rule):
        cure = f"; {TEACHER}" if rule.needs_teacher and batch.teacher_logprobs is None else ""
        raise WorkbenchError(f"method {rule.name} {lack}{cure}")
    for what, names in unknown.items():
        if _reads(batch, rule, step, names):
            raise WorkbenchError(f"method {rule.name} reads {what}, and step {step} of the run does not say")
    done = replay.credit_of(batch, rule, step, _max_tokens(config))
    return _Credit(done.push, done.slope)


def _reads(batch: Batch, rule: Method, step: int, names: Sequence[str]) -> bool:
    """Whether a method's credit depends on these fields of the batch: it is asked twice, with other values in them."""
    episodes, last = len(batch.group_index), batch.turn_counts[:, None] - 1
    if episodes == 1:  # which no rule can compare with others
        return rule.loss.pg_coef != 0
    number = torch.arange(episodes)
    share = number.double() / (episodes - 1)
    none = torch.zeros_like(batch.turn_rewards)
    asked = []
    for other in (False, True):
        values = {"group_index": number * 0, "outcome": share * 0, "reward": share}
        changed = {"group_index": number, "outcome": share * 0 + 1, "reward": 1 - share}
        values |= {name: changed[name] for name in names if other and name in changed}
        values["turn_rewards"] = none.scatter(1, last, values["reward"][:, None])
        asked.append(replay.credit_of(batch.with_(**values), rule, step).push)
    return not torch.equal(*asked)


def _max_tokens(config: Mapping[str, Any]) -> int | None:
    """The most tokens that an episode of the run could sample, where its configuration says."""
    sizes = [_setting(config, name, None) for name in ("max_turns", "max_response_tokens")]
    return sizes[0] * sizes[1] if all(isinstance(size, int) and size > 0 for size in sizes) else None


def _recorded(batch: Batch, turns: pl.DataFrame, step: int, rule: Method, config: Mapping[str, Any]) -> _Credit:
    """The credit that the tables hold. That of a method with an auxiliary loss is in dloss/dlogp alone: it is read off
    there, with the weights that the method's two losses give to tokens."""
    advantage = replay.recorded_values(turns, step, "advantage", batch)
    slope = replay.recorded_values(turns, step, "dloss_dlogp", batch)
    if advantage is None:
        raise WorkbenchError(
            f"turns: step {step} was recorded without advantages, so there is no credit to compare with; "
            "name a method to compare against, such as grpo"
        )
    if slope is None:
        plain = PolicyLossConfig(aggregation=rule.loss.aggregation)
        weights = losses.token_weights(batch, plain.aggregation, _max_tokens(config))
        old = batch.old_logprobs
        return _Credit(advantage, losses.dloss_dlogp(old, old, advantage, weights, plain, batch.turn_index))
    own = None
    if isinstance(config.get("method"), str):
        own = methods.method(config["method"], **(config.get("method_options") or {}))
    if own is None or own.aux is None:
        return _Credit(advantage, slope)
    policy = own.loss.pg_coef * advantage
    weights = losses.token_weights(batch, own.loss.aggregation, _max_tokens(config))
    mean = losses.token_weights(batch, "token_mean")
    return _Credit(policy - torch.where(batch.response_mask, (slope + weights * policy) / mean, 0), slope)


def _frames(
    run: str,
    step: int,
    batch: Batch,
    turns: pl.DataFrame,
    heads: pl.DataFrame,
    old: _Credit,
    new: _Credit,
    top: int,
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The four frames of one step. Rows of `batch` hold turns in the order of (episode, turn)."""
    rows, heads = turns.sort("episode", "turn"), heads.sort("episode")
    sizes, tables, means = batch.turn_tokens, [], []
    for side in (old, new):
        sums = batch.turn_sum(side.push)
        tables.append(sums / sizes.clamp(min=1))
        means.append(sums.sum(1) / sizes.sum(1))
    signs = [torch.sign(torch.where(t.abs() > SAME * t.abs().max(), t, 0)) for t in tables]
    flipped = signs[0] * signs[1] < 0
    scaled, mask = [t / t.abs().max().clamp(min=1e-12) for t in tables], batch.turn_mask
    ranks = rank_correlation(*scaled, mask, digits=6)
    link = pl.format(f"{Link(run, step)}&episode={{}}&turn={{}}", "episode", "turn")  # a link holds no braces
    texts = [n for n in ("group", "task", "outcome", "return") if n in heads.columns]
    episode_frame = heads.select("step", "episode", *texts).with_columns(
        n_turns=pl.Series(batch.turn_counts.numpy()),
        n_tokens=pl.Series(sizes.sum(1).numpy()),
        rank_correlation=pl.Series(ranks.double().numpy()).fill_nan(None),
        flips=pl.Series((flipped & mask).sum(1).numpy()),
        baseline_credit=pl.Series(means[0].numpy()),
        other_credit=pl.Series(means[1].numpy()),
    )
    action = pl.col("action") if "action" in rows.columns else pl.lit(None, pl.String).alias("action")
    turn_frame = rows.select(*KEY, action).with_columns(
        baseline_credit=pl.Series(tables[0][mask].numpy()),
        other_credit=pl.Series(tables[1][mask].numpy()),
        change=pl.Series((tables[1] - tables[0])[mask].numpy()),
        flipped=pl.Series(flipped[mask].numpy()),
        link=link,
    )
    slopes = [side.slope[batch.response_mask] for side in (old, new)]
    token_frame = _tokens(rows, *slopes, top).with_columns(
        pl.format("{}&span={}-{}", link, "position", pl.col("position") + 1).alias("link")
    )
    summary = pl.DataFrame(
        {
            "step": step,
            "episodes": episode_frame.height,
            "turns": turn_frame.height,
            "tokens": len(slopes[0]),
            "ranked": len(episode_frame["rank_correlation"].drop_nulls()),
            "rank_correlation": episode_frame["rank_correlation"].mean(),
            "flips": int(turn_frame["flipped"].sum()),
            "baseline_slope": slopes[0].abs().sum().item(),
            "other_slope": slopes[1].abs().sum().item(),
            "change": (slopes[1] - slopes[0]).abs().sum().item(),
        },
        schema_overrides={"rank_correlation": pl.Float64},
    )
    return episode_frame, turn_frame, token_frame, summary


def _tokens(rows: pl.DataFrame, old: Tensor, new: Tensor, top: int) -> pl.DataFrame:
    """The `top` sampled tokens of largest |new - old|. old, new: (N,) dloss/dlogp in the order of the rows' tokens."""
    change = new - old
    found = change.abs().argsort(descending=True, stable=True)[:top].sort().values.numpy()
    ends = rows["token_ids"].list.len().cum_sum().to_numpy()
    at = np.searchsorted(ends, found, side="right")
    within = found - np.concatenate([[0], ends])[at]
    picked = rows[at].with_columns(position=pl.Series(within, dtype=pl.Int64))
    has_pieces = "pieces" in rows.columns and rows["pieces"].dtype == pl.List(pl.String)
    piece = pl.col("pieces").list.get(pl.col("position"), null_on_oob=True) if has_pieces else pl.lit(None, pl.String)
    return picked.select(
        *KEY,
        "position",
        pl.col("token_ids").list.get(pl.col("position")).alias("token_id"),
        piece.alias("piece"),
        pl.Series("baseline_slope", old[found].numpy()),
        pl.Series("other_slope", new[found].numpy()),
        pl.Series("change", change[found].numpy()),
    )


def _notes(config: Mapping[str, Any], against: str, returns: bool) -> tuple[str, ...]:
    notes = []
    if against == RECORDED and _setting(config, "kl_coef", 0):
        notes.append("The recorded dloss/dlogp holds the slope of the run's KL penalty; the replay has none.")
    if returns and _setting(config, "reward", "outcome") != "return":
        notes.append("Groups compare returns, as the run does not say of every episode whether it succeeded.")
    return tuple(notes)
