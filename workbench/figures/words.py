"""What the figures show, in sentences computed from the same frames. Plain text; rollout text is quoted as it is."""

import math

import polars as pl

from . import beliefs, lm_head, style
from .gates import over_training_frame, tokens_by_outcome
from .replay import PAPER, has_beliefs
from .tokens import token_rows


def _p(value: float | None, digits: int = 0) -> str:
    return style.percent(value, digits)


def _n(value: float | None, spec: str = "+.2f") -> str:
    return style.number(value, spec)


def _quote(action: str) -> str:
    line = " ".join(action.split())
    return f"“{line if len(line) <= 60 else line[:59] + '…'}”"


def belief_source(recorded: pl.DataFrame, gamma: float) -> str:
    """Whether the beliefs shown are the run's own."""
    if gamma < 0 and has_beliefs(recorded):
        return "Beliefs are shown as the run recorded them."
    decay = PAPER.gamma if gamma < 0 else gamma
    return f"Beliefs are computed again from the recorded log-probs, by AgentOPSD's rule with gamma = {decay:g}."


def group(turns: pl.DataFrame, episodes: pl.DataFrame, step: int, group: int) -> list[str]:
    """Where the group's beliefs ended, by outcome, and how many turns were pivotal."""
    rows = style.pick(beliefs.outcomes(turns, episodes), "turns", step=step, group=group).sort("turn")
    ends = rows.group_by("episode").agg(pl.col("outcome").first(), pl.col("belief").last())
    means = dict(ends.group_by("outcome").agg(pl.col("belief").mean()).rows())
    pivotal = (rows["z"].abs() > 1).sum()
    out = [
        f"{ends['outcome'].sum()} of {ends.height} episodes of the group succeeded; {pivotal} of {rows.height} turns "
        "are pivotal."
    ]
    if len(means) == 2:
        apart = means[1] - means[0]
        verdict = (
            "tells them apart" if apart > 0.2 else "hardly tells them apart" if apart > 0 else "has them the wrong way"
        )
        out.append(
            f"Successes end at a mean belief of {means[1]:.2f}, failures at {means[0]:.2f}: the "
            f"teacher's evidence {verdict}."
        )
    else:
        out.append("All had the same outcome, so their advantage, and any credit of their turns, is zero.")
    return out


def episode(turns: pl.DataFrame, episodes: pl.DataFrame, step: int, episode: int) -> list[str]:
    """The episode's most pivotal turn: what was done, what the belief did, what its advantage became."""
    rows = style.pick(beliefs.outcomes(turns, episodes), "turns", step=step, episode=episode)
    top = rows.row(by_predicate=pl.col("turn") == beliefs.top_turn(rows, step, episode), named=True)
    won = "succeeded" if top["outcome"] else "failed"
    if top["z"] is None or abs(top["z"]) <= 1:
        return [f"Episode {episode} of step {step} {won}; none of its {rows.height} turns is pivotal."]
    whole, own = top["episode_advantage"], top["turn_advantage"]
    share = f", {own / whole:.2f} of the episode's {_n(whole)}" if whole and own is not None else ""
    return [
        f"Episode {episode} of step {step} {won} in {rows.height} turns. Its most pivotal turn is number "
        f"{top['turn'] + 1}, {_quote(top['action'])}: evidence of {_n(top['evidence'])} nats took the belief from "
        f"{top['belief_before']:.2f} to {top['belief']:.2f} (z = {_n(top['z'])}).",
        f"Its tokens were trained with an advantage of {_n(own)}{share}.",
    ]


def saturation(frame: pl.DataFrame) -> list[str]:
    """How saturated the belief is, from evidence.saturation_frame."""
    first, last = frame.row(0, named=True), frame.row(-1, named=True)
    out = [
        f"After {_p(last['saturated'])} of turns at step {last['step']} the belief lies outside [0.01, 0.99] "
        f"({_p(first['saturated'])} at step {first['step']}); {_p(last['tiny'])} of revisions are below 0.001."
    ]
    if frame["saturated"].max() > 0.5:
        worst = frame.sort("saturated", descending=True).row(0, named=True)
        out.append(f"At step {worst['step']} more than half are saturated: there, z compares noise among later turns.")
    else:
        out.append(
            "At no recorded step are more than half of the turns saturated, so revisions still carry information."
        )
    return out


def order(turns: pl.DataFrame, episodes: pl.DataFrame) -> tuple[float | None, int]:
    """(share, n): of the n pairs of a success and a failure of one group, in how many the success has the larger belief
    after the last turn that both played (failures last longer, and beliefs drift). Ties count half; None: no pairs."""
    rows = beliefs.outcomes(turns, episodes).filter(pl.col("belief").is_not_null())
    group, at = ["step", "group"], ["step", "group", "episode"]
    ends = rows.group_by(at).agg(pl.col("outcome").first(), pl.col("turn").max().alias("last"))
    won, lost = (ends.filter(pl.col("outcome") == o) for o in (1, 0))
    pairs = won.join(lost, on=group, suffix="_lost").with_columns(turn=pl.min_horizontal("last", "last_lost"))
    beliefs_at = rows.select(*at, "turn", "belief")
    pairs = pairs.join(beliefs_at, on=[*at, "turn"])
    pairs = pairs.join(beliefs_at, left_on=[*group, "episode_lost", "turn"], right_on=[*at, "turn"], suffix="_lost")
    if pairs.is_empty():
        return None, 0
    gap = pairs["belief"] - pairs["belief_lost"]
    return (gap > 0).mean() + 0.5 * (gap == 0).mean(), pairs.height


def trust(turns: pl.DataFrame, episodes: pl.DataFrame) -> list[str]:
    """Whether beliefs order episodes as their outcomes do, over all groups; and how many pivotal turns were invalid."""
    share, pairs = order(turns, episodes)
    if share is None:
        return ["No group has both a success and a failure, so beliefs cannot be held against outcomes."]
    verdict = "better than a coin" if share > 0.55 else "no better than a coin" if share > 0.45 else "worse than a coin"
    out = [
        f"Over all groups, of a success and a failure the success has the larger belief after the last turn that both "
        f"played in {_p(share)} of {pairs:,} pairs: {verdict}."
    ]
    pivotal = turns.filter(pl.col("z").abs() > 1)
    if pivotal.height:
        out.append(
            f"{_p(1 - pivotal['valid'].mean())} of the {pivotal.height:,} pivotal turns were actions that the "
            f"environment did not accept, against {_p(1 - turns['valid'].mean())} of all turns."
        )
    return out


def _auc(high: pl.Series, low: pl.Series) -> float:
    """Chance that a random value of `high` lies above a random one of `low`, ties counting half."""
    both = pl.concat([high, low])
    ranks = both.rank("average").head(len(high)).sum()
    return (ranks - len(high) * (len(high) + 1) / 2) / (len(high) * len(low))


def gap(turns: pl.DataFrame, episodes: pl.DataFrame, beta: float = -1.0) -> list[str]:
    """Whether the gap tells tokens of successes from those of failures."""
    tokens = tokens_by_outcome(turns, episodes, beta)
    won, lost = (tokens.filter(pl.col("outcome") == o)["gap"] for o in (1, 0))
    share = _p((tokens["gate"] > 0.5).mean())
    out = [
        f"The gate is above one half for {share} of {tokens.height:,} tokens; "
        f"the mean gap is {_n(tokens['gap'].mean())} nats."
    ]
    if len(won) and len(lost):
        auc = _auc(won, lost)
        verdict = "tells little of the outcome" if abs(auc - 0.5) < 0.05 else "tells something of the outcome"
        verdict = "points away from the outcome" if auc <= 0.45 else verdict
        out.append(
            f"It is {_n(won.mean())} in successes and {_n(lost.mean())} in failures; a random token of a success has "
            f"the larger gap of the two in {_p(auc)} of pairs, so a single token's gap {verdict}."
        )
    return out


def gate_over_training(turns: pl.DataFrame, episodes: pl.DataFrame, beta: float = -1.0) -> list[str]:
    """How the gate-active share and the mean gap moved."""
    frame = over_training_frame(turns, episodes, beta)
    first, last = frame.row(0, named=True), frame.row(-1, named=True)
    return [
        f"From step {first['step']} to step {last['step']} the gate-active share went from "
        f"{_p(first['gate_active'])} to {_p(last['gate_active'])}, the mean gap from "
        f"{_n(first['gap_mean'], '+.3f')} to {_n(last['gap_mean'], '+.3f')} nats."
    ]


def push(turns: pl.DataFrame, step: int, episode: int, turn: int, beta: float, coef: float) -> list[str]:
    """How large the gated loss's coefficient is beside the policy loss's."""
    tokens = token_rows(turns, step, episode, turn, beta)
    gated = [coef * t["gate"] for t in tokens]
    credit = [abs(t["advantage"]) for t in tokens if t["advantage"] is not None]
    out = [
        f"Over these {len(tokens)} tokens the gated loss has coefficients of {min(gated):.4f} to "
        f"{max(gated):.4f}, all upwards."
    ]
    if credit and max(credit) > 0:
        size = sum(gated) / len(gated) / (sum(credit) / len(credit))
        out.append(f"On average that is {_p(size, 1)} of the size of the policy loss's.")
    elif credit:
        out.append("The policy loss gives these tokens no push at all: their advantage is zero.")
    return out


def head(modules: pl.DataFrame) -> list[str]:
    """How far the head moves against the median module, per update and since the start."""
    ratio = lm_head.head_ratio(modules).drop_nulls("ratio")
    total = lm_head.head_ratio(modules, "cumulative_change").drop_nulls("ratio")
    low, high = ratio["ratio"].min(), ratio["ratio"].max()
    typical = ratio["ratio"].median()
    side = "more than" if typical > 1.1 else "less than" if typical < 0.9 else "about as much as"
    end = total.row(-1, named=True)
    return [
        f"Relative to its size lm_head moves {side} the median module: {typical:.2f} times per update "
        f"({low:.2f} to {high:.2f} over {ratio.height} updates).",
        f"Since the start it has moved by {_p(end['head'], 1)} of its norm, {end['ratio']:.2f} times the "
        "median module.",
    ]


def gate(updates: pl.DataFrame) -> list[str]:
    """What the gate did, and whether the head's energy went its own way."""
    frame = lm_head.reuse_frame(updates)
    gone, stopped = frame["discarded"].sum(), int(frame["stopped"].sum())
    out = [
        f"{updates.height} gradients were computed on {frame.height} batches, {gone} of them discarded and reuse "
        f"cut short {stopped} times; a batch gave {frame['applied'].mean():.2f} updates on average."
    ]
    pairs = []
    for name, label in lm_head.SIGNALS.items():
        if name == "energy" or name not in updates.columns:
            continue
        rows = updates.select("energy", name).drop_nulls()
        value = rows.select(pl.corr("energy", name, method="spearman")).item() if rows.height > 4 else None
        if value is not None and math.isfinite(value):
            pairs.append(f"{label} {_n(value)}")
    if pairs:
        out.append(f"Rank correlation of the head's energy with {', '.join(pairs)}.")
    return out
