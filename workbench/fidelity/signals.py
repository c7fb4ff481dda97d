"""What is held against the truth: the turn credit of methods, beliefs, a solver's advantages, and plain baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch

from .. import replay
from ..credit import agent_opsd, grpo
from ..errors import WorkbenchError
from ..methods import METHODS, method
from ..policy import Policy
from ..records import Batch, Episode
from ..skills import SkillBank, privileged_inputs, skill_ids
from ..update import TeacherRows, teacher_logprobs

KINDS = ("method", "recorded", "signal", "solver", "baseline", "ceiling")
RECORDED = "as recorded"
TEACHERS = ("right", "random", "wrong")


@dataclass(frozen=True)
class Name:
    """A signal: its name, one of KINDS, and whose log-probs it read: "" none, RECORDED, or one of TEACHERS."""

    name: str
    kind: str
    teacher: str = ""


@dataclass(frozen=True, eq=False)
class Found:
    """Of one signal a list over episodes: credit (K,) of the turns, and belief (K+1,) of the states or None."""

    credit: list[np.ndarray]
    belief: list[np.ndarray] | None = None


Signals = dict[Name, Found]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded step: its batch for credit (workbench/replay.py), its episodes with their contexts, and the places of
    those that are scored."""

    step: int
    batch: Batch
    episodes: Sequence[Episode]
    picked: Sequence[int]

    @property
    def known(self) -> list[Episode]:
        return [self.episodes[i] for i in self.picked]


def recorded(
    turns: pl.DataFrame,
    heads: pl.DataFrame,
    step: int,
    episodes: Sequence[Episode],
    picked: Sequence[int],
    solver: Mapping[int, Sequence[float]] | None = None,
    reward: str = "outcome",
) -> Recorded:
    """A step of the tables. episodes: of `replay.episodes_of` with contexts; solver: advantages of the turns by an
    exact solver, by place, for a run that recorded none."""
    batch, _ = replay.batch_of(turns, heads, step, reward)
    if solver and batch.solver_advantages is None:
        table = torch.full(batch.turn_mask.shape, float("nan"), dtype=torch.float64)
        for place, values in solver.items():
            table[place, : len(values)] = torch.tensor(values, dtype=torch.float64)
        batch = batch.with_(solver_advantages=table)
    return Recorded(step, batch, episodes, picked)


def from_tables(
    step: Recorded,
    turns: pl.DataFrame,
    names: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Signals, dict[str, str], list[int] | None]:
    """Signals of the picked episodes, credited in their whole batch; methods that are left out and why; and how many
    turns of each have a revision of the belief that stands out, |z| > 1 as in AgentOPSD, or None without a teacher.

    The credit of a turn is the mean of its tokens', that of a token the push of the method's whole loss
    (workbench/replay.py). names: default all methods.
    """
    batch, picked = step.batch, step.picked
    done, left_out = replay.credit_by_method(batch, names, options, step.step, episodes=step.episodes)
    whose = {name: RECORDED if made.method.needs_teacher else "" for name, made in done.items()}
    out = {Name(name, "method", whose[name]): _of_method(batch, made, picked) for name, made in done.items()}
    own = replay.recorded_values(turns, step.step, "advantage", batch)
    if own is not None:
        out[Name("advantage of the run", "recorded")] = Found(_picked(batch.turn_mean(own), batch, picked))
    flags = None
    if batch.teacher_logprobs is not None:
        table = agent_opsd.credit(batch).turns
        out |= _beliefs(batch, table, picked, RECORDED)
        # The rule's own z is 0 where a group has no advantage to reshape, and next to 0 where its belief begins at one
        # end; every signal is to be judged there too.
        z = agent_opsd.standardise(table["revision"], batch.turn_mask, 1e-12)
        flags = [int(n) for n in (z.abs() > 1).sum(1)[list(picked)]]
    return out | baselines(batch, picked), left_out, flags


def baselines(batch: Batch, picked: Sequence[int]) -> Signals:
    """Uniform credit, +1 or -1 as the episode ended, whose belief is the group's success rate throughout; and the
    group's advantage shared out by turns' tokens. Random credit is drawn where it is scored."""
    mask, counts = batch.turn_mask, batch.turn_counts[:, None]
    outcome = torch.where(mask, 2 * batch.outcome[:, None] - 1, 0)
    prior = agent_opsd.prior(batch)
    group = grpo.group_advantage(batch.reward, batch.group_index)[:, None]
    share = batch.turn_tokens * counts / batch.turn_tokens.sum(1, keepdim=True)
    constant = [np.full(int(batch.turn_counts[e]) + 1, float(prior[e])) for e in picked]
    return {
        Name("uniform", "baseline"): Found(_picked(outcome, batch, picked), constant),
        Name("turn length", "baseline"): Found(_picked(group * share, batch, picked)),
    }


def by_teacher(
    step: Recorded,
    policy: Policy,
    banks: Mapping[str, SkillBank],
    insert_at: int,
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    temperature: float = 1.0,
) -> Signals:
    """Signals of the picked episodes by methods that read a teacher, under each bank's texts on the same tokens.

    Only picked episodes are read again: what a teacher says of others is no part of their credit.
    """
    own, batch, out = step.known, step.batch, {}
    rows = Batch.from_episodes(own, "auto", policy.pad_id).to(policy.device)
    start = batch.old_logprobs if batch.teacher_logprobs is None else batch.teacher_logprobs
    for teacher, bank in banks.items():
        skills = skill_ids(bank, policy.tokenizer, own)
        scored = teacher_logprobs(rows, TeacherRows(policy, *privileged_inputs(rows, skills, insert_at)), temperature)
        taught = start.clone()
        for place, values in zip(step.picked, _tokens(rows, scored), strict=True):
            taught[place, batch.response_mask[place]] = values
        batch_taught = batch.with_(teacher_logprobs=taught)
        for name in names:
            built = method(name, **(options or {}).get(name, {}))
            if built.needs_teacher and not replay.lacking(batch_taught, built):
                made = replay.credit_of(batch_taught, built, step.step)
                out[Name(name, "method", teacher)] = _of_method(batch_taught, made, step.picked)
        out |= _beliefs(batch_taught, agent_opsd.credit(batch_taught).turns, step.picked, teacher)
    return out


def banks_of(
    bank: SkillBank, teachers: Sequence[str] = TEACHERS, other: SkillBank | None = None
) -> dict[str, SkillBank]:
    """The bank as it is ("right"), one whose text is of a random kind, and one whose text is always of another kind
    ("wrong"); the general text stays in all. Of a bank that tells no kinds apart all that is wrong is the `other`, of
    another environment, its general text included."""
    made = {"right": bank}
    if len(bank.by_kind) > 1:
        kinds = sorted(bank.by_kind)
        turned = dict(zip(kinds, [bank.by_kind[k] for k in kinds[1:] + kinds[:1]], strict=True))
        made |= {"random": replace(bank, retrieval="random"), "wrong": replace(bank, by_kind=turned)}
    elif other is not None and other.by_kind:
        text = other.by_kind[min(other.by_kind)]
        made["wrong"] = SkillBank(other.general, dict.fromkeys(bank.by_kind, text))
    return {name: made[name] for name in teachers if name in made}


def check_names(names: Sequence[str] | None) -> None:
    """Raise WorkbenchError where a method is unknown."""
    for name in names or ():
        method(name)


def teacher_methods(names: Sequence[str] | None) -> list[str]:
    """Those of the names (default all) that read a teacher."""
    return [name for name in (names or METHODS) if method(name).needs_teacher]


def padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Rows of different lengths as one array, 0 where there is nothing."""
    out = np.zeros((len(rows), width))
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def joined(parts: Sequence[tuple[Signals, int]]) -> Signals:
    """Signals of several steps one after another, each given with its number of episodes. A signal that one step lacks
    is left out: a score over other episodes cannot be compared."""
    if not parts:
        raise WorkbenchError("fidelity: no episodes to credit")
    shared = [name for name in parts[0][0] if all(name in signals for signals, _ in parts)]
    out: Signals = {}
    for name in shared:
        founds = [signals[name] for signals, _ in parts]
        beliefs = None if any(f.belief is None for f in founds) else [b for f in founds for b in f.belief]
        out[name] = Found([c for f in founds for c in f.credit], beliefs)
    return out


def _of_method(batch: Batch, made: replay.Replayed, picked: Sequence[int]) -> Found:
    belief = _belief(batch, made.credit.turns, picked) if "belief" in made.credit.turns else None
    return Found(_picked(batch.turn_mean(made.push), batch, picked), belief)


def _beliefs(batch: Batch, table: Mapping[str, torch.Tensor], picked: Sequence[int], teacher: str) -> Signals:
    belief = _belief(batch, table, picked)
    return {
        Name("belief revision", "signal", teacher): Found(_picked(table["revision"], batch, picked), belief),
        Name("evidence", "signal", teacher): Found(_picked(table["evidence"], batch, picked)),
    }


def _belief(batch: Batch, table: Mapping[str, torch.Tensor], picked: Sequence[int]) -> list[np.ndarray]:
    whole = torch.cat([table["belief_before"][:, :1], table["belief"]], 1).double().numpy()
    return [whole[e, : int(batch.turn_counts[e]) + 1] for e in picked]


def _picked(table: torch.Tensor, batch: Batch, picked: Sequence[int]) -> list[np.ndarray]:
    values = table.double().numpy()
    return [values[e, : int(batch.turn_counts[e])] for e in picked]


def _tokens(batch: Batch, values: torch.Tensor) -> list[torch.Tensor]:
    """Of each episode the values of its sampled tokens, turn after turn, float64."""
    places, owners, sizes = batch.tokens_by_turn()
    episode = (owners // batch.turn_mask.shape[1]).repeat_interleave(sizes)
    flat = values.reshape(-1)[places].double()
    return [flat[episode == e].cpu() for e in range(len(batch.group_index))]
