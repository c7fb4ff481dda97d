"""Which rollouts a training step draws: equal groups, fresh ones for groups without signal, or groups of any size.

Member m of group g draws from (seed, step, TRAIN, g * group_size + m), and beyond group_size from (seed, step, MORE, g,
m): whatever decides the sizes, the first members of a group are those that equal groups would have.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch

from .budget import coba, v0, v05
from .budget.coba import CoBAConfig
from .budget.dynamic_sampling import DynamicSamplingConfig, mixed_groups
from .budget.history import History
from .budget.v0 import V0AllocationConfig
from .budget.v05 import V05Config
from .envs.base import Task
from .errors import WorkbenchError
from .records import Episode
from .rollout import Job

SamplingConfig = DynamicSamplingConfig | CoBAConfig | V05Config | V0AllocationConfig
TASKS, TRAIN, PANEL, MORE = 1, 2, 3, 4  # purposes of a random draw

# The table `budget`: of each group what was expected and seen of it, its rollouts, and why it got no more or no fewer.
BUDGET = {
    "group": pl.Int64, "task": pl.String, "kind": pl.String, "rate": pl.Float64, "success": pl.Float64,
    "rollouts": pl.Int64, "why": pl.String, "alpha": pl.Float64, "beta": pl.Float64, "bias2": pl.Float64,
    "weight": pl.Float64, "baseline": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """kept: the episodes to train on, group by group; played: all that were drawn; batches: of tasks that were dealt;
    budget: rows of the table BUDGET, none where groups are equal."""

    kept: list[Episode]
    played: list[Episode]
    batches: int = 1
    budget: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Dealer:
    """What a step is drawn with. deal: number of a batch, from 0 in each step -> its tasks; play: jobs -> episodes in
    their order; kind: of a task, known before it is played; reward: what groups compare, "outcome" or "return"."""

    seed: int
    step: int
    group_size: int
    reward: str
    deal: Callable[[int], list[Task]]
    play: Callable[[list[Job]], list[Episode]]
    kind: Callable[[Task], str]
    history: History
    say: Callable[[str], Any]

    def job(self, task: Task, group: int, member: int) -> Job:
        plain = member < self.group_size
        place = (TRAIN, group * self.group_size + member) if plain else (MORE, group, member)
        return Job(task, group, (self.seed, self.step, *place))


def check(sampling: SamplingConfig, tasks: int, group_size: int, reward: str, reads_prior: bool = False) -> None:
    """Raise WorkbenchError where groups cannot be drawn so: `tasks` a step, `group_size` rollouts each on average.

    reads_prior: whether credit holds outcomes against an expected success rate, which no other reward has.
    """
    if reward != "outcome" and (reads_prior or isinstance(sampling, V05Config)):
        raise WorkbenchError(f"V0.5 compares successes, so reward must be outcome, got {reward!r}")
    match sampling:
        case CoBAConfig(lo=lo, hi=hi) | V0AllocationConfig(lo=lo, hi=hi) if not lo <= group_size <= hi:
            name = "CoBA" if isinstance(sampling, CoBAConfig) else "V0"
            raise WorkbenchError(
                f"{name}: {tasks} tasks of {lo} to {hi} rollouts take {tasks * lo} to {tasks * hi} in all, but tasks "
                f"of group_size {group_size} make {tasks * group_size}: set lo, hi or group_size"
            )
        case V05Config(first=first) if first > group_size:
            raise WorkbenchError(
                f"V0.5: every task gets first = {first} rollouts, but group_size allows {group_size} each: set first "
                "or group_size"
            )


def tasks_of(tasks: Sequence[Task], seed: int, number: int, per_step: int) -> list[Task]:
    """Tasks of a numbered batch, in an order that passes over all of them before it repeats."""
    n, out = len(tasks), []
    for position in range(number * per_step, (number + 1) * per_step):
        order = np.random.default_rng([seed, TASKS, position // n]).permutation(n)
        out.append(tasks[order[position % n]])
    return out


def panel_tasks(tasks: Sequence[Task], seed: int, games: int) -> list[Task]:
    """The first of a panel's games in the order that eval_seed gives them."""
    order = np.random.default_rng([seed, PANEL]).permutation(len(tasks))
    return [tasks[i] for i in order[:games]]


def panel_jobs(tasks: Sequence[Task], seed: int, games: int) -> list[Job]:
    """One episode of each of a panel's fixed games, the same in every run of one eval_seed."""
    return [Job(task, n, (seed, PANEL, n)) for n, task in enumerate(panel_tasks(tasks, seed, games))]


def draw(sampling: SamplingConfig, dealer: Dealer) -> Drawn:
    """A step's episodes, as the method samples them."""
    match sampling:
        case CoBAConfig() | V0AllocationConfig():
            return _allocated(sampling, dealer)
        case V05Config():
            return _grown(sampling, dealer)
        case _:
            return _equal(sampling, dealer)


def _equal(config: DynamicSamplingConfig, d: Dealer) -> Drawn:
    """Groups of group_size; where more than one batch may be drawn, until as many groups are mixed as a batch has."""
    kept, played = [], []
    for batch in range(config.max_batches):
        tasks = d.deal(batch)
        jobs = [
            d.job(task, group, member)
            for group, task in enumerate(tasks, batch * len(tasks))
            for member in range(d.group_size)
        ]
        episodes = d.play(jobs)
        played += episodes
        if config.max_batches == 1:
            return Drawn(episodes, played)
        reward = torch.tensor([float(e.outcome if d.reward == "outcome" else e.total_reward) for e in episodes])
        mixed = mixed_groups(reward, torch.tensor([e.group for e in episodes]))
        kept += [e for e, keep in zip(episodes, mixed.tolist(), strict=True) if keep]
        if len(kept) >= len(jobs):
            break
        d.say(f"step {d.step + 1}: {len(kept) // d.group_size} of {len(tasks)} groups are mixed")
    return Drawn(kept[: len(jobs)] or episodes, played, batch + 1)


def _allocated(config: CoBAConfig | V0AllocationConfig, d: Dealer) -> Drawn:
    """As many rollouts as equal groups, allocated by what is known of the tasks; equal groups while nothing is."""
    tasks = d.deal(0)
    kinds = [d.kind(task) for task in tasks]
    rates = [d.history.rate(task.id, kind) for task, kind in zip(tasks, kinds, strict=True)]
    sizes, alpha, beta = [d.group_size] * len(tasks), None, None
    known = bool(d.history.values if isinstance(config, V0AllocationConfig) else d.history.success)
    if known and isinstance(config, V0AllocationConfig):
        sizes = v0.allocate(rates, sum(sizes), lo=config.lo, hi=config.hi)
    elif known:
        alpha, beta = coba.density_parameters(d.history.success, config)
        sizes = coba.allocate(
            rates, sum(sizes), lo=config.lo, hi=config.hi, alpha=alpha, beta=beta, tau=config.tau
        )  # fmt: skip
    jobs = [d.job(task, group, member) for group, task in enumerate(tasks) for member in range(sizes[group])]
    episodes = d.play(jobs)
    why = "allocated" if known else "equal"
    won = Counter(e.group for e in episodes if e.outcome)
    rows = [
        {
            "group": i, "task": task.id, "kind": kinds[i], "rate": rates[i], "rollouts": sizes[i], "why": why,
            "success": won[i] / sizes[i] if sizes[i] else None, "alpha": alpha, "beta": beta,
        }
        for i, task in enumerate(tasks)
    ]  # fmt: skip
    return Drawn(episodes, episodes, budget=rows)


def _grown(config: V05Config, d: Dealer) -> Drawn:
    """Groups that start alike and grow by one in each wave until they stop, of at most as many rollouts as equal ones.

    A step whose groups all stop early draws fewer.
    """
    tasks = d.deal(0)
    groups: list[list[Episode]] = [[] for _ in tasks]
    left = d.group_size * len(tasks)
    wave = [(g, m) for g in range(len(tasks)) for m in range(config.first)]
    while wave:
        for (g, _), episode in zip(wave, d.play([d.job(tasks[g], g, m) for g, m in wave]), strict=True):
            groups[g].append(episode)
        left -= len(wave)
        rates = [d.history.rate(own[0].task, own[0].kind) for own in groups]
        prior, mean, count = observed(rates, [[e.outcome for e in own] for own in groups])
        more, why = v05.next_wave(prior, mean, count, left, config)
        wave = [(g, len(groups[g])) for g in more]
    fused = v05.fuse(prior, mean, count)
    rows = [
        {
            "group": i, "task": own[0].task, "kind": own[0].kind, "rate": rates[i], "rollouts": len(own),
            "why": why[i], "success": sum(e.outcome for e in own) / len(own), "bias2": fused.bias2[i].item(),
            "weight": fused.weight[i].item(), "baseline": fused.baseline[i].item(),
        }
        for i, own in enumerate(groups)
    ]  # fmt: skip
    episodes = [e for own in groups for e in own]
    return Drawn(episodes, episodes, budget=rows)


def observed(
    rates: Sequence[float], outcomes: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expected rates and 0/1 outcomes of M groups -> prior and mean on the scale of -1 and 1, and count, each (M,)."""
    means = [sum(own) / len(own) for own in outcomes]
    prior, mean = (v05.prior_from_rate(torch.tensor(x, dtype=torch.float64)) for x in (rates, means))
    return prior, mean, torch.tensor([len(own) for own in outcomes])


def budget_frame(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """The table BUDGET of one step."""
    return pl.DataFrame(rows, schema=BUDGET)
