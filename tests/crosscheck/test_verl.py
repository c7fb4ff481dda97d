"""Our losses and advantages against verl's core algorithms, on the same tensors.

verl asks for an older transformers than ours, so it runs under an interpreter of its own (verl_reference.py).
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from shared_tensors import (
    Case,
    assert_same,
    assert_same_loss,
    make_case,
    our_loss,
    row_aggregation,
    value_and_gradient,
)

from workbench.credit import grpo, reinforce_pp, rloo
from workbench.loss import MAX_KL, PolicyLossConfig, kl_k3, kl_k3_gradient, token_weights

ROOT = Path(__file__).parents[2]
LAYOUTS = ("episode", "turn")
DTYPES = ("float32", "float64")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
WIDTH = 40

# verl's loss_agg_mode, which knows rows only
MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sum",
    "seq-mean-token-mean": "mean",
    "seq-mean-token-sum-norm": "sum_norm",
}


def interpreter() -> str:
    if os.environ.get("VERL_PYTHON"):
        return os.environ["VERL_PYTHON"]
    if not (ROOT / ".venv-verl" / ".installed").exists():
        pytest.skip("verl is not installed: `make crosscheck` installs it, or set VERL_PYTHON to a Python that has it")
    return str(ROOT / ".venv-verl" / "bin" / "python")


def far_case() -> Case:
    """Log-ratios of +-25, beyond the bound of 20, and a reference whose k3 is beyond 10 on a third of the tokens."""
    case = make_case()
    signs = torch.ones_like(case.logp).cumsum(1) % 3 - 1
    logp = torch.where(case.batch.response_mask, case.batch.old_logprobs + 25 * signs, 0)
    return dataclasses.replace(case, logp=logp, reference=logp + 2 + signs)


def payload(case: Case, dtype: str, **changes) -> dict:
    batch = case.batch
    given = {
        "old": batch.old_logprobs,
        "logp": case.logp,
        "reference": case.reference,
        "advantages": case.advantages,
        "mask": batch.response_mask.int(),
        "rewards": batch.reward[batch.episode_index],
        "group": batch.group_index[batch.episode_index],
    }
    options = {"dtype": dtype, "clip_c": 3.0, "scale": WIDTH, **CLIP}
    return {name: tensor.tolist() for name, tensor in given.items()} | options | changes


@pytest.fixture(scope="module")
def verl():
    """verl's answers by layout and dtype, to groups of one ("single") and to `far_case` ("far")."""
    python = interpreter()
    asked = {
        (layout, dtype): payload(make_case(layout, getattr(torch, dtype)), dtype)
        for layout in LAYOUTS
        for dtype in DTYPES
    }
    asked["single"] = payload(make_case(), "float64", group=list(range(8)))
    asked["far"] = payload(far_case(), "float64")
    done = subprocess.run(
        [python, str(Path(__file__).with_name("verl_reference.py"))],
        input=json.dumps(list(asked.values())),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(asked, json.loads(done.stdout), strict=True))


def tensors(answer: dict, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """verl's value, and its gradient where there is one."""
    return tuple(torch.tensor(values, dtype=dtype) for values in answer.values())


@pytest.fixture(params=[(layout, dtype) for layout in LAYOUTS for dtype in DTYPES], ids="-".join)
def both(request, verl):
    """Our case, and a function that gives verl's answer by name."""
    layout, dtype = request.param
    case = make_case(layout, getattr(torch, dtype))
    return case, lambda name: tensors(verl[request.param][name], case.logp.dtype)


RULES = {
    "grpo": lambda batch, per: grpo.credit(batch, grpo.GRPOConfig(per=per)),
    "dr_grpo": lambda batch, per: grpo.credit(batch, grpo.GRPOConfig(std=False, per=per)),
    "rloo": lambda batch, per: rloo.credit(batch, rloo.RLOOConfig(per=per)),
    "reinforce_pp_baseline": lambda batch, per: reinforce_pp.credit(batch, reinforce_pp.ReinforcePPConfig(per=per)),
}


@pytest.mark.parametrize("rule", RULES)
def test_advantages(both, rule):
    """verl groups rows; where rows are turns that is per="turn"."""
    case, theirs = both
    credit = RULES[rule](case.batch, "trajectory" if case.layout == "episode" else "turn")
    assert_same(credit.advantages, theirs(rule)[0])


@pytest.mark.parametrize("rule", ("grpo", "dr_grpo", "rloo"))
def test_a_group_of_one_keeps_its_reward_in_verl_and_has_no_advantage_here(verl, rule):
    batch = make_case().batch
    (theirs,) = tensors(verl["single"][rule])
    raw = batch.episodes_to_tokens(batch.reward)
    torch.testing.assert_close(theirs, raw, rtol=2e-6, atol=0)
    alone = batch.with_(group_index=torch.arange(len(batch.group_index)))
    assert not RULES[rule](alone, "trajectory").advantages.any()


@pytest.mark.parametrize("mode", MODES)
def test_clipped_loss(both, mode):
    case, theirs = both
    config = PolicyLossConfig(**CLIP, dual_clip=3.0)
    assert_same_loss(our_loss(case, config, **row_aggregation(MODES[mode], case, WIDTH)), theirs(f"vanilla {mode}"))


@pytest.mark.parametrize("mode", MODES)
def test_gspo(both, mode):
    """verl's sequence is a row, and its GSPO has no dual clip."""
    case, theirs = both
    config = PolicyLossConfig(**CLIP, dual_clip=0, ratio="row")
    assert_same_loss(our_loss(case, config, **row_aggregation(MODES[mode], case, WIDTH)), theirs(f"gspo {mode}"))


@pytest.mark.parametrize("mode", MODES)
def test_aggregation(both, mode):
    case, theirs = both
    options = row_aggregation(MODES[mode], case, WIDTH)
    weights = token_weights(case.batch, options["aggregation"], options.get("max_tokens"))
    value, gradient = theirs(f"agg_loss {mode}")
    assert_same((weights * case.logp).sum(), value)
    assert_same(weights, gradient)


def test_kl(both):
    case, theirs = both
    value, gradient = theirs("low_var_kl")
    assert_same(kl_k3(case.logp, case.reference), value)
    assert_same(value_and_gradient(lambda logp: kl_k3(logp, case.reference).sum(), case.logp)[1], gradient)
    assert_same(kl_k3_gradient(case.logp, case.reference), gradient)


def test_bounds_on_the_ratio_and_on_the_kl(verl):
    case = far_case()
    config = PolicyLossConfig(**CLIP, dual_clip=3.0)
    assert_same_loss(our_loss(case, config, "token_mean"), tensors(verl["far"]["vanilla token-mean"]))
    value, gradient = tensors(verl["far"]["low_var_kl"])
    assert (value == MAX_KL).any() and gradient.any()
    assert_same(kl_k3(case.logp, case.reference), value)
    assert_same(kl_k3_gradient(case.logp, case.reference), gradient)
