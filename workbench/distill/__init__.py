"""Auxiliary token losses from a teacher's log-probs: one file a method, pure tensor functions."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .dear import DEARConfig
from .opsd import OPSDConfig
from .sdar import SDARConfig


@dataclass(frozen=True)
class AuxLoss:
    """A loss beside the policy loss, the mean over sampled tokens of what its file gives, `coef` included.

    loss, gradient: (student, teacher, old, entropy), each (B,T), to (B,T): the loss of each token, and its derivative
    with respect to the student's log-prob. gate: the gate of an SDAR-type loss. divergence: a loss over the whole
    vocabulary, which takes logits in place of log-probs and has no `loss` or `gradient` per sampled token. keep: which
    tokens a divergence is taken at, the mean being over those; None: all.
    """

    coef: float
    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    gate: SDARConfig | None = None
    divergence: OPSDConfig | None = None
    keep: DEARConfig | None = None
