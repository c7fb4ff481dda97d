"""How a Method's options become TRL's, and which of either cannot be kept: those are errors, never passed over."""

import copy
from dataclasses import fields
from typing import Any

from ..budget.dynamic_sampling import DynamicSamplingConfig
from ..composition import Method, make_gate
from ..errors import WorkbenchError
from ..loss import PolicyLossConfig
from ..reuse.controls import FixedReuseConfig
from ..rollout import Limits

LOSS_TYPES = {"episode_mean": "grpo", "token_mean": "dapo", "token_sum_norm": "dr_grpo"}  # a row is an episode

# Options of GRPOConfig that shape what the method, or the way games are played here, replaces.
_REPLACED = {
    "scale_rewards": "the method's own advantage", "reward_weights": "the environment's reward",
    "multi_objective_aggregation": "the environment's reward", "mask_truncated_completions": "the turns' own limits",
    "chat_template_kwargs": "the tokenizer's chat template as it is",
}  # fmt: skip
_OF_TRLS_LOSS = (
    "top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef", "use_adaptive_entropy", "router_aux_loss_coef",
)  # fmt: skip


def trl_loss(loss: PolicyLossConfig) -> dict[str, Any] | None:
    """The options of TRL's GRPOConfig that mean this policy loss, or None where it has none for it.

    Rows are episodes. TRL's loss has no bound on the log-ratio (ours: 20, of which exp is 5e8). An importance ratio of
    a whole row is another loss in TRL where tokens differ in advantage (it spreads them over the row), so it is ours.
    """
    if loss.ratio != "token" or loss.aggregation not in LOSS_TYPES or loss.engine_cap or loss.pg_coef != 1:
        return None
    return {
        "loss_type": LOSS_TYPES[loss.aggregation], "epsilon": loss.clip_low, "epsilon_high": loss.clip_high,
        "delta": loss.dual_clip or None, "importance_sampling_level": "token",
    }  # fmt: skip


def gated(method: Method) -> bool:
    """Whether something may discard an update or end the reuse of a batch early."""
    return not isinstance(method.reuse, FixedReuseConfig)


def check_groups(method: Method, engine: str) -> None:
    """Raise WorkbenchError where a step of a method is more than groups of one size, played and scored once."""
    where = f"method {method.name} under {engine}"
    equal = isinstance(method.sampling, DynamicSamplingConfig) and method.sampling.max_batches == 1
    if not equal:
        option = "max_batches = 1" if isinstance(method.sampling, DynamicSamplingConfig) else "dynamic = False"
        raise WorkbenchError(f"{where}: groups are of equal size and drawn once: set {option}")
    if method.reads_prior or method.values:
        raise WorkbenchError(f"{where}: success rates of past steps are not kept there")
    if method.verification:
        raise WorkbenchError(f"{where}: the policy is not asked about its attempts there: set schedule = 'generate'")


def check_method(method: Method) -> None:
    """Raise WorkbenchError where a method asks for what is not done under TRL."""
    check_groups(method, "TRL")
    if method.aux and method.aux.coef and method.aux.divergence:
        raise WorkbenchError(
            f"method {method.name} under TRL: its divergence needs whole distributions, and TRL's head gives log-probs"
        )


def fitted(args: Any, method: Method, limits: Limits) -> tuple[Any, bool]:
    """A copy of a GRPOConfig with the method's options in it, and whether TRL's own policy loss computes the method's.

    An option that is left at TRL's default takes the method's value; one that was set to something else is an error,
    as are options that would have no effect. Raises WorkbenchError naming the option and what it must be.
    """
    check_method(method)
    args, own = copy.copy(args), trl_loss(method.loss)
    defaults = {field.name: field.default for field in fields(args)}

    def refuse(name: str, why: str) -> None:
        raise WorkbenchError(f"GRPOConfig: {name} = {getattr(args, name)!r}, but {why}")

    for name, instead in _REPLACED.items():
        if getattr(args, name) not in (defaults[name], None, {}):
            refuse(name, f"it has no effect beside {instead}")
    if own is None:
        for name in _OF_TRLS_LOSS:
            if getattr(args, name) != defaults[name]:
                refuse(name, f"the policy loss of method {method.name} is not TRL's, and has no such option")
        if args.beta and args.use_bias_correction_kl:
            refuse("use_bias_correction_kl", "the KL of a policy loss that is not TRL's is plain k3: set it to False")
    if args.use_vllm and args.vllm_importance_sampling_correction and own is None:
        refuse("vllm_importance_sampling_correction", "this policy loss is not TRL's: set it to False, and engine_cap")
    wanted = {
        **({"loss_type": "grpo", "importance_sampling_level": "token"} if own is None else own),
        "num_iterations": method.reuse.max_reuse, "disable_dropout": True,
        "max_completion_length": limits.max_turns * limits.max_response_tokens,
    }  # fmt: skip
    for name, value in wanted.items():
        if getattr(args, name) not in (defaults[name], value):
            refuse(name, f"method {method.name} and the limits of play make it {value!r}")
        setattr(args, name, value)
    if args.max_steps <= 0:
        refuse("max_steps", "the games have no end, so it must say how many updates to make")
    if args.steps_per_generation != args.gradient_accumulation_steps:
        refuse("steps_per_generation", "an update takes its whole batch: gradient_accumulation_steps must equal it")
    if not args.max_grad_norm > 0:
        refuse("max_grad_norm", "updates are recorded where gradients are clipped: 1e9 clips none")
    if gated(method) and args.fp16:
        refuse("fp16", "a gate reads gradients, which are scaled there: use bf16")
    return args, own is not None


def own_sampling(args: Any) -> bool:
    """Whether a GRPOConfig asks for sampling that only TRL's own generation does."""
    shaped = args.top_p != 1 or args.top_k not in (0, None) or args.min_p is not None or args.repetition_penalty != 1
    return bool(args.use_vllm or args.use_transformers_continuous_batching or shaped or args.generation_kwargs)


def check_engine(method: Method, distributed: str, head_trains: bool, fsdp_version: int | None = None) -> None:
    """Raise WorkbenchError where a method's gate cannot see or drop a gradient.

    distributed: accelerate's DistributedType; head_trains: whether the output head has a gradient.
    """
    if not gated(method):
        return
    if distributed == "DEEPSPEED":
        raise WorkbenchError(f"method {method.name}: DeepSpeed steps before a gate is asked; use DDP or FSDP2")
    if fsdp_version == 1:
        raise WorkbenchError(f"method {method.name}: FSDP1 has no gradient of the head by itself; use FSDP2")
    if not head_trains and make_gate(method).statistic in ("energy", "norm"):
        raise WorkbenchError(f"method {method.name}: its gate watches the output head, which is frozen here")
