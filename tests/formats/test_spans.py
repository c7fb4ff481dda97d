"""Rows of tokens with a mask: turns, contexts and signals of any mask put together give the row again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.formats.spans import turns_of


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 3))
def test_turns_hold_the_masked_tokens_once_and_in_order(trained, start):
    mask = np.array(trained, np.int8)
    tokens = np.arange(start + len(mask), dtype=np.int32)
    logprobs = -tokens[start:].astype(np.float32)
    turns = turns_of(tokens, start, mask, {"logprobs": logprobs, "teacher_logprobs": None})
    kept = mask.astype(bool)
    np.testing.assert_array_equal(np.concatenate([turn.token_ids for turn in turns]), tokens[start:][kept])
    np.testing.assert_array_equal(np.concatenate([turn.logprobs for turn in turns]), logprobs[kept])
    for turn in turns:
        n = len(turn.context_ids)
        assert turn.teacher_logprobs is None
        assert turn.mask.sum() == len(turn.token_ids)
        np.testing.assert_array_equal(tokens[:n], turn.context_ids)
        np.testing.assert_array_equal(tokens[n : n + len(turn.token_ids)], turn.token_ids)
    if kept.any():
        assert sum(len(turn.mask) for turn in turns) == len(mask) - int(kept.argmax())


def test_a_row_that_trains_nothing_is_one_turn_with_its_mask():
    (turn,) = turns_of(np.arange(5, dtype=np.int32), 2, np.zeros(3, np.int8), {"logprobs": np.zeros(3, np.float32)})
    assert (len(turn.token_ids), len(turn.logprobs), turn.mask.tolist()) == (0, 0, [0, 0, 0])
    assert turn.context_ids.tolist() == [0, 1]


def test_lengths_that_disagree_are_not_cut():
    tokens = np.arange(5, dtype=np.int32)
    (turn,) = turns_of(tokens, 2, np.ones(2, np.int8), {"logprobs": np.zeros(4, np.float32)})
    assert (len(turn.token_ids), len(turn.logprobs), len(turn.mask)) == (3, 4, 2)
