"""One step's rollouts as every process of a run knows them: the whole batch, its credit, and the updates made on it.

Processes exchange episodes and log-probs once a step, and each computes the credit of the whole batch: rules compare
episodes of a group, or of the batch, wherever they were played. All of it is on the CPU, in the files of credit/.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import loss as losses
from ..composition import Method
from ..credit import cast
from ..errors import WorkbenchError
from ..records import Batch, Credit, Episode
from ..reuse.controls import FixedReuse, RandomStop
from ..reuse.dgg import Decision, Gate


@dataclass(frozen=True, eq=False)
class Scored:
    """An episode, and log-probs and entropy (T,) of its row under the policy, the teacher and the reference."""

    episode: Episode
    old: np.ndarray
    entropy: np.ndarray
    teacher: np.ndarray | None = None
    reference: np.ndarray | None = None


def scored(
    episodes: Sequence[Episode],
    lengths: Sequence[int],
    old: Tensor,
    entropy: Tensor,
    teacher: Tensor | None,
    reference: Tensor | None,
) -> list[Scored]:
    """Episodes with their rows of (B,T) tensors, cut to their lengths."""
    tensors = [None if x is None else x.float().cpu().numpy() for x in (old, entropy, teacher, reference)]
    return [
        Scored(episode, *(None if x is None else x[b, :n] for x in tensors))
        for b, (episode, n) in enumerate(zip(episodes, lengths, strict=True))
    ]


@dataclass(eq=False)
class Step:
    """number: of the step, from 0; episodes, batch, credit: of all processes, a row an episode; entropy (B,T): of the
    policy that sampled. used: how many updates were computed on it; updates, modules: rows of the tables so far."""

    number: int
    episodes: list[Episode]
    batch: Batch
    credit: Credit
    entropy: Tensor
    method: Method
    max_tokens: int
    beta: float = 0.0
    used: int = 0
    updates: list[dict[str, Any]] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self):
        own, aux = self.method.loss, self.method.aux
        self.advantages = losses.weighted(self.credit.advantages, self.batch, own)
        self.weights = losses.token_weights(self.batch, own.aggregation, self.max_tokens)
        self.aux_weights = losses.token_weights(self.batch, "token_mean") if aux and aux.coef else None

    @property
    def signal(self) -> bool:
        """Whether anything in the loss has a gradient."""
        other = self.aux_weights is not None or self.beta != 0
        return other or bool((self.advantages != 0).any()) and self.method.loss.pg_coef != 0

    def measure(self, logp: Tensor, entropy: Tensor) -> dict[str, float | None]:
        """What the update's log-probs and entropy (B,T) make of the parts of the loss and of the ratios, by loss.py."""
        own, aux, batch = self.method.loss, self.method.aux, self.batch
        form = losses.sequence_form(logp, batch.old_logprobs, batch.turn_index, own.ratio, batch.episode_index)
        pg = (self.weights * losses.surrogate(form, batch.old_logprobs, self.advantages, **own.clip)).sum()
        extra = kl = None
        if self.aux_weights is not None:
            per_token = aux.loss(logp, batch.teacher_logprobs, batch.old_logprobs, entropy)
            extra = float((self.aux_weights * per_token).sum())
        if batch.reference_logprobs is not None:
            kl = float((self.weights * losses.kl_k3(logp, batch.reference_logprobs)).sum())
        ratios = losses.ratio_metrics(
            logp, batch.old_logprobs, batch.counted, self.credit.advantages, own, batch.turn_index, batch.episode_index
        )
        return {
            "pg_loss": float(pg), "aux_loss": extra, "kl_reference": kl, "kl": ratios["approx_kl"],
            "chi2": ratios["chi2"], "ratio_max": ratios["ratio_max"], "clip_fraction": ratios["clip_fraction"],
        }  # fmt: skip

    def decide(
        self,
        gate: Gate | FixedReuse | RandomStop,
        update: int,
        logp: Tensor,
        entropy: Tensor,
        loss: float,
        grad_norm: float,
        energy: float,
    ) -> Decision:
        """Ask the gate about the update with log-probs and entropy (B,T), and note it as a row of `updates`.

        energy: of the output head's gradient, nan where the engine has none to show; increments are then unknown.
        Nothing is asked where nothing in the loss has a gradient. Raises WorkbenchError where a gate is blind.
        """
        self.used += 1
        seen = self.measure(logp, entropy)
        watched = {
            "energy": energy, "norm": math.sqrt(energy), "grad_norm": grad_norm, "kl": seen["kl"], "chi2": seen["chi2"],
        }  # fmt: skip
        value = watched[gate.statistic]
        asked = self.signal and not math.isnan(value)
        if self.signal and not asked and not isinstance(gate, FixedReuse):
            raise WorkbenchError(f"update {update}: the gate watches {gate.statistic}, and the engine shows none")
        decision = gate.observe(value, self.used) if asked else Decision(True, not self.signal)
        known = None if math.isnan(energy) else energy
        self.updates.append({
            "step": self.number, "update": update, "reuse": self.used, "applied": decision.apply,
            "stop": decision.stop, "signal": self.signal, "energy": known, "head_norm": known and math.sqrt(known),
            "statistic": gate.statistic, "increment": decision.increment, "z": decision.z, "threshold": gate.threshold,
            "loss": loss, "grad_norm": grad_norm, **seen,
        })  # fmt: skip
        return decision


def step_of(
    number: int,
    rows: Sequence[Scored],
    method: Method,
    pad_id: int,
    reward: str,
    max_tokens: int,
    beta: float = 0.0,
    sampled: bool = False,
) -> Step:
    """The step of the rows of all processes, in their order. sampled: whether the episodes' own log-probs are those of
    another engine than the one that scored them, which is then weighed where the method does so."""
    episodes = [row.episode for row in rows]
    batch = Batch.from_episodes(episodes, "episode", pad_id, reward)

    def wide(name: str) -> Tensor | None:
        values = [getattr(row, name) for row in rows]
        if all(v is None for v in values):
            return None
        out = torch.zeros(batch.input_ids.shape)
        for b, value in enumerate(values):
            if value is None or len(value) != int(batch.lengths[b]):
                raise WorkbenchError(f"row {b}: {name} log-probs do not fit its {int(batch.lengths[b])} tokens")
            out[b, : len(value)] = torch.from_numpy(value)
        return torch.where(batch.response_mask, out, 0)

    changes = {"old_logprobs": wide("old"), "teacher_logprobs": wide("teacher")}
    changes["reference_logprobs"] = wide("reference")
    if sampled:
        changes["sampled_logprobs"] = batch.old_logprobs
    if method.anchors:
        changes["anchors"] = method.anchors(episodes)
    if method.needs_solver:
        changes["solver_advantages"] = cast.solver_advantages(episodes)
    batch = batch.with_(**changes)
    return Step(number, episodes, batch, method.credit(batch, number), wide("entropy"), method, max_tokens, beta)
