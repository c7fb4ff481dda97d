"""The fidelity of a run: its episodes' states restored and rolled on, and every signal scored against what they say."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from .. import envs, replay, shipped
from ..envs.base import Env, EnvBatch
from ..envs.memo import MemoEnv, Transitions
from ..errors import WorkbenchError, unknown
from ..policy import Policy
from ..records import Batch, Episode
from ..runs.folder import RunFolder, step_of
from ..settings import TrainConfig, from_parameters
from ..skills import SkillBank
from ..train import Trainer
from . import frames, signals
from .frames import Fidelity
from .rolls import Progress, Roller, roll
from .signals import TEACHERS, Signals
from .states import Restored, choose, restore
from .truth import THRESHOLD, Value, truth, values

FOLDER = "fidelity"  # in the run folder
GAMES = ("minesweeper", "rush_hour", "sokoban")
CHECKED = 32  # episodes whose recorded log-probs are scored again, to know whether the policy is the one that sampled


@dataclass(frozen=True)
class FidelityConfig:
    episodes: int = 200  # how many to value, whole groups as far as they go
    rolls: int = 16  # of every undecided state
    methods: tuple[str, ...] = ()  # names of methods.METHODS; none: all
    options: dict = field(default_factory=dict)  # {method: {option: value}}
    steps: tuple[int, ...] = ()  # training steps; none: those nearest to a policy that is there
    model: str = ""  # plays on instead of the run's own policy: a folder, a hub name or a shipped model
    teachers: tuple[str, ...] = TEACHERS  # skill texts under which methods that read a teacher are credited again
    live: int = 96  # games live at once
    seed: int = 0
    threshold: float = THRESHOLD  # of a pivotal turn's advantage

    def __post_init__(self):
        for name, least in (("episodes", 1), ("rolls", 2), ("live", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise WorkbenchError(f"fidelity: {name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.threshold <= 1:
            raise WorkbenchError(f"fidelity: threshold must lie in (0, 1], got {self.threshold}")
        for name in self.teachers:
            if name not in TEACHERS:
                raise unknown("teacher of fidelity", name, TEACHERS)
        signals.check_names(self.methods)


@dataclass(frozen=True, eq=False)
class _Part:
    """What one training step gives."""

    step: int
    numbers: list[int]
    episodes: list[Episode]
    restored: Restored
    paths: list[list[Value]]
    signals: Signals
    flags: list[int] | None
    policy_step: int | None
    gap: float


def measure(
    run: RunFolder,
    config: FidelityConfig = FidelityConfig(),
    message: Callable[[str], Any] = print,
    progress: Progress | None = None,
    keep: bool = True,
) -> Fidelity:
    """Value the states of recorded episodes by rolling the policy on from each, and score every signal.

    The policy is the checkpoint of the step that sampled the episodes, the one training began with at step 0, else the
    nearest that is there; `facts` say which and how far its log-probs are from those recorded. keep: rolls go to the
    run's folder `fidelity/`, where a second call finds them. progress: (rolls there are, rolls wanted) of a step.
    Raises WorkbenchError where the run has no contexts to go on from, no policy, or no episode that can be restored.
    """
    began = time.monotonic()
    for table in ("turns", "episodes"):
        if table not in run.tables:
            raise WorkbenchError(f"{run.path}: no {table} are recorded in it, so there is nothing to value")
    trainer = _trainer(run, config.model)
    policies = _policies(run, config.model)
    picked = _pick(run, policies, config)
    live = _envs(trainer.config, config.live)
    parts, excluded, left_out, rolled_states = [], {}, {}, 0
    for step, numbers in picked.items():
        at = _load(trainer, policies, step)
        part, gone, lacking, count = _part(run, trainer, live, step, numbers, at, config, message, progress, keep)
        excluded |= {f"step {step}, episode {n}": why for n, why in gone.items()}
        left_out |= lacking
        rolled_states += count
        if part.numbers:
            parts.append(part)
    live.close()
    if not parts:
        first = next(iter(excluded.items()))
        raise WorkbenchError(f"{run.path}: no episode could be restored; {first[0]}: {first[1]}")
    facts = {
        "run": run.path.name, "env": trainer.config.env, "method": trainer.config.method,
        "model": config.model or trainer.config.model, "rolls": config.rolls, "rolled_states": rolled_states,
        "policies": {str(p.step): p.policy_step for p in parts},
        "logprob_gap": max(p.gap for p in parts), "seconds": round(time.monotonic() - began, 1),
        "threshold": config.threshold, "left_out": left_out, "excluded": excluded,
    }  # fmt: skip
    return assemble(parts, facts, config)


def assemble(parts: Sequence[_Part], facts: Mapping[str, Any], config: FidelityConfig) -> Fidelity:
    """Score what the steps gave, together."""
    groups = [(p.step, e.group) for p in parts for e in p.episodes]
    names = {group: n for n, group in enumerate(dict.fromkeys(groups))}
    right = truth([path for p in parts for path in p.paths], [names[g] for g in groups])
    found = signals.joined([(p.signals, len(p.numbers)) for p in parts])
    flags = None if any(p.flags is None for p in parts) else np.array([n for p in parts for n in p.flags])
    solved = [p.restored.solver.get(n) for p in parts for n in p.numbers]
    rows = frames.score_rows(found, right, flags, solved, config.threshold, config.seed)
    heads = [(p.step, n, e, p.restored.paths[n]) for p in parts for n, e in zip(p.numbers, p.episodes, strict=True)]
    unsolved = {f"step {p.step}, episode {n}": why for p in parts for n, why in p.restored.unsolved.items()}
    facts = dict(facts) | {
        "episodes": len(heads), "groups": len(names), "turns": int(right.mask.sum()),
        "states": int(right.state_mask.sum()),
        "teacher_gains": frames.teacher_gains(found, right, config.seed),
        "unsolved": unsolved,
        "flags": "revisions beyond one deviation" if flags is not None else "as many as are pivotal",
    }  # fmt: skip
    return Fidelity(
        facts,
        frames.scores_frame(rows, facts["env"]),
        frames.reliability_frame(found, right, facts["env"], config.seed),
        frames.states_frame(heads, right),
        frames.turns_frame(heads, right, config.threshold),
        frames.credit_frame(heads, found, solved),
    )


def _part(
    run: RunFolder, trainer: Trainer, live: EnvBatch, step: int, numbers: list[int], at: int | None,
    config: FidelityConfig, message: Callable, progress: Progress | None, keep: bool,
) -> tuple[_Part, dict[int, str], dict[str, str], int]:  # fmt: skip
    """One step: restore, roll, credit. Also excluded episodes, left-out methods, and how many states were rolled."""
    c, policy = trainer.config, trainer.policy
    turns, heads = (run.scan(name).filter(pl.col("step") == step).collect() for name in ("turns", "episodes"))
    everything = replay.episodes_of(turns, heads, step, contexts=True)
    order = heads.sort("episode")["episode"].to_list()
    restored = restore(live.envs[0], {order[i]: everything[i] for i in numbers}, trainer.chat.style.history < 0)
    kept = [i for i in numbers if order[i] in restored.paths]
    episodes = [everything[i] for i in kept]
    where = "" if at == step else f", on from step {at}" if at is not None else f", by {config.model}"
    message(
        f"step {step}{where}: {len(kept)} episodes, {sum(len(e.turns) + 1 for e in episodes)} states, "
        f"{len(restored.places)} different ones that are not decided"
    )
    skilled = trainer.teacher if trainer.method.skills != "never" else None
    roller = Roller(policy, trainer.chat, live, trainer.limits, c.temperature, skilled, config.seed)
    folder = run.path / FOLDER / "rolls" / roller.digest() if keep else None
    needed = {key for i in kept for key in restored.paths[order[i]] if key in restored.places}
    rolled = roll(roller, [restored.places[key] for key in needed], config.rolls, folder, progress)
    known = values(rolled)
    found, left_out, flags, gap = {}, {}, None, 0.0
    if kept:
        solver = {i: restored.solver[order[i]] for i in kept if order[i] in restored.solver}
        own = signals.recorded(turns, heads, step, everything, kept, solver, c.reward)
        found, left_out, flags = signals.from_tables(own, turns, config.methods or None, config.options)
        gap = _logprob_gap(policy, episodes[:CHECKED], c.temperature)
        if trainer.scores_teacher and config.teachers:
            banks = signals.banks_of(trainer.teacher.bank, config.teachers, _other_bank(c.env))
            names, insert_at = signals.teacher_methods(config.methods), trainer.teacher.insert_at
            found |= signals.by_teacher(own, policy, banks, insert_at, names, config.options, c.temperature)
    paths = [[known[key] for key in restored.paths[order[i]]] for i in kept]
    part = _Part(step, [order[i] for i in kept], episodes, restored, paths, found, flags, at, gap)
    return part, restored.excluded, left_out, len(needed)


def _trainer(run: RunFolder, model: str) -> Trainer:
    """The run's policy, conversation, limits and teacher as its own training builds them."""
    if "env" not in run.config:
        raise WorkbenchError(f"{run.path}: its configuration names no environment, so no state can be restored")
    config = from_parameters(run.config)
    return Trainer(replace(config, model=model or config.model, live_episodes=1), run, lambda line: None)


def _policies(run: RunFolder, model: str) -> dict[int, Path | None]:
    """{step: checkpoint} of the policies that are there; None for the one that training began with."""
    if model:
        return {}
    found = {step_of(p): p for p in sorted(run.checkpoint_dir.glob("step=*")) if (p / "checkpoint.json").is_file()}
    return {0: None} | found


def _load(trainer: Trainer, policies: Mapping[int, Path | None], step: int) -> int | None:
    """Give the trainer's policy the weights nearest to those that sampled a step; returns which step they are of."""
    if not policies:
        return None
    nearest = min(policies, key=lambda s: (abs(s - step), s))
    path = policies[nearest]
    if path is not None:
        state = torch.load(path / "trainer.pt", map_location=trainer.policy.device, weights_only=True)
        trainer.policy.model.load_state_dict(state["model"])
    return nearest


def _pick(run: RunFolder, policies: Mapping[int, Path | None], config: FidelityConfig) -> dict[int, list[int]]:
    """{step: places of its episodes}: steps whose policy is there first, the latest of them first."""
    recorded = run.scan("turns").select("step").unique().collect()["step"].sort().to_list()
    if missing := [s for s in config.steps if s not in recorded]:
        raise WorkbenchError(f"turns: step {missing[0]} was not recorded; recorded: {', '.join(map(str, recorded))}")
    steps = list(dict.fromkeys(config.steps)) or sorted(
        recorded, key=lambda s: (min((abs(s - p) for p in policies), default=0), -s)
    )
    picked, left = {}, config.episodes
    for step in steps:
        heads = run.scan("episodes").filter(pl.col("step") == step).sort("episode").collect()
        picked[step] = choose(heads["group"].to_list(), left, config.seed)
        left -= len(picked[step])
        if left <= 0:
            break
    # The initial policy must be rolled before a checkpoint takes its place.
    return dict(sorted(picked.items()))


def _other_bank(env: str) -> SkillBank | None:
    """The skill texts of the next of the games that have but one kind each."""
    if env not in GAMES:
        return None
    return SkillBank.load(shipped.data("skills", GAMES[(GAMES.index(env) + 1) % len(GAMES)]))


def _envs(config: TrainConfig, live: int) -> EnvBatch:
    """Games to roll in. The Java engine's transitions are kept in memory, shared by all of them: rolls repeat them."""
    if config.env not in envs.TWX_GAMES:
        return envs.make(config.env, live, **config.env_options)
    known = Transitions()

    def engine() -> Env:
        return envs.make(config.env, 1, **config.env_options).envs[0]

    return EnvBatch([MemoEnv(engine, known) for _ in range(live)])


def _logprob_gap(policy: Policy, episodes: Sequence[Episode], temperature: float) -> float:
    """Mean distance of the policy's log-probs from those recorded, nats a token: rounding alone where it sampled."""
    batch = Batch.from_episodes(episodes, "auto", policy.pad_id).to(policy.device)
    scored, _ = policy.score_rows(batch.input_ids, batch.lengths, batch.response_mask, temperature)
    return float((scored - batch.old_logprobs)[batch.response_mask].abs().mean())
