"""rLLM: episode files of evaluations with tokens, and of training with text."""

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import open_source, rllm

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted((FIXTURES / "rllm" / "episodes").iterdir())
TRAIN = sorted((FIXTURES / "rllm_train").rglob("episode_*.json"))


@pytest.fixture
def record():
    return json.loads(FILES[1].read_text())


def _written(tmp_path, record):
    file = tmp_path / "episode_000000_sink.json"
    file.write_text(json.dumps(record, indent=2))
    return file


def test_folders_are_told_apart_and_summaries_passed_over():
    for folder, files in (("rllm", FILES), ("rllm_train", TRAIN)):
        source = open_source(FIXTURES / folder)
        assert source.format == "rllm" and list(source.files) == files
        assert len(source.notes) == 1 and ("meta" in source.notes[0] or "summary" in source.notes[0])


def test_an_evaluation_keeps_tokens_logprobs_and_advantages():
    (episode,) = rllm.read(FILES[0])
    steps = json.loads(FILES[0].read_text())["trajectories"][0]["steps"]
    assert (episode.episode, episode.group, episode.reward, episode.success) == ("sink:0", "sink:solver", 1.0, True)
    assert episode.fidelity == "token" and episode.stop_reason == "env_done"
    for turn, step in zip(episode.turns, steps, strict=True):
        assert turn.token_ids.tolist() == step["response_ids"] and turn.context_ids.tolist() == step["prompt_ids"]
        np.testing.assert_array_equal(turn.logprobs, np.float32(step["logprobs"]))
        given = step["advantage"] if isinstance(step["advantage"], list) else [step["advantage"]] * len(turn.token_ids)
        np.testing.assert_array_equal(turn.advantages, np.float32(given))
        assert (turn.response, turn.reward) == (step["model_response"], step["reward"])
    assert episode.turns[0].action == "take mug" and episode.turns[1].observation == '{"text": "You take the mug."}'


def test_trajectories_of_other_names_are_rollouts_of_other_groups():
    solver, judge = rllm.read(FILES[1])
    assert (solver.group, judge.group) == ("sink:solver", "sink:judge") and solver.episode != judge.episode
    assert (solver.fidelity, judge.fidelity, judge.reward) == ("token", "text", None)
    assert judge.turns[0].observation == "Is it done?" and judge.turns[0].token_ids is None


def test_training_logs_are_text_of_their_step():
    episodes = [episode for file in TRAIN for episode in rllm.read(file)]
    assert {episode.step for episode in episodes} == {11} and {e.fidelity for e in episodes} == {"text"}
    assert [episode.reward for episode in episodes] == [1.0, 0.0, None]
    assert all(turn.token_ids is None and turn.advantages is None for e in episodes for turn in e.turns)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(response_ids=[1, "x"]), "steps[1]: response_ids holds"),
        (lambda s: s.update(prompt_ids=[{"image": 1}]), "steps[1]: prompt_ids holds an object"),
        (lambda s: s.update(logprobs=[float("nan")]), "steps[1]: logprobs is nan at token 0"),
        (lambda s: s.update(advantage="high"), "advantage is a string, expected a number"),
        (lambda s: s.update(chat_completions="x"), "chat_completions is a string, expected a list"),
        (lambda s: s.update(reward=[1]), "reward is a list, expected a number"),
    ],
)
def test_ill_typed_steps_name_the_place(record, tmp_path, change, said):
    change(record["trajectories"][0]["steps"][1])
    with pytest.raises(WorkbenchError) as caught:
        list(rllm.read(_written(tmp_path, record)))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_torn_file_is_one_line(tmp_path):
    file = tmp_path / "episode_0.json"
    file.write_bytes(FILES[0].read_bytes()[:-50])
    with pytest.raises(WorkbenchError, match=r"episode_0.json:1: torn"):
        list(rllm.read(file))


def test_a_long_file_is_told_by_the_names_at_its_head(record, tmp_path):
    record["trajectories"][0]["steps"][0]["model_response"] = "x" * 100_000
    assert open_source(_written(tmp_path, record)).format == "rllm"
