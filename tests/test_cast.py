import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import by_token, make_batch, make_episodes, pad, take_rows

from workbench.credit import cast, grpo
from workbench.credit.cast import CASTConfig, combine, normalise, outcome_advantage, reveal_advantage, solver_advantage
from workbench.credit.grpo import GRPOConfig
from workbench.errors import WorkbenchError

INF = math.inf


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def table(rows):
    """Ragged turn values as (E,K) and its mask; what lies off the mask must not matter."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    values = torch.full(mask.shape, 99.0, dtype=torch.float64)
    values[mask] = f64(*(v for row in rows for v in row))
    return values, mask


TURNS = [[1, 1, 0, 1], [1, -1, -3], [0, 0]]
WANT = [[1.2533, 1.2533, 1.1547, 1.2533], [-0.4787, -0.6760, -0.7808], [-0.5774, -0.5774]]


def test_worked_example():
    solver, mask = table(TURNS)
    outcome = outcome_advantage(f64(1, 0, 0), torch.zeros(3, dtype=torch.long))
    np.testing.assert_allclose(outcome, [1.1547, -0.5774, -0.5774], atol=5e-5)
    turns = combine(solver, mask, outcome)
    assert turns["rms"].item() == pytest.approx(0.893858, abs=5e-7)
    for got, want in zip(turns["turn_advantage"], WANT, strict=True):
        np.testing.assert_allclose(got[: len(want)], want, atol=5e-5)
    assert bool((turns["turn_advantage"][~mask] == 0).all())


def test_groups_of_one_and_of_near_equal_rewards_have_no_outcome_advantage():
    groups = torch.tensor([0, 1, 1, 2, 2])
    got = outcome_advantage(f64(1, 1, 1 + 1e-7, 0, 1), groups)
    np.testing.assert_allclose(got, [0, 0, 0, -math.sqrt(0.5), math.sqrt(0.5)], atol=1e-12)
    assert outcome_advantage(f64(1, 1, 1 + 1e-5, 0, 1), groups)[1] == pytest.approx(-math.sqrt(0.5))


# Importing torch may switch the processor to flush subnormals: hypothesis refuses to draw them then, and what lies
# barely above them may become 0 on division.
worth = st.floats(-50, 50, allow_subnormal=False).map(lambda x: 0.0 if abs(x) < 1e-200 else x)
rows = st.lists(st.lists(worth, min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows, st.floats(0, 2, allow_subnormal=False), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_shares_of_a_batch(rows, alpha, extra, rng):
    solver, mask = table(rows)
    outcome = torch.linspace(-1, 1, len(rows), dtype=torch.float64)
    turns = combine(solver, mask, outcome, CASTConfig(alpha=alpha))
    shares = normalise(solver, mask)[0]
    # A root mean square of 1 over every turn, signs and order kept, and a wasted turn keeps the outcome alone.
    if any(abs(v) > 1e-3 for row in rows for v in row):
        assert shares[mask].square().mean().sqrt().item() == pytest.approx(1, rel=1e-4)
    assert torch.equal(shares[mask].sign(), solver[mask].sign())
    order = torch.argsort(solver[mask])
    assert bool((shares[mask][order].diff() >= 0).all())
    base = outcome[:, None].expand_as(solver)
    wasted = mask & (solver == 0)
    assert torch.equal(turns["turn_advantage"][wasted], base[wasted])
    torch.testing.assert_close(turns["turn_advantage"][mask], (base + alpha * shares)[mask])
    # Neither the order of episodes nor more padding matters.
    order = list(range(len(rows)))
    rng.shuffle(order)
    wide, there = (torch.nn.functional.pad(t, (0, extra))[order] for t in (solver, mask))
    again = combine(wide, there, outcome[order], CASTConfig(alpha=alpha))
    want = torch.nn.functional.pad(turns["turn_advantage"], (0, extra))[order]
    torch.testing.assert_close(again["turn_advantage"], want, rtol=1e-12, atol=1e-12)


def test_zeros_count_in_the_root_mean_square():
    alone, mask = table([[3.0]])
    among, wide = table([[3.0, 0.0, 0.0, 0.0]])
    one, other = normalise(alone, mask), normalise(among, wide)
    assert other[1] == pytest.approx(one[1].item() / 2) and other[0][0, 0] == pytest.approx(2 * one[0][0, 0].item())


def test_a_batch_of_wasted_turns_is_plain():
    turns = combine(*table([[0.0, 0.0], [0.0]]), f64(0.7, -0.7))
    assert turns["turn_advantage"].tolist() == [[0.7, 0.7], [-0.7, 0.0]] and turns["rms"] == 0


def test_what_a_move_is_worth():
    before = f64(5, 5, 5, 5, INF, INF, 1)
    after = f64(4, 5, 7, INF, INF, 3, 0)
    assert solver_advantage(before, after).tolist() == [1, 0, -2, -5, 0, 0, 1]
    assert solver_advantage(f64(5), f64(4.5)).tolist() == [0.5]


def test_what_a_reveal_is_worth():
    cases = [  # before, after, won, lost, valid, worth; the board has 54 safe cells
        (6, 5, 0, 0, 1, 1),
        (6, 6, 0, 0, 1, 0),
        (6, 7, 0, 0, 1, -1),
        (6, INF, 0, 0, 1, -6),
        (INF, INF, 0, 0, 1, 0),
        (INF, 9, 0, 0, 1, 9),
        (3, 0, 1, 0, 1, 3),
        (INF, 0, 1, 0, 1, 54),
        (6, INF, 0, 1, 1, -6),
        (6, 6, 0, 1, 1, -6),
        (INF, INF, 0, 1, 1, 0),
        (INF, 4, 0, 1, 1, 0),
        (6, 2, 0, 0, 0, 0),
        (INF, 9, 0, 0, 0, 0),
    ]
    before, after, won, lost, valid, worth = (f64(*column) for column in zip(*cases, strict=True))
    got = reveal_advantage(before, after, won.bool(), lost.bool(), valid.bool(), torch.full_like(before, 54))
    assert got.tolist() == worth.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.integers(0, 3))
def test_worth_telescopes_up_to_a_deadlock(distances, stuck):
    clean = f64(*distances)
    assert solver_advantage(clean[:-1], clean[1:]).sum() == distances[0] - distances[-1]
    if stuck:
        trace = torch.cat([clean, torch.full((stuck,), INF, dtype=torch.float64)])
        assert solver_advantage(trace[:-1], trace[1:]).sum() == distances[0] - 2 * distances[-1]


def test_on_a_grid_the_best_move_is_worth_one_and_no_other_more():
    """Fewest steps to a goal by breadth-first search in a small maze with a one-way pit."""
    maze = ["G..#....", ".#.#.##.", ".#...#..", "...#.P.."]
    cells = {(r, c): v for r, line in enumerate(maze) for c, v in enumerate(line) if v != "#"}
    moves = {}
    for r, c in cells:
        steps = [(r, c + 1), (r + 1, c), (r, c - 1), (r - 1, c)]
        moves[r, c] = [step if step in cells and cells[r, c] != "P" else (r, c) for step in steps]
    goal = next(cell for cell, v in cells.items() if v == "G")
    distance, queue = {cell: INF for cell in cells} | {goal: 0}, deque([goal])
    while queue:
        at = queue.popleft()
        for cell, nexts in moves.items():
            if at in nexts and distance[cell] == INF and cell != at:
                distance[cell] = distance[at] + 1
                queue.append(cell)
    assert [cells[cell] for cell, d in distance.items() if d == INF] == ["P"]
    for cell, nexts in moves.items():
        if 0 < distance[cell] < INF:
            worth = solver_advantage(f64(distance[cell]), f64(*(distance[n] for n in nexts)))
            assert worth.max() == 1
            assert all(w == -distance[cell] for w, n in zip(worth, nexts, strict=True) if cells[n] == "P")


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_impossible_distances_are_refused(bad):
    for before, after in ((f64(bad), f64(1)), (f64(1), f64(bad))):
        with pytest.raises(WorkbenchError, match="at least 0"):
            solver_advantage(before, after)
    yes = torch.tensor([True])
    with pytest.raises(WorkbenchError, match="both won and lost"):
        reveal_advantage(f64(1), f64(0), yes, yes, yes, f64(9))


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
def test_a_worth_that_is_not_finite_is_refused(bad):
    with pytest.raises(WorkbenchError, match="not finite"):
        normalise(*table([[1.0, bad]]))
    values, mask = table([[1.0, 2.0], [3.0]])
    values[1, 1] = bad
    assert bool(torch.isfinite(normalise(values, mask)[0]).all()), "what lies off the mask is not looked at"


def test_shapes_and_settings_that_do_not_fit_are_refused():
    with pytest.raises(WorkbenchError, match=r"\(E,K\) both"):
        normalise(torch.zeros(2, 3), torch.ones(2, 2).bool())
    for wrong in ({"alpha": -0.1}, {"alpha": math.nan}, {"eps": INF}):
        with pytest.raises(WorkbenchError, match="finite and at least 0"):
            CASTConfig(**wrong)


# On batches


@pytest.fixture
def episodes():
    return make_episodes()


def solved(batch, seed=0):
    values = np.random.default_rng(seed).integers(-4, 2, batch.turn_mask.shape)
    return batch.with_(solver_advantages=torch.from_numpy(values).double())


def test_layouts_orders_repeats_and_padding_give_the_same_credit(episodes):
    batch = solved(make_batch(episodes))
    want = cast.credit(batch)
    tokens = by_token(batch, want.advantages)
    rows = solved(make_batch(episodes, layout="turn"))
    order = np.random.default_rng(0).permutation(len(rows.input_ids)).tolist()
    for other in (rows, take_rows(rows, order), take_rows(rows, [*order[:6], *order, 0]), pad(batch, 6)):
        got = cast.credit(other)
        torch.testing.assert_close(got.turns, want.turns, rtol=1e-12, atol=1e-12)
        assert by_token(other, got.advantages) == pytest.approx(tokens, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base", [{"eps": 0.0}, {}, {"std": False}, {"per": "turn"}])
def test_alpha_zero_is_grpo_bit_for_bit(dtype, base, episodes):
    batch = solved(make_batch(episodes))
    batch = batch.with_(old_logprobs=batch.old_logprobs.to(dtype), reward=batch.reward.to(dtype))
    config = CASTConfig(alpha=0.0, grpo=GRPOConfig(**base))
    got = cast.credit(batch.with_(solver_advantages=None), config).advantages
    want = grpo.credit(batch, config.grpo).advantages
    assert got.dtype == want.dtype == dtype and torch.equal(got, want)
    assert not torch.equal(cast.credit(batch, CASTConfig(grpo=config.grpo)).advantages, want)
    without = cast.credit(batch.with_(solver_advantages=torch.full_like(batch.solver_advantages, math.nan)))
    torch.testing.assert_close(without.advantages, grpo.credit(batch, GRPOConfig(eps=0.0)).advantages)


def test_a_group_without_outcome_advantage_still_learns_from_the_solver(episodes):
    batch = solved(make_batch(episodes))
    credit = cast.credit(batch)
    assert bool((grpo.credit(batch).advantages[4:] == 0).all())
    assert bool((credit.advantages[4:] != 0).any())
    assert torch.equal(credit.advantages[4:], batch.to_tokens(credit.turns["solver_share"])[4:])


def test_an_unsolved_episode_keeps_the_outcome_alone_and_counts_in_no_mean(episodes):
    batch = solved(make_batch(episodes))
    table = batch.solver_advantages.clone()
    table[3] = math.nan
    got = cast.credit(batch.with_(solver_advantages=table)).turns
    outcome = grpo.credit(batch, GRPOConfig(eps=0.0)).turns["turn_advantage"]
    torch.testing.assert_close(got["turn_advantage"][3], outcome[3])
    assert bool((got["solver_share"][3] == 0).all())
    # The others are credited as in a batch whose unsolved turns are not there at all.
    there = batch.turn_mask.clone()
    there[3] = False
    want = combine(batch.solver_advantages, there, outcome)["turn_advantage"]
    torch.testing.assert_close(got["turn_advantage"][there], want[there], atol=1e-12, rtol=0)
    with pytest.raises(WorkbenchError, match="no solver advantages"):
        cast.credit(make_batch(episodes))


def test_a_part_of_an_episode_is_not_credited_as_if_it_were_all(episodes):
    worth = [[1.0, 0.0, -2.0, 1.0], [1.0, None]]
    two = [
        replace(e, turns=[replace(t, solver_advantage=v) for t, v in zip(e.turns, values, strict=True)])
        for e, values in zip(episodes[:2], worth, strict=True)
    ]
    table = cast.solver_advantages(two)
    assert table[0].tolist() == worth[0] and table[1].isnan().tolist() == [True, True, False, False]
