"""Fixtures of agent frameworks written as a run: tables hold the ids, masks, log-probs and rewards of the source."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from workbench.formats import open_source
from workbench.formats.write import import_run

FIXTURES = Path(__file__).parent / "fixtures"
COLUMNS = {
    "token_ids": "token_ids", "logprobs": "old_logprobs", "teacher_logprobs": "teacher_logprobs",
    "trainer_logprobs": "trainer_logprobs", "reference_logprobs": "reference_logprobs", "advantages": "advantage",
    "mask": "source_mask",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["verifiers", "verifiers_legacy", "prime_rl", "rllm",
     "rllm_train", "art", "art_jsonl", "agent_lightning", "slime", "slime_train"],
)  # fmt: skip
def test_tables_hold_what_the_source_holds(tmp_path, name):
    source = open_source(FIXTURES / name)
    episodes = list(source.episodes())
    run = import_run(FIXTURES / name, tmp_path / "a run")
    assert run.complete
    heads = pl.concat([pl.read_parquet(file) for file in run.table_files("episodes")])
    turns = pl.concat([pl.read_parquet(file) for file in run.table_files("turns")]).to_dicts()
    assert heads["return"].to_list() == [episode.reward for episode in episodes]
    assert heads["fidelity"].to_list() == [episode.fidelity for episode in episodes]
    said = [turn for episode in episodes for turn in episode.turns]
    for row, turn in zip(turns, said, strict=True):
        assert (row["response"], row["observation"], row["reward"]) == (turn.response, turn.observation, turn.reward)
        for field, column in COLUMNS.items():
            value = getattr(turn, field)
            assert (row[column] is None) == (value is None), field
            if value is not None:
                np.testing.assert_array_equal(np.array(row[column], value.dtype), value)
    facts = json.loads((run.path / "source.json").read_text())
    assert facts["format"] == source.format and name.startswith(source.format)
    assert facts["turns"] == len(said)


@pytest.mark.parametrize("name", ["verifiers", "prime_rl", "slime_train", "agent_lightning_events"])
def test_contexts_and_responses_one_after_another_are_what_the_policy_saw(tmp_path, name):
    path = FIXTURES / name
    path = path / "events.jsonl" if name.endswith("events") else path
    run = import_run(path, tmp_path / "run")
    turns = pl.concat([pl.read_parquet(file) for file in run.table_files("turns")]).to_dicts()
    said = [turn for episode in open_source(path).episodes() for turn in episode.turns]
    seen = []
    for row, turn in zip(turns, said, strict=True):
        seen = [*(seen if row["continues"] else []), *row["context_ids"]]
        assert seen == turn.context_ids.tolist()
        seen += row["token_ids"]


@pytest.mark.parametrize("lacks", ["verifiers", "prime_rl", "rllm", "art", "agent_lightning", "slime"])
def test_what_a_format_is_said_to_lack_is_never_there(lacks):
    for folder in FIXTURES.glob(f"{lacks}*"):
        files = [folder / "events.jsonl"] if folder.name.endswith("events") else [folder]
        for source in map(open_source, files):
            for episode in source.episodes():
                for name in source.lacks:
                    for holder in (episode, *episode.turns):
                        if name in vars(holder) and not (name == "reward" and holder is not episode):
                            assert getattr(holder, name) in (None, ""), name
