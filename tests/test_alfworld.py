import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from workbench.envs import alfworld_engine, alfworld_games
from workbench.envs.alfworld import AlfworldEnv, memoised
from workbench.envs.alfworld_games import KINDS
from workbench.envs.base import Env
from workbench.envs.memo import Transitions
from workbench.errors import WorkbenchError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "alfworld"
DATA = Path(os.environ.get("ALFWORLD_DATA") or SHARED)
needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("alfworld") is None, reason='pip install "credit-workbench[alfworld]"'
)
needs_games = pytest.mark.skipif(
    not (DATA / "json_2.1.1").is_dir(), reason=f"no released games: neither ALFWORLD_DATA nor {SHARED} holds json_2.1.1"
)
# One small game of each task type, half of them in unseen rooms.
NAMES = [f"generated/{('train', 'unseen')[n % 2]}/{kind}/{n}" for n, kind in enumerate(KINDS)]
SMALL = "generated/train/pick_clean_then_place_in_recep/1"  # a bathroom

PLAIN = """
import json, sys
game, commands = sys.argv[1], json.loads(sys.argv[2])  # the engine's translator replaces sys.argv
import textworld
from textworld.envs import PddlEnv
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
infos = textworld.EnvInfos(admissible_commands=True, won=True, extras=["gamefile"])
env = AlfredInfos(AlfredDemangler(PddlEnv(infos)))
env.load(game)
state = env.reset()
said = [[state.feedback, state["admissible_commands"], False]]
for command in commands:
    state, score, done = env.step(command)
    said.append([state.feedback, state["admissible_commands"], done])
print("SAID", json.dumps(said))
"""
BUILD = """
import hashlib, json, sys
from workbench.envs.alfworld_games import build, parse
for name in sys.argv[1:]:
    print("BUILT", name, hashlib.sha256(json.dumps(build(parse(name))).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("alfworld"))


@pytest.fixture
def env(cache):
    env = AlfworldEnv("generated", cache)
    yield env
    env.close()


def python(code, *arguments, seed):
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )  # fmt: skip


def answer(process, word):
    out, err = process.communicate(timeout=200)
    lines = [line.removeprefix(word + " ") for line in out.splitlines() if line.startswith(word)]
    assert process.returncode == 0 and lines, err[-2000:]
    return lines


def test_it_imports_and_lists_games_without_the_engine():
    code = "import sys\nsys.modules['alfworld'] = sys.modules['textworld'] = None\n" + (
        "from workbench.envs.alfworld import AlfworldEnv, memoised\n"
        "print('LISTED', len(AlfworldEnv('generated', per_kind=3).tasks('train')), memoised('generated').splits)"
    )
    assert answer(python(code, seed="0"), "LISTED") == ["18 ('train', 'heldout', 'unseen')"]


def test_a_missing_engine_is_one_line(monkeypatch, tmp_path):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    alfworld_engine.versions.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)
    try:
        with pytest.raises(WorkbenchError, match=r'pip install "credit-workbench\[alfworld\]"') as caught:
            AlfworldEnv("generated", str(tmp_path)).reset(NAMES[0])
    finally:
        alfworld_engine.versions.cache_clear()
    assert "\n" not in str(caught.value)


def test_tasks_of_generated_games_are_even_and_apart(env):
    assert isinstance(env, Env) and env.splits == ("train", "heldout", "unseen")
    ids = {split: [task.id for task in env.tasks(split)] for split in env.splits}
    assert [len(set(names)) for names in ids.values()] == [1200] * 3
    assert not set(ids["train"]) & set(ids["heldout"])
    assert {task.kind for task in env.tasks("unseen")[:6]} == set(KINDS)
    assert all(name.startswith("generated/unseen/") for name in ids["unseen"])
    assert all(name.startswith("generated/train/") for name in ids["train"] + ids["heldout"])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("generated/train/pick_heat_then_place/3", "did you mean 'pick_heat_then_place_in_recep'"),
        ("generated/trian/look_at_obj_in_light/3", "did you mean 'train'"),
        ("generated/train/look_at_obj_in_light/-3", "expected generated/<train|unseen>/<task type>/<seed>"),
        ("generated/train/look_at_obj_in_light/03", "expected generated/"),
        ("json_2.1.1/train/x/y/game.tw-pddl", "give data=FOLDER or set ALFWORLD_DATA"),
    ],
)
def test_wrong_names_are_one_line(env, task, message):
    with pytest.raises(WorkbenchError) as caught:
        env.reset(task)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_bad_input_is_one_line(env, tmp_path, monkeypatch):
    for call, message in (
        (lambda: env.tasks("unsen"), "did you mean 'unseen'"),
        (lambda: env.step("look"), "no ALFWorld game is running"),
        (lambda: env.expert(), "no ALFWorld game is running"),
        (lambda: AlfworldEnv(str(tmp_path)), "expected json_2.1.1/<train|valid_seen|valid_unseen>/ in it"),
        (lambda: AlfworldEnv(per_kind=0), "per_kind must be 1 to"),
    ):
        with pytest.raises(WorkbenchError) as caught:
            call()
        assert message in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(WorkbenchError, match="ALFWorld data .*nowhere"):
        AlfworldEnv()
    assert AlfworldEnv("generated").splits == alfworld_games.SPLITS
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / ".cache" / "alfworld"))
    assert AlfworldEnv().splits == alfworld_games.SPLITS, "set by an import of alfworld, and empty"


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_games_of_every_type_are_proved_and_won(env, name):
    start = env.reset(name)
    assert start.info["task"].startswith("Your task is to: ") and start.info["task"] in start.observation
    assert start.info["kind"] == name.split("/")[2] and not start.done and not start.outcome
    solution = env.walkthrough(name)
    assert len(solution) > 2
    for n, command in enumerate(solution):
        assert env.expert() == command
        state = env.step(command)
        assert state.valid and state.done == (n == len(solution) - 1)
    assert (state.outcome, state.reward, state.done) == (1, 1.0, True) and env.expert() is None
    room = json.loads(alfworld_games.proved_path(alfworld_games.parse(name), env.cache).read_text())["meta"]["room"]
    assert (room % 100 <= 6) == ("unseen" in name), "rooms 1 to 6 of each kind are the official unseen ones"


@needs_engine
@pytest.mark.slow
def test_text_is_the_plain_engines_and_games_are_the_same_in_any_process(env):
    """A process without our memoised parsers and with another hash seed says and builds the same, byte for byte."""
    env.reset(SMALL)
    rng, state = random.Random(4), env.restore((SMALL, 0, ()))
    solution = env.walkthrough(SMALL)
    said, commands = [[state.observation, list(state.admissible), False]], []
    for n in range(24):
        command = solution[n // 2] if n % 2 and n // 2 < len(solution) else rng.choice([*state.admissible, "dance"])
        state = env.step(command)
        said.append([state.observation, list(state.admissible), state.done])
        commands.append(command)
    path = str(alfworld_games.proved_path(alfworld_games.parse(SMALL), env.cache))
    if sys.version_info < (3, 13):  # TextWorld 1.7 itself fails there: it writes to locals()
        plain = python(PLAIN, path, json.dumps(commands), seed="1234")
        assert json.loads(answer(plain, "SAID")[0]) == said
    built = python(BUILD, *NAMES, seed="99")
    wanted = [json.dumps(alfworld_games.build(alfworld_games.parse(name))).encode() for name in NAMES]
    digests = [f"{name} {hashlib.sha256(game).hexdigest()}" for name, game in zip(NAMES, wanted, strict=True)]
    assert answer(built, "BUILT") == digests and len(set(wanted)) == len(NAMES)


@needs_engine
def test_invalid_commands_get_the_engines_answer(env):
    before = env.reset(SMALL)
    state = env.step("dance")
    assert (state.observation, state.valid, state.admissible) == ("Nothing happens.", False, before.admissible)
    assert env.step("look").valid and env.step(" look ").valid, "the engine strips commands"


@needs_engine
def test_snapshots_restore_in_another_game_and_the_expert_recovers(env, cache):
    rng, states, snapshots = random.Random(0), [env.reset(SMALL)], [env.snapshot()]
    for _ in range(12):
        states.append(env.step(rng.choice(states[-1].admissible)))
        snapshots.append(env.snapshot())
    other = AlfworldEnv("generated", cache)
    for n in (5, 8, 3, 12, 0):
        assert other.restore(json.loads(json.dumps(snapshots[n]))) == states[n]
    state = other.restore(snapshots[12])
    for _ in range(20):
        if state.done:
            break
        assert (command := other.expert()) in state.admissible
        state = other.step(command)
    assert state.outcome == 1
    other.close()


@needs_engine
def test_identity_reads_what_the_planner_state_holds(env):
    """The table of facts, which identities are made of, mirrors the planner's own state on every observed predicate."""
    import fast_downward

    state, rng = env.reset(SMALL), random.Random(3)
    engine, seen = env._engine, {}
    observed = engine._observed
    assert {"inreceptacle", "istoggled", "opened", "isclean"} <= observed
    assert not {"checked", "ison", "examined", "wasinreceptacle"} & observed, "nothing reads these"
    for _ in range(40):
        lib = engine._env.unwrapped.downward_lib
        atoms = (fast_downward.Atom * lib.get_state_size())()
        lib.get_state(atoms)
        names = [atom.name.split(" ", 1) for atom in atoms]
        held = {n[: n.index("(")] + n[n.index("(") :].replace(" ", "") for sign, n in names if sign == "Atom"}
        held = {fact for fact in held if fact.split("(")[0] in observed}
        moving = {n.split("(")[0] for _, n in names} & observed
        table = {f"{name}({','.join(args)})" for name, *args in engine.facts() if name in moving}
        assert held == table
        key = (env.identity(), frozenset(held))
        assert seen.setdefault(key[0], (key[1], state.admissible)) == (key[1], state.admissible)
        state = env.step(rng.choice(state.admissible))
    assert 5 < len(seen) < 41


def test_a_conditional_effect_that_is_read_rules_identities_out():
    domain = """(define (domain d) (:predicates (lit ?o) (warm ?o) (seen ?o))
        (:action use :parameters (?o) :precondition ()
            :effect (and (seen ?o) (when (not (lit ?o)) (lit ?o)) (forall (?p) (when (lit ?p) (warm ?p))))))"""
    goal = "(define (problem p) (:goal (%s o)))"
    observed = alfworld_engine.observed_predicates
    assert observed(domain, "", goal % "seen") == {"seen"}
    assert observed(domain, "", goal % "lit") is None
    assert observed(domain, "it is #warm# { not_warm(o:object) }", goal % "seen") is None


@needs_engine
def test_memo_answers_as_the_engine_and_warm_without_it(env, cache, tmp_path):
    import check_alfworld

    cold, warm = (memoised("generated", cache, path=Transitions(tmp_path)) for _ in range(2))
    said = check_alfworld.play_cold(SMALL, env, cold, 12, 0)
    engine_steps = sum(len(lines) for _, lines in said)
    assert 10 < cold.played < engine_steps, "histories meet"
    check_alfworld.play_warm(SMALL, warm, said)
    assert warm.played == 0 and warm.inner._engine is None, "a warm process starts no engine"
    said[0][1][2] = ("look", *said[0][1][2][1:])
    with pytest.raises(check_alfworld.Mismatch):
        check_alfworld.play_warm(SMALL, warm, said)
    cold.close()


@needs_engine
def test_proving_one_game_leaves_another_running(env, tmp_path):
    path = alfworld_games.proved_path(alfworld_games.parse(SMALL), tmp_path)
    env.reset(SMALL)
    path.parent.mkdir(parents=True)
    shutil.copy(alfworld_games.proved_path(alfworld_games.parse(SMALL), env.cache), path)
    memo = memoised("generated", str(tmp_path))
    memo.reset(SMALL)
    first = memo.step(env.walkthrough(SMALL)[0])
    here = memo.snapshot()
    unproved = "generated/unseen/pick_clean_then_place_in_recep/0"
    memo.inner.fingerprint(unproved)
    assert memo.step("look") == env.restore((SMALL, 0, (*here[2], "look")))
    memo.reset(unproved)
    assert memo.restore(here) == first
    assert memo.step("inventory") == env.restore((SMALL, 0, (*here[2], "inventory")))
    memo.close()


@needs_engine
def test_a_damaged_cached_game_is_made_again(env, cache, tmp_path):
    env.reset(SMALL)
    task = alfworld_games.parse(SMALL)
    good = alfworld_games.proved_path(task, Path(cache)).read_bytes()
    path = alfworld_games.proved_path(task, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(good[: len(good) // 2])
    other = AlfworldEnv("generated", str(tmp_path))
    first = other.fingerprint(SMALL)
    assert other.reset(SMALL) == env.reset(SMALL) and path.read_bytes() == good
    assert other.fingerprint(SMALL) == env.fingerprint(SMALL) != first
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no half-written file is left"
    other.close()


@needs_engine
def test_an_unprovable_draw_is_passed_over(env, monkeypatch, tmp_path):
    prove, refused = alfworld_games.prove, []

    def refuse_first(engine, game):
        refused.append(game["meta"]["attempt"])
        return prove(engine, game) if len(refused) > 1 else None

    monkeypatch.setattr(alfworld_games, "prove", refuse_first)
    game = alfworld_games.proved_game(alfworld_games.parse(SMALL), tmp_path, env._live())
    assert game["meta"]["attempt"] == refused[1] > refused[0]
    monkeypatch.setattr(alfworld_games, "prove", lambda engine, game: None)
    with pytest.raises(WorkbenchError, match="none of 50 drawn games could be proved solvable"):
        alfworld_games.proved_game(alfworld_games.parse(SMALL), tmp_path, env._live())


@needs_engine
def test_a_disk_that_refuses_is_one_line(env, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match="cannot write .*: (Not a directory|File exists)"):
        alfworld_games.write_atomically(tmp_path / "file" / "game", "text")


@needs_engine
def test_the_users_variables_are_left_alone(env):
    before = os.environ.get("ALFWORLD_DATA"), list(sys.argv)
    env.reset(SMALL)
    assert (os.environ.get("ALFWORLD_DATA"), sys.argv) == before


@needs_games
def test_released_games_are_listed():
    env = AlfworldEnv(str(DATA))
    tasks = env.tasks(env.splits[0])
    assert tasks and all((DATA / task.id).is_file() and task.kind in KINDS for task in tasks)
    assert list(tasks) == sorted(tasks, key=lambda task: task.id)


@needs_engine
@needs_games
@pytest.mark.slow
def test_a_released_game_is_won_by_its_walkthrough_and_by_the_expert():
    env = AlfworldEnv(str(DATA))
    task = next(task for split in env.splits for task in env.tasks(split) if task.kind == "look_at_obj_in_light")
    for player in (iter(env.walkthrough(task.id)), iter(env.expert, None)):
        state = env.reset(task.id)
        for command in player:
            assert not state.done
            state = env.step(command)
        assert state.outcome == 1
    env.close()


@pytest.fixture
def release(tmp_path):
    """A data folder with one game that is fine, and one each that is torn, incomplete, unsolvable, sliced."""
    game = {"pddl_domain": "(define (domain d))", "grammar": "", "pddl_problem": "(define", "solvable": True}
    text = json.dumps(game)
    for name, content in {
        "pick_and_place_simple-Mug-None-Desk-1": text,
        "pick_and_place_simple-Mug-None-Desk-2": text[:-30],
        "pick_and_place_simple-Mug-None-Desk-3": json.dumps({"grammar": "x"}),
        "pick_and_place_simple-Mug-None-Desk-4": json.dumps(game | {"solvable": False}),
        "pick_and_place_simple-MugSliced-None-Desk-5": text,
        "pick_and_place_with_movable_recep-Mug-Bowl-Desk-6": text,
    }.items():
        path = tmp_path / "json_2.1.1" / "train" / name / "trial" / "game.tw-pddl"
        path.parent.mkdir(parents=True)
        path.write_text(content)
    return tmp_path


@needs_engine
def test_missing_and_torn_game_files_are_one_line(release):
    env = AlfworldEnv(str(release))
    tasks = [task.id for task in env.tasks("train")]
    assert [name.split("/")[2][-1] for name in tasks] == ["1", "2", "3"]
    shutil.rmtree(release / "json_2.1.1/train/pick_and_place_simple-Mug-None-Desk-4")
    for task, message in (
        (tasks[0], "does not load in ALFWorld's engine"),
        (tasks[1], "is torn: not valid JSON at character"),
        (tasks[2], "has no 'pddl_domain': expected pddl_domain, grammar, pddl_problem"),
        (tasks[0].replace("Mug", "Mgu"), f"does not exist; did you mean '{tasks[0]}'?"),
        ("json_2.1.1/train", "does not exist"),
    ):
        for call in (env.reset, memoised(str(release), path=str(release / "memo")).reset):
            with pytest.raises(WorkbenchError) as caught:
                call(task)
            assert message in str(caught.value) and "\n" not in str(caught.value)
            assert str(release / task) in str(caught.value)
