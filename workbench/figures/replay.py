"""Signals computed again from a run's recorded log-probs: for runs of other methods, or by another rule.

The rules are the library's own (`credit.agent_opsd.reshape_turns`, `distill.sdar.gate`); nothing is computed here but
the layout of tables as tensors and back. All in float64, from teacher and student log-probs of the sampled tokens.
"""

from dataclasses import replace

import polars as pl
import torch

from ..credit.agent_opsd import AgentOPSDConfig, reshape_turns
from ..distill import sdar
from ..tables import cut
from . import style

NO_TEACHER = "the run was recorded without a teacher's log-probs, so there is no gap to read"
KEY = ["step", "episode"]
PAPER = AgentOPSDConfig()


def with_gap(turns: pl.DataFrame) -> pl.DataFrame:
    """Turns that have teacher log-probs, with `gap` = teacher - student of every sampled token (nats) filled in."""
    style.need(turns, ["teacher_logprobs", "old_logprobs"], "turns", NO_TEACHER)
    rows = turns.filter(pl.col("teacher_logprobs").is_not_null())
    return rows.with_columns((pl.col("teacher_logprobs") - pl.col("old_logprobs")).alias("gap"))


def _tensor(column: pl.Series) -> torch.Tensor:
    return torch.from_numpy(column.to_numpy(writable=True))


def with_gate(turns: pl.DataFrame, beta: float = -1.0) -> pl.DataFrame:
    """Turns with SDAR's `gate` = sigmoid(beta gap) of every token; beta < 0: as recorded, or 5 where it was not."""
    if beta < 0 and "gate" in turns.columns and turns["gate"].null_count() < turns.height:
        return with_gap(turns)
    rows = with_gap(turns)
    gap = _tensor(rows["gap"].explode().cast(pl.Float64))
    gate = sdar.gate(gap[None], sdar.SDARConfig(beta=5.0 if beta < 0 else beta))[0]
    return rows.with_columns(cut(pl.Series(gate.numpy()), rows["gap"].list.len().to_list()).alias("gate"))


def _evidence(rule: str) -> pl.Expr:
    total = pl.col("gap").list.sum()
    if rule == "mean":
        return pl.col("gap").list.mean()
    if rule == "centred":
        return pl.when(pl.len().over(KEY) > 1).then(total - total.mean().over(KEY)).otherwise(total)
    return total


def with_beliefs(turns: pl.DataFrame, episodes: pl.DataFrame, config: AgentOPSDConfig = PAPER) -> pl.DataFrame:
    """Turns with evidence, belief_before, belief, revision, z, weight, turn_advantage and pivotal by the given rule.

    The prior and the advantage that is reshaped are the recorded ones of the episode; a missing prior is the success
    rate of its group. Turn granularity only; `config.prior`, `prior_per` and `grpo` have no effect here.
    """
    heads = episodes.with_columns(pl.col("outcome").mean().over("step", "group").cast(pl.Float64).alias("rate"))
    heads = heads.with_columns(pl.coalesce(pl.col("prior").cast(pl.Float64), "rate").alias("prior"))
    rows = with_gap(turns).with_columns(_evidence(config.evidence).alias("evidence")).sort(*KEY, "turn")
    rows = rows.join(heads.select(*KEY, "prior", pl.col("advantage").alias("_advantage")), on=KEY, how="left")
    rows = rows.with_columns(
        pl.col("evidence").cast(pl.Float64),
        pl.struct(KEY).rle_id().cast(pl.Int64).alias("_row"),
        pl.int_range(pl.len()).over(KEY).alias("_col"),
    )
    at = _tensor(rows["_row"]), _tensor(rows["_col"])
    shape = (int(at[0].max()) + 1, int(at[1].max()) + 1)
    evidence, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    evidence[at], mask[at] = _tensor(rows["evidence"]), True
    first = rows.filter(pl.col("_col") == 0)
    prior, advantage = (_tensor(first[c].cast(pl.Float64)) for c in ("prior", "_advantage"))
    table = reshape_turns(evidence, mask, prior, advantage, config)
    new = {name: pl.Series(table[name][at].numpy()) for name in table if name != "cumulative"}
    return (
        rows.drop("_row", "_col", "_advantage", "prior")
        .with_columns(**new)
        .with_columns((pl.col("z").abs() > 1).alias("pivotal"))
    )


def rule(gamma: float = -1.0) -> AgentOPSDConfig:
    """The paper's rule with another decay; gamma < 0 leaves it at .95."""
    return PAPER if gamma < 0 else replace(PAPER, gamma=gamma)


def has_beliefs(turns: pl.DataFrame) -> bool:
    """Whether the run recorded beliefs of its own."""
    return "belief" in turns.columns and turns["belief"].null_count() < turns.height


def beliefs_of(turns: pl.DataFrame, episodes: pl.DataFrame, gamma: float = -1.0) -> pl.DataFrame:
    """Turns with beliefs: the recorded ones where the run has them and gamma < 0, else by AgentOPSD's rule with this
    gamma (.95, the paper's, if < 0) from the recorded log-probs."""
    return turns if gamma < 0 and has_beliefs(turns) else with_beliefs(turns, episodes, rule(gamma))
