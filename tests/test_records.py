import numpy as np
import pytest
import torch
from make_batch import SPEC, by_token, make_batch, make_episodes, make_gaps, pad, take_rows

from workbench.errors import WorkbenchError
from workbench.records import Batch, Episode, Turn


@pytest.fixture
def batch():
    episodes = make_episodes()
    return make_batch(episodes, make_gaps(episodes))


def test_rows_hold_the_sampled_tokens_and_nothing_else(batch):
    for e, episode in enumerate(make_episodes()):
        for k, turn in enumerate(episode.turns):
            chosen = batch.turn_index[e] == k
            assert batch.input_ids[e][chosen].tolist() == turn.response_ids.tolist()
            np.testing.assert_array_equal(batch.old_logprobs[e][chosen].numpy(), turn.logprobs.astype(np.float64))
            assert int(chosen.nonzero()[0]) == len(turn.prompt_ids)
    assert batch.turn_counts.tolist() == [len(lengths) for _, _, lengths in SPEC]
    assert batch.turn_tokens[batch.turn_mask].tolist() == [n for _, _, lengths in SPEC for n in lengths]
    assert bool((batch.old_logprobs[~batch.response_mask] == 0).all())


def test_layouts_give_the_same_turn_sums(batch):
    episodes = make_episodes()
    rows = make_batch(episodes, make_gaps(episodes), layout="turn")
    assert len(rows.input_ids) == sum(len(e.turns) for e in episodes) > len(batch.input_ids) == len(episodes)
    torch.testing.assert_close(rows.turn_sum(rows.old_logprobs), batch.turn_sum(batch.old_logprobs), rtol=1e-12, atol=0)
    values = torch.arange(batch.turn_mask.numel()).view(batch.turn_mask.shape).double()
    assert by_token(rows, rows.to_tokens(values)) == by_token(batch, batch.to_tokens(values))


def test_auto_layout_splits_only_where_prompts_do_not_extend():
    first, second = make_episodes()[:2]
    broken = Episode((first.turns[0], Turn([7], [8, 9], [-1.0, -1.0])), "t", 0, 0, 0, 0.0)
    mixed = Batch.from_episodes([broken, second])
    assert mixed.episode_index.tolist() == [0, 0, 1]
    with pytest.raises(WorkbenchError, match="use layout='turn'"):
        Batch.from_episodes([broken, second], layout="episode")


def test_repeated_rows_count_once():
    episodes = make_episodes()
    rows = make_batch(episodes, make_gaps(episodes), layout="turn")
    twice = take_rows(rows, [3, 0, *range(len(rows.input_ids)), 5, 5])
    assert int(twice.counted.sum()) == int(rows.response_mask.sum())
    torch.testing.assert_close(twice.turn_sum(twice.old_logprobs), rows.turn_sum(rows.old_logprobs), rtol=1e-12, atol=0)


def test_reward_is_the_outcome_or_the_return():
    episodes = make_episodes(scale=10.0)
    assert Batch.from_episodes(episodes).reward.max() == 1
    returns = Batch.from_episodes(episodes, reward="return")
    assert returns.reward.max() == 10 and returns.outcome.max() == 1


def test_padding_changes_nothing(batch):
    wide = pad(batch, 5)
    assert wide.input_ids.shape[1] == batch.input_ids.shape[1] + 5
    assert torch.equal(wide.turn_sum(wide.old_logprobs), batch.turn_sum(batch.old_logprobs))


def test_turn_means_leave_out_what_lies_off_the_mask_and_count_a_turn_once():
    episodes = make_episodes()
    rows = make_batch(episodes, layout="turn")
    twice = take_rows(rows, [*range(len(rows.input_ids)), 0, 4])
    values = torch.where(twice.response_mask, twice.old_logprobs, 99.0)
    want = torch.zeros(twice.turn_mask.shape).double()
    for e, episode in enumerate(episodes):
        for k, turn in enumerate(episode.turns):
            want[e, k] = turn.logprobs.astype(np.float64).mean()
    torch.testing.assert_close(twice.turn_mean(values), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["old_logprobs", "teacher_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("junk", [float("nan"), float("-inf"), float("inf"), 5.0])
def test_log_probs_that_cannot_be_become_zero_off_the_mask(batch, name, junk):
    clean = batch.with_(reference_logprobs=batch.teacher_logprobs)
    given = torch.where(batch.response_mask, getattr(clean, name), junk)
    noisy = clean.with_(**{name: given})
    assert torch.equal(getattr(noisy, name), getattr(clean, name))
    assert not torch.equal(given, getattr(clean, name)), "the caller's tensor stays as it was"


def _set(tensor, index, value):
    changed = tensor.clone()
    changed[index] = value
    return changed


WRONG = {
    "shape": (lambda b: {"old_logprobs": b.old_logprobs[:, 1:]}, "old_logprobs has shape"),
    "flat": (lambda b: {"input_ids": b.input_ids[0]}, r"must be \(B,T\)"),
    "lengths": (lambda b: {"lengths": b.lengths[1:]}, "lengths must have one value for each of 7 rows"),
    "episode rows": (lambda b: {"episode_index": b.episode_index[1:]}, "episode_index must have one value"),
    "too long": (lambda b: {"lengths": b.lengths + 99}, "a length exceeds"),
    "outcomes": (lambda b: {"outcome": b.outcome[1:]}, "outcome must have one value for each of 7 episodes"),
    "raw reward as outcome": (lambda b: {"outcome": b.outcome * 10}, "outcome must be 0 or 1"),
    "mask type": (lambda b: {"response_mask": b.response_mask.long()}, "must be bool"),
    "mask and turns": (lambda b: {"turn_index": b.turn_index.clamp(min=0)}, "exactly where response_mask is set"),
    "empty row": (
        lambda b: {
            "response_mask": _set(b.response_mask, 2, False),
            "turn_index": _set(b.turn_index, 2, -1),
        },
        "row 2 has an empty response mask",
    ),
    "mask over padding": (lambda b: {"lengths": b.lengths - 1}, "covers padding"),
    "first token": (
        lambda b: {
            "response_mask": _set(b.response_mask, (0, 0), True),
            "turn_index": _set(b.turn_index, (0, 0), 0),
        },
        "first token, which has no context",
    ),
    "episode out of range": (lambda b: {"episode_index": b.episode_index + 1}, r"must lie in 0\.\.6"),
    "positive log-prob": (
        lambda b: {"old_logprobs": b.old_logprobs.abs()},
        "old_logprobs must be finite and at most 0",
    ),
    "nan teacher": (
        lambda b: {"teacher_logprobs": b.teacher_logprobs * float("nan")},
        "teacher_logprobs must be finite",
    ),
    "infinite teacher": (lambda b: {"teacher_logprobs": b.teacher_logprobs * float("inf")}, "teacher_logprobs must"),
    "gap in turns": (
        lambda b: {"turn_index": torch.where(b.turn_index == 1, 2, b.turn_index)},
        "gap in its turn numbers",
    ),
    "episode without rows": (
        lambda b: {"episode_index": _set(b.episode_index, 6, 5)},
        "an episode has no turns",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_batch_that_does_not_fit_is_refused_in_one_line(batch, case):
    change, message = WRONG[case]
    with pytest.raises(WorkbenchError, match=message) as caught:
        batch.with_(**change(batch))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [1], [-1.0]), "at least one token"),
        (([1], [], []), "at least one token"),
        (([1], [1, 2], [-1.0]), "2 response tokens but 1 log-probs"),
        (([1], [1], [0.5]), "at most 0"),
        (([1], [1], [float("nan")]), "finite"),
    ],
)
def test_a_turn_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(WorkbenchError, match=message):
        Turn(*arguments)


def test_episodes_that_do_not_fit_are_refused():
    turn = Turn([1], [2], [-1.0])
    with pytest.raises(WorkbenchError, match="outcome must be 0 or 1"):
        Episode((turn,), "t", 0, 0, 10, 10.0)
    with pytest.raises(WorkbenchError, match="no turns"):
        Episode((), "t", 0, 0, 1, 1.0)
    with pytest.raises(WorkbenchError, match="no episodes"):
        Batch.from_episodes([])
    with pytest.raises(WorkbenchError, match="only text was recorded"):
        Batch.from_episodes([Episode((turn,), "t", 0, 0, 1, 1.0, fidelity="text")])
    with pytest.raises(WorkbenchError, match="layout must be"):
        Batch.from_episodes(make_episodes(), layout="rows")
    with pytest.raises(WorkbenchError, match="reward must be"):
        Batch.from_episodes(make_episodes(), reward="raw")
