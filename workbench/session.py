"""Live episodes of one rollout: sampling that keeps each episode's key-value cache from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .errors import WorkbenchError

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True)
class Sampled:
    """One sampled response: ids (L,), their log-probs (L,) in nats, and whether the token limit cut it."""

    ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool


class _Slots:
    """Where the tokens of the current forward go: row indices, positions (R,Q), and how many columns are in use."""

    rows: Tensor
    positions: Tensor
    width: int
    prefix: bool  # rows are 0..R-1, so the cache can be viewed instead of copied


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, one contiguous run of positions a row, written in place."""

    def __init__(self, slots: _Slots, rows: int, length: int):
        super().__init__()
        self.slots, self.shape = slots, (rows, length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        heads = key_states.shape[1]
        rows, length = self.shape
        self.keys = key_states.new_zeros(rows, heads, length, key_states.shape[-1])
        self.values = value_states.new_zeros(rows, heads, length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        s = self.slots
        out = []
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            store[s.rows[:, None], :, s.positions] = new.transpose(1, 2)
            out.append(store[: len(s.rows), :, : s.width] if s.prefix else store[s.rows, :, : s.width])
        return out[0], out[1]

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.width, 0


class Session:
    """Live episodes of one rollout: row i remembers the tokens it has seen and their keys and values.

    rows: how many episodes at once; max_length: the longest sequence a row may reach, in tokens.
    """

    def __init__(self, policy: Policy, rows: int, max_length: int):
        self.policy, self.max_length = policy, max_length
        self._slots = _Slots()
        layers = policy.model.config.get_text_config().num_hidden_layers
        self._cache = Cache(layers=[_SlotLayer(self._slots, rows, max_length + 1) for _ in range(layers)])
        self._seen: list[np.ndarray] = [np.empty(0, np.int32) for _ in range(rows)]

    @torch.no_grad()
    def sample(
        self, prompts: dict[int, np.ndarray], uniforms: dict[int, np.ndarray], end_id: int, temperature: float = 1.0
    ) -> dict[int, Sampled]:
        """Sample one response in each named row.

        prompts: row -> the whole prompt; what the row has in its cache already is not computed again. uniforms: row ->
        numbers in [0,1), one a token, by which tokens are drawn (the token limit is their count), so that a draw
        depends on its own numbers and not on which rows run beside it. temperature 0 takes the likeliest token.
        Raises WorkbenchError where a prompt leaves no room for a token.
        """
        rows = sorted(prompts)
        for row in rows:
            if len(prompts[row]) + 1 > self.max_length:
                raise WorkbenchError(
                    f"row {row}: a prompt of {len(prompts[row])} tokens leaves no room in {self.max_length}"
                )
        hidden = self._prefill(rows, prompts)
        device = self.policy.device
        drawn: dict[int, list[tuple[int, float]]] = {row: [] for row in rows}
        active, truncated = list(rows), dict.fromkeys(rows, False)
        while active:
            u = torch.tensor([uniforms[row][len(drawn[row])] for row in active], dtype=torch.float64, device=device)
            tokens, logprobs = draw(self.policy.logits(hidden), u, temperature)
            for row, token, logprob in zip(active, tokens.tolist(), logprobs.tolist(), strict=True):
                drawn[row].append((token, logprob))
            going = []
            for i, row in enumerate(active):
                room = min(len(uniforms[row]), self.max_length - len(prompts[row]))
                if drawn[row][-1][0] == end_id:
                    continue
                if len(drawn[row]) >= room:
                    truncated[row] = True
                    continue
                going.append(i)
            active = [active[i] for i in going]
            if active:
                new = [np.array([drawn[row][-1][0]], np.int32) for row in active]
                hidden = self._forward(active, new)
        return {
            row: Sampled(np.array([t for t, _ in d], np.int32), np.array([p for _, p in d], np.float32), truncated[row])
            for row, d in drawn.items()
        }

    def _prefill(self, rows: Sequence[int], prompts: dict[int, np.ndarray]) -> Tensor:
        """Compute what is new of each prompt. A prompt that several fresh rows share is computed once and copied."""
        new, first_of = {}, {}
        for row in rows:
            common = _common_prefix(self._seen[row], prompts[row])
            common = min(common, len(prompts[row]) - 1)
            self._seen[row] = prompts[row][:common]
            new[row] = prompts[row][common:]
            if common == 0:
                first_of.setdefault(prompts[row].tobytes(), row)
        copies = {r: first_of[prompts[r].tobytes()] for r in rows if len(self._seen[r]) == 0}
        copies = {r: source for r, source in copies.items() if source != r}
        computed = [r for r in rows if r not in copies]
        states = dict(zip(computed, self._forward(computed, [new[r] for r in computed]), strict=True))
        if copies:
            to, source = (torch.tensor(list(x), device=self.policy.device) for x in (copies.keys(), copies.values()))
            width = max(len(prompts[r]) for r in copies)
            for layer in self._cache.layers:
                for store in (layer.keys, layer.values):
                    store[to, :, :width] = store[source, :, :width]
            for row, original in copies.items():
                self._seen[row] = prompts[row]
                states[row] = states[original]
        return torch.stack([states[r] for r in rows])

    def _forward(self, rows: Sequence[int], new: Sequence[np.ndarray]) -> Tensor:
        """Run the new tokens of each row through the model; returns the last hidden state of each row (R,D).

        Rows of like length go together, so that one long observation does not pad all the others.
        """
        states: list[Tensor | None] = [None] * len(rows)
        for group in _like_lengths([len(n) for n in new]):
            for i, state in zip(group, self._run([rows[i] for i in group], [new[i] for i in group]), strict=True):
                states[i] = state
        return torch.stack(states)

    def _run(self, rows: list[int], new: list[np.ndarray]) -> Tensor:
        device, slots = self.policy.device, self._slots
        # A view of the first rows costs less than a copy of some: most of them wanted, the others ride along. What they
        # write lies behind what they have seen, and their own next tokens replace it.
        place = dict(zip(rows, new, strict=True))
        every = range(max(rows) + 1)
        slots.prefix = len(rows) * (3 if len(new[0]) == 1 else 1.5) >= len(every)
        run = list(every) if slots.prefix else rows
        counts = np.array([len(place[r]) if r in place else 1 for r in run])
        starts = np.array([len(self._seen[r]) for r in run])
        ids = np.full((len(run), counts.max()), self.policy.pad_id, np.int64)
        for i, r in enumerate(run):
            if r in place:
                ids[i, : counts[i]] = place[r]
        positions = np.minimum(starts[:, None] + np.arange(ids.shape[1]), self.max_length)
        slots.rows = torch.tensor(run, device=device)
        slots.positions = torch.from_numpy(positions).to(device)
        slots.width = max(len(self._seen[r]) + len(n) for r, n in place.items())
        mask = torch.arange(slots.width, device=device) <= slots.positions[:, None, :, None]
        with self.policy.autocast():
            out = self.policy.body(
                input_ids=torch.from_numpy(ids).to(device),
                attention_mask=mask,
                position_ids=slots.positions,
                cache=self._cache,
                use_cache=True,
            ).last_hidden_state
        for row, tokens in place.items():
            self._seen[row] = np.concatenate([self._seen[row], tokens])
        wanted = [i for i, r in enumerate(run) if r in place]
        return out[torch.tensor(wanted, device=device), torch.from_numpy(counts[wanted] - 1).to(device)]


def _like_lengths(lengths: Sequence[int], max_tokens: int = 16384) -> list[list[int]]:
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


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n


def draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniform` (R,); returns ids and log-probs (R,).

    Log-probs are those of the tempered distribution that was drawn from (of the untempered one at temperature 0).
    """
    logp = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logp.argmax(-1)
    else:
        cumulative = logp.double().exp().cumsum(-1)
        ids = (cumulative <= (uniform * cumulative[:, -1])[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)
    return ids, logp.gather(1, ids[:, None])[:, 0]
