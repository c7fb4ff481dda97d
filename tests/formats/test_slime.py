"""slime: dumps are loaded without running code, and keep ids, masks, log-probs, teacher and advantages."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.formats import open_source, slime

FIXTURES = Path(__file__).parent / "fixtures"
ROLLOUT = FIXTURES / "slime" / "rollout_6.pt"
TRAIN = FIXTURES / "slime_train" / "train_6.pt"


def _saved(tmp_path, change):
    data = torch.load(ROLLOUT, weights_only=True)
    change(data)
    file = tmp_path / "rollout_6.pt"
    torch.save(data, file)
    return file


def _error(file):
    with pytest.raises(WorkbenchError) as caught:
        list(slime.read(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_dumps_are_told_from_their_heads():
    for file in (ROLLOUT, TRAIN):
        assert open_source(file).format == "slime"


def test_stretches_of_the_loss_mask_are_turns():
    first, second, single = slime.read(ROLLOUT)
    sample = torch.load(ROLLOUT, weights_only=True)["samples"][0]
    assert (first.step, first.group, first.reward, first.stop_reason) == (6, "0", 1.0, "completed")
    assert (second.reward, second.stop_reason, second.turns[-1].truncated) == (0.0, "truncated", True)
    assert first.fidelity == "token"
    for turn, span in zip(first.turns, (slice(0, 2), slice(4, 6)), strict=True):
        assert turn.context_ids.tolist() == sample["tokens"][: 3 + span.start]
        assert turn.token_ids.tolist() == sample["tokens"][3:][span]
        np.testing.assert_array_equal(turn.logprobs, np.float32(sample["rollout_log_probs"][span]))
        np.testing.assert_array_equal(turn.teacher_logprobs, np.float32(sample["teacher_log_probs"][span]))
    assert [turn.response for turn in first.turns] == ["", ""] and first.info["response"] == [sample["response"]]
    assert (single.turns[0].response, single.turns[0].observation) == ("stop", "Say stop.")
    assert single.reward is None and single.info["rewards"] == {"exact": 1.0, "style": 0.5}


def test_a_training_dump_has_what_the_trainer_added():
    first, second = slime.read(TRAIN)
    sample = torch.load(TRAIN, weights_only=True)["samples"][1]
    assert (first.reward, second.reward, second.info["processed_reward"]) == (1.0, 0.0, -0.5)
    assert first.episode == "train/0" and first.group == ""
    names = {"trainer_logprobs": "log_probs", "reference_logprobs": "ref_log_probs", "advantages": "advantages"}
    for turn, span in zip(second.turns, (slice(0, 2), slice(4, 6)), strict=True):
        for field, name in names.items():
            np.testing.assert_array_equal(getattr(turn, field), sample[name][span].numpy())


def test_samples_of_one_rollout_are_one_episode(tmp_path):
    def share(data):
        for sample in data["samples"][:2]:
            sample["rollout_id"] = 5

    first, second = slime.read(_saved(tmp_path, share))
    assert (len(first.turns), len(second.turns)) == (4, 1)


def test_lengths_that_disagree_are_kept_for_the_audit(tmp_path):
    file = _saved(tmp_path, lambda data: data["samples"][0]["rollout_log_probs"].pop())
    (turn,) = next(iter(slime.read(file))).turns
    assert (len(turn.token_ids), len(turn.logprobs), len(turn.mask)) == (4, 5, 6)


class _Harm:
    def __reduce__(self):
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize("value", [_Harm(), np.float64(1.0), Path("x")])
def test_what_could_run_code_is_refused_and_not_run(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    message = _error(_saved(tmp_path, lambda data: data["samples"][0].update(metadata={"x": value})))
    assert "rollout_6.pt: refused" in message and "can run code" in message
    assert not (tmp_path / "harmed").exists()


def test_a_pickle_is_not_taken_for_a_dump(tmp_path):
    file = tmp_path / "rollout_6.pt"
    file.write_bytes(pickle.dumps({"rollout_id": 1, "samples": []}))
    with pytest.raises(WorkbenchError, match="pickle"):
        open_source(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["samples"].__setitem__(0, 3), "rollout_6.pt:samples[0] is a number, expected a sample"),
        (lambda d: d.update(samples=None), "samples is missing, expected a list"),
        (lambda d: d.update(rollout_id="six"), "rollout_id is a string, expected a whole number"),
        (lambda d: d["samples"][0].update(response_length=99), "response_length is 99, expected 0 to 9"),
        (lambda d: d["samples"][0].update(tokens=torch.ones(9) / 2), "tokens holds"),
        (lambda d: d["samples"][0].update(loss_mask=[2] * 6), "loss_mask holds something else than 0 and 1"),
        (lambda d: d["samples"][0].update(rollout_log_probs=[float("nan")] * 6), "rollout_log_probs is nan at token 0"),
        (lambda d: d["samples"][0].update(reward="high"), "reward is a string, expected a number"),
        (lambda d: d["samples"][0].update(tokens=torch.ones(3, 3)), "tokens holds"),
        (lambda d: d["samples"][0].update(truncated=[1]), "truncated is a list, expected true or false"),
    ],
)
def test_ill_typed_dumps_name_the_sample(tmp_path, change, said):
    assert said in _error(_saved(tmp_path, change))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(1).expand(10**8), "rollout_log_probs has 100000000 values and 4 bytes, expected all"),
        (torch.zeros(6).to_sparse(), "rollout_log_probs is a sparse, quantized, nested or meta tensor"),
        (torch.zeros(6, device="meta"), "rollout_log_probs is a sparse, quantized, nested or meta tensor"),
    ],
)
def test_tensors_that_are_no_plain_data(tmp_path, value, said):
    assert said in _error(_saved(tmp_path, lambda data: data["samples"][0].update(rollout_log_probs=value)))


def test_a_reward_without_data_names_the_sample(tmp_path):
    change = {"reward": torch.zeros(1, device="meta")}
    assert "samples[0]: reward is " in _error(_saved(tmp_path, lambda data: data["samples"][0].update(change)))


def test_a_tensor_that_has_a_gradient_is_its_values(tmp_path):
    values = torch.arange(6.0, requires_grad=True)
    file = _saved(tmp_path, lambda data: data["samples"][0].update(rollout_log_probs=values))
    assert [turn.logprobs.tolist() for turn in next(iter(slime.read(file))).turns] == [[0.0, 1.0], [4.0, 5.0]]


def test_a_torn_dump_is_one_line(tmp_path):
    file = tmp_path / "rollout_6.pt"
    file.write_bytes(ROLLOUT.read_bytes()[:-30])
    assert "rollout_6.pt: no whole zip archive" in _error(file)
