"""How rows are put together for the model: rows of like length, and a prompt that several rows share read once.

The members of a group begin with the same prompt, often the larger part of their tokens. Read once, with gradients that
flow through it from every member, it costs a pass over one row instead of over all of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SHARED_LEAST = 16  # a shorter common prompt costs more in a pass of its own than it saves


def microbatches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Row indices in groups of at most `max_tokens` padded tokens, rows of like length together, longest first."""
    order = torch.argsort(lengths, descending=True, stable=True)
    start = 0
    while start < len(order):
        take = max(1, max_tokens // int(lengths[order[start]]))
        yield order[start : start + take]
        start += take


def passes(input_ids: Tensor, lengths: Tensor, mask: Tensor, max_tokens: int) -> Iterator[tuple[Tensor, int]]:
    """Row indices that go through the model together, about `max_tokens` tokens, and how many leading ones they share.

    Rows (B,T) whose prompts, up to the first token of `mask`, are the same share all of it but the last token, from
    which the first sampled one is predicted; a pass may take as many tokens again as a long prompt has, so that it is
    not read for each row. Rows that share with none go by length, as in `microbatches`, with 0.
    """
    ids, first = input_ids.cpu().numpy(), mask.to(torch.uint8).argmax(1).tolist()
    prompts: dict[bytes, list[int]] = {}
    for row, end in enumerate(first):
        prompts.setdefault(ids[row, :end].tobytes(), []).append(row)
    alone: list[int] = []
    for members in prompts.values():
        shared = first[members[0]] - 1
        if len(members) == 1 or shared < SHARED_LEAST:
            alone += members
            continue
        part, tokens, room = [], shared, max(max_tokens, 2 * shared)
        for row, length in zip(members, lengths[members].tolist(), strict=True):
            if part and tokens + length - shared > room:
                yield torch.tensor(part, device=lengths.device), shared
                part, tokens = [], shared
            part.append(row)
            tokens += length - shared
        yield torch.tensor(part, device=lengths.device), shared
    rows = torch.tensor(sorted(alone), dtype=torch.long, device=lengths.device)
    yield from ((rows[part], 0) for part in microbatches(lengths[rows], max_tokens))


def like_lengths(lengths: Sequence[int], max_tokens: int = 16384) -> list[list[int]]:
    """Indices in groups of rows whose padding to the group's longest stays small, in order within a group."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups: list[list[int]] = []
    for i in order:
        group = groups[-1] if groups else None
        if group and lengths[i] <= 1.5 * lengths[group[0]] + 4 and (len(group) + 1) * lengths[i] <= max_tokens:
            group.append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


class _PromptLayer(CacheLayerMixin):
    """Keys and values of one layer: of the prompt as it was read first, before those of every row that follows it."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        kept = ((self.keys, key_states), (self.values, value_states))
        keys, values = (torch.cat([k.expand(len(new), -1, -1, -1), new], 2) for k, new in kept)
        return keys, values

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def hidden_after(body: Any, layers: int, input_ids: Tensor, shared: int, ends: Sequence[int]) -> Tensor:
    """Last hidden states (B,T-shared,D) of the tokens after the `shared` leading ones, which are the same in every row.

    ends: where each row's tokens end; what lies behind is not computed and 0. body: a causal LM without its head.
    """
    cache = Cache(layers=[_PromptLayer() for _ in range(layers)])
    body(input_ids=input_ids[:1, :shared], cache=cache, use_cache=True)
    states = None
    for rows in like_lengths([end - shared for end in ends]):
        width = max(ends[i] for i in rows)
        positions = torch.arange(width, device=input_ids.device)
        own = body(
            input_ids=input_ids[rows, shared:width],
            attention_mask=(positions <= positions[shared:, None])[None, None],
            position_ids=positions[None, shared:].expand(len(rows), -1),
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        if states is None:
            states = own.new_zeros(len(input_ids), input_ids.shape[1] - shared, own.shape[-1])
        states[rows, : width - shared] = own
    return states
