"""A Hugging Face causal LM that samples turns for many live episodes at once and scores tokens.

Both run the model's own forward. Sampling keeps the key-value cache of an episode from turn to turn; scoring applies
the output head to the tokens that are asked for, a bounded number at a time. Their log-probs agree within rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils.logging import disable_progress_bar

from .errors import WorkbenchError

# Probabilities of words that never fit fall below the smallest normal float, and CPU arithmetic on such numbers is
# many times slower. Worker threads take the setting from the thread that starts them, so it is made at import.
torch.set_flush_denormal(True)


@dataclass(frozen=True)
class Sampled:
    """One sampled response: ids (L,), their log-probs (L,) in nats, and whether the token limit cut it."""

    ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool


class Policy:
    """A causal LM, its tokenizer and device. `score` takes a `head` (weight, bias) to stand for the model's own.

    Raises WorkbenchError where the model is not a full-attention causal LM whose logits are `head(hidden)`.
    """

    def __init__(self, model: Any, tokenizer: Any, compute_dtype: torch.dtype | None = None):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.device = next(model.parameters()).device
        self.compute_dtype = compute_dtype
        self.body, self.lm_head = model.base_model, model.get_output_embeddings()
        if self.lm_head is None:
            raise WorkbenchError(f"{type(model).__name__} has no output embedding; a causal language model is needed")
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise WorkbenchError(
                f"{type(model).__name__} mixes attention kinds {sorted(kinds)}; only full attention is supported"
            )
        self._check_head()

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        attention: str = "sdpa",
        random_init: bool = False,
    ) -> "Policy":
        """Load a model by hub name or folder.

        Weights are kept in float32 so that small updates are not rounded away; `dtype` is that of the computation:
        "auto" (bfloat16 on a GPU, float32 on a CPU), "float32" or "bfloat16". random_init builds it from its config
        alone. Raises WorkbenchError naming what a folder lacks.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype not in ("auto", "float32", "bfloat16"):
            raise WorkbenchError(f"dtype must be auto, float32 or bfloat16, got {dtype!r}")
        low = dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda"))
        _check_folder(str(name), random_init)
        disable_progress_bar()  # it leaves an empty widget in every notebook
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            if random_init:
                config = AutoConfig.from_pretrained(name)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
            else:
                model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=attention)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise WorkbenchError(f"model {str(name)!r} could not be loaded: {_first_line(error)}") from None
        return cls(model.to(device), tokenizer, torch.bfloat16 if low else None)

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    def autocast(self):
        on = self.compute_dtype is not None
        return torch.autocast(self.device.type, dtype=self.compute_dtype or torch.bfloat16, enabled=on)

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Last hidden states (B,T,D) of right-padded rows: padding comes after, so causal attention needs no mask."""
        with self.autocast():
            return self.body(input_ids=input_ids, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor, head: tuple[Tensor, Tensor | None] | None = None) -> Tensor:
        """Logits (N,V) float32 of hidden states (N,D)."""
        weight, bias = head or (self.lm_head.weight, self.lm_head.bias)
        with self.autocast():
            return F.linear(hidden, weight, bias).float()

    def score(
        self,
        input_ids: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        head: tuple[Tensor, Tensor | None] | None = None,
        chunk: int = 2**22,
        entropy_grad: bool = False,
        also: Callable[[Tensor, slice], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-prob and entropy (both (B,T), nats, 0 off the mask) of the tokens in `mask` (B,T) given all before them.

        also: of logits (n,V) and which of the mask's tokens they predict, in row-major order, a third value (n,) each.
        At most `chunk` logits are held at once: memory does not grow with vocabulary times length. With gradients on,
        each chunk is recomputed in the backward pass instead of kept; entropy carries gradient only with entropy_grad.
        """
        if bool(mask[:, 0].any()):
            raise WorkbenchError("score: the first token of a row has no context to be scored in")
        picked = mask[:, 1:]
        states, targets = self.hidden(input_ids)[:, :-1][picked], input_ids[:, 1:][picked]
        rows = max(1, chunk // self.lm_head.weight.shape[0])
        weight, bias = head or (self.lm_head.weight, self.lm_head.bias)

        def part(start: int, h: Tensor, y: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
            logits = self.logits(h, (w, b)) / temperature
            logp = F.log_softmax(logits, dim=-1)
            with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
                entropy = -(logp.exp() * logp).sum(-1)
            extra = () if also is None else (also(logits, slice(start, start + len(h))),)
            return logp.gather(1, y[:, None])[:, 0], entropy, *extra

        parts = []
        for start in range(0, len(states), rows):
            chunked = (start, states[start : start + rows], targets[start : start + rows], weight, bias)
            whole = not torch.is_grad_enabled() or len(states) <= rows
            parts.append(part(*chunked) if whole else checkpoint(part, *chunked, use_reentrant=False))
        empty = torch.zeros(mask.shape, device=input_ids.device)
        place = F.pad(picked, (1, 0))
        return tuple(empty.masked_scatter(place, torch.cat(values)) for values in zip(*parts, strict=True))

    @torch.no_grad()
    def score_rows(
        self, input_ids: Tensor, lengths: Tensor, mask: Tensor, temperature: float = 1.0, max_tokens: int = 16384
    ) -> tuple[Tensor, Tensor]:
        """`score` without gradients over any number of rows, `max_tokens` padded tokens at a time, sorted by length."""
        logprobs = torch.zeros(mask.shape, device=input_ids.device)
        entropy = torch.zeros_like(logprobs)
        for rows in microbatches(lengths, max_tokens):
            width = int(lengths[rows].max())
            logprobs[rows, :width], entropy[rows, :width] = self.score(
                input_ids[rows, :width], mask[rows, :width], temperature
            )
        return logprobs, entropy

    def session(self, rows: int, max_length: int) -> "Session":
        return Session(self, rows, max_length)

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(min(8, self.lm_head.weight.shape[0]), device=self.device)[None]
        with self.autocast():
            want = self.model(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(self.logits(self.hidden(ids)[0])[None], want, atol=1e-2, rtol=1e-2):
            raise WorkbenchError(
                f"{type(self.model).__name__}: its logits are not head(hidden states); it is not supported"
            )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _check_folder(name: str, random_init: bool) -> None:
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise WorkbenchError(f"model folder {folder} does not exist")
        return
    need = {"config.json": "config.json"}
    if not random_init:
        need["weights (*.safetensors)"] = "*.safetensors"
    need["a tokenizer (tokenizer.json or tokenizer_config.json)"] = "tokenizer*"
    for what, pattern in need.items():
        if not any(folder.glob(pattern)):
            raise WorkbenchError(f"model folder {folder} has no {what}")


def microbatches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Row indices in groups of at most `max_tokens` padded tokens, rows of like length together, longest first."""
    order = torch.argsort(lengths, descending=True, stable=True)
    start = 0
    while start < len(order):
        take = max(1, max_tokens // int(lengths[order[start]]))
        yield order[start : start + take]
        start += take


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
