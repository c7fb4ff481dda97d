"""verl, plain chat, ms-swift, ROLL and SkyRL: what each row becomes, and what is refused."""

import json
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.formats import FORMATS, messages, ms_swift, open_source, roll, skyrl, verl

FIXTURES = Path(__file__).parent / "fixtures"
ASKED = "You are in the kitchen. The mug is on the table."
SEEN = "You take the mug."


def read(name, expected):
    source = open_source(FIXTURES / name)
    assert source.format == expected
    return list(source.episodes())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(tmp_path, module, row, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(WorkbenchError) as error:
        list(module.read(path))
    assert str(error.value).startswith(f"{tmp_path.name}/rows.jsonl:1") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_verl_legacy():
    first, second = read("verl_legacy", "verl")
    (turn,) = first.turns
    assert (turn.response, turn.observation, first.reward, first.step) == ("take mug", ASKED, 1.0, 3)
    assert first.group == second.group and (first.episode, second.episode) == ("r0", "r1")
    assert first.info == {"gts": "sink", "acc": True} and first.where == "verl_legacy/3.jsonl:1"
    assert first.fidelity == "text" and turn.token_ids is None


def test_verl_v1_sessions():
    first, second = read("verl_v1", "verl")
    assert [t.response for t in first.turns] == ["take mug", "put mug in sink"] and len(second.turns) == 1
    assert (first.episode, second.episode, first.group, second.group) == ("a_b_0", "a_b_1", "a_b", "a_b")
    assert (first.reward, second.reward) == (1.0, 0.0) and [t.turn for t in first.turns] == [0, 1]
    assert [t.info["score"] for t in first.turns] == [0.0, 1.0]


def test_verl_mixed_uids(tmp_path):
    rows = lines(FIXTURES / "verl_v1" / "4.jsonl")
    rows[1]["uid"] = "not-split"
    (tmp_path / "4.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [(e.group, e.episode) for e in verl.read(tmp_path / "4.jsonl")] == [
        ("a_b", "a_b_0"), ("not-split", "2"), ("a_b", "a_b_1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"score": float("nan")}, "score is nan, expected a finite number"),
        ({"score": "1"}, "score is a string, expected a number"),
        ({"score": True}, "score is true, expected a number"),
        ({"output": None}, "output is missing, expected a string"),
        ({"input": ["x"]}, "input is a list, expected a string"),
        ({"step": 1.5}, "step is a number, expected a whole number"),
        ({"uid": 3}, "uid is a number, expected a string"),
    ],
)
def test_verl_wrong_values(tmp_path, change, said):
    refused(tmp_path, verl, {"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 1} | change, said)


def test_messages():
    first, second = read("messages", "messages")
    assert [t.response for t in first.turns] == ["", "put mug in sink"]
    assert [t.observation for t in first.turns] == [f"Act.\n\n{ASKED}", SEEN]
    assert first.turns[0].action == 'act({"do": "take"})' and second.turns[0].action is None
    assert (first.reward, second.reward, first.success, second.success) == (1.0, 0.25, True, None)
    assert first.group == second.group and first.episode == "one" and first.info == {"id": "one", "seed": 3}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": "hi"}, "messages is a string, expected a list of messages"),
        ({"messages": []}, "messages holds no assistant message"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages holds no assistant message"),
        ({"messages": ["x"]}, "messages[0] is a string, expected an object with a role"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "messages[0].content is a number, expected a string"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [3]}]}, "tool_calls holds a number"),
        ({"reward": None}, "reward is missing, expected a number"),
        ({"reward": float("inf")}, "reward is inf, expected a finite number"),
        ({"success": "yes"}, "success is a string, expected true or false"),
        ({"group": 1.5}, "group is a number, expected text or a whole number"),
        ({"step": 10**400}, "step"),
    ],
)
def test_messages_wrong_values(tmp_path, change, said):
    row = {"messages": [{"role": "assistant", "content": "x"}], "reward": 1} | change
    if "step" in change:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row | {"step": 0}))
        assert next(messages.read(path)).step == 0
        return
    refused(tmp_path, messages, row, said)


def test_ms_swift_columns():
    episodes = read("ms_swift", "ms_swift")
    assert [e.step for e in episodes] == [7, 7, 8, 8] and [e.reward for e in episodes[:2]] == [1.5, 0.0]
    assert episodes[0].info == {"rewards": {"Accuracy": 1.0, "Format": 0.5}} and episodes[0].advantage == 0.5
    assert episodes[1].info["rewards"]["Format"] is None and episodes[0].group == episodes[1].group
    assert episodes[2].turns[0].response == "take mug" and episodes[2].where == "ms_swift/completions.jsonl:2[0]"


def test_ms_swift_rows():
    first, second = read("ms_swift_rows", "ms_swift")
    assert (first.reward, second.reward, first.step) == (1.0, 0.0, 2) and first.turns[0].observation == ASKED


def test_ms_swift_samples_keep_tokens_of_the_mask():
    (episode,) = read("ms_swift_samples", "ms_swift")
    first, second = episode.turns
    assert first.token_ids.tolist() == [11, 12, 13] and first.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert first.mask.tolist() == [1, 1, 1, 0, 0] and second.token_ids.tolist() == [14, 15]
    assert (first.response, second.observation) == ("take mug", SEEN)
    assert (episode.group, episode.episode, episode.fidelity) == ("p0", "r0", "token")
    assert first.truncated is None and second.truncated is True
    assert episode.info["teacher_prompt"] == "The mug belongs in the sink."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollout_logprobs": [[-1.0]]}, "rollout_logprobs has 1 turns, response_token_ids 2"),
        ({"response_loss_mask": [[1, 2], [1]]}, "turn 0: response_loss_mask holds something else than 0 and 1"),
        ({"response_token_ids": [1, 2]}, "turn 0: response_token_ids is a number, expected a list of token ids"),
        ({"rollout_logprobs": [["a"], [-1.0]]}, "turn 0: rollout_logprobs holds a string, expected a list of numbers"),
        ({"response_token_ids": {"a": 1}}, "response_token_ids is an object, expected a list"),
    ],
)
def test_ms_swift_wrong_samples(tmp_path, change, said):
    row = {"messages": [{"role": "assistant", "content": "x"}], "response_token_ids": [[1, 2], [3]]}
    refused(tmp_path, ms_swift, row | change, said)


def test_ms_swift_columns_of_other_lengths(tmp_path):
    row = {"step": ["1"], "prompt": ["a"], "completion": ["x", "y"]}
    refused(tmp_path, ms_swift, row, "completion has 2 values, expected 1 as prompt has")


def test_roll_rlvr():
    first, second = read("roll", "roll")
    assert (first.turns[0].response, first.reward, first.step, first.group) == ("take mug", 1.0, 6, "q1")
    assert second.where == "roll/rollout_dump_data.step_6.jsonl:1[1]" and first.task == "kitchen"


def test_roll_agentic():
    (episode,) = read("roll_agentic", "roll")
    assert [t.reward for t in episode.turns] == [0.0, 1.0] and episode.reward == 1.0
    assert episode.turns[0].action == 'act({"do": "take"})' and episode.turns[1].observation == SEEN
    assert (episode.group, episode.stop_reason) == ("kitchen_2_4_9", "FINISH")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": [1.0]}, "column scores has 1 values, expected a list of 2 as responses has"),
        ({"scores": 1.0}, "column scores has no list, expected a list of 2"),
        ({"scores": [1.0, None]}, "[1]: scores is missing, expected a number"),
        ({"responses": "ab"}, "responses is a string, expected a list"),
        ({"trajectory_data": ["{", "{"], "messages": ["[]", "[]"]}, "trajectory_data: torn or not JSON"),
        ({"trajectory_data": ["{}", "{}"], "messages": ["no", "no"]}, "messages is not JSON"),
        ({"trajectory_data": ["{}", "{}"], "messages": ["[]", "[]"]}, "episode_reward is missing"),
    ],
)
def test_roll_wrong_values(tmp_path, change, said):
    refused(tmp_path, roll, {"responses": ["a", "b"], "scores": [1.0, 0.0], "global_step": [1, 1]} | change, said)


def test_skyrl():
    source = open_source(FIXTURES / "skyrl")
    assert source.notes == ("passed over global_step_9_evals/aggregated_results.jsonl: no format fits",)
    first, second = read("skyrl", "skyrl")
    assert (first.step, first.reward, first.task, first.turns[0].truncated) == (9, 1.0, "kitchen", False)
    assert second.reward == 0.75 and second.info["token_rewards"] == [0.0, 0.25, 0.5]
    assert second.turns[0].truncated is True and first.group == second.group


def test_skyrl_wrong_score(tmp_path):
    row = {"input_prompt": "a", "output_response": "b", "score": [1.0, "x"]}
    refused(tmp_path, skyrl, row, "score holds a string, expected a list of numbers")


@pytest.mark.parametrize("module", [verl, messages, ms_swift, roll, skyrl])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": "a", "out', "torn or not JSON"),
        ("[1, 2]", "a list, expected a JSON object"),
        ("null", "null, expected a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": "\udcff"}', "torn or not JSON (not UTF-8)"),
    ],
)
def test_a_torn_line_names_itself(tmp_path, module, line, said):
    fixtures = {verl: "verl_v1/4.jsonl", messages: "messages/chats.jsonl", ms_swift: "ms_swift_rows/completions.jsonl"}
    fixtures |= {roll: "roll/rollout_dump_data.step_6.jsonl", skyrl: "skyrl/global_step_9_evals/kitchen.jsonl"}
    good = (FIXTURES / fixtures[module]).read_bytes()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(good + b"\n" + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(WorkbenchError) as error:
        list(module.read(path))
    number = good.count(b"\n") + 2
    assert f"rows.jsonl:{number}: {said}" in str(error.value) and "\n" not in str(error.value)


def test_each_fixture_is_of_one_format():
    """No two formats claim a file; asked of every fixture of every reader."""
    known = 0
    for path in FIXTURES.rglob("*"):
        if path.is_file():
            claimed = [n for n, m in FORMATS.items() if m.sniff(path, path.read_bytes()[: 1 << 16])]
            assert len(claimed) <= 1, (path, claimed)
            known += len(claimed)
    assert known > 15
