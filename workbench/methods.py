"""Published methods by name, each a few lines that compose a credit rule, losses, and a rule for reuse.

`method("agent_opsd", lam=0.25)` gives a Method; `options("agent_opsd")` lists what can be set, with defaults. Options
of the group advantage carry the prefix `advantage_`; the others are fields of the method's own configurations and of
its policy loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .budget.dynamic_sampling import DynamicSamplingConfig
from .composition import AnchorConfig, Method, Options, SkillPromptConfig, blend, rule_of
from .credit import agent_opsd, gigpo, grpo, reinforce_pp, rloo, rlsd, step_opsd
from .credit.grpo import GRPOConfig
from .distill import AuxLoss, opd, sdar, skill_sd
from .distill.opsd import OPSDConfig
from .errors import unknown
from .records import Batch, Credit
from .reuse.controls import FixedReuse, FixedReuseConfig, RandomStop, RandomStopConfig
from .reuse.dgg import DGGConfig, Gate


def _at_step(batch: Batch, step: int = 0, *, rule: Callable[..., Credit], config: Any) -> Credit:
    return rule(batch, config, step)


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


def _gspo(o: Options) -> Method:
    return replace(
        _grpo(o, ratio="turn", clip_low=3e-4, clip_high=4e-4, dual_clip=0.0, aggregation="turn_mean"),
        name="gspo",
        paper="arXiv 2507.18071",
        description="GRPO whose importance ratio is that of a whole turn, clipped within a much narrower band.",
        sees=OUTCOME_ONLY + " Off policy, a turn is kept or clipped as a whole.",
        off={"ratio": "token", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "episode_mean"},
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


def _with_aux(o: Options, aux: AuxLoss, pg_coef: float = 1.0, **named: Any) -> Method:
    off = {"coef": 0.0} | ({} if pg_coef == 1 else {"pg_coef": 1.0})
    return replace(_grpo(o, pg_coef=pg_coef), aux=aux, needs_teacher=True, off=off, **named)


def _sdar_loss(config: sdar.SDARConfig) -> AuxLoss:
    return AuxLoss(
        config.coef,
        lambda student, teacher, old, entropy: sdar.token_loss(student, teacher, config, entropy),
        lambda student, teacher, old, entropy: sdar.gradient_coefficient(student, teacher, config, entropy),
        gate=config,
    )


def _sdar(o: Options) -> Method:
    return _with_aux(
        o,
        _sdar_loss(o.take(sdar.SDARConfig())),
        name="sdar",
        paper="arXiv 2605.15155",
        description="GRPO plus a token distillation loss, gated by how far the privileged teacher is ahead.",
        sees="The policy loss sees the outcome alone; the gate tells tokens apart, whatever the outcome was. It raises "
        "every sampled token, less where the teacher disagrees.",
    )


def _grpo_opsd(o: Options) -> Method:
    return _with_aux(
        o,
        _sdar_loss(o.take(sdar.SDARConfig(beta=0.0), only=("coef",))),
        name="grpo_opsd",
        paper="arXiv 2605.15155 (baseline, beta = 0)",
        description="GRPO plus the distillation loss with every gate half open; its expected gradient on policy is 0.",
        sees="The policy loss sees the outcome alone; the other raises every sampled token alike.",
    )


def _skill_sd(o: Options) -> Method:
    config = o.take(skill_sd.SkillSDConfig())
    aux = AuxLoss(
        config.coef,
        lambda student, teacher, old, entropy: skill_sd.token_loss(student, teacher, old, config),
        lambda student, teacher, old, entropy: skill_sd.gradient_coefficient(student, teacher, old, config),
    )
    return _with_aux(
        o,
        aux,
        name="skill_sd",
        paper="arXiv 2604.10674",
        description="GRPO plus an importance-weighted estimate of the reverse KL to the privileged teacher.",
        sees="The policy loss sees the outcome alone; the other tells tokens apart by the teacher alone.",
    )


def _opd(o: Options) -> Method:
    config = o.take(opd.OPDConfig())
    aux = AuxLoss(
        config.coef,
        lambda student, teacher, old, entropy: opd.token_loss(student, teacher, config),
        lambda student, teacher, old, entropy: opd.gradient_coefficient(student, teacher, config),
    )
    return _with_aux(
        o,
        aux,
        pg_coef=0.0,
        name="opd",
        paper="thinkingmachines.ai/blog/on-policy-distillation",
        description="Distillation alone: a policy gradient whose reward is the privileged teacher's log-prob gap.",
        sees="Tells tokens apart by the teacher; the outcome plays no part.",
    )


def _opsd(o: Options) -> Method:
    config = o.take(OPSDConfig())
    return _with_aux(
        o,
        AuxLoss(config.coef, divergence=config),
        pg_coef=0.0,
        name="opsd",
        paper="arXiv 2601.18734",
        description="Distillation alone: a divergence from the privileged teacher over the whole vocabulary.",
        sees="Compares whole distributions at every token, unsampled words too; the outcome plays no part.",
    )


def _skill_grpo(o: Options) -> Method:
    return replace(
        _grpo(o),
        name="skill_grpo",
        paper="arXiv 2605.15155 (baseline)",
        description="GRPO whose student reads the skill text while it trains, and plays without it when evaluated.",
        sees=OUTCOME_ONLY,
        skills=o.take(SkillPromptConfig("training")).skills,
        off={"skills": "never"},
    )


def _skill_grpo_star(o: Options) -> Method:
    return replace(
        _grpo(o),
        name="skill_grpo_star",
        paper="arXiv 2605.15155 (baseline, starred)",
        description="GRPO whose student reads the skill text both while it trains and when it is evaluated.",
        sees=OUTCOME_ONLY,
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
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "dapo": _dapo,
    "gspo": _gspo,
    "gigpo": _gigpo,
    "agent_opsd": _agent_opsd,
    "rlsd": _rlsd,
    "step_opsd": _step_opsd,
    "sdar": _sdar,
    "grpo_opsd": _grpo_opsd,
    "skill_sd": _skill_sd,
    "opd": _opd,
    "opsd": _opsd,
    "skill_grpo": _skill_grpo,
    "skill_grpo_star": _skill_grpo_star,
    "grpo_dgg": _grpo_dgg,
    "agent_opsd_dgg": _agent_opsd_dgg,
    "grpo_reuse": _grpo_reuse,
    "grpo_random_stop": _grpo_random_stop,
}


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


def make_gate(method: Method, seed: int = 0) -> Gate | FixedReuse | RandomStop:
    """The stateful object that decides about every computed gradient: `observe(energy, reuse) -> Decision`."""
    match method.reuse:
        case DGGConfig():
            return Gate(method.reuse)
        case RandomStopConfig():
            return RandomStop(method.reuse, seed)
        case _:
            return FixedReuse(method.reuse)
