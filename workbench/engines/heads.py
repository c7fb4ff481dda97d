"""The output head's gradient energy under an engine: whole where it is sharded, apart where the head is tied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..reuse.lm_head import IsolatedHead


def energy_of(weight: Tensor) -> float | None:
    """Squared Frobenius norm of a weight's gradient, whole where it is sharded; None where it has none."""
    if weight.grad is None:
        return None
    norm = torch.linalg.vector_norm(weight.grad, dtype=torch.promote_types(weight.grad.dtype, torch.float32))
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())


class HeadEnergy:
    """The energy of a model's output head before gradients are clipped.

    isolate: where the head is tied to the embedding, give the loss a head of its own (reuse/lm_head.py), so that the
    energy is that of the logits alone. Each process must have the whole weight. The sum of the two parts then reaches
    the weight in another order than without, which rounds otherwise.
    """

    def __init__(self, model: Any, isolate: bool):
        self.model = model
        self.tied = model.get_input_embeddings().weight is self.weight
        self.own = IsolatedHead(model) if self.tied and isolate else None

    @property
    def weight(self) -> Tensor:
        """The head's weight as it is now: sharding puts another in its place."""
        return self.model.get_output_embeddings().weight

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While a loss is computed: the head that its logits come from."""
        if self.own is None:
            yield
            return
        self.model.get_output_embeddings = lambda: self.own
        try:
            yield
        finally:
            del self.model.get_output_embeddings

    def take(self) -> float | None:
        """The energy of the gradient that has been accumulated, averaged over processes; all must call it at once."""
        if self.own is None or self.own.weight.grad is None:
            return energy_of(self.weight)
        for leaf in (self.own.weight, self.own.bias):
            if leaf is not None:
                leaf.grad = reduce(leaf.grad, "mean")
        energy = self.own.energy()
        self.own.merge()
        return energy
