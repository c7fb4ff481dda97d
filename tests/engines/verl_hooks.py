"""Runs where verl is installed, with this package on the path: JSON on stdout of how its own losses and ours differ.

For each of ours its verl counterpart, on random rows of two turns: the largest difference of value and of gradient over
all aggregations, relative to the largest value; and the signatures that the adapter relies on.
"""

import ast
import contextlib
import json
import sys
from pathlib import Path

PAIRS = {"workbench_token": "vanilla", "workbench_row": "gspo"}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def losses() -> dict[str, list[float]]:
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    from workbench.engines.verl import NO_BOUND, register_losses

    register_losses()
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(6, 9)
    mask[:, 4], mask[1, 7:], mask[3, 3:] = 0, 0, 0
    old, moved, weights = (torch.randn(6, 9, generator=generator, dtype=torch.float64) for _ in range(3))
    old, weights = -old.abs() - 1, weights.abs()
    logp, advantages = old + 0.5 * moved, moved.flip(0).sign() * weights
    out = {}
    for ours, theirs in PAIRS.items():
        out[ours] = [0.0, 0.0]
        for mode in MODES:
            for given in (None, weights):
                config = ActorConfig(
                    strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=0.2, clip_ratio_high=0.28,
                    clip_ratio_c=3.0 if theirs == "vanilla" else NO_BOUND, loss_agg_mode=mode,
                )  # fmt: skip
                results = []
                for name in (ours, theirs):
                    at = logp.clone().requires_grad_()
                    value, _ = get_policy_loss_fn(name)(old, at, advantages, mask, mode, config, given)
                    results.append((value.detach()[None], torch.autograd.grad(value, at)[0]))
                for i, (mine, other) in enumerate(zip(*results, strict=True)):
                    out[ours][i] = max(out[ours][i], float((mine - other).abs().max() / other.abs().max()))
    return out


def signatures() -> dict[str, list[str]]:
    """Arguments of verl's methods, read from its files: importing its trainer takes packages for clusters."""
    import verl

    root, found = Path(verl.__file__).parent, {}
    wanted = {
        "trainer/ppo/v1/trainer_base.py": ("_compute_advantage", "register_trainer", "get_trainer_cls"),
        "trainer/ppo/v1/trainer_sync.py": ("on_sample_end",),
        "workers/utils/padding.py": ("response_to_nested",),
        "trainer/ppo/core_algos.py": ("register_policy_loss", "agg_loss"),
    }
    for file, names in wanted.items():
        source = (root / file).read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                found[node.name] = [a.arg for a in node.args.args]
    source = (root / "trainer/ppo/v1/trainer_base.py").read_text()
    found["fields"] = [name for name in ("response_mask", "old_log_probs", "rm_scores") if f'"{name}"' in source]
    found["version"] = [verl.__version__]
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answer = {"losses": losses(), "signatures": signatures()}
    json.dump(answer, sys.stdout)
