"""Checks on what is compared: the episodes of a group, and the groups of a step."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ..formats.base import SourceEpisode, SourceTurn
from ..links import Link
from .tally import Place, Tally, number, numeric, written

HELD_TURNS = 500_000  # turns of open groups kept as a few numbers each; beyond it the group seen least lately is closed
_TELLING = 64  # characters: two rollouts of one task may well say the same short thing
_CLOSE = 1e-3  # relative: what an epsilon in a deviation and float32 may move an advantage by


@dataclass(frozen=True, slots=True)
class _Turn:
    """number, and of its tokens how many have advantage 0, how many there are, and their mean advantage."""

    number: int
    zero: int
    tokens: int
    advantage: float | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class _Member:
    place: Place
    reward: float | None
    success: bool | None
    total: float | None
    prior: float | None
    turns: tuple[_Turn, ...]


@dataclass
class _Copies:
    """Episodes of one id and content; number: of the content among those of the id; place: of the last."""

    number: int
    place: Place
    turns: int
    telling: bool
    count: int = 1


@dataclass
class _Group:
    named: bool
    members: dict[str, _Member] = field(default_factory=dict)
    numbers: dict[str, set[int]] = field(default_factory=dict)
    numbered: dict[str, Place] = field(default_factory=dict)  # episodes whose turns are numbered, and where they are
    expected: dict[str, int] = field(default_factory=dict)
    copies: dict[str, dict[int, "_Copies"]] = field(default_factory=dict)  # of episodes without numbers, by content
    held: int = 0


class Groups:
    """Open groups of a source whose episodes may come in any order, few numbers a turn, at most HELD_TURNS turns."""

    def __init__(self, tally: Tally):
        self.tally = tally
        self.open: OrderedDict[tuple[int, str], _Group] = OrderedDict()
        self.held = self.count = self.closed_early = 0

    def add(self, place: Place, episode: SourceEpisode) -> None:
        key = (episode.step, f"group {episode.group}" if episode.group else f"episode {episode.episode}")
        if key not in self.open:
            self.open[key] = _Group(bool(episode.group))
        group = self.open[key]
        self.open.move_to_end(key)
        name = episode.episode or f"unnamed {len(group.members)}"
        numbers = [number(t, k) for k, t in enumerate(episode.turns)]
        if any(written(t) is not None for t in episode.turns):
            self.tally.look("duplicate_turns", len(episode.turns))
            self._repeats(place, episode, group.numbers.setdefault(name, set()))
            group.numbered[name] = place
            if type(n := episode.info.get("n_turns")) is int:
                group.expected[name] = n
        elif episode.episode and episode.turns:
            name = _copy(group.copies.setdefault(name, {}), place, episode)
            if any(t.turn is not None for t in episode.turns):  # imported: numbered by the run, not by its source
                own = f"run {place.where}"
                self._repeats(place, episode, group.numbers.setdefault(own, set()))
                group.numbered[own] = place
                if type(n := episode.info.get("n_turns")) is int:
                    group.expected[own] = n
        member = _member(place, episode, numbers)
        before = group.members.get(name)
        if before is not None:  # an episode in parts, or one that is there twice
            seen = {t.number for t in before.turns}
            member = _merged(before, tuple(t for t in member.turns if t.number not in seen))
        group.members[name] = member
        added = 1 + len(member.turns) - (0 if before is None else 1 + len(before.turns))
        group.held += added
        self.held += added
        while self.held > HELD_TURNS:
            self._close(next(iter(self.open)))
            self.closed_early += 1

    def close(self) -> None:
        """Check the groups that are still open."""
        while self.open:
            self._close(next(iter(self.open)))

    def _repeats(self, place: Place, episode: SourceEpisode, seen: set[int]) -> None:
        for index, turn in enumerate(episode.turns):
            given = written(turn)
            k = number(turn, index) if given is None else given
            if k in seen:
                detail = f"step {episode.step}, episode {episode.episode}, turn {k} again"
                self.tally.hit("duplicate_turns", place.turn(turn), detail, turn=number(turn, index))
            seen.add(k)

    def _close(self, key: tuple[int, str]) -> None:
        group = self.open.pop(key)
        self.held -= group.held
        self.count += group.named
        for name, place in group.numbered.items():
            _gaps(self.tally, place, group.numbers[name], group.expected.get(name))
        for same in group.copies.values():
            _copied(self.tally, list(same.values()))
        members = list(group.members.values())
        for member in members:
            if member.prior is not None:
                self.tally.look("prior_out_of_range")
                if not 0 <= member.prior <= 1:
                    self.tally.hit("prior_out_of_range", member.place, f"prior {member.prior:.6g}")
        if group.named:
            _compare(self.tally, members)


class Steps:
    """Optimizer steps on each rollout batch: those the source says were taken, else rows over rows of a minibatch."""

    def __init__(self, minibatch: int | None, epochs: int):
        self.minibatch, self.epochs = minibatch, epochs
        self.batches: dict[int, tuple[Place, tuple[int, int] | None, int]] = {}

    def add(self, place: Place, episode: SourceEpisode) -> None:
        given = episode.info.get("optimizer_steps")
        given = given if isinstance(given, tuple) else None
        if given is not None or self.minibatch:
            before = self.batches.get(episode.step, (place, given, 0))
            self.batches[episode.step] = (before[0], given, before[2] + len(episode.turns))

    def close(self, tally: Tally) -> None:
        for step, (place, given, rows) in self.batches.items():
            if given is None and not rows:
                continue
            taken, discarded = given or (math.ceil(rows / self.minibatch) * self.epochs, 0)
            tally.look("optimizer_steps")
            if taken != 1:
                link = None if place.link is None else Link(place.link.run, step)
                first = Place(f"{place.where} (step {step})", step, "", link)
                also = f", {discarded} discarded" if discarded else ""
                tally.hit("optimizer_steps", first, f"{taken} taken{also}")


def _copy(same: dict[int, _Copies], place: Place, episode: SourceEpisode) -> str:
    """Count the episode among those of its id; the name of the member it is, one for each content."""
    said = tuple(t.response for t in episode.turns)
    content = hash((said, tuple(t.token_ids.tobytes() for t in episode.turns if t.token_ids is not None)))
    if content in same:
        same[content].count += 1
        same[content].place = place
    else:
        telling = episode.fidelity == "token" or sum(map(len, said)) >= _TELLING
        same[content] = _Copies(len(same), place, len(said), telling)
    return f"{episode.episode} {same[content].number}"


def _copied(tally: Tally, same: Sequence[_Copies]) -> None:
    """Whole episodes that are there again. Ids that different contents share are no ids of episodes."""
    tally.look("duplicate_turns", sum(copies.count * copies.turns for copies in same))
    if len(same) == 1 and same[0].count > 1 and same[0].telling:
        n = same[0].turns * (same[0].count - 1)
        tally.hit("duplicate_turns", same[0].place, f"the same episode {same[0].count} times", n)


def _member(place: Place, episode: SourceEpisode, numbers: Sequence[int]) -> _Member:
    reward = episode.reward
    if reward is None and episode.success is not None:
        reward = float(episode.success)
    prior = numeric(episode.info.get("prior"))
    if prior is None and episode.turns:
        prior = numeric(episode.turns[0].info.get("belief_before"))
    turns = tuple(_turn(t, k, episode.advantage) for t, k in zip(episode.turns, numbers, strict=True))
    return _Member(place, reward, episode.success, numeric(episode.info.get("return", reward)), prior, turns)


def _merged(member: _Member, more: tuple[_Turn, ...]) -> _Member:
    turns = tuple(sorted(member.turns + more, key=lambda t: t.number))
    return _Member(member.place, member.reward, member.success, member.total, member.prior, turns)


def _turn(turn: SourceTurn, k: int, of_episode: float | None) -> _Turn:
    values = turn.advantages
    if values is not None and len(values):
        return _Turn(k, int(np.count_nonzero(values == 0)), len(values), float(np.mean(values)), turn.reward)
    given = numeric(turn.info.get("turn_advantage", of_episode))
    n = 1 if turn.token_ids is None else len(turn.token_ids)
    return _Turn(k, n if given == 0 else 0, n, given, turn.reward)


def _gaps(tally: Tally, place: Place, numbers: set[int], expected: int | None) -> None:
    tally.look("turn_gaps", len(numbers))
    first = min(min(numbers), 1)  # sources count from 0 or from 1
    missing = max(numbers) - first + 1 - len(numbers)
    if expected is not None:
        missing = max(missing, expected - len(numbers))
    if missing > 0:
        lost = list(islice((str(k) for k in range(first, max(numbers)) if k not in numbers), 5))
        detail = f"turn {', '.join(lost)} missing" if lost else f"{len(numbers)} turns of {expected}"
        tally.hit("turn_gaps", place, detail, missing)


def _compare(tally: Tally, members: Sequence[_Member]) -> None:
    known = [m for m in members if m.reward is not None and math.isfinite(m.reward)]
    if len(known) < 2 or len(known) < len(members):
        return
    rewards = np.array([m.reward for m in known])
    tally.look("groups_without_variance")
    _scale(tally, known)
    if rewards.max() == rewards.min():
        detail = f"{len(known)} episodes, every reward {rewards[0]:.6g}"
        tally.hit("groups_without_variance", known[0].place, detail)
        return
    mean, spread = rewards.mean(), rewards.max() - rewards.min()
    for member in known:
        apart = abs(member.reward - mean) > 1e-6 * spread  # an episode at the mean rightly has advantage 0
        for turn in member.turns if apart else ():
            if turn.advantage is not None:
                tally.look("zero_credit")
                if turn.zero:
                    detail = f"{turn.zero} of {turn.tokens} tokens, reward {member.reward:.6g}, group mean {mean:.6g}"
                    tally.hit("zero_credit", member.place, detail, turn=turn.number)
    _baselines(tally, known)


def _scale(tally: Tally, members: Sequence[_Member]) -> None:
    """A prior that is the clipped mean of raw rewards where that is not the success rate."""
    rate = _success_rate(members)
    if rate is None or any(m.prior is None or not 0 <= m.prior <= 1 for m in members):
        return
    tally.look("prior_wrong_scale")
    prior = members[0].prior
    if abs(prior - rate) < 0.01:
        return
    totals = [np.nan if m.total is None else m.total for m in members]
    for raw in (np.mean([m.reward for m in members]), np.mean(totals)):
        if abs(prior - np.clip(raw, 0, 1)) <= _CLOSE:
            detail = f"prior {prior:.6g}, success rate {rate:.6g}, mean of raw rewards {raw:.6g}"
            tally.hit("prior_wrong_scale", members[0].place, detail)
            return


def _success_rate(members: Sequence[_Member]) -> float | None:
    """Share of successes; where the source names none, rewards of 0 and one other value say it."""
    if all(m.success is not None for m in members):
        return float(np.mean([m.success for m in members]))
    values = {m.reward for m in members}
    if len(values) == 2 and min(values) == 0:
        return float(np.mean([m.reward > 0 for m in members]))
    return None


def _baselines(tally: Tally, members: Sequence[_Member]) -> None:
    """Whether turns' advantages are what centring over turns of one number gives, and centring episodes does not."""
    if any(not m.turns or any(t.advantage is None for t in m.turns) for m in members):
        return
    last = max(t.number for m in members for t in m.turns)
    first = min(t.number for m in members for t in m.turns)
    if len(members) * (last - first + 1) > HELD_TURNS:
        return
    shape = (len(members), last - first + 1)
    given, earned = np.full(shape, np.nan), np.full(shape, np.nan)
    for i, member in enumerate(members):
        for t in member.turns:
            given[i, t.number - first], earned[i, t.number - first] = t.advantage, t.reward
    there = ~np.isnan(given)
    shared = there & (there.sum(0) > 1)
    if not shared.any() or (there.all() and np.isnan(earned[there]).any()):
        return  # of equal lengths, and no rewards of turns: both baselines are the same
    tally.look("per_turn_baselines")
    rewards = np.array([m.reward for m in members])[:, None]
    by_episode = list(_scaled(np.where(there, rewards - rewards.mean(), np.nan), rewards.std(), rewards.std(ddof=1)))
    if any(_same(given, rule, there) for rule in by_episode):
        return
    for rule in _by_turn(np.where(there, rewards, np.nan), earned, there):
        if _same(given, rule, shared) and not any(_same(rule, other, shared) for other in by_episode):
            numbers = int((there.sum(0) > 1).sum())
            detail = f"advantages of {int(shared.sum())} turns are centred over equal numbers ({numbers} of them)"
            tally.hit("per_turn_baselines", members[0].place, detail)
            return


def _by_turn(outcome: np.ndarray, earned: np.ndarray, there: np.ndarray) -> Iterator[np.ndarray]:
    """Advantages that per-turn-index rules give: of the outcome, a turn's reward, its return, and the sums of them."""
    rewards = [outcome]
    if not np.isnan(earned[there]).any():
        rewards += [earned, np.where(there, _to_go(np.where(there, earned, 0)), np.nan)]
    for values in rewards:
        alone = there.sum(0) < 2
        filled = np.where(there, values, 0)
        count = np.maximum(there.sum(0), 1)
        centred = np.where(there, filled - filled.sum(0) / count, 0)
        squares = np.square(centred).sum(0)
        for rule in _scaled(centred, np.sqrt(squares / count), np.sqrt(squares / np.maximum(count - 1, 1))):
            yield np.where(there & ~alone, rule, np.nan)
            yield np.where(there, _to_go(np.where(there & ~alone, rule, 0)), np.nan)


def _scaled(centred: np.ndarray, *deviations: np.ndarray) -> Iterator[np.ndarray]:
    yield centred
    for deviation in deviations:
        yield centred / np.where(deviation > 0, deviation, 1)


def _to_go(values: np.ndarray) -> np.ndarray:
    return np.cumsum(values[:, ::-1], 1)[:, ::-1]


def _same(given: np.ndarray, rule: np.ndarray, where: np.ndarray) -> bool:
    scale = np.abs(rule[where]).max()
    return bool(scale > 0 and np.abs(given[where] - rule[where]).max() <= _CLOSE * scale)
