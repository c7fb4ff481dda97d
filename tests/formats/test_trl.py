"""TRL's completions and batches, as TRL 1.16.0 wrote them."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.formats import open_source, trl

FIXTURES = Path(__file__).parent / "fixtures"


def batch():
    return torch.load(FIXTURES / "trl_batch" / "batch.pt", weights_only=True)


def test_a_folder_of_text_completions():
    source = open_source(FIXTURES / "trl")
    assert source.format == "trl" and [f.name for f in source.files] == [
        "completions_00001.parquet", "completions_00002.parquet",
    ]  # fmt: skip
    table = pl.concat([pl.read_parquet(f) for f in source.files]).to_dicts()
    episodes = list(source.episodes())
    assert len(episodes) == len(table) == 8
    for episode, row in zip(episodes, table, strict=True):
        (turn,) = episode.turns
        assert (turn.response, turn.observation, episode.step) == (row["completion"], row["prompt"], row["step"])
        assert episode.advantage == row["advantage"] and episode.fidelity == "text"
        assert turn.token_ids is None and turn.logprobs is None
    assert len({(e.step, e.group) for e in episodes}) == 4


def test_a_reward_that_does_not_apply_adds_nothing():
    row = pl.read_parquet(FIXTURES / "trl" / "completions_00001.parquet").to_dicts()
    episodes = list(trl.read(FIXTURES / "trl" / "completions_00001.parquet"))
    assert row[3]["cup_reward"] is None  # what pandas makes of a NaN
    assert episodes[3].info["rewards"] == {"length_reward": row[3]["length_reward"], "cup_reward": None}
    assert episodes[3].reward == row[3]["length_reward"]
    assert episodes[1].reward == row[1]["length_reward"] + row[1]["cup_reward"]


def test_chat_completions_and_tool_turns(tmp_path):
    (path,) = (FIXTURES / "trl_chat").glob("*.parquet")
    table = pl.read_parquet(path).to_dicts()
    for episode, row in zip(trl.read(path), table, strict=True):
        assert episode.turns[0].observation == "go\n\n" + row["prompt"][1]["content"]
        assert episode.turns[0].response == row["completion"][0]["content"]
    said = [
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "a mug"},
        {"role": "assistant", "content": "take mug"},
    ]
    asked = [{"role": "assistant", "content": "an example"}, {"role": "user", "content": "go"}]
    row = {"step": 1, "prompt": asked, "completion": said, "r": 1.0, "note": "x", "advantage": 0.5}
    pl.DataFrame([row]).write_parquet(tmp_path / "c.parquet")
    (episode,) = open_source(tmp_path / "c.parquet").episodes()
    assert [t.response for t in episode.turns] == ["look", "take mug"]
    assert [t.observation for t in episode.turns] == ["an example\n\ngo", "a mug"]
    assert episode.info["note"] == "x" and episode.reward == 1.0


def test_a_nan_reward_is_one_that_does_not_apply(tmp_path):
    row = {"step": 1, "prompt": "go", "completion": "x", "a": 1.0, "b": float("nan"), "advantage": 0.5}
    pl.DataFrame([row]).write_parquet(tmp_path / "c.parquet")
    (episode,) = trl.read(tmp_path / "c.parquet")
    assert episode.reward == 1.0 and episode.info["rewards"] == {"a": 1.0, "b": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"advantage": float("nan")}, "row 0: advantage is nan, expected a finite number"),
        ({"r": float("inf")}, "row 0: r is inf, expected a finite number"),
        ({"completion": 3}, "row 0: prompt or completion is a number, expected text or messages"),
        ({"completion": [{"role": "user", "content": "x"}]}, "row 0: completion holds no assistant message"),
        ({"step": "one"}, "row 0: step is a string, expected a whole number"),
    ],
)
def test_wrong_values(tmp_path, change, said):
    row = {"step": 1, "prompt": "go", "completion": "x", "r": 1.0, "advantage": 0.5}
    pl.DataFrame([row | change]).write_parquet(tmp_path / "c.parquet")
    with pytest.raises(WorkbenchError, match=said):
        list(trl.read(tmp_path / "c.parquet"))


def test_a_torn_parquet(tmp_path):
    whole = (FIXTURES / "trl" / "completions_00001.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(whole[:-100])
    with pytest.raises(WorkbenchError, match="torn or no parquet file"):
        list(trl.read(tmp_path / "c.parquet"))
    with pytest.raises(WorkbenchError, match="no format fits"):
        open_source(tmp_path / "c.parquet")


def test_a_batch_whose_tool_mask_is_padded_with_ones():
    tensors = batch()
    assert tensors["tool_mask"][0].tolist() == [1, 1, 0, 0, 1, 1, 1]  # its last two are padding
    episodes = trl.from_batch(tensors, step=3, rewards=[1.0, 0.0, 0.5, 0.25])
    first = episodes[0]
    assert [t.token_ids.tolist() for t in first.turns] == [[10, 11], [20]]
    assert [t.mask.tolist() for t in first.turns] == [[1, 1, 0, 0], [1]]
    for row, episode in enumerate(episodes):
        trained = (tensors["completion_mask"] * tensors["tool_mask"])[row].bool()
        assert np.concatenate([t.token_ids for t in episode.turns]).tolist() == (
            tensors["completion_ids"][row][trained].tolist()
        )
        for name, column in (("logprobs", "sampling_per_token_logps"), ("reference_logprobs", "ref_per_token_logps")):
            got = np.concatenate([getattr(t, name) for t in episode.turns])
            np.testing.assert_array_equal(got, tensors[column][row][trained].numpy(), strict=True)
        prompt = tensors["prompt_ids"][row][tensors["prompt_mask"][row].bool()].tolist()
        said = tensors["completion_ids"][row].tolist()
        assert [t.context_ids.tolist() for t in episode.turns] == [prompt, [*prompt, *said[:4]]]
        assert episode.advantage == tensors["advantages"][row].item()
    assert [e.reward for e in episodes] == [1.0, 0.0, 0.5, 0.25] and episodes[0].step == 3
    assert episodes[0].group == episodes[1].group != episodes[2].group == episodes[3].group


def test_a_batch_with_an_advantage_a_token_and_text():
    tensors = batch()
    tensors["advantages"] = torch.arange(28.0).view(4, 7)
    episode = trl.from_batch(tensors, decode=lambda ids: " ".join(map(str, ids)))[1]
    assert [t.advantages.tolist() for t in episode.turns] == [[7.0, 8.0], [11.0, 12.0]]
    assert episode.advantage is None
    assert [t.response for t in episode.turns] == ["11 12", "20 21"] and episode.turns[1].observation == "3 4"


def test_a_row_whose_mask_is_empty_stays_for_the_audit():
    tensors = batch()
    tensors["tool_mask"][0] = 0
    (turn,) = trl.from_batch(tensors)[0].turns
    assert len(turn.token_ids) == 0 and turn.mask.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tool_mask", torch.ones(4, 9), r"tool_mask has shape \(4, 9\), completion_ids \(4, 7\)"),
        ("sampling_per_token_logps", torch.full((4, 7), torch.nan), "sampling_per_token_logps is not finite"),
        ("advantages", torch.ones(3), r"advantages has shape \(3,\)"),
        ("completion_mask", None, "completion_mask is missing"),
        ("prompt_ids", None, "prompt_ids is missing"),
    ],
)
def test_a_batch_that_does_not_fit(name, value, said):
    with pytest.raises(WorkbenchError, match=said):
        trl.from_batch(batch() | {name: value})
