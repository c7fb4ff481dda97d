"""The output head apart from the rest: its gradient through the logits alone, and how far each module's weights move.

arXiv 2605.19425 reports that reuse of a batch fails with a surge of the head's weight change while other layers stay
calm; its exact metric is not public, and the relative Frobenius changes here are our reading. Under Adam a step has a
size of about lr * sqrt(parameters) whatever the gradient, so a relative change also reflects the weight's own norm.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WorkbenchError


def _output_head(model: nn.Module) -> nn.Module:
    head = model.get_output_embeddings()
    if head is None:
        raise WorkbenchError(f"{type(model).__name__} has no output embeddings; a causal language model was expected")
    return head


class _Alias:
    """A leaf tensor over a parameter's storage, so that gradients through it stay apart from the parameter's own."""

    def __init__(self, parameter: Tensor):
        self.parameter = parameter
        self.leaf = parameter.detach().requires_grad_(True)

    def get(self) -> Tensor:
        # Moving a model to another device or dtype gives its parameters new storage.
        if self.leaf.data_ptr() != self.parameter.data_ptr() or self.leaf.dtype != self.parameter.dtype:
            self.leaf = self.parameter.detach().requires_grad_(True)
        return self.leaf

    def merge(self) -> None:
        if self.leaf.grad is not None and self.parameter.requires_grad:
            own = self.parameter.grad
            self.parameter.grad = self.leaf.grad if own is None else own.add_(self.leaf.grad)
        self.leaf.grad = None


class IsolatedHead:
    """The output head of a causal language model as leaf tensors of its own.

    Compute logits as `F.linear(hidden, head.weight, head.bias)`; the gradient of `head.weight` is then that of the
    logits alone, also where the weight is tied to the input embedding or frozen. Per update: backward (all of its
    micro-batches), `energy()`, then `merge()` before clipping and stepping, or `clear()` for a discarded update.
    """

    def __init__(self, model: nn.Module):
        head = _output_head(model)
        embedding = model.get_input_embeddings()
        self.tied = embedding is not None and embedding.weight is head.weight
        self._weight = _Alias(head.weight)
        self._bias = None if head.bias is None else _Alias(head.bias)

    @property
    def weight(self) -> Tensor:
        """(V,H) alias of the head's weight; sees every update of it."""
        return self._weight.get()

    @property
    def bias(self) -> Tensor | None:
        """(V,) alias of the head's bias, or None."""
        return None if self._bias is None else self._bias.get()

    def energy(self) -> float:
        """Squared Frobenius norm of the weight's isolated gradient, in float32 or wider. Raises before a backward."""
        grad = self.weight.grad
        if grad is None:
            raise WorkbenchError("head energy: no gradient yet; run the backward pass through head.weight first")
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return float(torch.linalg.vector_norm(grad, dtype=dtype).square())

    def merge(self) -> None:
        """Move the isolated gradient into the real parameters that train; they then hold what a plain forward gives."""
        self._weight.merge()
        if self._bias is not None:
            self._bias.merge()

    def clear(self) -> None:
        """Drop the isolated gradient."""
        self._weight.leaf.grad = None
        if self._bias is not None:
            self._bias.leaf.grad = None


def _layer(name: str, module: nn.Module, n_layers: int) -> int:
    """Number of the block a module belongs to; -1 for embeddings before the blocks, n_layers for what follows them."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if number:
        return int(number[1])
    return -1 if isinstance(module, nn.Embedding) else n_layers


def _norm(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32))


class WeightMonitor:
    """Relative weight change and gradient norm of every module that owns parameters, one row a module and update.

    Keeps two copies of the trainable weights on their device: at the start, and at the last observation. Frozen modules
    are left out, but for the head. every: observe only each `every`-th applied update; changes are then since the last
    observed one.
    """

    def __init__(self, model: nn.Module, every: int = 1):
        if every < 1:
            raise WorkbenchError(f"weight monitor: every must be at least 1, got {every}")
        self.every, self.calls = every, 0
        head = _output_head(model)
        embedding = model.get_input_embeddings()
        self.tied = embedding is not None and embedding.weight is head.weight
        owners = {n: m for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
        numbered = [_layer(n, m, -1) for n, m in owners.items()]
        self._rows: list[dict[str, Any]] = []
        self._own: list[list[int]] = []
        self._params: list[Tensor] = []
        place: dict[int, int] = {}
        for name, module in owners.items():
            parameters = list(module.parameters(recurse=False))
            if module is not head and not any(p.requires_grad for p in parameters):
                continue
            for p in parameters:
                if id(p) not in place:
                    place[id(p)] = len(self._params)
                    self._params.append(p)
            self._own.append([place[id(p)] for p in parameters])
            self._rows.append(
                {
                    "module": name,
                    "layer": _layer(name, module, max(numbered) + 1),
                    "is_head": module is head,
                    "tied": self.tied and (module is head or module is embedding),
                    "params": sum(p.numel() for p in parameters),
                }
            )
        self._start = [p.detach().clone() if p.requires_grad else None for p in self._params]
        self._previous = [None if w is None else w.clone() for w in self._start]
        self._gradients: Tensor | None = None

    @torch.no_grad()
    def measure_gradients(self) -> None:
        """Take the gradient norms of the next observation now, e.g. before clipping scales the gradients."""
        zero = torch.zeros((), device=self._params[0].device)
        norms = [zero - 1 if p.grad is None else _norm(p.grad).to(zero) for p in self._params]
        self._gradients = torch.stack(norms)

    @torch.no_grad()
    def observe(self, step: int, update: int, reuse: int, head_norm: float | None = None) -> list[dict[str, Any]]:
        """Rows of the `modules` table for an update just applied; call after the optimizer's step, before zero_grad.

        head_norm: the head's gradient norm through the logits alone (`sqrt(IsolatedHead.energy())`); without it a tied
        head shows the norm of the shared gradient. A change relative to weights of norm 0 is None, as is the gradient
        norm of a module without gradients.
        """
        self.calls += 1
        if self.calls % self.every:
            self._gradients = None
            return []
        if self._gradients is None:
            self.measure_gradients()
        zero = torch.zeros((), device=self._params[0].device)
        parts = []
        for p, start, previous in zip(self._params, self._start, self._previous, strict=True):
            if start is None:
                parts += [zero, zero + 1, zero, zero + 1]
                continue
            wide = torch.promote_types(p.dtype, torch.float32)
            now = p.detach().to(wide)
            parts += [_norm(now - previous.to(wide)), _norm(previous), _norm(now - start.to(wide)), _norm(start)]
            previous.copy_(p)
        # One transfer for all of them: a float() per parameter would wait for the device each time.
        table = torch.cat([torch.stack([x.to(zero) for x in parts]).view(-1, 4), self._gradients[:, None]], 1).tolist()
        self._gradients = None
        rows = []
        for row, own in zip(self._rows, self._own, strict=True):
            change, before, total, start, _ = (sum(table[i][j] ** 2 for i in own) ** 0.5 for j in range(5))
            norms = [table[i][4] for i in own if table[i][4] >= 0]
            grad_norm = sum(n**2 for n in norms) ** 0.5 if norms else None
            rows.append(
                {
                    "step": step,
                    "update": update,
                    "reuse": reuse,
                    **row,
                    "relative_change": change / before if before else None,
                    "cumulative_change": total / start if start else None,
                    "grad_norm": head_norm if row["is_head"] and head_norm is not None else grad_norm,
                }
            )
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "start": self._start, "previous": self._previous}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises WorkbenchError where the state is of a model with other trainable weights."""
        for name, own in (("start", self._start), ("previous", self._previous)):
            given = state[name]
            shapes = [[None if w is None else tuple(w.shape) for w in ws] for ws in (given, own)]
            if shapes[0] != shapes[1]:
                raise WorkbenchError("weight monitor: the saved state belongs to a model with other trainable weights")
            for mine, saved in zip(own, given, strict=True):
                if mine is not None:
                    mine.copy_(saved)
        self.calls = state["calls"]
