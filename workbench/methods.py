"""Published methods by name: each composes a credit rule, perhaps an auxiliary loss, and a rule for reuse.

`method("agent_opsd", lam=0.25)` gives a Method; `options("agent_opsd")` lists what can be set, with defaults. Options
of the group advantage carry the prefix `advantage_`, the others are fields of the method's own configurations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

from .credit import agent_opsd, grpo
from .credit.agent_opsd import AgentOPSDConfig
from .credit.grpo import GRPOConfig
from .distill.sdar import SDARConfig
from .errors import WorkbenchError, unknown
from .records import Batch, Credit
from .reuse.controls import FixedReuse, FixedReuseConfig, RandomStop, RandomStopConfig
from .reuse.dgg import DGGConfig, Gate

ReuseConfig = DGGConfig | FixedReuseConfig | RandomStopConfig
Config = TypeVar("Config")


@dataclass(frozen=True)
class Method:
    """credit: Batch -> Credit. aux: configuration of the auxiliary token loss (distill/sdar.py), or None.

    reuse: how often a batch is used and what may stop it. needs_teacher: whether batches must hold teacher log-probs.
    """

    name: str
    paper: str
    credit: Callable[[Batch], Credit]
    aux: SDARConfig | None
    reuse: ReuseConfig
    needs_teacher: bool
    description: str


class _Options:
    """Given options on their way into configurations; remembers every name that could have been given."""

    def __init__(self, name: str, given: Mapping[str, Any]):
        self.name, self.given = name, given
        self.known: dict[str, Any] = {}

    def take(self, config: Config, prefix: str = "", only: tuple[str, ...] | None = None) -> Config:
        """`config` with the given options in place of its fields; `only` restricts which fields are options."""
        changes = {}
        for field in fields(config):
            default = getattr(config, field.name)
            if isinstance(default, GRPOConfig) or (only is not None and field.name not in only):
                continue
            self.known[prefix + field.name] = default
            if prefix + field.name in self.given:
                changes[field.name] = self._typed(prefix + field.name, default)
        return replace(config, **changes)

    def advantage(self) -> GRPOConfig:
        return self.take(GRPOConfig(), "advantage_")

    def _typed(self, name: str, default: Any) -> Any:
        value, kind = self.given[name], type(default)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise WorkbenchError(
                f"option {name} of method {self.name!r} must be {kind.__name__} (default {default!r}), got {value!r}"
            )
        return value


def _grpo(o: _Options) -> Method:
    return Method(
        name="grpo",
        paper="arXiv 2402.03300",
        credit=partial(grpo.credit, config=o.advantage()),
        aux=None,
        reuse=FixedReuseConfig(max_reuse=1),
        needs_teacher=False,
        description="Every token of a trajectory gets the trajectory's reward against its group's mean.",
    )


def _agent_opsd(o: _Options) -> Method:
    config = replace(o.take(AgentOPSDConfig()), grpo=o.advantage())
    return Method(
        name="agent_opsd",
        paper="arXiv 2608.05987",
        credit=partial(agent_opsd.credit, config=config),
        aux=None,
        reuse=FixedReuseConfig(max_reuse=1),
        needs_teacher=True,
        description="Turns that move a privileged self-teacher's belief towards the outcome weigh more, within a band.",
    )


def _sdar(o: _Options) -> Method:
    return replace(
        _grpo(o),
        name="sdar",
        paper="arXiv 2605.15155",
        aux=o.take(SDARConfig()),
        needs_teacher=True,
        description="GRPO plus a token distillation loss, gated by how far the privileged teacher is ahead.",
    )


def _grpo_opsd(o: _Options) -> Method:
    return replace(
        _grpo(o),
        name="grpo_opsd",
        paper="arXiv 2605.15155 (baseline, beta = 0)",
        aux=o.take(SDARConfig(beta=0.0), only=("coef",)),
        needs_teacher=True,
        description="GRPO plus the distillation loss with every gate half open; its expected gradient on policy is 0.",
    )


def _grpo_dgg(o: _Options) -> Method:
    return replace(
        _grpo(o),
        name="grpo_dgg",
        paper="arXiv 2605.19425",
        reuse=o.take(DGGConfig()),
        description="GRPO that reuses a batch until the output head's gradient energy jumps.",
    )


def _agent_opsd_dgg(o: _Options) -> Method:
    return replace(
        _agent_opsd(o),
        name="agent_opsd_dgg",
        paper="arXiv 2608.05987 with arXiv 2605.19425",
        reuse=o.take(DGGConfig()),
        description="AgentOPSD credit, with a batch reused until the output head's gradient energy jumps.",
    )


def _grpo_reuse(o: _Options) -> Method:
    return replace(
        _grpo(o),
        name="grpo_reuse",
        paper="arXiv 2605.19425 (baseline)",
        reuse=o.take(FixedReuseConfig()),
        description="GRPO that uses every batch a fixed number of times: the control without a gate.",
    )


def _grpo_random_stop(o: _Options) -> Method:
    return replace(
        _grpo(o),
        name="grpo_random_stop",
        paper="control for arXiv 2605.19425",
        reuse=o.take(RandomStopConfig()),
        description="GRPO with reuse that stops at random, at a gate's rate: the control for the gate's timing.",
    )


METHODS: dict[str, Callable[[_Options], Method]] = {
    "grpo": _grpo,
    "agent_opsd": _agent_opsd,
    "sdar": _sdar,
    "grpo_opsd": _grpo_opsd,
    "grpo_dgg": _grpo_dgg,
    "agent_opsd_dgg": _agent_opsd_dgg,
    "grpo_reuse": _grpo_reuse,
    "grpo_random_stop": _grpo_random_stop,
}


def _build(name: str, given: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    if name not in METHODS:
        raise unknown("method", str(name), METHODS)
    taken = _Options(name, given)
    built = METHODS[name](taken)
    for option in given:
        if option not in taken.known:
            raise unknown(f"option of method {name!r}", option, taken.known)
    return built, taken.known


def method(name: str, **options: Any) -> Method:
    """The method of that name. Raises WorkbenchError on an unknown name or option, an ill-typed or impossible value."""
    return _build(name, options)[0]


def options(name: str) -> dict[str, Any]:
    """The options a method accepts, with their defaults."""
    return _build(name, {})[1]


def make_gate(method: Method, seed: int = 0) -> Gate | FixedReuse | RandomStop:
    """The stateful object that decides about every computed gradient: `observe(energy, reuse) -> Decision`."""
    match method.reuse:
        case DGGConfig():
            return Gate(method.reuse)
        case RandomStopConfig():
            return RandomStop(method.reuse, seed)
        case _:
            return FixedReuse(method.reuse)
