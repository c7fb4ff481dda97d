import numpy as np
import pytest
import torch

from workbench import shipped
from workbench.errors import WorkbenchError
from workbench.records import Batch, Episode, Turn
from workbench.skills import HEADING, SkillBank, check_privileged, privileged_inputs


def batch_of(prompt=6):
    rng = np.random.default_rng(0)
    episodes = []
    for g in range(2):
        ids, turns = rng.integers(3, 30, prompt + g), []
        for _ in range(2):
            response = rng.integers(3, 30, 3)
            turns.append(Turn(ids, response, -rng.random(3)))
            ids = np.concatenate([ids, response, rng.integers(3, 30, 2)])
        episodes.append(Episode(turns, "t", 0, 0, g, float(g), kind=f"k{g}"))
    return episodes


@pytest.mark.parametrize("layout", ["episode", "turn"])
def test_every_token_keeps_its_place_behind_the_skill(layout):
    batch = Batch.from_episodes(batch_of(), layout)
    skills = [np.array([40, 41, 42]), np.array([50, 51])]
    rows, lengths, shift = privileged_inputs(batch, skills, insert_at=1)
    for b in range(len(rows)):
        e, n = int(batch.episode_index[b]), int(batch.lengths[b])
        assert rows[b, 1 : 1 + len(skills[e])].tolist() == skills[e].tolist()
        assert torch.equal(rows[b, 1 + int(shift[b]) : n + int(shift[b])], batch.input_ids[b, 1:n])
        assert int(lengths[b]) == n + len(skills[e])


def test_a_missing_or_late_skill_is_an_error():
    batch = Batch.from_episodes(batch_of())
    with pytest.raises(WorkbenchError, match="no tokens"):
        privileged_inputs(batch, [np.array([], int), np.array([5])], 1)
    with pytest.raises(WorkbenchError, match="before every sampled token"):
        privileged_inputs(batch, [np.array([5]), np.array([5])], 12)
    rows, _, _ = privileged_inputs(batch, [np.array([40, 41]), np.array([40, 41])], 1)
    with pytest.raises(WorkbenchError, match="not in what the teacher reads"):  # as left truncation would leave it
        check_privileged(rows[:, 2:], batch, [np.array([40, 41]), np.array([40, 41])], 1)
    with pytest.raises(WorkbenchError, match="a sampled token is not where"):  # as truncation from the right would
        check_privileged(rows[:, :-1], batch, [np.array([40, 41]), np.array([40, 41])], 1)
    with pytest.raises(WorkbenchError, match="teacher row 1: the skill text"):
        check_privileged(rows, batch, [np.array([40, 41]), np.array([40, 42])], 1)


def test_bank_reads_files_by_kind(tmp_path):
    with pytest.raises(WorkbenchError, match="general.md"):
        SkillBank.load(tmp_path)
    (tmp_path / "general.md").write_text("be brief\n")
    (tmp_path / "living_room.md").write_text("sofa\n")
    bank = SkillBank.load(tmp_path)
    assert bank.text("living room") == f"{HEADING}\nbe brief\n\nsofa\n\n"
    assert bank.text("elsewhere") == f"{HEADING}\nbe brief\n\n"
    (tmp_path / "living_room.md").write_text(" \n")
    with pytest.raises(WorkbenchError, match="living_room.md is empty"):
        SkillBank.load(tmp_path)


@pytest.mark.parametrize("env", ["twc", "alfworld"])
def test_shipped_skills_cover_the_kinds_of_task(env):
    bank = SkillBank.load(shipped.data("skills", env))
    kinds = {
        "twc": ["kitchen", "pantry", "bathroom", "bedroom", "living room", "corridor", "laundry room"],
        "alfworld": ["pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
                     "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place"],
    }[env]  # fmt: skip
    assert all(len(bank.text(k)) > len(bank.text("")) for k in kinds)


def test_skills_are_retrieved_by_kind_keyword_chance_or_all(tmp_path):
    for name, text in {
        "general": "be brief", "heat": "keywords: hot, warm\nuse the oven", "cool": "use the fridge", "two": "twice",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.md").write_text(text + "\n")
    banks = {how: SkillBank.load(tmp_path, how) for how in ("kind", "keyword", "random", "all")}
    assert banks["kind"].retrieve("cool") == ("cool",) and banks["kind"].retrieve("pick") == ()
    assert banks["all"].retrieve("cool") == ("cool", "heat", "two")
    by_word = banks["keyword"]
    assert by_word.retrieve("two", "Put a WARM apple on the table.") == ("heat",)
    assert by_word.retrieve("two", "cool it, then make it hot") == ("cool", "heat")
    assert by_word.retrieve("two", "a hotel, uncooled") == ()
    assert "keywords" not in by_word.text("", "warm") and "use the oven" in by_word.text("", "warm")
    drawn = [banks["random"].retrieve("heat", "warm", f"task-{i}")[0] for i in range(90)]
    assert drawn == [banks["random"].retrieve("two", "", f"task-{i}")[0] for i in range(90)]
    assert all(15 < drawn.count(kind) < 50 for kind in ("cool", "heat", "two"))
    with pytest.raises(WorkbenchError, match="unknown skill retrieval 'keywords'; did you mean 'keyword'"):
        SkillBank.load(tmp_path, "keywords")


def test_alfworld_keywords_find_the_kind_of_a_task_sentence():
    bank = SkillBank.load(shipped.data("skills", "alfworld"), "keyword")
    found = bank.retrieve("", "Your task is to: put a hot apple in fridge.")
    assert "pick heat then place in recep" in found and "pick clean then place in recep" not in found
