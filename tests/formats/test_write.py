"""What is read comes out of the tables again, exactly, and a folder is whole or not there."""

import json
import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import FORMATS, open_source, write
from workbench.formats.base import SourceEpisode, SourceTurn
from workbench.formats.source import Source
from workbench.formats.write import import_run
from workbench.tables import TOKEN_LISTS, TURN_SCALARS

FIXTURES = Path(__file__).parent / "fixtures"
OURS = (
    "verl_agent", "verl_agent_sdar", "verl_legacy", "verl_v1", "trl", "trl_chat", "ms_swift", "ms_swift_samples",
    "roll", "roll_agentic", "skyrl", "messages",
)  # fmt: skip


def first_of_each_number(turns):
    seen = set()
    return [t for t in turns if t.turn is None or not (t.turn in seen or seen.add(t.turn))]


@pytest.mark.parametrize("name", OURS)
def test_round_trip(name, tmp_path):
    run = import_run(FIXTURES / name, tmp_path / "run")
    assert run.state == "complete" and run.is_complete
    episodes = list(open_source(FIXTURES / name).episodes())
    rows = run.read("episodes").sort("step", "episode").to_dicts()
    assert len(rows) == len(episodes)
    turns = run.read("turns").sort("step", "episode", "turn").partition_by("step", "episode", maintain_order=True)
    for episode, row, table in zip(episodes, rows, turns, strict=True):
        assert (row["step"], row["source_episode"], row["source_group"]) == (
            episode.step, episode.episode, episode.group,
        )  # fmt: skip
        assert (row["return"], row["advantage"], row["fidelity"]) == (
            episode.reward, episode.advantage, episode.fidelity,
        )  # fmt: skip
        assert row["outcome"] == (None if episode.success is None else int(episode.success))
        kept = first_of_each_number(episode.turns)
        assert table["turn"].to_list() == list(range(len(kept))) and row["n_turns"] == len(kept)
        for turn, got in zip(kept, table.to_dicts(), strict=True):
            assert (got["response"], got["observation"], got["action"], got["reward"], got["source_turn"]) == (
                turn.response, turn.observation, turn.action, turn.reward, turn.turn,
            )  # fmt: skip
            for field, column in (
                ("token_ids", "token_ids"), ("mask", "source_mask"), ("logprobs", "old_logprobs"),
                ("teacher_logprobs", "teacher_logprobs"), ("reference_logprobs", "reference_logprobs"),
                ("trainer_logprobs", "trainer_logprobs"), ("advantages", "advantage"),
            ):  # fmt: skip
                value = getattr(turn, field)
                assert got[column] == (None if value is None else value.tolist()), (field, column)
            pieces = turn.info.get("pieces")
            assert got["pieces"] == (None if pieces is None else list(pieces))
            if turn.teacher_logprobs is not None:
                assert got["gap"] == (turn.teacher_logprobs - turn.logprobs).tolist()


def test_the_columns_are_those_of_a_recorded_run(tmp_path):
    run = import_run(FIXTURES / "verl_agent", tmp_path / "run")
    turns, episodes = run.read("turns"), run.read("episodes")
    own = {"step", "episode", "group", "turn", "observation", "action", "response", "valid", "truncated", "reward"}
    own |= {"context_ids", "continues", "token_ids", "pieces", *TOKEN_LISTS, *TURN_SCALARS}
    assert own <= set(turns.columns)
    assert all(turns.schema[name] == pl.List(pl.Float32) for name in TOKEN_LISTS)
    assert turns.schema["token_ids"] == pl.List(pl.Int32) and turns.schema["pivotal"] == pl.Boolean
    own = {"task", "kind", "split", "seed", "outcome", "return", "prior", "n_turns", "n_tokens", "stop_reason"}
    assert own <= set(episodes.columns) and episodes["outcome"].null_count() == len(episodes)


def test_an_episode_without_turns(tmp_path):
    record = json.loads(next((FIXTURES / "rllm" / "episodes").iterdir()).read_text())
    record["trajectories"] = record["trajectories"][:1]
    record["trajectories"][0]["steps"] = []
    (tmp_path / "episode_0.json").write_text(json.dumps(record, indent=2))
    run = import_run(tmp_path / "episode_0.json", tmp_path / "run")
    assert run.read("episodes")["n_turns"].to_list() == [0] and run.read("turns").height == 0


def test_a_step_in_a_folder_name_that_no_table_holds(tmp_path):
    folder = tmp_path / f"global_step_{2**63}_evals"
    folder.mkdir()
    for file in (FIXTURES / "skyrl").rglob("*.jsonl"):
        (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(WorkbenchError, match="step is over 2\\^63-1, expected"):
        import_run(folder, tmp_path / "run")


def test_copies_are_written_once_and_counted(tmp_path):
    facts = json.loads((import_run(FIXTURES / "verl_agent", tmp_path / "a").path / "source.json").read_text())
    assert facts["repeated_turns_left_out"] == {"identical": 1, "different": 0}
    assert (facts["episodes"], facts["turns"], facts["fidelity"], facts["format"]) == (2, 5, "token", "verl_agent")
    assert {"group", "success", "turn context_ids", "turn mask"} <= set(facts["missing"]) and facts["partly"] == {}
    assert "turn logprobs" not in facts["missing"] and "turn teacher_logprobs" not in facts["missing"]
    rows = [json.loads(line) for line in (FIXTURES / "verl_agent" / "step_5.jsonl").read_text().splitlines()]
    rows[5]["token_ids"][0] += 1
    changed = tmp_path / "step_5.jsonl"
    changed.write_text("".join(json.dumps(r) + "\n" for r in rows))
    facts = json.loads((import_run(changed, tmp_path / "b").path / "source.json").read_text())
    assert facts["repeated_turns_left_out"] == {"identical": 0, "different": 1}


def imported(episodes, folder, monkeypatch):
    class Reader:
        NAME, DESCRIPTION, LACKS = "made", "made here", ()

        @staticmethod
        def read(path):
            yield from episodes

    source = Source(Path("here"), "made", "made here", (), (), (), Reader)
    source = Source(**vars(source) | {"files": (Path(__file__),)})
    monkeypatch.setattr(write, "open_source", lambda path: source)
    return import_run("here", folder)


def test_contexts_hold_only_what_is_new(tmp_path, monkeypatch):
    ids = [np.array(x, np.int32) for x in ([1, 2], [3], [1, 2, 3, 4], [5], [9], [6])]
    turns = [SourceTurn("", context_ids=ids[i], token_ids=ids[i + 1]) for i in (0, 2, 4)]
    unknown = SourceTurn("", token_ids=ids[5])
    table = imported([SourceEpisode((*turns, unknown, turns[0]))], tmp_path / "run", monkeypatch).read("turns")
    assert table["context_ids"].to_list() == [[1, 2], [4], [9], None, [1, 2]]
    assert table["continues"].to_list() == [False, True, False, None, False]


def test_steps_parts_and_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_PART_BYTES", 2000)
    monkeypatch.setattr(write, "_MAX_GROUPS", 3)
    steps = [1] * 20 + [2] * 3 + [1] * 2
    episodes = [
        SourceEpisode((SourceTurn("x" * 300),), step=s, group=f"g{i % 5}", episode=str(i)) for i, s in enumerate(steps)
    ]
    run = imported(episodes, tmp_path / "run", monkeypatch)
    assert len(run.table_files("episodes")) > 5
    rows = run.read("episodes").sort("step", "episode")
    assert rows["source_episode"].to_list() == [str(i) for i in (*range(20), 23, 24, 20, 21, 22)]
    assert rows.filter(pl.col("step") == 1)["episode"].to_list() == list(range(22))
    pairs = rows.select("step", "source_group", "group").unique()
    assert len(pairs) == len(pairs.select("step", "source_group").unique()) == pairs["group"].n_unique()
    assert sorted(pairs["group"])[:3] == [0, 1, 2] and rows["group"].min() >= 0
    assert json.loads((run.path / "source.json").read_text())["steps"] == 2


def test_memory_is_bounded_by_a_part(tmp_path, monkeypatch):
    """Of a source far larger than a part, only a few episodes are alive at a time."""
    alive, most = set(), 0

    class Counted(SourceEpisode):
        def __init__(self, **fields):
            super().__init__(**fields)
            alive.add(id(self))

        def __del__(self):
            alive.discard(id(self))

    def many():
        nonlocal most
        for i in range(2000):
            yield Counted(turns=(SourceTurn("x" * 200),), episode=str(i))
            most = max(most, len(alive))

    monkeypatch.setattr(write, "_PART_BYTES", 50_000)
    run = imported(many(), tmp_path / "run", monkeypatch)
    assert run.read("episodes").height == 2000 and most < 200


def test_half_a_surrogate_pair_becomes_a_mark(tmp_path, monkeypatch):
    turn = SourceTurn("a\ud800b", info={"pieces": ["a", "\ud800", "b"], "why": "\udfff"})
    table = imported([SourceEpisode((turn,), task="\ud800")], tmp_path / "run", monkeypatch).read("turns")
    assert table["response"][0] == "a?b" and table["pieces"][0].to_list() == ["a", "?", "b"]


def test_mixed_pieces(tmp_path, monkeypatch):
    given = [pl.Series(["a", "b"]), None, ["c"], pl.Series([], dtype=pl.String)]
    turns = tuple(SourceTurn("x", info={} if p is None else {"pieces": p}) for p in given)
    table = imported([SourceEpisode(turns)], tmp_path / "run", monkeypatch).read("turns")
    assert table["pieces"].to_list() == [["a", "b"], None, ["c"], []]


def test_nothing_is_left_of_a_torn_source(tmp_path):
    lines = (FIXTURES / "verl_v1" / "4.jsonl").read_bytes()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "4.jsonl").write_bytes(lines + b'{"input": "a", "outp')
    with pytest.raises(WorkbenchError, match="4.jsonl:4: torn or not JSON"):
        import_run(tmp_path / "in", tmp_path / "out" / "run")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def stopped():
        yield SourceEpisode((SourceTurn("x"),))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        imported(stopped(), tmp_path / "run", monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "mine").write_text("keep")
    with pytest.raises(WorkbenchError, match="run is there already"):
        import_run(FIXTURES / "verl_v1", out)
    assert (out / "mine").read_text() == "keep"
    (out / "mine").unlink()
    assert import_run(FIXTURES / "verl_v1", out).is_complete  # an empty folder may be filled


def test_a_disk_that_does_not_take_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match="was not written"):
        import_run(FIXTURES / "verl_v1", tmp_path / "file" / "run")


def test_no_episodes_and_negative_steps(tmp_path, monkeypatch):
    with pytest.raises(WorkbenchError, match="here: no episodes in it"):
        imported([], tmp_path / "run", monkeypatch)
    with pytest.raises(WorkbenchError, match="a:3: step is -1, expected 0 or more"):
        imported([SourceEpisode((SourceTurn("x"),), step=-1, where="a:3")], tmp_path / "run", monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_progress_and_manifest(tmp_path):
    row = {"messages": [{"role": "assistant", "content": "x"}], "reward": 1}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 10_000)
    said = []
    run = import_run(tmp_path / "a.jsonl", tmp_path / "run", said.append)
    assert said == ["10000 episodes, 10000 turns read"]
    assert run.manifest["result"]["format"] == "messages" and run.manifest["result"]["episodes"] == 10_000
    assert run.config["source"] == str(tmp_path / "a.jsonl")


def test_a_name_that_is_no_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"old \xff")
    folder.mkdir()
    (folder / "4.jsonl").write_bytes((FIXTURES / "verl_v1" / "4.jsonl").read_bytes())
    (folder / os.fsdecode(b"\xfe")).touch()
    run = import_run(folder, tmp_path / "run")
    assert run.config["source"].endswith("old ?") and run.read("episodes")["where"][0] == "old ?/4.jsonl:1"


def test_every_format_names_itself():
    for name, module in FORMATS.items():
        assert module.NAME == name and module.DESCRIPTION and isinstance(module.LACKS, tuple)
