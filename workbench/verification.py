"""Learning to self-verify (arXiv 2602.07594): a policy is also trained to say whether its own attempts succeeded.

Batches are drawn as in the released code (github chenyuxin1999/Learning-to-Self-Verify, recipe/dapo/
dapo_self_verification_answeronly_ray_trainer.py, read). Where a side of a batch has neither samples nor a pool to fill
it, the code trains on what there is, out of balance; here both sides are cut to the shorter one. The paper's verifier
sees the question and the final answer alone. A game has no such answer: what stands for it here is the commands that
were played, without what the environment said to them.

`pass_rate` is that of the group a sample comes from. A verification group asks about one sample, so its members share
the factor, and dividing by the group's deviation cancels it: it matters only where nothing divides.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import WorkbenchError, unknown
from .policy import Policy
from .prompts import Chat
from .records import Episode, Turn

SCHEDULES = ("generate", "verify", "alternate", "init", "mixed")
SHOWN = ("commands", "transcript")
CAP = 0.5


@dataclass(frozen=True)
class Attempt:
    """One answer as a batch is drawn from: its group, whether it is correct, and whether an answer could be read."""

    group: int
    correct: bool
    valid: bool = True


@dataclass(frozen=True)
class Sample:
    """One question to a verifier: which attempt it is about, the true answer, and the pass rate of the attempt's group
    (correct attempts over all of them, invalid ones included)."""

    index: int
    label: bool
    pass_rate: float


def attempts_of(episodes: Sequence[Episode]) -> list[Attempt]:
    """Played episodes as attempts: a success is correct; one that was ended for invalid actions has no answer."""
    return [Attempt(e.group, e.outcome == 1, e.stop_reason != "invalid_actions") for e in episodes]


def build_batch(attempts: Sequence[Attempt], rng: np.random.Generator) -> list[Sample]:
    """A shuffled batch, half of correct attempts and half of wrong ones, of as many samples as there are groups with a
    valid attempt (one fewer where that is odd).

    Every mixed group gives one of each, and one more of each to the pools where it has them; a group of correct
    attempts gives one to the pool; a group without any gives none. Sides are filled from their pools, first without and
    then with replacement. Empty where there is nothing correct, nothing wrong, or fewer than two groups.
    """
    sizes: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for i, attempt in enumerate(attempts):
        sizes[attempt.group] = sizes.get(attempt.group, 0) + 1
        if attempt.valid:
            groups.setdefault(attempt.group, []).append(i)
    core: dict[bool, list[Sample]] = {True: [], False: []}
    pool: dict[bool, list[Sample]] = {True: [], False: []}
    for group, members in groups.items():
        sides = {label: [i for i in members if attempts[i].correct == label] for label in (True, False)}
        rate = len(sides[True]) / sizes[group]
        if not sides[True]:
            continue
        mixed = bool(sides[False])
        for label, own in sides.items():
            drawn = [Sample(int(i), label, rate) for i in rng.permutation(own)[: 1 + mixed]]
            core[label] += drawn[:mixed]
            pool[label] += drawn[mixed:]
    half = len(groups) // 2
    for label, own in core.items():
        spare = [pool[label][i] for i in rng.permutation(len(pool[label]))]
        own += spare[: max(0, half - len(own))]
        if spare and len(own) < half:
            own += [spare[i] for i in rng.integers(len(spare), size=half - len(own))]
    half = min(half, *map(len, core.values()))
    batch = core[True][:half] + core[False][:half]
    return [batch[i] for i in rng.permutation(len(batch))]


def reward(verdict: bool | None, sample: Sample, cap: float = CAP) -> float:
    """min(pass rate, cap) for a right verdict, 0 for a wrong one or none. Raises WorkbenchError on a pass rate or cap
    outside [0, 1]."""
    if not 0 <= sample.pass_rate <= 1 or not 0 <= cap <= 1:
        raise WorkbenchError(
            f"self-verification: pass rate and cap must lie in [0, 1], got {sample.pass_rate} and {cap}"
        )
    return min(sample.pass_rate, cap) if verdict is sample.label else 0.0


@dataclass(frozen=True)
class Schedule:
    kind: str = "alternate"  # "generate" or "verify" alone; "alternate"; "init": verify first; "mixed": both at once
    interval: int = 5  # alternate: generation steps before verification
    loops: int = 1  # alternate: verification steps then
    first: int = 400  # init: verification steps before the first generation step, as a port of the code is said to do

    def __post_init__(self):
        if self.kind not in SCHEDULES:
            raise unknown("self-verification schedule", str(self.kind), SCHEDULES)
        for name, least in (("interval", 1), ("loops", 1), ("first", 0)):
            if getattr(self, name) < least:
                raise WorkbenchError(f"self-verification: {name} must be at least {least}, got {getattr(self, name)}")

    def trains(self, step: int) -> tuple[str, ...]:
        """What step number `step` (from 0) is trained on: ("generate",), ("verify",) or both.

        A step that verifies needs attempts to verify: of the steps since the last one when alternating, else its own.
        """
        if step < 0:
            raise WorkbenchError(f"self-verification: a step is at least 0, got {step}")
        if self.kind == "mixed":
            return ("generate", "verify")
        if self.kind == "alternate":
            return ("generate",) if step % (self.interval + self.loops) < self.interval else ("verify",)
        if self.kind == "init":
            return ("verify",) if step < self.first else ("generate",)
        return (self.kind,)

    def generates(self, step: int) -> bool:
        """Whether a training step that plays games, number `step` of those, is trained on them."""
        return self.kind == "alternate" or "generate" in self.trains(step)

    def verifications(self, step: int) -> int:
        """Verification updates that follow training step number `step`, where only steps that play games are counted
        (`trains` counts those of both kinds)."""
        if self.kind == "alternate":
            return 0 if (step + 1) % self.interval else self.loops
        return int("verify" in self.trains(step))

    def flushes(self, step: int) -> bool:
        """Whether attempts that were kept to be verified are dropped after this step: the last of a verification."""
        return "verify" in self.trains(step) and (self.kind != "alternate" or self.trains(step + 1) == ("generate",))


@dataclass(frozen=True)
class VerificationConfig:
    schedule: str = "alternate"  # as Schedule.kind, and interval, loops and first as there
    interval: int = 5
    loops: int = 1
    first: int = 400
    size: int = 8  # answers to each question
    max_tokens: int = 64  # of an answer
    cap: float = CAP  # of the pass rate as a reward
    shown: str = "commands"  # of an attempt: its "commands", or the whole "transcript"
    yes: str = "Yes"  # the word for a success; the small models that are shipped lack it, but have e.g. "put"
    no: str = "No"  # and for a failure, there e.g. "take"

    def __post_init__(self):
        self.plan  # noqa: B018, checks the schedule
        if self.size < 2 or self.max_tokens < 1:
            raise WorkbenchError(
                "self-verification: size must be at least 2, for answers are compared, and max_tokens at least 1, got "
                f"{self.size} and {self.max_tokens}"
            )
        if not 0 < self.cap <= 1:
            raise WorkbenchError(f"self-verification: cap must lie in (0, 1], got {self.cap}")
        if self.shown not in SHOWN:
            raise unknown("what a verifier is shown", str(self.shown), SHOWN)
        words = [self.yes.casefold(), self.no.casefold()]
        if not all(re.fullmatch(r"\w+", word) for word in words) or words[0] == words[1]:
            raise WorkbenchError(
                f"self-verification: yes and no must be two different words, got {self.yes!r} and {self.no!r}"
            )

    @property
    def plan(self) -> Schedule:
        return Schedule(self.schedule, self.interval, self.loops, self.first)


def plan(schedule: Schedule, steps: int) -> Iterator[tuple[str, ...]]:
    """What each of so many steps is trained on."""
    return (schedule.trains(step) for step in range(steps))


def question(episode: Episode, shown: str = "commands", yes: str = "Yes", no: str = "No") -> str:
    """The message that asks whether an episode succeeded.

    shown: its "commands" alone after the first observation, or the whole "transcript" up to the last command. What the
    environment answered to that one is not recorded in an episode, so neither gives the verdict away.
    """
    if shown not in SHOWN:
        raise unknown("what a verifier is shown", str(shown), SHOWN)
    lines = [f"Task:\n{episode.turns[0].observation}", "Attempt:"]
    for k, turn in enumerate(episode.turns):
        if k and shown == "transcript":
            lines.append(turn.observation)
        lines.append(f"> {turn.action}")
    lines.append(f"Did this attempt succeed? End with \\boxed{{{yes}}} or \\boxed{{{no}}}.")
    return "\n".join(lines)


def verdict(response: str, yes: str = "Yes", no: str = "No") -> bool | None:
    """What a response says: the last boxed yes or no, else the only one of the two words in it; None where neither."""
    either = f"({re.escape(yes)}|{re.escape(no)})\\b"
    boxed = re.findall(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*" + either, response, re.IGNORECASE)
    said = boxed[-1:] or {word.casefold() for word in re.findall(r"\b" + either, response, re.IGNORECASE)}
    return said.pop().casefold() == yes.casefold() if len(said) == 1 else None


def verify(
    policy: Policy,
    chat: Chat,
    episodes: Sequence[Episode],
    samples: Sequence[Sample],
    key: tuple[int, ...],
    size: int = 8,
    max_tokens: int = 64,
    max_context: int = 1024,
    temperature: float = 1.0,
    shown: str = "commands",
    cap: float = CAP,
    live: int = 64,
    yes: str = "Yes",
    no: str = "No",
) -> list[Episode]:
    """Ask the policy `size` times about each sample; returns one episode of one turn for each answer, a group a sample.

    outcome is whether the verdict is right, total_reward the capped reward, so that Batch.from_episodes(...,
    reward="return") trains on them as on any others. key: integers the draws derive from; at most `live` are answered
    at once. Raises WorkbenchError where a sample names no episode or a question does not fit the context.
    """
    if size < 1 or live < 1:
        raise WorkbenchError(f"self-verification: size and live must be at least 1, got {size} and {live}")
    asked = []
    for n, sample in enumerate(samples):
        if not 0 <= sample.index < len(episodes):
            raise WorkbenchError(f"self-verification: sample {n} is about episode {sample.index} of {len(episodes)}")
        text = question(episodes[sample.index], shown, yes, no)
        ids = chat.first(text)
        if len(ids) + max_tokens > max_context:
            raise WorkbenchError(
                f"self-verification: the question about episode {sample.index} takes {len(ids)} tokens, which leaves "
                f"no room for {max_tokens} in a context of {max_context}"
            )
        asked += [(n, k, text, ids) for k in range(size)]
    answers: list[Episode] = []
    for start in range(0, len(asked), live):
        part = asked[start : start + live]
        sampled = policy.session(len(part), max_context).sample(
            {row: ids for row, (*_, ids) in enumerate(part)},
            {row: np.random.default_rng([*key, n, k]).random(max_tokens) for row, (n, k, *_) in enumerate(part)},
            chat.end_id,
            temperature,
        )
        for row, (n, _, text, ids) in enumerate(part):
            own, about = sampled[row], episodes[samples[n].index]
            response = chat.decode(own.ids)
            said = verdict(response, yes, no)
            earned = reward(said, samples[n], cap)
            action = "(nothing)" if said is None else yes if said else no
            turn = Turn(
                prompt_ids=ids,
                response_ids=own.ids,
                logprobs=np.minimum(own.logprobs, 0),
                observation=text,
                action=action,
                valid=said is not None,
                reward=earned,
                truncated=own.truncated,
                info={"response": response},
            )
            right = int(said is samples[n].label)
            stop = "won" if right else "lost" if said is not None else "invalid_actions"
            answers.append(Episode((turn,), about.task, n, about.seed, right, earned, stop, "verify", about.split))
    return answers
