"""Live episodes of one rollout: sampling that keeps each episode's key-value cache from turn to turn.

Every forward takes what is new of all rows, whole prompts of some and one sampled token of others, so that no row waits
for another to end its turn. Rows whose tokens are the same so far, as members of a group are at first, are computed
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import WorkbenchError
from .slots import Slots

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True)
class Sampled:
    """One sampled response: ids (L,), their log-probs (L,) in nats, and whether the token limit cut it."""

    ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool


@dataclass
class _Row:
    """What a row has in the cache, and the response that is being sampled in it.

    kind: rows of one kind have the same tokens in the cache; new: what is still to be read.
    """

    tokens: np.ndarray
    seen: int = 0
    kind: int | bytes = b""
    new: np.ndarray | None = None
    uniforms: np.ndarray | None = None
    room: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Session:
    """Live episodes of one rollout: row i remembers the tokens it has seen and their keys and values.

    rows: how many episodes at once; max_length: the longest sequence a row may reach, in tokens.
    """

    def __init__(self, policy: Policy, rows: int, max_length: int):
        self.policy, self.max_length = policy, max_length
        self._slots = Slots(policy.model, rows, max_length, alone=policy.device.type == "cpu")
        self._rows = [_Row(np.empty(max_length, np.int32)) for _ in range(rows)]
        self._live: list[int] = []  # rows in which a response is being sampled
        self._kinds = 0

    def begin(self, row: int, prompt: np.ndarray, uniforms: np.ndarray) -> None:
        """Have a response sampled in a row, by the steps that follow.

        prompt: the whole of it; what the row has in its cache already is not computed again. uniforms: numbers in
        [0,1), one a token, by which tokens are drawn (the token limit is their count), so that a draw depends on its
        own numbers and not on which rows run beside it.
        Raises WorkbenchError where the prompt leaves no room for a token.
        """
        if len(prompt) + 1 > self.max_length:
            raise WorkbenchError(f"row {row}: a prompt of {len(prompt)} tokens leaves no room in {self.max_length}")
        own = self._rows[row]
        common = min(_common_prefix(own.tokens[: own.seen], prompt), len(prompt) - 1)
        if common < own.seen:
            own.seen, own.kind = common, own.tokens[:common].tobytes()
        own.new, own.uniforms, own.ids, own.logprobs = prompt[common:], uniforms, [], []
        own.room = min(len(uniforms), self.max_length - len(prompt))
        self._live = sorted({*self._live, row})

    @torch.inference_mode()
    def step(self, end_id: int, temperature: float = 1.0) -> dict[int, Sampled]:
        """Sample one token in every row with a response under way; returns the responses that ended by it.

        temperature 0 takes the likeliest token.
        """
        live = [self._rows[i] for i in self._live]
        if not live:
            return {}
        hidden = self._forward(self._live)
        u = torch.tensor([r.uniforms[len(r.ids)] for r in live], dtype=torch.float64, device=self.policy.device)
        tokens, logprobs = draw(self.policy.logits(hidden), u, temperature)
        ended: dict[int, Sampled] = {}
        for i, row, token, logprob in zip(self._live, live, tokens.tolist(), logprobs.tolist(), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.new = np.array([token], np.int32)
            if token == end_id or len(row.ids) >= row.room:
                ended[i] = Sampled(np.array(row.ids, np.int32), np.array(row.logprobs, np.float32), token != end_id)
        self._live = [i for i in self._live if i not in ended]
        return ended

    def sample(
        self, prompts: dict[int, np.ndarray], uniforms: dict[int, np.ndarray], end_id: int, temperature: float = 1.0
    ) -> dict[int, Sampled]:
        """Sample one response in each named row: `begin` in all, and steps until they have ended."""
        for row, prompt in prompts.items():
            self.begin(row, prompt, uniforms[row])
        done: dict[int, Sampled] = {}
        while self._live:
            done |= self.step(end_id, temperature)
        return {row: done[row] for row in prompts}

    def _forward(self, rows: list[int]) -> Tensor:
        """Read what is new of each row; returns the hidden state of its last token (R,D)."""
        same: dict[tuple, list[int]] = {}
        for i in rows:
            row = self._rows[i]
            same.setdefault((row.kind, row.seen, row.new.tobytes()), []).append(i)
        twins, part, tokens, states = list(same.values()), [], 0, []
        limit = self.policy.micro_tokens
        for members in twins:
            count = len(self._rows[members[0]].new)
            if part and tokens + count > limit:
                states.append(self._run(part))
                part, tokens = [], 0
            part.append(members)
            tokens += count
        states.append(self._run(part))
        place = {i: n for n, members in enumerate(twins) for i in members}
        return torch.cat(states)[[place[i] for i in rows]]

    def _run(self, twins: list[list[int]]) -> Tensor:
        first = [self._rows[members[0]] for members in twins]
        new = [row.new for row in first]
        plan = self._slots.plan(new, [row.seen for row in first], twins, self.policy.pad_id)
        with self.policy.autocast():
            states = self._slots.forward(self.policy.body, plan)
        for members in twins:
            self._kinds += 1
            for i in members:
                row = self._rows[i]
                row.tokens[row.seen : row.seen + len(row.new)] = row.new
                row.seen, row.kind, row.new = row.seen + len(row.new), self._kinds, None
        return states


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
        drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        ids = drawn.clamp(max=logits.shape[1] - 1)
    return ids, logp.gather(1, ids[:, None])[:, 0]
