"""What a method is composed of, and how its options reach the configurations of its parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .budget.coba import CoBAConfig
from .budget.dynamic_sampling import DynamicSamplingConfig
from .budget.history import HistoryConfig
from .budget.v0 import V0AllocationConfig, V0Config
from .budget.v05 import V05Config
from .credit import grpo
from .credit.grpo import GRPOConfig
from .distill import AuxLoss
from .errors import WorkbenchError, unknown
from .loss import PolicyLossConfig
from .records import Batch, Credit, Episode
from .reuse.controls import FixedReuse, FixedReuseConfig, RandomStop, RandomStopConfig
from .reuse.dgg import DGGConfig, Gate
from .verification import VerificationConfig

ReuseConfig = DGGConfig | FixedReuseConfig | RandomStopConfig
Config = TypeVar("Config")
EQUAL_GROUPS = DynamicSamplingConfig(max_batches=1)


@dataclass(frozen=True)
class SkillPromptConfig:
    skills: str = "never"  # when the student reads the skill text in its own prompt: "never", "training" or "always"

    def __post_init__(self):
        if self.skills not in ("never", "training", "always"):
            raise unknown("skills in the student's prompt", str(self.skills), ("never", "training", "always"))


@dataclass(frozen=True)
class AnchorConfig:
    similarity: float = 1.0  # texts of one state: 1 the same text, else difflib's ratio at least this (released: .95)

    def __post_init__(self):
        if not 0 < self.similarity <= 1:
            raise WorkbenchError(f"GiGPO: similarity must lie in (0, 1], got {self.similarity}")


@dataclass(frozen=True)
class BlendConfig:
    share: float = 1.0  # of the method's own advantage; the rest is GRPO's

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise WorkbenchError(f"share must lie in [0, 1], got {self.share}")


@dataclass(frozen=True)
class Method:
    """credit: (batch, training step) -> Credit. loss: the policy loss. aux: an auxiliary loss beside it, or None.

    description: what it does; sees: what its credit can and cannot tell apart; off: options that make it GRPO exactly.
    reuse: how often a batch is used and what may stop it. needs_teacher: whether batches must hold teacher log-probs;
    needs_solver: whether an exact solver's advantages of turns. anchors: episodes -> Batch.anchors, where the rule
    compares states. sampling: which groups are kept, or how large each is. history: how success rates of past steps
    are kept, where sampling or credit reads them; reads_prior: whether credit does, as Batch.prior_rate; values: how V0
    predicts them instead, where it does. skills: when the student itself reads the skill text, "never", "training" or
    "always". verification: how the policy is also trained to judge its own attempts, or None.
    """

    name: str
    paper: str
    description: str
    sees: str
    credit: Callable[..., Credit]
    loss: PolicyLossConfig
    off: dict[str, Any]
    aux: AuxLoss | None = None
    reuse: ReuseConfig = FixedReuseConfig(max_reuse=1)
    needs_teacher: bool = False
    needs_solver: bool = False
    anchors: Callable[[Sequence[Episode]], Tensor] | None = None
    sampling: DynamicSamplingConfig | CoBAConfig | V05Config | V0AllocationConfig = EQUAL_GROUPS
    history: HistoryConfig | None = None
    reads_prior: bool = False
    values: V0Config | None = None
    skills: str = "never"
    verification: VerificationConfig | None = None


class Options:
    """Given options on their way into configurations; remembers every name that could have been given."""

    def __init__(self, name: str, given: Mapping[str, Any]):
        self.name, self.given = name, given
        self.known: dict[str, Any] = {}

    def take(self, config: Config, prefix: str = "", only: tuple[str, ...] | None = None) -> Config:
        """`config` with the given options in place of its fields; `only` restricts which fields are options."""
        changes = {}
        for each in fields(config):
            default = getattr(config, each.name)
            if isinstance(default, GRPOConfig):
                changes[each.name] = self.take(default, "advantage_")
                continue
            if only is not None and each.name not in only:
                continue
            self.known[prefix + each.name] = default
            if prefix + each.name in self.given:
                changes[each.name] = self._typed(prefix + each.name, default)
        return replace(config, **changes)

    def loss(self, **defaults: Any) -> PolicyLossConfig:
        return self.take(PolicyLossConfig(**defaults))

    def _typed(self, name: str, default: Any) -> Any:
        value, kind = self.given[name], type(default)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise WorkbenchError(
                f"option {name} of method {self.name!r} must be {kind.__name__} (default {default!r}), got {value!r}"
            )
        return value


def _same_at_every_step(batch: Batch, step: int = 0, *, rule: Callable[..., Credit], config: Any) -> Credit:
    return rule(batch, config)


def rule_of(rule: Callable[..., Credit], config: Any) -> Callable[..., Credit]:
    """A credit rule with its configuration, for (batch, training step); most rules are the same at every step."""
    return partial(_same_at_every_step, rule=rule, config=config)


def _blended(
    batch: Batch, step: int = 0, *, rule: Callable[..., Credit], config: Any, group: GRPOConfig, share: float
) -> Credit:
    if share == 1:
        return rule(batch, config)
    plain = grpo.credit(batch, group)
    if share == 0:
        return plain
    own = rule(batch, config)
    turns = torch.lerp(plain.turns["turn_advantage"], own.turns["turn_advantage"], share)
    return Credit(batch.to_tokens(turns), {"turn_advantage": turns})


def blend(o: Options, rule: Callable[..., Credit], config: Any) -> Callable[..., Credit]:
    """A rule that replaces GRPO's advantage, or only a share of it."""
    share = o.take(BlendConfig()).share
    return partial(_blended, rule=rule, config=o.take(config), group=GRPOConfig(), share=share)


def make_gate(method: Method, seed: int = 0) -> Gate | FixedReuse | RandomStop:
    """The stateful object that decides about every computed gradient: `observe(energy, reuse) -> Decision`."""
    match method.reuse:
        case DGGConfig():
            return Gate(method.reuse)
        case RandomStopConfig():
            return RandomStop(method.reuse, seed)
        case _:
            return FixedReuse(method.reuse)
