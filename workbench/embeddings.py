"""Task texts as vectors, read by the policy itself: by them budget.v0 tells questions apart without an encoder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import WorkbenchError
from .passes import microbatches
from .policy import Policy


@torch.no_grad()
def embed(policy: Policy, texts: Sequence[str], max_tokens: int = 512, micro_tokens: int = 0) -> Tensor:
    """N texts -> (N,D) float32 on the CPU: the mean of the policy's last hidden states over a text's tokens, of which
    the first `max_tokens` are read.

    They are the policy's at this moment: embed a history and its queries with one policy, or with a copy that does not
    train. `micro_tokens` padded tokens are read at a time, 0: as many as the policy says. Raises WorkbenchError where
    there is no text, or no token in one.
    """
    if not texts or max_tokens < 1:
        raise WorkbenchError(f"embed: at least one text and one token are needed, got {len(texts)} and {max_tokens}")
    ids = [policy.tokenizer.encode(text, add_special_tokens=False)[:max_tokens] for text in texts]
    for i, own in enumerate(ids):
        if not own:
            raise WorkbenchError(f"embed: text {i} has no tokens: {texts[i][:40]!r}")
    lengths = torch.tensor([len(own) for own in ids])
    means: list[Tensor | None] = [None] * len(ids)
    for rows in microbatches(lengths, micro_tokens or policy.micro_tokens):
        width = int(lengths[rows].max())
        padded = [ids[i] + [policy.pad_id] * (width - len(ids[i])) for i in rows.tolist()]
        hidden = policy.hidden(torch.tensor(padded, device=policy.device)).float()
        mask = (torch.arange(width) < lengths[rows][:, None]).to(hidden)[:, :, None]
        for i, mean in zip(rows.tolist(), ((hidden * mask).sum(1) / mask.sum(1)).cpu(), strict=True):
            means[i] = mean
    return torch.stack(means)
