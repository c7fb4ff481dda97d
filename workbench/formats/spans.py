"""A rollout that its source holds as one row of tokens with a mask: each run of trained tokens is a turn."""

from collections.abc import Mapping

import numpy as np

from .base import SourceTurn


def turns_of(
    tokens: np.ndarray, start: int, mask: np.ndarray, signals: Mapping[str, np.ndarray | None]
) -> list[SourceTurn]:
    """The turns of a row, without text.

    tokens (T,) int32: prompt and response; start: where the response begins; mask (T-start,) int8; signals: by the name
    of a SourceTurn's field, (T-start,) each, or None. A turn's context is all tokens before it, and its mask goes on
    over the tokens that nobody trains up to the next. Where lengths disagree or nothing is masked in, the row is one
    turn with the lengths that the source wrote, for the audit to find.
    """
    raw = tokens[start:]
    given = {name: values for name, values in signals.items() if values is not None}
    fits = len(mask) == len(raw)
    if not fits or not mask.any() or any(len(values) != len(raw) for values in given.values()):
        keep = mask.astype(bool) if fits else slice(None)
        signals = {name: values[keep] if len(values) == len(raw) else values for name, values in given.items()}
        return [SourceTurn("", token_ids=raw[keep], context_ids=tokens[:start], mask=mask, **signals)]
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    after = [*bounds[1:, 0].tolist(), len(mask)]
    return [
        SourceTurn(
            "",
            token_ids=raw[a:b],
            context_ids=tokens[: start + a],
            mask=mask[a:end],
            **{name: values[a:b] for name, values in given.items()},
        )
        for (a, b), end in zip(bounds.tolist(), after, strict=True)
    ]
