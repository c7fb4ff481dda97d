"""Agent Lightning: events give every call's tokens, zipped trajectories the text of the last call."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import agent_lightning, open_source

FIXTURES = Path(__file__).parent / "fixtures"
ZIP = FIXTURES / "agent_lightning" / "step_5" / "train_trajectories.jsonl.zip"
LINES = FIXTURES / "agent_lightning_events" / "events.jsonl"
LIST = FIXTURES / "agent_lightning_events" / "events.json"


@pytest.fixture
def events():
    return json.loads(LIST.read_text())


def _written(tmp_path, events):
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return file


def _error(file):
    with pytest.raises(WorkbenchError) as caught:
        list(agent_lightning.read(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_forms_are_told_from_their_heads():
    for file in (ZIP, LINES, LIST):
        assert open_source(file).format == "agent_lightning"


def test_trajectories_are_text_of_their_step():
    episodes = list(agent_lightning.read(ZIP))
    assert [(e.episode, e.step, e.reward) for e in episodes] == [("rollout0", 5, 1.0), ("rollout1", 5, 0.0)]
    assert {e.fidelity for e in episodes} == {"text"} and {e.group for e in episodes} == {""}
    assert episodes[0].turns[0].response == "w23 w24"


@pytest.mark.parametrize("file", [LINES, LIST])
def test_events_keep_ids_and_logprobs_of_what_was_trained_on(file):
    first, second = agent_lightning.read(file)
    assert (first.reward, second.reward, first.fidelity) == (1.0, 0.0, "token")
    assert first.group == second.group != ""
    assert first.info["requests_asked_again"] == 1
    take, put = first.turns
    assert take.context_ids.tolist() == [1, 2, 3] and take.token_ids.tolist() == [21, 22]
    assert put.context_ids.tolist() == [1, 2, 3, 21, 22, 4] and put.token_ids.tolist() == [23, 24]
    np.testing.assert_array_equal(take.logprobs, np.float32([-0.125, -0.5]))
    np.testing.assert_array_equal(put.logprobs, np.float32([-0.25, -1.0]))
    assert (put.response, put.observation, put.truncated) == ("put mug in sink", "You take the mug.", True)


def test_the_triplet_form_has_the_same_tokens(events, tmp_path):
    for event in events:
        if event["event_type"] == "model_request" and event["data"]["status"] == "ok":
            answer = event["data"]["response"]
            choice = answer["choices"][0]
            event["data"] = {
                "prompt_token_ids": answer["prompt_token_ids"],
                "response_token_ids": choice["token_ids"],
                "response_log_probs": [one["logprob"] for one in choice["logprobs"]["content"]],
                "status": "ok",
            }
    for a, b in zip(agent_lightning.read(_written(tmp_path, events)), agent_lightning.read(LINES), strict=True):
        for x, y in zip(a.turns, b.turns, strict=True):
            for name in ("token_ids", "context_ids", "logprobs"):
                np.testing.assert_array_equal(getattr(x, name), getattr(y, name))


def test_an_engine_that_gives_no_ids_leaves_text(events, tmp_path):
    for event in events:
        for choice in event["data"].get("response", {}).get("choices", []):
            choice["token_ids"] = None
    episode = next(iter(agent_lightning.read(_written(tmp_path, events))))
    assert episode.fidelity == "text" and all(t.token_ids is None and t.logprobs is None for t in episode.turns)


def test_another_attempt_is_another_episode(events, tmp_path):
    for event in events[6:]:
        event |= {"rollout_id": "rollout0", "attempt_id": "1"}
    assert [e.episode for e in agent_lightning.read(_written(tmp_path, events))] == ["rollout0", "rollout0#1"]


def test_events_of_a_rollout_that_lie_apart_are_refused(events, tmp_path):
    message = _error(_written(tmp_path, [*events, events[0]]))
    assert "events.jsonl:13: rollout rollout0 comes again" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(response="x"), "request or response is a string"),
        (lambda d: d["response"].update(choices=[]), "choices holds no message"),
        (lambda d: d["response"]["choices"][0].update(message="x"), "choices holds no message"),
        (lambda d: d["response"]["choices"][0].update(token_ids=[1.5]), "token_ids holds 1.5"),
        (lambda d: d["response"]["choices"][0]["logprobs"].update(content=[{"token": "a"}]), "logprobs holds null"),
        (lambda d: d["request"].update(messages="x"), "messages is a string, expected a list"),
    ],
)
def test_ill_typed_requests_name_the_line(events, tmp_path, change, said):
    change(events[1]["data"])
    message = _error(_written(tmp_path, events))
    assert said in message and "events.jsonl:2" in message


def test_a_reward_that_is_no_number_names_the_line(events, tmp_path):
    events[5]["data"]["value"] = float("nan")
    assert "events.jsonl:6: value is nan" in _error(_written(tmp_path, events))


def test_a_torn_list_is_one_line(tmp_path):
    file = tmp_path / "events.json"
    file.write_bytes(LIST.read_bytes()[:-5])
    assert "events.json: torn" in _error(file)


def test_a_zip_that_would_explode_is_refused(tmp_path):
    file = tmp_path / "train_trajectories.jsonl.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train_trajectories.jsonl", b" " * (1 << 24))
    assert "would unpack" in _error(file)


def test_blank_lines_of_a_zip_are_counted(tmp_path):
    row = json.dumps({"rollout_id": "a", "reward": 1.0, "prompt": "p", "response": "r" * 70_000}).encode()
    file = tmp_path / "train_trajectories.jsonl.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rows", b"\n \n" + row + b"\n" * 200_000 + b"  " + row + b"\n\n" + row)
    where = [episode.where.rpartition(":")[2] for episode in agent_lightning.read(file)]
    assert where == ["3", "200003", "200005"]


def test_a_torn_zip_is_one_line(tmp_path):
    file = tmp_path / "train_trajectories.jsonl.zip"
    data = bytearray(ZIP.read_bytes())
    file.write_bytes(data[:-10])
    assert "no whole zip archive" in _error(file)
    data[60:90] = bytes(30)
    file.write_bytes(data)
    assert "torn" in _error(file)
