"""Which sampled tokens of a batch are distilled: DEAR's choice, from one more reading by student and teacher."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .distill import dear, opsd
from .distill.dear import DEARConfig
from .passes import microbatches
from .policy import Policy
from .records import Batch
from .update import TeacherRows


@dataclass(frozen=True)
class Chosen:
    """decisions, evidence (B,T) bool, off the mask False; score (B,T) by which evidence was chosen, 0 at decisions;
    divergence (B,T): reverse KL to the teacher, nats; mass (B,T): how hard its gradient pulls."""

    decisions: Tensor
    evidence: Tensor
    score: Tensor
    divergence: Tensor
    mass: Tensor

    @property
    def keep(self) -> Tensor:
        return self.decisions | self.evidence

    def tokens(self) -> dict[str, Tensor]:
        """The columns of the turns table."""
        return {"decision": self.decisions, "support": self.evidence, "support_score": self.score}

    def summary(self, counted: Tensor) -> dict[str, float | None]:
        """Shares: of the counted (B,T) tokens that are kept, of their gradient's mass on decisions and on all kept."""
        return {
            "kept_share": float(self.keep[counted].float().mean()),
            "mass_decisions": dear.coverage(self.mass[counted], self.decisions[counted]),
            "mass_kept": dear.coverage(self.mass[counted], self.keep[counted]),
        }


@torch.no_grad()
def choose(
    policy: Policy,
    batch: Batch,
    teacher: TeacherRows,
    config: DEARConfig,
    temperature: float = 1.0,
    max_tokens: int = 16384,
    chunk: int = 2**22,
) -> Chosen:
    """Choose among the batch's sampled tokens, `max_tokens` padded tokens and `chunk` logits at a time.

    A token's state, entropy and divergence are those of the place it was predicted at. Raises WorkbenchError where the
    teacher has another vocabulary.
    """
    vocabulary = policy.lm_head.weight.shape[0]
    dear.same_vocabulary(vocabulary, teacher.policy.lm_head.weight.shape[0])
    step = max(1, chunk // vocabulary)
    flags = torch.zeros(2, *batch.input_ids.shape, dtype=torch.bool, device=batch.input_ids.device)
    numbers = torch.zeros(3, *batch.input_ids.shape, device=batch.input_ids.device)
    for rows in microbatches(teacher.lengths, max_tokens):
        width = int(batch.lengths[rows].max())
        mask, turns = batch.response_mask[rows, :width], batch.turn_index[rows, :width]
        b, t = torch.nonzero(mask, as_tuple=True)
        states = policy.hidden(batch.input_ids[rows, :width])[b, t - 1]
        theirs = teacher.states(rows, mask)
        parts = []
        for start in range(0, len(states), step):
            part = slice(start, start + step)
            own, other = policy.logits(states[part]) / temperature, teacher.policy.logits(theirs[part]) / temperature
            logp = F.log_softmax(own, dim=-1)
            entropy = -(logp.exp() * logp).sum(-1)
            parts.append((entropy, opsd.divergence(own, other, dear.REVERSE_KL), dear.gradient_mass(own, other)))
        entropy, divergence, mass = (torch.cat(values) for values in zip(*parts, strict=True))
        response = b
        if config.within == "turn":
            begins = (b.diff() != 0) | (turns[b, t].diff() != 0)
            response = F.pad(begins.long().cumsum(0), (1, 0))
        found = dear.select(entropy, divergence, states, response, config)
        flags[:, rows[b], t] = torch.stack([found.decisions, found.evidence])
        numbers[:, rows[b], t] = torch.stack([found.score, divergence, mass])
    return Chosen(*flags, *numbers)
