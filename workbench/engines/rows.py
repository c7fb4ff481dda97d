"""An engine's padded prompt and completion tensors, and a Batch of the same rows: one index apart, nothing recomputed.

TRL and verl keep a row as a prompt (B,P) padded on its left and a completion (B,C) padded on its right. A row of a
Batch is the same tokens without padding inside, so completion column c of a prompt of p tokens is its column p + c.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import WorkbenchError
from ..records import Batch, Episode


@dataclass(frozen=True, eq=False)
class Rows:
    """prompts (B,) long: the length of each row's prompt without padding; columns: C, of the completions."""

    prompts: Tensor
    columns: int

    @classmethod
    def of(cls, prompt_mask: Tensor, completion_ids: Tensor) -> "Rows":
        """The rows of an engine's prompt_mask (B,P) and completion_ids (B,C)."""
        return cls(prompt_mask.sum(1).long(), completion_ids.shape[1])

    def completions(self, values: Tensor, fill: float = 0) -> Tensor:
        """(B,T) values of a batch's rows -> (B,C) of their completions; `fill` where a row has no such token."""
        place = self.prompts[:, None] + torch.arange(self.columns, device=values.device)
        there = place < values.shape[1]
        return torch.where(there, values.gather(1, place.clamp(max=values.shape[1] - 1)), fill)

    def tokens(self, columns: Tensor, width: int, fill: float = 0) -> Tensor:
        """(B,C) values of completions -> (B,width) of the batch's rows; `fill` at the prompts and behind the end."""
        place = torch.arange(width, device=columns.device) - self.prompts[:, None]
        there = (place >= 0) & (place < self.columns)
        return torch.where(there, columns.gather(1, place.clamp(0, self.columns - 1)), fill)

    def check(self, batch: Batch, completion_ids: Tensor, loss_mask: Tensor) -> None:
        """Raise WorkbenchError unless the engine trains on the batch's sampled tokens, all of them and no others."""
        mask = self.completions(batch.response_mask, False)
        wrong = mask != loss_mask.bool()
        wrong |= mask & (self.completions(batch.input_ids) != completion_ids)
        if bool(wrong.any()):
            row = int(wrong.any(1).nonzero()[0, 0])
            raise WorkbenchError(f"row {row}: the engine's tokens or their mask are not those that were sampled")
        if int(mask.sum()) != int(batch.response_mask.sum()):
            raise WorkbenchError("the engine's completions do not hold all tokens that were sampled")


def count_positions(model: Any) -> None:
    """Have a model with learned positions count them from each row's first token, behind the padding.

    TRL passes a mask and no positions, and such a model would number the padding too, so that one text has other
    log-probs beside a longer prompt. Rotary positions are relative: those models stay bit for bit as they are.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return
    if any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        return

    def count(module: Any, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        mask, ids = given.get("attention_mask"), given.get("input_ids")
        if given.get("position_ids") is None and mask is not None and ids is not None and mask.shape == ids.shape:
            given["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
        return args, given

    model.register_forward_pre_hook(count, with_kwargs=True)


def trl_rows(batch: Batch, episodes: Sequence[Episode]) -> dict[str, list]:
    """What TRL's rollout_func returns for a batch of a row an episode: the first prompt, and all that came after it.

    env_mask is 1 on sampled tokens; logprobs are those they were sampled at.
    """
    spans = [slice(len(e.turns[0].prompt_ids), n) for e, n in zip(episodes, batch.lengths.tolist(), strict=True)]

    def cut(values: Tensor) -> list[list]:
        return [values[b, span].tolist() for b, span in enumerate(spans)]

    return {
        "prompt_ids": [batch.input_ids[b, : span.start].tolist() for b, span in enumerate(spans)],
        "completion_ids": cut(batch.input_ids),
        "logprobs": cut(batch.old_logprobs),
        "env_mask": cut(batch.response_mask.int()),
        "episode_reward": batch.reward.tolist(),
    }


def episode_reward(prompts: list, completions: list, episode_reward: list[float], **columns: Any) -> list[float]:
    """TRL's reward function: what the environment gave."""
    return episode_reward
