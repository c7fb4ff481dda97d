"""The methods that distil the privileged teacher by a loss of its own, beside GRPO's policy loss or in its place."""

from typing import Any

from .composition import Method, Options, rule_of
from .credit import grpo
from .credit.grpo import GRPOConfig
from .distill import AuxLoss, opd, sdar, skill_sd
from .distill.dear import DEARConfig
from .distill.opsd import OPSDConfig


def _with_aux(o: Options, aux: AuxLoss, pg_coef: float = 1.0, **named: Any) -> Method:
    off = {"coef": 0.0} | ({} if pg_coef == 1 else {"pg_coef": 1.0})
    return Method(
        credit=rule_of(grpo.credit, o.take(GRPOConfig(), "advantage_")),
        loss=o.loss(pg_coef=pg_coef),
        off=off,
        aux=aux,
        needs_teacher=True,
        **named,
    )


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


def _dear(o: Options) -> Method:
    own = o.take(DEARConfig())
    return _with_aux(
        o,
        AuxLoss(own.coef, divergence=OPSDConfig(own.coef, beta=1.0, teacher=own.teacher), keep=own),
        pg_coef=0.0,
        name="dear",
        paper="arXiv 2606.22830",
        description="Distillation alone: the reverse KL to the teacher where a turn decides and at what that rests on.",
        sees="Compares whole distributions at the tokens it keeps; the outcome plays no part.",
    )


DISTILLED = (_sdar, _grpo_opsd, _skill_sd, _opd, _opsd, _dear)
