"""Published methods by name, each a few lines that compose a credit rule, losses, and a rule for reuse.

`method("agent_opsd", lam=0.25)` gives a Method; `options("agent_opsd")` lists what can be set, with defaults: fields
of the method's own configurations and its policy loss, and with the prefix `advantage_` those of the group advantage.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .budget import v05
from .budget.coba import CoBAConfig
from .budget.dynamic_sampling import DynamicSamplingConfig
from .budget.history import HistoryConfig
from .budget.v0 import V0AllocationConfig, V0Config
from .composition import EQUAL_GROUPS, AnchorConfig, BlendConfig, Method, Options, SkillPromptConfig, blend, rule_of
from .credit import agent_opsd, cast, gigpo, grpo, reinforce_pp, rloo, rlsd, step_opsd
from .credit.grpo import GRPOConfig
from .errors import unknown
from .methods_distill import DISTILLED
from .records import Batch, Credit
from .reuse.controls import FixedReuseConfig, RandomStopConfig
from .reuse.dgg import DGGConfig
from .verification import VerificationConfig


def _at_step(batch: Batch, step: int = 0, *, rule: Callable[..., Credit], config: Any) -> Credit:
    return rule(batch, config, step)


def _where_it_generates(batch: Batch, step: int = 0, *, rule: Callable[..., Credit], config: Any) -> Credit:
    credit = rule(batch, step)
    if config.plan.generates(step):
        return credit
    return Credit(
        torch.zeros_like(credit.advantages), {name: torch.zeros_like(each) for name, each in credit.turns.items()}
    )


OUTCOME_ONLY = "Sees the outcome alone: every turn and token of an episode gets the same credit."


def _grpo(o: Options, **loss: Any) -> Method:
    return Method(
        name="grpo",
        paper="arXiv 2402.03300",
        description="Every token of a trajectory gets the trajectory's reward against its group's mean.",
        sees=OUTCOME_ONLY,
        credit=rule_of(grpo.credit, o.take(GRPOConfig(), "advantage_")),
        loss=o.loss(**loss),
        off={},
    )


def _dr_grpo(o: Options) -> Method:
    return Method(
        name="dr_grpo",
        paper="arXiv 2503.20783",
        description="GRPO without its two normalisers: no division by the deviation, none by the episode's own length.",
        sees=OUTCOME_ONLY,
        credit=rule_of(grpo.credit, o.take(GRPOConfig(std=False), "advantage_")),
        loss=o.loss(aggregation="token_sum_norm"),
        off={"advantage_std": True, "aggregation": "episode_mean"},
    )


def _rloo(o: Options) -> Method:
    return Method(
        name="rloo",
        paper="arXiv 2402.14740",
        description="A trajectory's reward against the mean of the others in its group, not scaled by their deviation.",
        sees=OUTCOME_ONLY,
        credit=blend(o, rloo.credit, rloo.RLOOConfig()),
        loss=o.loss(),
        off={"share": 0.0},
    )


def _reinforce_pp_baseline(o: Options) -> Method:
    return Method(
        name="reinforce_pp_baseline",
        paper="arXiv 2501.03262",
        description="Reward less its group's mean, whitened over the whole batch instead of each group.",
        sees=OUTCOME_ONLY + " An episode of a group without any signal can get some, from the batch's mean.",
        credit=blend(o, reinforce_pp.credit, reinforce_pp.ReinforcePPConfig()),
        loss=o.loss(),
        off={"share": 0.0},
    )


def _dapo(o: Options) -> Method:
    return replace(
        _grpo(o, clip_high=0.28, aggregation="token_mean"),
        name="dapo",
        paper="arXiv 2503.14476",
        description="GRPO with a wider upper clip, a mean over all tokens, and groups of equal rewards drawn again.",
        sees=OUTCOME_ONLY + " A group of equal rewards is replaced instead of trained on.",
        sampling=o.take(DynamicSamplingConfig()),
        off={"clip_high": 0.2, "aggregation": "episode_mean", "max_batches": 1},
    )


def _v05(o: Options) -> Method:
    config, share = o.take(v05.V05Config()), o.take(BlendConfig()).share
    history = o.take(HistoryConfig())
    return Method(
        name="v05",
        paper="arXiv 2603.10848",
        description="Outcome less a rate expected beforehand, unless the rollouts contradict it; groups grow until one "
        "more would tell little.",
        sees=OUTCOME_ONLY + " A group of equal outcomes gets credit too where the prior expected another.",
        credit=blend(o, v05.credit, config),
        loss=o.loss(),
        sampling=config if config.dynamic else EQUAL_GROUPS,
        history=history,
        reads_prior=share > 0,
        values=V0Config() if history.prior == "v0" else None,
        off={"share": 0.0, "dynamic": False},
    )


def _coba(o: Options) -> Method:
    config = o.take(CoBAConfig())
    return replace(
        _grpo(o),
        name="coba",
        paper="arXiv 2602.03048",
        description="GRPO whose step gives more rollouts to tasks that the policy, as strong as it is, learns most "
        "from.",
        sees=OUTCOME_ONLY + " What a task gets to see of itself depends on its past success.",
        sampling=config if config.dynamic else EQUAL_GROUPS,
        history=o.take(HistoryConfig(), only=("memory", "strength")),
        off={"dynamic": False},
    )


def _v0(o: Options) -> Method:
    config, values = o.take(V0AllocationConfig()), o.take(V0Config())
    return replace(
        _grpo(o),
        name="v0",
        paper="arXiv 2602.03584 (head: logistic regression or nearest neighbours, not TabPFN; allocation exact)",
        description="GRPO whose step gives more rollouts to tasks that its outcomes on similar texts value lower, as "
        "far as enough wins are to be expected.",
        sees=OUTCOME_ONLY + " What a task gets to see of itself depends on how tasks that read alike went lately.",
        sampling=config if config.dynamic else EQUAL_GROUPS,
        history=HistoryConfig(prior="v0"),
        values=values if config.dynamic else None,
        off={"dynamic": False},
    )


def _gspo(o: Options) -> Method:
    return replace(
        _grpo(o, ratio="turn", clip_low=3e-4, clip_high=4e-4, dual_clip=0.0, aggregation="turn_mean"),
        name="gspo",
        paper="arXiv 2507.18071",
        description="GRPO whose importance ratio is that of a whole turn, clipped within a much narrower band.",
        sees=OUTCOME_ONLY + " Off policy, a turn is kept or clipped as a whole.",
        off={"ratio": "token", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "episode_mean"},
    )


def _dora(o: Options) -> Method:
    # The report prints none of its bounds: these are those of DAPO, of dual clip and of truncated importance sampling.
    return replace(
        _grpo(o, clip_high=0.28, engine_cap=2.0, aggregation="token_sum_norm"),
        name="dora",
        paper="arXiv 2509.18883, eq. 4",
        description="GRPO with three clips, a weight for what sampling and training engine differ by, one normaliser.",
        off={"clip_high": 0.2, "engine_cap": 0.0, "aggregation": "episode_mean"},
    )


def _self_verification(o: Options) -> Method:
    config, plain = o.take(VerificationConfig()), _grpo(o)
    return replace(
        plain,
        name="self_verification",
        paper="arXiv 2602.07594",
        description="GRPO that also trains the policy to say whether its own attempts succeeded.",
        sees=OUTCOME_ONLY + " An answer to a question about an attempt is credited apart, within its own group.",
        credit=partial(_where_it_generates, rule=plain.credit, config=config),
        verification=None if config.schedule == "generate" else config,
        off={"schedule": "generate"},
    )


def _gigpo(o: Options) -> Method:
    anchor = o.take(AnchorConfig())
    return Method(
        name="gigpo",
        paper="arXiv 2505.10978",
        description="The group advantage, plus how a turn fared against other turns taken in the same state.",
        sees="Compares turns only where a group met the same observation twice; elsewhere it sees the outcome alone.",
        credit=rule_of(gigpo.credit, o.take(gigpo.GiGPOConfig())),
        loss=o.loss(),
        anchors=partial(gigpo.anchors, similarity=anchor.similarity),
        off={"weight": 0.0},
    )


def _cast(o: Options) -> Method:
    config = o.take(cast.CASTConfig())
    return Method(
        name="cast",
        paper="arXiv 2607.25308",
        description="The group advantage, plus a share of what an exact solver says that each turn won or lost.",
        sees="Tells every turn apart by the fewest actions left to a win, not tokens within a turn; only where an "
        "environment has an exact solver. A wasted turn keeps the outcome's credit.",
        credit=rule_of(cast.credit, config),
        loss=o.loss(clip_high=0.28, aggregation="token_mean"),
        needs_solver=config.alpha > 0,
        off={"alpha": 0.0, "advantage_eps": 1e-6, "clip_high": 0.2, "aggregation": "episode_mean"},
    )


def _agent_opsd(o: Options) -> Method:
    return Method(
        name="agent_opsd",
        paper="arXiv 2608.05987",
        description="Turns that move a privileged self-teacher's belief towards the outcome weigh more, within a band.",
        sees="Tells turns apart by the teacher's log-probs, not tokens within a turn; once the belief is saturated, or "
        "where the skill text says nothing about an action, every turn looks alike.",
        credit=rule_of(agent_opsd.credit, o.take(agent_opsd.AgentOPSDConfig())),
        loss=o.loss(),
        needs_teacher=True,
        off={"lam": 0.0},
    )


def _rlsd(o: Options) -> Method:
    config = o.take(rlsd.RLSDConfig())
    return Method(
        name="rlsd",
        paper="arXiv 2604.03128",
        description="The outcome's sign, with each token weighed by how far the privileged teacher agrees with it.",
        sees="Tells tokens apart by the teacher's log-probs, each for itself: it adds up nothing over a turn.",
        credit=partial(_at_step, rule=rlsd.credit, config=config),
        loss=o.loss(),
        needs_teacher=True,
        off={"lam": 0.0},
    )


def _step_opsd(o: Options) -> Method:
    return Method(
        name="step_opsd",
        paper="arXiv 2605.27140 (form inferred from the abstract)",
        description="Token weights from the teacher's log-probs, scaled so that every turn keeps its share of credit.",
        sees="Tells tokens apart within a turn, and by construction never one turn from another.",
        credit=rule_of(step_opsd.credit, o.take(step_opsd.StepOPSDConfig())),
        loss=o.loss(),
        needs_teacher=True,
        off={"lam": 0.0},
    )


def _skill_grpo(o: Options) -> Method:
    return replace(
        _grpo(o),
        name="skill_grpo",
        paper="arXiv 2605.15155 (baseline)",
        description="GRPO whose student reads the skill text while it trains, and plays without it when evaluated.",
        skills=o.take(SkillPromptConfig("training")).skills,
        off={"skills": "never"},
    )


def _skill_grpo_star(o: Options) -> Method:
    return replace(
        _grpo(o),
        name="skill_grpo_star",
        paper="arXiv 2605.15155 (baseline, starred)",
        description="GRPO whose student reads the skill text both while it trains and when it is evaluated.",
        skills=o.take(SkillPromptConfig("always")).skills,
        off={"skills": "never"},
    )


def _grpo_dgg(o: Options) -> Method:
    return replace(
        _grpo(o),
        name="grpo_dgg",
        paper="arXiv 2605.19425",
        description="GRPO that reuses a batch until the output head's gradient energy jumps.",
        sees=OUTCOME_ONLY + " The gate sees the update, not who earned it.",
        reuse=o.take(DGGConfig()),
        off={"max_reuse": 1},
    )


def _agent_opsd_dgg(o: Options) -> Method:
    method = _agent_opsd(o)
    return replace(
        method,
        name="agent_opsd_dgg",
        paper="arXiv 2608.05987 with arXiv 2605.19425",
        description="AgentOPSD credit, with a batch reused until the output head's gradient energy jumps.",
        reuse=o.take(DGGConfig()),
        off=method.off | {"max_reuse": 1},
    )


def _grpo_reuse(o: Options) -> Method:
    return replace(
        _grpo(o),
        name="grpo_reuse",
        paper="arXiv 2605.19425 (baseline)",
        description="GRPO that uses every batch a fixed number of times: the control without a gate.",
        reuse=o.take(FixedReuseConfig()),
        off={"max_reuse": 1},
    )


def _grpo_random_stop(o: Options) -> Method:
    return replace(
        _grpo(o),
        name="grpo_random_stop",
        paper="control for arXiv 2605.19425",
        description="GRPO with reuse that stops at random, at a gate's rate: the control for the gate's timing.",
        reuse=o.take(RandomStopConfig()),
        off={"max_reuse": 1},
    )


METHODS: dict[str, Callable[[Options], Method]] = {
    build.__name__.removeprefix("_"): build
    for build in (
        _grpo, _dr_grpo, _rloo, _reinforce_pp_baseline, _dapo, _gspo, _dora, _v05, _coba, _v0, _self_verification,
        _gigpo, _cast, _agent_opsd, _rlsd, _step_opsd, *DISTILLED, _skill_grpo, _skill_grpo_star, _grpo_dgg,
        _agent_opsd_dgg, _grpo_reuse, _grpo_random_stop,
    )
}  # fmt: skip


def _build(name: str, given: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    if name not in METHODS:
        raise unknown("method", str(name), METHODS)
    taken = Options(name, given)
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
