"""inspect_ai: its logs are read by itself where it is installed, and the lack of it is said in a line."""

import sys
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import inspect_ai, open_source

FILE = Path(__file__).parent / "fixtures" / "inspect_ai" / "kitchen.eval"


def _log():
    return pytest.importorskip("inspect_ai.log", reason="inspect_ai is not installed (pip install inspect_ai)")


def _json_log(path):
    log = _log()
    log.write_eval_log(log.read_eval_log(str(FILE)), str(path))
    return path


def test_a_log_is_told_by_its_name_and_head():
    assert open_source(FILE).format == "inspect_ai"


def test_without_inspect_ai_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    with pytest.raises(WorkbenchError) as caught:
        list(inspect_ai.read(FILE))
    assert "pip install inspect_ai" in str(caught.value) and "\n" not in str(caught.value)


def test_epochs_of_a_sample_are_a_group_of_text_rollouts():
    _log()
    first, second = inspect_ai.read(FILE)
    assert first.group == second.group and first.episode != second.episode and first.task == "kitchen"
    assert (first.reward, first.success, second.reward, second.success) == (1.0, True, 0.0, False)
    assert first.fidelity == "text" and all(turn.token_ids is None for turn in first.turns)
    take, put = first.turns
    assert take.action == 'act({"do": "take mug"})' and take.logprobs is None
    assert (put.response, put.observation, put.truncated) == ("put mug in sink", "You take the mug.", False)


def test_logprobs_come_with_the_text_of_their_tokens_and_no_ids():
    _log()
    put = next(iter(inspect_ai.read(FILE))).turns[1]
    np.testing.assert_array_equal(put.logprobs, np.float32([-0.5, -0.25]))
    assert put.info["pieces"] == ("put", " mug in sink") and put.token_ids is None


def test_a_json_log_gives_the_same(tmp_path):
    file = _json_log(tmp_path / "kitchen.json")
    assert open_source(file).format == "inspect_ai"
    for a, b in zip(inspect_ai.read(file), inspect_ai.read(FILE), strict=True):
        assert (a.episode, a.group, a.reward) == (b.episode, b.group, b.reward)
        assert [(t.response, t.observation, t.action) for t in a.turns] == [
            (t.response, t.observation, t.action) for t in b.turns
        ]


@pytest.mark.parametrize("end", [-30, 200])
def test_a_torn_log_is_one_line(tmp_path, end):
    _log()
    file = tmp_path / "kitchen.eval"
    file.write_bytes(FILE.read_bytes()[:end])
    with pytest.raises(WorkbenchError) as caught:
        list(inspect_ai.read(file))
    assert "kitchen.eval" in str(caught.value) and "\n" not in str(caught.value)


def test_a_log_with_damage_inside_is_one_line(tmp_path):
    _log()
    data = bytearray(FILE.read_bytes())
    data[1000:3000] = bytes(2000)
    file = tmp_path / "kitchen.eval"
    file.write_bytes(data)
    with pytest.raises(WorkbenchError) as caught:
        list(inspect_ai.read(file))
    assert "\n" not in str(caught.value)
