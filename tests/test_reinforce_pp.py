import numpy as np
import pytest
import torch
from make_batch import SPEC, make_batch, make_episodes, take_rows

from workbench.credit import reinforce_pp
from workbench.credit.reinforce_pp import ReinforcePPConfig, whiten
from workbench.errors import WorkbenchError


def by_hand(spec, over="token", per="trajectory", eps=1e-8):
    """Advantage of each trajectory: reward less its group's mean, written out for every token, then whitened."""
    centred = []
    for group, outcome, _ in spec:
        mine = [(o, len(turns)) for g, o, turns in spec if g == group]
        sizes = [1 if per == "trajectory" else n for _, n in mine]
        centred.append(outcome - np.average([o for o, _ in mine], weights=sizes))
    samples = [c for c, (_, _, turns) in zip(centred, spec, strict=True) for _ in range(sum(turns))]
    samples = np.array(samples if over == "token" else centred)
    return (np.array(centred) - samples.mean()) / np.sqrt(samples.var(ddof=1) + eps)


@pytest.mark.parametrize("layout", ["episode", "turn"])
@pytest.mark.parametrize("over", ["token", "trajectory"])
@pytest.mark.parametrize("per", ["trajectory", "turn"])
def test_equals_the_formula_written_out_for_every_token(layout, over, per):
    batch = make_batch(make_episodes(), layout=layout)
    credit = reinforce_pp.credit(batch, ReinforcePPConfig(over=over, per=per))
    want = torch.where(batch.turn_mask, torch.from_numpy(by_hand(SPEC, over, per))[:, None], 0)
    torch.testing.assert_close(credit.turns["turn_advantage"], want, rtol=1e-12, atol=1e-12)
    assert torch.equal(credit.advantages, batch.to_tokens(credit.turns["turn_advantage"]))


def test_the_batch_is_white_over_what_it_is_whitened_over():
    batch = make_batch(make_episodes())
    tokens = reinforce_pp.credit(batch).advantages[batch.response_mask]
    assert tokens.mean().abs() < 1e-12 and tokens.var().item() == pytest.approx(1, abs=1e-6)
    config = ReinforcePPConfig(over="trajectory")
    episodes = reinforce_pp.credit(batch, config).turns["turn_advantage"][:, 0]
    assert episodes.mean().abs() < 1e-12 and episodes.var().item() == pytest.approx(1, abs=1e-6)


def test_groups_without_a_signal_are_shifted_by_tokens_and_not_by_trajectories():
    batch = make_batch(make_episodes())
    flat = batch.group_index > 0
    shifted = reinforce_pp.credit(batch).turns["turn_advantage"][flat, 0]
    assert len(shifted.unique()) == 1 and shifted[0].abs() > 1e-3
    unshifted = reinforce_pp.credit(batch, ReinforcePPConfig(over="trajectory")).turns["turn_advantage"][flat]
    assert unshifted.abs().max() < 1e-12


def test_rows_that_repeat_a_turn_count_once():
    batch = make_batch(make_episodes(), layout="turn")
    copied = take_rows(batch, [*range(len(batch.input_ids)), 0, 0, 0])
    want = reinforce_pp.credit(batch).turns["turn_advantage"]
    torch.testing.assert_close(reinforce_pp.credit(copied).turns["turn_advantage"], want, rtol=0, atol=0)


def test_whiten_keeps_zeros_and_survives_one_sample():
    assert torch.equal(whiten(torch.zeros(3), torch.tensor([5, 1, 9])), torch.zeros(3))
    assert torch.equal(whiten(torch.tensor([2.0]), torch.tensor([1])), torch.zeros(1))
    got = whiten(torch.tensor([1.0, 2.0]).double(), torch.tensor([3, 1]), eps=0.0)
    np.testing.assert_allclose(got.numpy(), [-0.5, 1.5], atol=1e-12)


@pytest.mark.parametrize("wrong", [{"over": "tokens"}, {"per": "row"}, {"eps": 0.0}, {"eps": float("nan")}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError, match=r"REINFORCE\+\+"):
        ReinforcePPConfig(**wrong)
