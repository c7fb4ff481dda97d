"""Fewest commands in ALFWorld and TWC, against searches that try everything; plans' lengths elsewhere."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import envs
from workbench.envs.alfworld_expert import Goal
from workbench.envs.base import Solution, SolvedEnv, Unsolved
from workbench.envs.textworld_express import TextWorldExpress
from workbench.solvers import alfworld
from workbench.solvers.put_away import Thing, fewest

RELEASED = Path("../shared/data/alfworld")
KINDS = ("shelftype", "drawertype", "sinkbasintype", "fridgetype")
STATES = {"": "", "isclean": "cleanable", "iscool": "coolable"}


def room(rng):
    """A small room in the engine's facts, somewhere in the middle of a game, and a goal."""
    spots = [f"l{i}" for i in range(rng.randint(2, 4))]
    receptacles = {f"r{i}": rng.choice(KINDS) for i in range(rng.randint(3, 5))}
    objects = {f"o{i}": "pentype" if rng.random() < 0.2 else "mugtype" for i in range(rng.randint(1, 3))}
    facts = {("atlocation", "agent", rng.choice(spots))}
    for r, kind in receptacles.items():
        facts |= {("receptacletype", r, kind), ("receptacleatlocation", r, rng.choice(spots))}
        if kind in ("drawertype", "fridgetype"):
            facts |= {("openable", r), *([("opened", r)] if rng.random() < 0.4 else [])}
    facts |= {("cancontain", kind, o) for kind in KINDS for o in ("mugtype", "pentype") if rng.random() < 0.9}
    state, held = rng.choice(list(STATES)), rng.choice([None, None, *objects])
    for o, kind in objects.items():
        facts |= {("objecttype", o, kind), *([("pickupable", o)] if rng.random() < 0.9 else [])}
        facts |= {(able, o) for able in STATES.values() if able and rng.random() < 0.8}
        facts |= {(name, o) for name in STATES if name and rng.random() < 0.2}
        places = rng.sample(list(receptacles), 1 + (rng.random() < 0.1))  # some released games have a thing in two
        facts |= {("holds", "agent", o)} if o == held else {("inreceptacle", o, r) for r in places}
    if state or rng.random() < 0.5:
        return Goal(
            "mugtype", rng.choice(list(receptacles.values())), state, count=1 if state else rng.randint(1, 2)
        ), facts
    for lamp in ("lamp0", "lamp1")[: rng.randint(1, 2)]:
        facts |= {("objecttype", lamp, "lamptype"), ("toggleable", lamp)}
        facts |= {("inreceptacle", lamp, rng.choice(list(receptacles)))}
        facts |= {("istoggled", lamp)} if rng.random() < 0.2 else set()
    return Goal("mugtype", lamp="lamptype"), facts


def every_command(facts):
    """What ALFWorld's domain lets a player do, word for word on the facts: (command, facts afterwards)."""
    of = {}
    for name, *arguments in facts:
        of.setdefault(name, set()).add(tuple(arguments))
    get = lambda name: of.get(name, set())  # noqa: E731
    (at,) = [spot for _, spot in get("atlocation")]
    kind = dict(get("receptacletype"))
    held = [o for _, o in get("holds")]
    for r, spot in get("receptacleatlocation"):
        yield f"go to {r}", (facts - {("atlocation", "agent", at)}) | {("atlocation", "agent", spot)}
        if spot != at:
            continue
        shut = (r,) in get("openable") and (r,) not in get("opened")
        if (r,) in get("openable"):
            yield (f"open {r}", facts | {("opened", r)}) if shut else (f"close {r}", facts - {("opened", r)})
        for o, where in get("inreceptacle"):
            if where == r and (o,) in get("toggleable"):
                yield f"use {o}", facts | {("istoggled", o)}
            if where == r and not shut and not held and (o,) in get("pickupable"):
                yield f"take {o} from {r}", (facts - {("inreceptacle", o, r)}) | {("holds", "agent", o)}
        for o in held:
            if not shut and (kind[r], dict(get("objecttype"))[o]) in get("cancontain"):
                yield f"move {o} to {r}", (facts - {("holds", "agent", o)}) | {("inreceptacle", o, r)}
            if kind[r] == "sinkbasintype" and (o,) in get("cleanable"):
                yield f"clean {o} with {r}", facts | {("isclean", o)}
            if kind[r] == "fridgetype" and (o,) in get("coolable"):
                yield f"cool {o} with {r}", facts | {("iscool", o)}


def reached(goal, facts):
    mugs = {f[1] for f in facts if f[0] == "objecttype" and f[2] == goal.object}
    if goal.lamp:
        (at,) = [f[2] for f in facts if f[0] == "atlocation"]
        here = {f[1] for f in facts if f[0] == "receptacleatlocation" and f[2] == at}
        lit = any(f[0] == "inreceptacle" and f[2] in here and ("istoggled", f[1]) in facts for f in facts)
        return lit and any(("holds", "agent", o) in facts for o in mugs)
    if goal.state:
        mugs = {o for o in mugs if (goal.state, o) in facts and (STATES[goal.state], o) in facts}
    targets = [f[1] for f in facts if f[0] == "receptacletype" and f[2] == goal.receptacle]
    return any(sum(("inreceptacle", o, r) in facts for o in mugs) >= goal.count for r in targets)


def everything_tried(goal, start, most=40_000):
    """(distance, first commands of every shortest way) by breadth, or None where there is too much to try."""
    layer, seen, depth = {start: frozenset()}, {start}, 0
    while layer:
        won = [begun for facts, begun in layer.items() if reached(goal, facts)]
        if won:
            return depth, frozenset().union(*won)
        following = {}
        for facts, begun in layer.items():
            for command, after in every_command(facts):
                if after not in seen:
                    following[after] = following.get(after, frozenset()) | (begun or {command})
        seen.update(following)
        layer, depth = following, depth + 1
        if len(seen) > most:
            return None
    return math.inf, frozenset()


def ask(goal, facts):
    names = {word: word for fact in facts for word in fact[1:]}
    return alfworld.solve(goal, facts, names), names


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_alfworlds_fewest_commands_are_those_of_a_search_that_tries_everything(seed):
    goal, facts = room(random.Random(seed))
    wanted = everything_tried(goal, frozenset(facts), 4_000)
    if wanted is None:
        return
    said = alfworld.solve(goal, facts, {word: word for fact in facts for word in fact[1:]})
    assert said.distance == wanted[0]
    assert set(said.actions) <= wanted[1] and bool(said.actions) == (0 < said.distance < math.inf)


@pytest.fixture(scope="module")
def released():
    if not RELEASED.is_dir():
        pytest.skip(f"{RELEASED} is absent")
    pytest.importorskip("alfworld", reason="the alfworld extra is not installed")
    return envs.make("alfworld", memo=False, data=str(RELEASED)).envs[0]


def test_the_engine_plays_alfworlds_shortest_ways(released):
    """Also from where random commands lead. In this game a pan stands on two burners at once."""
    name = "/pick_cool_then_place_in_recep-Pan-None-StoveBurner"
    rng, (task, *_) = random.Random(0), [t for t in released.tasks("valid_seen") if name in t.id]
    state = released.reset(task.id)
    assert released.solution().distance == len(released.walkthrough(task.id))
    for _ in range(5):
        state = released.step(rng.choice(state.admissible))
    left = released.solution().distance
    while not state.done:
        before = released.solution()
        assert set(before.actions) <= set(state.admissible)
        state = released.step(rng.choice(before.actions))
        left -= 1
        assert released.solution().distance == left
        assert released.solver_advantage(before, released.solution(), state) == 1
    assert state.outcome == 1 and left == 0 and released.solution() == Solution(0.0)


def test_over_its_limit_alfworlds_search_says_so():
    goal, facts = next(
        (goal, facts)
        for goal, facts in map(room, map(random.Random, range(100)))
        if 4 < alfworld.solve(goal, facts, {word: word for fact in facts for word in fact[1:]}).distance < math.inf
    )
    with pytest.raises(Unsolved, match="over 3 states"):
        alfworld.solve(goal, facts, {word: word for fact in facts for word in fact[1:]}, limit=3)


CONTAINERS = ("box", "bin", "bed")


def put_away_tried(things, shut):
    """(distance, first commands) by breadth, over takes, puts, opens and closes."""

    def commands(state):
        where, closed = state
        for c in CONTAINERS:
            if c in shut:  # what cannot be opened is never shut
                yield (f"open {c}", (where, closed - {c})) if c in closed else (f"close {c}", (where, closed | {c}))
        for i, (thing, at) in enumerate(zip(things, where, strict=True)):
            if at != "hand" and at not in closed:
                yield f"take {thing.name}", ((*where[:i], "hand", *where[i + 1 :]), closed)
            for c in CONTAINERS if at == "hand" else ():
                if c not in closed:
                    yield f"put {thing.name} in {c}", ((*where[:i], c, *where[i + 1 :]), closed)

    layer, seen, depth = {(tuple("hand" if t.held else t.inside for t in things), shut): frozenset()}, set(), 0
    while layer:
        ends = [b for (where, _), b in layer.items() if all(w in t.right for w, t in zip(where, things, strict=True))]
        if ends:
            return depth, frozenset().union(*ends)
        seen.update(layer)
        following = {}
        for state, begun in layer.items():
            for command, after in commands(state):
                if after not in seen:
                    following[after] = following.get(after, frozenset()) | (begun or {command})
        layer, depth = following, depth + 1
    return math.inf, frozenset()


containers = st.sampled_from(CONTAINERS)
somewhere = st.tuples(st.frozensets(containers), st.booleans(), st.sampled_from(("", *CONTAINERS)))


@given(st.lists(somewhere, min_size=1, max_size=3), st.frozensets(containers))
def test_putting_away_takes_what_a_search_that_tries_everything_finds(places, shut):
    things = [Thing(f"t{i}", right, held, "" if held else at) for i, (right, held, at) in enumerate(places)]
    said = fewest(things, shut)
    assert (said.distance, set(said.actions)) == put_away_tried(things, shut)


def test_twc_is_exact_wherever_random_play_leads():
    env, rng = TextWorldExpress(), random.Random(2)
    assert isinstance(env, SolvedEnv)
    shorter = 0
    for task in [f"twc/train/{seed}" for seed in rng.sample(range(1000), 14)] + ["twc/test/20003", "twc/test/20009"]:
        state = env.reset(task)
        shorter += env.solution().distance < len(env._gold_path())
        for _ in range(rng.randrange(10)):
            if state.done:
                break
            before, action = env.solution(), rng.choice((*state.admissible, "dance"))
            state = env.step(action)
            change = env.solver_advantage(before, env.solution(), state)
            assert change <= 1 and (change == 1) == (action in before.actions), "a best command, or no progress"
        left = env.solution().distance
        while not state.done:
            state = env.step(rng.choice(env.solution().actions))
            left -= 1
        assert state.outcome == 1 and left == 0 and env.solution() == Solution(0.0)
    assert shorter > 0, "the engine's gold path is not always a shortest one"


def test_other_worlds_have_their_gold_path_and_nothing_off_it():
    env = TextWorldExpress("cookingworld")
    task = "cookingworld/train/5"
    state, left = env.reset(task), len(env._gold_path())
    env.step("inventory")
    assert env.solution().distance == left
    for _ in range(left):
        assert not state.done
        state = env.step(env.solution().actions[0])
    assert state.outcome == 1 and env.solution() == Solution(0.0)
    state = env.reset(task)
    off = next(a for a in state.admissible if a not in (*env._gold_path(), "inventory", "look around"))
    env.step(off)
    with pytest.raises(Unsolved, match=f"task {task}: off the gold path after 1 commands"):
        env.solution()
    two_rooms = TextWorldExpress("twc", "numLocations=3,numItemsToPutAway=2,includeDoors=0,limitInventorySize=0")
    two_rooms.reset("twc/train/5")
    assert two_rooms.solution().distance == len(two_rooms._gold_path())
