"""A Hugging Face causal LM that scores tokens, and samples turns for many live episodes at once (session.py).

Both run the model's own forward, and their log-probs agree within rounding. Scoring applies the output head to the
tokens that are asked for, a bounded number at a time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from .errors import WorkbenchError
from .passes import hidden_after, passes
from .session import Session

# Probabilities of words that never fit fall below the smallest normal float, and CPU arithmetic on such numbers is
# many times slower. Worker threads take the setting from the thread that starts them, so it is made at import.
torch.set_flush_denormal(True)


class Policy:
    """A causal LM, its tokenizer and device. `score` takes a `head` (weight, bias) to stand for the model's own.

    micro_tokens: how many tokens go through the model at once where nothing else is asked for; may be set.
    Raises WorkbenchError where the model is not a causal LM of full attention, by torch's own kernel (sdpa), whose
    logits are `head(hidden)`.
    """

    def __init__(self, model: Any, tokenizer: Any, compute_dtype: torch.dtype | None = None):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.device = next(model.parameters()).device
        self.compute_dtype = compute_dtype
        # On a CPU so few that a layer's activations stay in its caches and rows of like length pad each other little.
        self.micro_tokens = 2048 if self.device.type == "cpu" else 16384
        self.body, self.lm_head = model.base_model, model.get_output_embeddings()
        if self.lm_head is None:
            raise WorkbenchError(f"{type(model).__name__} has no output embedding; a causal language model is needed")
        self._check_attention()
        self._check_head()

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        random_init: bool = False,
        seed: int = 0,
    ) -> "Policy":
        """Load a model by hub name or folder.

        Weights are kept in float32 so that small updates are not rounded away; `dtype` is that of the computation:
        "auto" (bfloat16 on a GPU, float32 on a CPU), "float32" or "bfloat16". random_init builds it from its config
        alone, with weights that derive from the seed. Raises WorkbenchError naming what a folder lacks.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype not in ("auto", "float32", "bfloat16"):
            raise WorkbenchError(f"dtype must be auto, float32 or bfloat16, got {dtype!r}")
        low = dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda"))
        check_folder(str(name), random_init)
        disable_progress_bar()  # it leaves an empty widget in every notebook
        try:
            tokenizer = load_tokenizer(name)
            if random_init:
                config = AutoConfig.from_pretrained(name)
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
            else:
                model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="sdpa")
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

    def _predicting(self, input_ids: Tensor, picked: Tensor, shared: int) -> Tensor:
        """Hidden states (N,D) from which the tokens after those in `picked` (B,T-1) are predicted, row-major."""
        if not shared:
            return self.hidden(input_ids)[:, :-1][picked]
        last = picked.shape[1] - picked.flip(1).to(torch.uint8).argmax(1)
        layers = self.model.config.get_text_config().num_hidden_layers
        with self.autocast():
            states = hidden_after(self.body, layers, input_ids[:, :-1], shared, last.tolist())
        return states[picked[:, shared:]]

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
        shared: int = 0,
    ) -> tuple[Tensor, ...]:
        """Log-prob and entropy (both (B,T), nats, 0 off the mask) of the tokens in `mask` (B,T) given all before them.

        also: of logits (n,V) and which of the mask's tokens they predict, in row-major order, a third value (n,) each.
        At most `chunk` logits are held at once: memory does not grow with vocabulary times length. With gradients on,
        each chunk is recomputed in the backward pass instead of kept; entropy carries gradient only with entropy_grad.
        shared: how many leading tokens are the same in every row and none of the mask's; they are read once for all.
        """
        if bool(mask[:, : shared + 1].any()):
            what = f"one of the {shared + 1} tokens that rows begin with" if shared else "the first token of a row"
            raise WorkbenchError(f"score: {what} has no context to be scored in")
        picked = mask[:, 1:]
        states, targets = self._predicting(input_ids, picked, shared), input_ids[:, 1:][picked]
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
        self, input_ids: Tensor, lengths: Tensor, mask: Tensor, temperature: float = 1.0, max_tokens: int = 0
    ) -> tuple[Tensor, Tensor]:
        """`score` without gradients over any number of rows, about `max_tokens` tokens at a time as `passes` puts them
        together; 0: `micro_tokens`."""
        logprobs = torch.zeros(mask.shape, device=input_ids.device)
        entropy = torch.zeros_like(logprobs)
        for rows, shared in passes(input_ids, lengths, mask, max_tokens or self.micro_tokens):
            width = int(lengths[rows].max())
            logprobs[rows, :width], entropy[rows, :width] = self.score(
                input_ids[rows, :width], mask[rows, :width], temperature, shared=shared
            )
        return logprobs, entropy

    def session(self, rows: int, max_length: int) -> Session:
        return Session(self, rows, max_length)

    def _check_attention(self) -> None:
        config, name = self.model.config.get_text_config(), type(self.model).__name__
        kinds = getattr(config, "layer_types", None)
        window = None if kinds else getattr(config, "sliding_window", None)
        if window and window < getattr(config, "max_position_embeddings", window + 1):
            kinds = ["sliding_attention"]  # of all layers, in models that name no kinds
        if kinds and set(kinds) != {"full_attention"}:
            raise WorkbenchError(f"{name}: its attention is {sorted(set(kinds))}; only full attention is supported")
        if config._attn_implementation != "sdpa":
            raise WorkbenchError(
                f"{name}: its attention is computed by {config._attn_implementation!r}, which reads masks in another "
                "way; only 'sdpa' is supported"
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(min(8, self.lm_head.weight.shape[0]), device=self.device)[None]
        with self.autocast():
            want = self.model(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(self.logits(self.hidden(ids)[0])[None], want, atol=1e-2, rtol=1e-2):
            raise WorkbenchError(
                f"{type(self.model).__name__}: its logits are not head(hidden states); it is not supported"
            )


def load_tokenizer(name: str | Path) -> Any:
    """A tokenizer by hub name or folder. Raises WorkbenchError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise WorkbenchError(f"tokenizer {str(name)!r} could not be loaded: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def check_folder(name: str, random_init: bool) -> None:
    """Raise WorkbenchError where `name` is a folder that is not there or lacks a file that loading needs."""
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
