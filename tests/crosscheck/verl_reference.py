"""verl's core algorithms on given tensors: JSON on stdin, JSON on stdout. Runs where verl is installed, without ours.

In: dtype, old, logp, reference, advantages, mask (B,T), rewards (B,), group (B,), clip_low, clip_high, clip_c, scale.
Out: for each name, "value", and where it is a loss "gradient" (B,T) for the log-probs.
"""

import contextlib
import json
import sys

import numpy as np
import torch

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def compute(given: dict) -> dict[str, dict]:
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    dtype = getattr(torch, given["dtype"])
    tensors = ("old", "logp", "reference", "advantages", "mask", "rewards")
    old, logp, reference, advantages, mask, rewards = (torch.tensor(given[name], dtype=dtype) for name in tensors)
    index = np.array(given["group"])
    results = {}

    last = torch.arange(mask.shape[1]).mul(mask).argmax(1)
    token_rewards = torch.zeros_like(mask).scatter(1, last[:, None], rewards[:, None])
    estimators = {
        "grpo": (core_algos.compute_grpo_outcome_advantage, {}),
        "dr_grpo": (core_algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        "rloo": (core_algos.compute_rloo_outcome_advantage, {}),
        "reinforce_pp_baseline": (core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage, {}),
    }
    for name, (estimator, options) in estimators.items():
        # the estimators write into the sums of what they are given
        values, _ = estimator(token_rewards.clone(), mask, index=index, **options)
        results[name] = {"value": values.tolist()}

    def record(name, loss):
        at = logp.clone().requires_grad_()
        value = loss(at)
        (gradient,) = torch.autograd.grad(value.sum(), at)
        results[name] = {"value": value.tolist(), "gradient": gradient.tolist()}

    for mode in MODES:
        scale = {"loss_scale_factor": given["scale"]} if mode.endswith("norm") else {}
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=given["clip_low"],
            clip_ratio_high=given["clip_high"],
            clip_ratio_c=given["clip_c"],
            loss_agg_mode=mode,
            global_batch_info=scale,
        )
        for kind in ("vanilla", "gspo"):
            policy_loss = core_algos.get_policy_loss_fn(kind)
            record(f"{kind} {mode}", lambda at: policy_loss(old, at, advantages, mask, mode, config)[0])  # noqa: B023
        record(f"agg_loss {mode}", lambda at: core_algos.agg_loss(at, mask, mode, **scale))  # noqa: B023
    record("low_var_kl", lambda at: core_algos.kl_penalty(at, reference, "low_var_kl"))
    return results


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answers = [compute(given) for given in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)
