"""What a training step leaves in the run folder: a table each of steps, updates, modules, turns and so on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from . import loss as losses
from . import sampling, tables
from .composition import Method
from .credit import agent_opsd, grpo
from .distill import sdar
from .records import Batch, Credit, Episode
from .runs.folder import RunFolder
from .selection import Chosen

NULLABLE = dict.fromkeys(
    ("increment", "z", "threshold", "energy", "head_norm", "head_energy", "aux_loss", "kl_reference", "gap_mean",
     "gap_std", "gate_mean", "gate_active", "belief_saturated", "revision_tiny", "pivotal_share", "relative_change",
     "cumulative_change", "grad_norm", "mass_decisions", "mass_kept"),
    pl.Float64,
) | {"n_unsolved": pl.Int64}  # fmt: skip


def record(
    folder: RunFolder,
    step: int,
    episodes: Sequence[Episode],
    batch: Batch,
    credit: Credit,
    entropy: Tensor,
    method: Method,
    updates: list[dict[str, Any]],
    modules: list[dict[str, Any]],
    *,
    pieces: Callable[[list[int]], list[str]],
    lr: float,
    max_tokens: int,
    kl_coef: float = 0.0,
    drawn: Sequence[Episode] | None = None,
    chosen: Chosen | None = None,
    budget: Sequence[dict[str, Any]] = (),
    turns: bool = True,
) -> None:
    """Write a step's tables.

    entropy (B,T): of the policy before any update. updates, modules, budget: rows of those tables. pieces: token ids
    -> their strings. max_tokens: as in loss.token_weights. drawn: all that was played, where it is more than episodes.
    chosen: the tokens that are distilled, where the method chooses. turns: whether that table is written.
    """
    mask, aux = batch.counted, method.aux
    old, teacher = batch.old_logprobs, batch.teacher_logprobs
    gap = None if teacher is None else torch.where(mask, teacher - old, 0)
    gates = None if gap is None else sdar.gate(gap, (aux and aux.gate) or sdar.SDARConfig(), entropy)
    summary = {
        "step": step,
        **tables.rollout_summary(episodes if drawn is None else drawn, credit.advantages, mask, batch),
        "updates": sum(r["applied"] for r in updates),
        "discarded": sum(r["signal"] and not r["applied"] for r in updates),
        "stopped_early": updates[-1]["stop"],
        **{name: updates[0][name] for name in ("loss", "pg_loss", "aux_loss", "grad_norm", "kl_reference")},
        **{name: updates[-1][name] for name in ("kl", "clip_fraction", "ratio_max", "chi2")},
        "head_energy": updates[0]["energy"],
        "entropy": float(losses.masked_mean(entropy, mask)),
        "lr": lr,
        **tables.gap_summary(gap, gates, mask),
        **dict.fromkeys(("belief_saturated", "revision_tiny", "pivotal_share")),
    }
    if "belief" in credit.turns:
        summary |= agent_opsd.saturation(credit.turns, batch.turn_mask)
    if chosen:
        summary |= chosen.summary(mask)

    def write(name: str, frame: pl.DataFrame) -> None:
        folder.write_table(name, step, frame)

    for name, rows in (("steps", [summary]), ("updates", updates), ("modules", modules)):
        if rows:
            write(name, pl.DataFrame(rows, infer_schema_length=None, schema_overrides=NULLABLE))
    if budget:
        write("budget", sampling.budget_frame(budget))
    advantage = grpo.group_advantage(batch.reward, batch.group_index)
    write("episodes", tables.episodes_frame(step, episodes, advantage, agent_opsd.prior(batch), batch.prior_rate))
    if turns:
        tokens = {
            "old_logprobs": old, "teacher_logprobs": teacher, "gap": gap, "gate": gates,
            "advantage": credit.advantages, "dloss_dlogp": _slope(batch, credit, entropy, method, max_tokens, kl_coef),
            "entropy": entropy, "sampled_logprobs": batch.sampled_logprobs, **(chosen.tokens() if chosen else {}),
        }  # fmt: skip
        write("turns", tables.turns_frame(step, episodes, batch, credit, tokens, lambda ids: pieces(ids.tolist())))


def record_seconds(folder: RunFolder, step: int, seconds: Mapping[str, float]) -> None:
    """Write what each stage of a step took."""
    rows = [{"step": step, "stage": stage, "seconds": taken} for stage, taken in seconds.items()]
    folder.write_table("timings", step, pl.DataFrame(rows))


def _slope(
    batch: Batch, credit: Credit, entropy: Tensor, method: Method, max_tokens: int, kl_coef: float
) -> Tensor | None:
    """(B,T) dloss/dlogp of the first update; None where the loss is not one of the sampled tokens' log-probs alone."""
    own, aux, old = method.loss, method.aux, batch.old_logprobs
    if aux and aux.coef and aux.divergence:
        return None
    slope = losses.dloss_dlogp(
        old, old, losses.weighted(credit.advantages, batch, own),
        losses.token_weights(batch, own.aggregation, max_tokens), own, batch.turn_index, batch.reference_logprobs,
        kl_coef, batch.episode_index,
    )  # fmt: skip
    if aux and aux.coef and aux.gradient:
        slope = slope + losses.token_weights(batch, "token_mean") * aux.gradient(
            old, batch.teacher_logprobs, old, entropy
        )
    return slope
