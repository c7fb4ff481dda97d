"""Keys and values of live episodes, a row each, and attention over them of tokens that come without padding.

A forward takes the new tokens of many rows one after another, as one packed sequence: what a model does token by token,
nearly all of it, meets no padding. Attention goes by chunks of rows. On a CPU a chunk is one row, which reads its own
run of keys where they are; elsewhere rows of like length go together, so that few kernels are started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .errors import WorkbenchError
from .passes import like_lengths

ATTENTION = "workbench_slots"  # its name in a model's config


@dataclass(frozen=True)
class Chunk:
    """Rows that attend together.

    tokens: where theirs are in the packed sequence; queries: how many a row, with padding; rows: of the cache; width:
    columns that are read; mask: (rows,1,queries,width), 0 or -inf, None where each token reads all up to its own.
    """

    tokens: slice
    queries: int
    rows: slice | Tensor
    width: int
    mask: Tensor | None


@dataclass(frozen=True)
class Plan:
    """One forward: ids and positions (1,N) of the packed tokens, and where each row's last one is (R,).

    Token source[i] is written to row rows[i] of the cache, in column columns[i]; width: columns that the cache needs.
    """

    ids: Tensor
    positions: Tensor
    last: Tensor
    source: Tensor
    rows: Tensor
    columns: Tensor
    width: int
    chunks: list[Chunk]


class _Layer(CacheLayerMixin):
    """Keys and values (rows,heads,columns,D) of one layer, one contiguous run of positions a row, written in place."""

    plan: Plan  # of the forward that is under way

    def __init__(self, rows: int, length: int, alone: bool):
        super().__init__()
        self.shape, self.alone = (rows, length), alone

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length = self.shape
        # A row alone reads only what it has written, and memory that nothing was written to takes none of a CPU's.
        columns = length if self.alone else 0
        self.keys, self.values = (
            x.new_empty(rows, x.shape[1], columns, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def _grow(self, width: int) -> None:
        """Room for `width` columns, and twice of what there was: few rollouts come near the longest they may."""
        have = self.keys.shape[2]
        if have < width:
            more = min(max(2 * have, width), self.shape[1]) - have
            self.keys, self.values = (F.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        self._grow(plan.width)
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            store[plan.rows, :, plan.columns] = new[0].transpose(0, 1)[plan.source]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class Slots:
    """The cache of `rows` live episodes of at most `length` tokens.

    alone: whether each row attends by itself. Raises WorkbenchError where a model's attention cannot be replaced.
    """

    def __init__(self, model: Any, rows: int, length: int, alone: bool):
        if not model._supports_attention_backend:
            raise WorkbenchError(
                f"{type(model).__name__}: its attention cannot be replaced, so it cannot be sampled from"
            )
        self.config, self.device, self.dtype = model.config.get_text_config(), model.device, model.dtype
        self.alone = alone
        self.cache = Cache(layers=[_Layer(rows, length, alone) for _ in range(self.config.num_hidden_layers)])

    def plan(self, new: Sequence[np.ndarray], starts: Sequence[int], rows: Sequence[Sequence[int]], pad: int) -> Plan:
        """The forward of tokens new[i] from column starts[i] on, computed in the first of rows[i], written to all."""
        counts, starts = np.array([len(n) for n in new]), np.asarray(starts)
        ends = starts + counts
        groups = [[i] for i in range(len(new))] if self.alone else like_lengths(counts.tolist())
        order = np.concatenate(groups)
        sizes = np.concatenate([np.full(len(group), counts[group].max()) for group in groups])
        begins = np.empty_like(starts)  # of a row in the packed sequence
        begins[order] = np.cumsum(sizes) - sizes
        ids = np.full(sizes.sum(), pad)
        ids[_runs(begins, counts)] = np.concatenate(new)
        positions = np.minimum(_runs(starts[order], sizes), np.repeat(ends[order] - 1, sizes))
        member = np.repeat(np.arange(len(new)), [len(r) for r in rows])
        source, columns = (_runs(first[member], counts[member]) for first in (begins, starts))
        to = np.repeat(np.concatenate(rows), counts[member])
        chunks = []
        for group in groups:
            begin, queries = int(begins[group[0]]), int(counts[group].max())
            tokens = slice(begin, begin + len(group) * queries)
            chunks.append(self._chunk(tokens, queries, [rows[i][0] for i in group], starts[group], ends[group]))
        ids, positions, last, source, to, columns = (
            torch.from_numpy(x).to(self.device) for x in (ids, positions, begins + counts - 1, source, to, columns)
        )
        return Plan(ids[None], positions[None], last, source, to, columns, int(ends.max()), chunks)

    def _chunk(self, tokens: slice, queries: int, rows: list[int], starts: np.ndarray, ends: np.ndarray) -> Chunk:
        width, mask = int(ends.max()), None
        if len(rows) > 1 or (queries > 1 and starts[0] > 0):
            place = torch.from_numpy(starts)[:, None] + torch.arange(queries)
            ahead = (torch.arange(width) > place[:, None, :, None]).to(self.device)
            mask = torch.zeros(ahead.shape, dtype=self.dtype, device=self.device).masked_fill_(ahead, -torch.inf)
        first, end = rows[0], rows[-1] + 1
        run = slice(first, end) if end - first == len(rows) else torch.tensor(rows, device=self.device)
        return Chunk(tokens, queries, run, width, mask)

    def forward(self, body: Any, plan: Plan) -> Tensor:
        """Hidden states (R,D) of each row's last token. body: a causal LM without its head."""
        for layer in self.cache.layers:
            layer.plan = plan
        own = self.config._attn_implementation
        self.config._attn_implementation = ATTENTION
        try:
            states = body(
                input_ids=plan.ids, position_ids=plan.positions, cache=self.cache, use_cache=True, chunks=plan.chunks
            ).last_hidden_state
        finally:
            self.config._attn_implementation = own
        return states[0, plan.last]


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[i], starts[i] + 1, ... (counts[i] of them), one run after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    chunks: Sequence[Chunk],
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention (1,N,heads,D) of packed queries (1,heads,N,D) to the rows of a cache."""
    out = []
    for c in chunks:
        asked, keys, values = query[:, :, c.tokens], key[c.rows, :, : c.width], value[c.rows, :, : c.width]
        if c.queries < asked.shape[2]:
            asked = asked[0].unflatten(1, (-1, c.queries)).transpose(0, 1)
        if asked.shape[1] == keys.shape[1]:
            causal = c.mask is None and c.queries > 1
            own = F.scaled_dot_product_attention(asked, keys, values, c.mask, 0.0, causal, scale=scaling)
            own = own.transpose(1, 2)
        else:  # heads that share keys
            own, _ = sdpa_attention_forward(module, asked, keys, values, c.mask, scaling=scaling)
        out.append(own.flatten(0, 1))
    return torch.cat(out)[None], None


AttentionInterface.register(ATTENTION, _attention)
