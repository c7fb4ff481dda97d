import math
import multiprocessing
import random

import pytest

from workbench.envs.base import Env, Solution, SolvedEnv, State, Task, Unsolved, step_advantage
from workbench.envs.memo import GameTable, MemoEnv, Transitions
from workbench.errors import WorkbenchError

ACTIONS = ("left", "right", "look")


class Corridor:
    """A walk along five cells; `look` tells how many commands were given, so histories differ where cells agree."""

    splits = ("train",)
    engines = 0

    def __init__(self, counts_commands: bool = True):
        self.counts_commands = counts_commands
        self.started = self.steps = self.resets = 0
        self.at = None

    def tasks(self, split):
        return [Task("corridor/0", "walk", split)]

    def reset(self, task_id, seed=0):
        if task_id == "corridor/bad":
            raise WorkbenchError("no such corridor")
        self.resets += 1
        self.at, self.count, self.seed = 0, 0, seed
        return State(f"cell 0 of {task_id} Ü", ACTIONS, info={"task": "walk"})

    def step(self, action):
        self.steps += 1
        if action == "explode":
            raise WorkbenchError("the engine failed")
        self.count += 1
        valid = action in ACTIONS
        self.at += {"right": 1, "left": -1}.get(action, 0) if valid else 0
        self.at = max(self.at, 0)
        count = self.count if self.counts_commands else "many"
        text = f"{count} commands" if action == "look" else f"cell {self.at}\r\n"
        won = self.at == 4
        return State(text if valid else "Nothing happens.", ACTIONS, 0.1 * won, won, int(won), valid, {"task": "walk"})

    def expert(self):
        return None if self.at == 4 else "right"

    def close(self):
        self.at = None


def unused():
    raise AssertionError("the engine was asked")


def fresh(make, folder, **options):
    """A memo that shares no memory with others in this process."""
    return MemoEnv(make, Transitions(folder), **options)


def where(env):
    return str(env.at)


def play(env, actions, task="corridor/0"):
    states = [env.reset(task)]
    return states + [env.step(action) for action in actions]


WALK = ["right", "look", "dance", "left", "right", "look", "right", "\ud800 half a pair", "right", "right", "look"]


def test_it_is_an_environment():
    assert isinstance(MemoEnv(Corridor), Env)


def test_cold_and_warm_answers_are_the_engines(tmp_path):
    wanted = play(Corridor(), WALK)
    cold = fresh(Corridor, tmp_path)
    assert play(cold, WALK) == wanted and cold.played == len(WALK) + 1
    assert play(cold, WALK) == wanted and cold.played == len(WALK) + 1
    assert play(fresh(unused, tmp_path), WALK) == wanted
    with pytest.raises(AssertionError, match="the engine was asked"):
        play(fresh(unused, tmp_path), ["look"])
    with pytest.raises(AssertionError, match="the engine was asked"):
        fresh(unused, tmp_path).reset("corridor/0", seed=1)


def test_histories_that_meet_in_a_cell_are_told_apart_by_default(tmp_path):
    memo = fresh(Corridor, tmp_path)
    assert play(memo, ["right", "look"])[-1].observation == "2 commands"
    assert play(memo, ["right", "left", "right", "look"])[-1].observation == "4 commands"


def test_an_identity_lets_histories_meet(tmp_path):
    make = lambda: Corridor(counts_commands=False)  # noqa: E731
    memo = fresh(make, tmp_path, identity=where)
    play(memo, ["right", "look"])
    played = memo.played
    assert play(memo, ["right", "look", "look", "look"]) == play(make(), ["right", "look", "look", "look"])
    assert memo.played == played, "look leads from a cell to itself, and was looked from before"
    assert play(fresh(make, tmp_path, identity=lambda env: None), ["right", "look"]) == play(make(), ["right", "look"])


def test_random_play_with_branches_and_experts_matches_the_engine(tmp_path):
    rng = random.Random(0)
    for _ in range(30):
        engine, memo = Corridor(), MemoEnv(Corridor, tmp_path)
        engine.reset("corridor/0"), memo.reset("corridor/0")
        snapshots = [memo.snapshot()]
        for _ in range(25):
            if rng.random() < 0.2:
                back = rng.choice(snapshots)
                assert memo.restore(back) == play(engine, back[2])[-1]
            action = rng.choice(WALK)
            assert memo.step(action) == engine.step(action)
            snapshots.append(memo.snapshot())
            if rng.random() < 0.3:
                assert memo.expert() == engine.expert()


def test_any_visited_state_is_restored_without_the_engine(tmp_path):
    memo = fresh(Corridor, tmp_path)
    states = play(memo, WALK)
    end = memo.snapshot()
    other = fresh(unused, tmp_path)
    for n, state in enumerate(states):
        assert other.restore((end[0], end[1], end[2][:n])) == state
    assert other.snapshot() == end and other.restore(end) == states[-1]


def test_the_live_engine_is_used_from_where_it_is():
    memo = MemoEnv(Corridor)
    play(memo, ["right", "right"])
    assert (memo.inner.resets, memo.inner.steps) == (1, 2)
    memo.step("look")
    assert (memo.inner.resets, memo.inner.steps) == (1, 3), "nothing to catch up with"
    play(memo, ["right", "right", "look"])
    memo.step("look")
    assert (memo.inner.resets, memo.inner.steps) == (1, 4), "it still stands where the repeated actions lead"
    play(memo, ["right"])
    assert (memo.inner.resets, memo.inner.steps) == (1, 4)
    memo.step("left")
    assert (memo.inner.resets, memo.inner.steps) == (2, 6), "it had gone past: from the start again"


def test_an_engine_that_fails_leaves_no_trace(tmp_path):
    memo = fresh(Corridor, tmp_path)
    play(memo, ["right"])
    with pytest.raises(WorkbenchError, match="the engine failed"):
        memo.step("explode")
    assert memo.snapshot()[2] == ("right",)
    assert memo.step("look").observation == "2 commands"
    with pytest.raises(WorkbenchError, match="no such corridor"):
        memo.reset("corridor/bad")
    with pytest.raises(WorkbenchError, match="no game is running"):
        memo.step("look")


def files(folder):
    return sorted(folder.rglob("*.jsonl"))


def test_torn_and_damaged_files_cost_only_what_was_lost(tmp_path):
    wanted = play(Corridor(), WALK)
    play(fresh(Corridor, tmp_path), WALK)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    rng = random.Random(1)
    for cut in [0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(25))]:
        damaged = bytearray(whole)
        damaged[cut] ^= 0x15
        for data in (whole[:cut], bytes(damaged), whole[:cut] + b"\n" + whole[:40] + whole):
            path.write_bytes(data)
            again = fresh(Corridor, tmp_path)
            assert play(again, WALK) == wanted
            assert play(fresh(unused, tmp_path), WALK) == wanted, "what was lost is written again, behind the torn tail"
    path.write_bytes(whole[: len(whole) // 2])
    again = fresh(Corridor, tmp_path)
    play(again, WALK)
    assert 0 < again.played < 2 * len(WALK)


def test_a_record_that_is_still_being_written_is_read_when_it_is_whole(tmp_path):
    play(fresh(Corridor, tmp_path), WALK)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        table = GameTable(path)
        table.edge("nowhere", "look")
        path.write_bytes(whole)
        table.edge("nowhere", "look")
        assert len(table.edges) == len(WALK) + 1


def wander(folder, seed):
    rng = random.Random(seed)
    memo = MemoEnv(Corridor, Transitions(folder))
    for _ in range(20):
        play(memo, [rng.choice(WALK) for _ in range(12)])


def test_processes_share_a_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=wander, args=(tmp_path, seed)) for seed in (0, 0, 1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    for seed in (0, 1, 2):
        rng = random.Random(seed)
        memo, engine = fresh(unused, tmp_path), Corridor()
        for _ in range(20):
            actions = [rng.choice(WALK) for _ in range(12)]
            assert play(memo, actions) == play(engine, actions)


def test_what_another_adds_is_seen_at_once(tmp_path):
    reader, writer = fresh(Corridor, tmp_path), fresh(Corridor, tmp_path)
    play(reader, ["right"])
    play(writer, ["right", "look", "look"])
    writer.expert()
    played = reader.played
    assert play(reader, ["right", "look", "look"]) == play(Corridor(), ["right", "look", "look"])
    assert reader.expert() == "right" and reader.played == played


def test_games_of_a_folder_share_memory_and_it_is_bounded(tmp_path):
    first = MemoEnv(Corridor, tmp_path)
    assert MemoEnv(Corridor, str(tmp_path))._transitions is first._transitions
    assert MemoEnv(Corridor)._transitions is not MemoEnv(Corridor)._transitions
    bounded = Transitions(tmp_path, limit=20)
    memo = MemoEnv(Corridor, bounded)
    for n in range(8):
        play(memo, WALK, task=f"corridor/{n}")
    assert len(bounded._tables) <= 2
    memo = MemoEnv(unused, bounded)
    for n in range(8):
        assert play(memo, WALK, task=f"corridor/{n}") == play(Corridor(), WALK, task=f"corridor/{n}")


def test_changed_contents_are_another_game(tmp_path):
    memo = fresh(Corridor, tmp_path, fingerprint=lambda env, task: "a")
    play(memo, WALK)
    other = fresh(Corridor, tmp_path, fingerprint=lambda env, task: "b")
    play(other, WALK)
    assert other.played == len(WALK) + 1 and len(files(tmp_path)) == 2


def test_a_disk_that_refuses_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match="cannot (read|write) .*Not a directory") as caught:
        fresh(Corridor, tmp_path / "file").reset("corridor/0")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    import os

    write = os.write
    memo = fresh(Corridor, tmp_path)
    play(memo, ["right"])
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    with pytest.raises(WorkbenchError, match="cannot write .* only a part"):
        memo.step("look")
    monkeypatch.undo()
    assert play(fresh(Corridor, tmp_path), WALK) == play(Corridor(), WALK)
    assert play(fresh(unused, tmp_path), WALK) == play(Corridor(), WALK)


class SolvedCorridor(Corridor):
    """Four steps to the right win; whoever looked back is lost, and in the second cell the solver gives up."""

    asked = 0

    def solution(self):
        SolvedCorridor.asked += 1
        if self.at == 1:
            raise Unsolved("the second cell")
        return (
            Solution(math.inf) if self.at == 0 and self.count else Solution(4.0 - self.at, ("right",)[self.at == 4 :])
        )

    def solver_advantage(self, before, after, state):
        return step_advantage(before, after)

    def snapshot(self):
        return unused()  # the memo never asks

    restore = snapshot


def test_solutions_are_kept_and_what_is_unsolved_is_asked_again(tmp_path):
    wanted = {(): Solution(4.0, ("right",)), ("left",): Solution(math.inf), ("right",) * 4: Solution(0.0)}
    for make in (SolvedCorridor, unused):
        memo = fresh(make, tmp_path)
        for actions, solution in wanted.items():
            play(memo, actions)
            assert memo.solution() == solution
    assert SolvedCorridor.asked == 3
    memo = fresh(SolvedCorridor, tmp_path)
    assert isinstance(memo, SolvedEnv) and memo.solver_advantage(Solution(4.0), Solution(math.inf), None) == -4
    play(memo, ["right"])
    for n in (4, 5):
        with pytest.raises(Unsolved, match="the second cell"):
            memo.solution()
        assert SolvedCorridor.asked == n


def test_an_environment_without_a_solver_is_one_line():
    memo = MemoEnv(Corridor)
    play(memo, ["right"])
    with pytest.raises(WorkbenchError, match="^Corridor has no solver$"):
        memo.solution()
