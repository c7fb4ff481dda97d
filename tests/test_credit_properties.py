"""What holds for every credit rule, whatever it computes."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import golden
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import (
    SPEC,
    as_dtype,
    by_token,
    make_batch,
    make_episodes,
    make_gaps,
    pad,
    take_episodes,
    take_rows,
    with_states,
)

from workbench.credit import agent_opsd, cast, gigpo, grpo, reinforce_pp, rloo, rlsd, step_opsd
from workbench.credit.agent_opsd import AgentOPSDConfig
from workbench.credit.cast import CASTConfig
from workbench.credit.gigpo import GiGPOConfig
from workbench.credit.grpo import GRPOConfig
from workbench.credit.reinforce_pp import ReinforcePPConfig
from workbench.credit.rloo import RLOOConfig
from workbench.credit.rlsd import RLSDConfig
from workbench.credit.step_opsd import StepOPSDConfig
from workbench.errors import WorkbenchError
from workbench.records import Batch, Credit

SHARED = Path(__file__).parents[2] / "shared" / "golden" / "credit_rules.json"
RAW, ROWS = GRPOConfig(std=False), GRPOConfig(per="turn")


def cast_credit(batch: Batch, config: CASTConfig) -> Credit:
    """CAST with the labels of states for a solver's judgement: 0 for label 1."""
    return cast.credit(batch.with_(solver_advantages=batch.anchors.to(batch.reward.dtype) - 1), config)


@dataclass(frozen=True)
class Rule:
    """credit(batch, config); off: the changes that turn it into GRPO, or None where nothing does; scale: what happens
    when all rewards are scaled: the credit "stays", or "scales" with them. teacher, turn_rewards: what it needs."""

    credit: Callable[..., Credit]
    config: object
    off: dict | None = None
    scale: str = "stays"
    teacher: bool = False
    turn_rewards: bool = False

    def __call__(self, batch: Batch) -> Credit:
        return self.credit(batch, self.config)


RULES = {
    "grpo": Rule(grpo.credit, GRPOConfig()),
    "grpo rows": Rule(grpo.credit, ROWS),
    "dr_grpo": Rule(grpo.credit, RAW, scale="scales"),
    "rloo": Rule(rloo.credit, RLOOConfig(), scale="scales"),
    "rloo rows": Rule(rloo.credit, RLOOConfig(per="turn"), scale="scales"),
    "reinforce_pp": Rule(reinforce_pp.credit, ReinforcePPConfig()),
    "reinforce_pp trajectories": Rule(reinforce_pp.credit, ReinforcePPConfig(over="trajectory")),
    "gigpo": Rule(gigpo.credit, GiGPOConfig(), {"weight": 0.0}, turn_rewards=True),
    "gigpo mean": Rule(
        gigpo.credit, GiGPOConfig(mode="mean_norm", grpo=RAW), {"weight": 0.0}, scale="scales", turn_rewards=True
    ),
    "agent_opsd": Rule(agent_opsd.credit, AgentOPSDConfig(), {"lam": 0.0}, teacher=True),
    "agent_opsd rows": Rule(
        agent_opsd.credit, AgentOPSDConfig(grpo=ROWS, prior_per="turn"), {"lam": 0.0}, teacher=True
    ),
    "agent_opsd token": Rule(agent_opsd.credit, AgentOPSDConfig(granularity="token"), {"lam": 0.0}, teacher=True),
    "rlsd": Rule(rlsd.credit, RLSDConfig(), {"lam": 0.0}, teacher=True),
    "rlsd released": Rule(
        partial(rlsd.credit, step=40), RLSDConfig(form="released", grpo=ROWS), {"lam": 0.0}, teacher=True
    ),
    "step_opsd": Rule(step_opsd.credit, StepOPSDConfig(), {"lam": 0.0}, teacher=True),
    "step_opsd raw": Rule(step_opsd.credit, StepOPSDConfig(grpo=RAW), {"lam": 0.0}, scale="scales", teacher=True),
    "cast": Rule(cast_credit, CASTConfig(), {"alpha": 0.0}),
}
every_rule = pytest.mark.parametrize("name", RULES)
# The others are group advantages of their own, which no option turns into GRPO.
every_switch = pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.off is not None])

# (group, outcome, tokens of each turn): turns of one token, episodes of one turn and groups of one are among them.
specs = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.lists(st.integers(1, 4), min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


def build(spec, seed=0, layout="episode", scale=10.0, spread=0.7) -> Batch:
    """A batch that every rule can take, the same in both layouts."""
    episodes = make_episodes(spec, seed, scale)
    return with_states(make_batch(episodes, make_gaps(episodes, seed, spread), layout, reward="return"), seed=seed)


def fixed(**options) -> Batch:
    return build(SPEC, **options)


def without_eps(config):
    """Nothing added to a deviation, so that only the formula is left."""
    if isinstance(config, GRPOConfig):
        return replace(config, eps=0.0)
    if isinstance(config, ReinforcePPConfig):
        return replace(config, eps=1e-30)
    return config if isinstance(config, RLOOConfig) else replace(config, grpo=replace(config.grpo, eps=0.0))


@every_rule
@settings(max_examples=5, deadline=None)
@given(specs, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_layouts_orders_repeats_and_padding_do_not_matter(name, spec, seed, rng):
    rule, batch, rows = RULES[name], build(spec, seed), build(spec, seed, "turn")
    want = rule(batch)
    tokens = by_token(batch, want.advantages)
    order = rng.sample(range(len(rows.input_ids)), len(rows.input_ids))
    episodes = rng.sample(range(len(spec)), len(spec))
    same = {
        "turn rows": rows,
        "shuffled": take_rows(rows, order),
        "repeated": take_rows(rows, [*order[: len(order) // 2 + 1], *order, 0]),
        "repeated episodes": take_rows(batch, [*range(len(spec)), *episodes[: len(spec) // 2 + 1]]),
        "padded": pad(batch, 5),
        "padded rows": pad(rows, 3),
    }
    for how, other in same.items():
        got = rule(other)
        assert got.turns.keys() == want.turns.keys()
        for column, values in want.turns.items():
            torch.testing.assert_close(got.turns[column], values, rtol=1e-9, atol=1e-9, msg=f"{column}, {how}")
        assert by_token(other, got.advantages) == pytest.approx(tokens, abs=1e-9), how
        assert bool((got.advantages[~other.response_mask] == 0).all()), how
    for moved in (take_episodes(batch, episodes), take_episodes(take_rows(rows, order), episodes)):
        got = by_token(moved, rule(moved).advantages)
        back = {(episodes[e], k, place): value for (e, k, place), value in got.items()}
        assert back == pytest.approx(tokens, abs=1e-9)


@every_rule
@settings(max_examples=5, deadline=None)
@given(specs, st.integers(0, 10**6), st.sampled_from([0.125, 3.0, 64.0]))
def test_scaled_rewards_scale_the_credit_or_leave_it(name, spec, seed, scale):
    rule = replace(RULES[name], config=without_eps(RULES[name].config))
    batch = build(spec, seed, scale=1.0)
    scaled = batch.with_(reward=batch.reward * scale, turn_rewards=batch.turn_rewards * scale)
    want = rule(batch).advantages * (scale if rule.scale == "scales" else 1)
    torch.testing.assert_close(rule(scaled).advantages, want, rtol=1e-8, atol=1e-8)


@every_rule
@pytest.mark.parametrize("reward", [0.0, 0.1, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(name, reward, dtype):
    batch = as_dtype(fixed(), dtype)
    # Turns that earned nothing, in a state the solver of `cast_credit` calls indifferent.
    still = batch.with_(turn_rewards=torch.zeros_like(batch.turn_rewards), anchors=torch.ones_like(batch.anchors))
    equal = still.with_(reward=torch.full_like(batch.reward, reward))
    alone = still.with_(group_index=torch.arange(len(batch.reward)))
    for given_batch in (equal, alone):
        advantages = RULES[name](given_batch).advantages
        assert torch.equal(advantages, torch.zeros_like(advantages))


@every_switch
@pytest.mark.parametrize("layout", ["episode", "turn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_switched_off_it_is_grpo_bit_for_bit(name, layout, dtype):
    rule, batch = RULES[name], as_dtype(fixed(layout=layout), dtype)
    want = grpo.credit(batch, rule.config.grpo)
    off = rule.credit(batch, replace(rule.config, **rule.off))
    assert off.advantages.dtype == dtype and torch.equal(off.advantages, want.advantages)
    if name != "agent_opsd token":  # its table holds means of equal tokens
        assert torch.equal(off.turns["turn_advantage"], want.turns["turn_advantage"])
    assert not torch.equal(rule(batch).advantages, want.advantages)


@every_rule
def test_the_turn_table_holds_the_mean_advantage_of_every_turn(name):
    batch = fixed(layout="turn")
    credit = RULES[name](batch)
    mean = batch.turn_mean(credit.advantages)
    torch.testing.assert_close(credit.turns["turn_advantage"], mean, rtol=1e-12, atol=1e-12)


@every_rule
@pytest.mark.parametrize("seed", range(2))
def test_float32_is_close_to_float64(name, seed):
    # Log-probs in steps of 2^-8 are exact in both precisions; a rule cannot mend what rounding did before it.
    batch = fixed(seed=seed)
    exact = {n: (getattr(batch, n) * 256).round() / 256 for n in ("old_logprobs", "teacher_logprobs")}
    batch = batch.with_(**exact)
    got, want = RULES[name](as_dtype(batch, torch.float32)), RULES[name](batch)
    assert got.advantages.dtype == torch.float32
    torch.testing.assert_close(got.advantages.double(), want.advantages, rtol=1e-5, atol=1e-6)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [20.0, 1e6])
def test_extreme_gaps_and_saturated_beliefs_stay_finite_and_bounded(name, dtype, size):
    batch = as_dtype(fixed(), dtype)
    certain = torch.zeros_like(batch.old_logprobs)
    hopeless = torch.where(batch.response_mask, -size, certain)
    mixed = torch.where(torch.arange(hopeless.shape[1]) % 2 == 0, hopeless, certain)
    for old, teacher in ((certain, hopeless), (hopeless, certain), (mixed, hopeless - mixed)):
        credit = RULES[name](batch.with_(old_logprobs=old, teacher_logprobs=teacher))
        assert all(bool(torch.isfinite(v.to(dtype)).all()) for v in (credit.advantages, *credit.turns.values()))
        assert credit.advantages.abs().max() < 30


@every_rule
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_are_refused(name, bad):
    rule, batch = RULES[name], fixed()
    tampered = ["reward"]
    tampered += ["teacher_logprobs", "old_logprobs"] if rule.teacher else []
    tampered += ["turn_rewards"] if rule.turn_rewards else []
    for field in tampered:
        # A batch refuses such log-probs when it is made, not when someone writes into its tensors later.
        other = batch.with_(**{field: getattr(batch, field).clone()})
        spot = tuple(batch.response_mask.nonzero()[0]) if "logprobs" in field else (0,) * getattr(batch, field).dim()
        getattr(other, field)[spot] = bad
        with pytest.raises(WorkbenchError, match="not finite") as error:
            rule(other)
        assert "\n" not in str(error.value)


@every_rule
def test_what_lies_off_the_mask_does_not_matter(name):
    batch = fixed()
    off = ~batch.response_mask
    noise = {n: torch.where(off, -1e30, getattr(batch, n)) for n in ("old_logprobs", "teacher_logprobs")}
    absent = ~batch.turn_mask
    noise["turn_rewards"] = torch.where(absent, 1e30, batch.turn_rewards)
    noise["anchors"] = torch.where(absent, -1, batch.anchors)
    assert torch.equal(RULES[name](batch.with_(**noise)).advantages, RULES[name](batch).advantages)


@every_rule
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_off_the_mask_does_not_matter(name, bad):
    batch = fixed()
    names = ("old_logprobs", "teacher_logprobs")
    noise = {n: torch.where(batch.response_mask, getattr(batch, n), bad) for n in names}
    assert torch.equal(RULES[name](batch.with_(**noise)).advantages, RULES[name](batch).advantages)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_how_tensors_lie_in_memory_does_not_matter(name, dtype):
    batch = as_dtype(fixed(), dtype)
    by_column = {n: value.T.contiguous().T for n, value in batch.tensors().items() if value.dim() == 2}
    strided = {n: value.repeat_interleave(2, -1)[..., ::2] for n, value in batch.tensors().items()}
    assert not by_column["old_logprobs"].is_contiguous() and not strided["reward"].is_contiguous()
    want = RULES[name](batch)
    for other in (by_column, strided, {n: by_column[n] for n in ("old_logprobs", "teacher_logprobs")}):
        got = RULES[name](batch.with_(**other))
        assert torch.equal(got.advantages, want.advantages)
        assert all(torch.equal(got.turns[column], values) for column, values in want.turns.items())


@every_rule
def test_integer_rewards_give_the_credit_of_equal_floats(name):
    batch = fixed(scale=1.0)
    batch = as_dtype(batch.with_(turn_rewards=batch.turn_rewards.round()), torch.float32)
    whole = batch.with_(reward=batch.reward.long(), turn_rewards=batch.turn_rewards.long())
    torch.testing.assert_close(RULES[name](whole).advantages, RULES[name](batch).advantages)


@pytest.mark.parametrize("rule", ["rlsd", "gigpo_step", "rloo"])
def test_golden_cases_pass_in_float32(rule):
    if not SHARED.is_file():
        pytest.skip(f"{SHARED.name} is not beside the checkout")
    for i, case in enumerate(json.loads(SHARED.read_text())[rule]):
        got = golden.RULES[rule](case, torch.float32)
        assert golden.difference(case["want"], got, f"{rule}[{i}]", tolerance=1e-5) is None


def test_a_signal_reaches_every_rule():
    # Guards the tests above: a rule that returned zeros would pass most of them.
    sizes = {name: RULES[name](fixed()).advantages.abs().max().item() for name in RULES}
    assert min(sizes.values()) > 0.3 and np.isfinite(list(sizes.values())).all()
