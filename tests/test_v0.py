import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.budget import exact, v0
from workbench.budget.v0 import V0Config
from workbench.errors import WorkbenchError

HEADS = [V0Config(), V0Config("knn")]


def by_head(config):
    return config.head


def best_by_trying_all(p, total, lo, hi):
    """Largest total utility over every allocation within the bounds."""
    budgets = (b for b in itertools.product(range(lo, hi + 1), repeat=len(p)) if sum(b) == total)
    return max(v0.total_utility(p, budget) for budget in budgets)


def test_greedy_starves_the_hard_task_that_the_best_allocation_feeds():
    p = [0.05, 0.5]
    assert v0.allocate_greedy(p, 20) == [2, 18] and v0.allocate(p, 20) == [18, 2]
    assert v0.total_utility(p, [2, 18]) == pytest.approx(9.09, abs=0.005)
    assert v0.total_utility(p, [18, 2]) == pytest.approx(10.45, abs=0.005)
    assert v0.total_utility(p, [18, 2]) == best_by_trying_all(p, 20, 2, 18)


# Importing torch may switch the processor to flush subnormals, which hypothesis refuses to draw then.
rate = st.one_of(st.floats(0, 1, allow_subnormal=False), st.integers(0, 8).map(lambda n: n / 8))


@settings(max_examples=80, deadline=None)
@given(st.lists(rate, min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 6), st.data())
def test_the_exact_allocation_is_the_best_and_greedy_at_most_that(p, lo, room, data):
    total = data.draw(st.integers(len(p) * lo, len(p) * (lo + room)))
    best = best_by_trying_all(p, total, lo, lo + room)
    found = {allocate: allocate(p, total, lo=lo, hi=lo + room) for allocate in (v0.allocate, v0.allocate_greedy)}
    for budget in found.values():
        assert sum(budget) == total and all(lo <= b <= lo + room for b in budget)
        assert all(type(b) is int for b in budget)
    assert v0.total_utility(p, found[v0.allocate]) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert v0.total_utility(p, found[v0.allocate_greedy]) <= best + 1e-9


table = st.tuples(st.integers(1, 6), st.integers(1, 7)).flatmap(
    lambda shape: st.lists(
        st.lists(
            st.one_of(st.integers(-3, 3).map(float), st.floats(-5, 5, allow_subnormal=False)),
            min_size=shape[1], max_size=shape[1],
        ),
        min_size=shape[0], max_size=shape[0],
    )
)  # fmt: skip


def best_by_programming(values, total):
    best = np.full(total + 1, -np.inf)
    best[0] = 0
    for row in values:
        after = np.full(total + 1, -np.inf)
        for b, value in enumerate(row[: total + 1]):
            after[b:] = np.maximum(after[b:], best[: total + 1 - b] + value)
        best = after
    return best[total]


@settings(max_examples=150, deadline=None)
@given(table, st.data())
def test_any_table_of_values_is_shared_as_well_as_can_be(rows, data):
    values = np.array(rows)
    total = data.draw(st.integers(0, len(values) * (values.shape[1] - 1)))
    units = exact.share(values, total)
    assert units.sum() == total and (units >= 0).all() and (units < values.shape[1]).all()
    got = values[np.arange(len(values)), units].sum()
    assert got == pytest.approx(best_by_programming(values, total), rel=1e-9, abs=1e-8)


@pytest.mark.parametrize("kind", ["spread", "eighths", "hard"])
def test_many_tasks_are_shared_as_well_as_can_be(kind):
    rng = np.random.default_rng(0)
    p = {"spread": rng.random(60), "eighths": rng.integers(0, 9, 60) / 8, "hard": rng.beta(1, 20, 60)}[kind]
    values = np.array([[v0.utility(q, b) for b in range(2, 41)] for q in p])
    best = best_by_programming(values, 720 - 120)
    assert v0.total_utility(p, v0.allocate(p, 720, hi=40)) == pytest.approx(best, rel=1e-12)
    assert v0.total_utility(p, v0.allocate_greedy(p, 720, hi=40)) < best


def test_utility_bends_upwards_to_where_it_should_and_then_runs_straight():
    for p in (0.02, 0.1, 0.3):
        values = np.array([v0.utility(p, b) for b in range(1, 400)])
        bends = np.diff(values, 2)  # bends[i] is about budget i + 2
        turn = 2 / -math.log1p(-p)
        budgets = np.arange(len(bends)) + 2
        assert (bends[budgets < turn - 1] > 0).all() and (bends[budgets > turn + 1] < 1e-12).all()
        assert values[-1] - values[-2] == pytest.approx(1 - p, rel=0.1)
    assert [v0.utility(p, b) for p in (0.0, 1.0) for b in (0, 1, 5)] == [0] * 6
    assert v0.utility(0.3, 1) == 0 and v0.utility(0.5, 2) == 0.5


def test_a_bound_far_beyond_the_total_costs_nothing():
    for allocate in (v0.allocate, v0.allocate_greedy):
        assert allocate([0.05, 0.5, 0.3], 22, hi=10**12) == allocate([0.05, 0.5, 0.3], 22, hi=18)
        assert allocate([0.05, 0.5], 4, hi=10**12) == [2, 2]


def test_bounds_and_rates_are_checked():
    for allocate in (v0.allocate, v0.allocate_greedy):
        for total in (3, 257):
            with pytest.raises(WorkbenchError, match="2 tasks of 2 to 128 rollouts take 4 to 256 in all"):
                allocate([0.1, 0.5], total)
        for p, said in (([0.1, 1.1], "success rate of task 1"), ([math.nan], "of task 0"), ([], "no task was given")):
            with pytest.raises(WorkbenchError, match=said):
                allocate(p, 20)
        with pytest.raises(WorkbenchError, match="bounds must be"):
            allocate([0.5], 1, lo=0)
        with pytest.raises(WorkbenchError, match="whole rollouts is expected, got 20.5"):
            allocate([0.1, 0.5], 20.5)
    for values, total in ((np.zeros((2, 3)), 5), (np.zeros((2, 3)), -1)):
        with pytest.raises(WorkbenchError, match="take 0 to 4 in all"):
            exact.share(values, total)
    for values in (np.zeros(3), np.zeros((0, 3)), np.array([[math.nan]])):
        with pytest.raises(WorkbenchError, match="must be a finite"):
            exact.share(values, 0)


def small_case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(12, generator=generator, dtype=torch.float64)
    outcomes = torch.tensor([1, 0, 0, 0.75, 0.25, 1, 0, 1, 1, 0.5, 0, 0], dtype=torch.float64)
    return scores, outcomes, torch.tensor([0] * 5 + [1] * 4 + [2] * 3)


def test_loss_is_its_definition():
    scores, outcomes, contexts = small_case()
    pairs = [
        -math.log(1 / (1 + math.exp(scores[j] - scores[i])))
        for i, j in itertools.permutations(range(12), 2)
        if contexts[i] == contexts[j] and outcomes[i] >= 0.5 > outcomes[j]
    ]
    p = scores.sigmoid()
    entropy = -(outcomes * p.log() + (1 - outcomes) * (1 - p).log()).mean()
    assert len(pairs) == 2 * 3 + 3 * 1 + 1 * 2
    for share in (0.0, 0.25, 1.0):
        want = share * np.mean(pairs) + (1 - share) * float(entropy)
        assert float(v0.value_loss(scores, outcomes, contexts, share)) == pytest.approx(want)
    none = v0.value_loss(scores, outcomes, torch.arange(12), 1.0)
    assert float(none) == 0


def test_the_ranking_loss_and_its_gradient_do_not_see_how_strong_a_policy_is():
    scores, outcomes, contexts = small_case()
    strength = torch.tensor([3.0, -2.0, 0.7], dtype=torch.float64)[contexts]
    found = []
    for shift in (0 * strength, strength):
        s = (scores + shift).requires_grad_()
        loss = v0.value_loss(s, outcomes, contexts, 1.0)
        found.append((loss.detach(), torch.autograd.grad(loss, s)[0]))
    torch.testing.assert_close(found[0], found[1])
    assert float(found[0][1].abs().max()) > 0.01
    for context in range(3):
        assert float(found[0][1][contexts == context].sum()) == pytest.approx(0, abs=1e-12)
    moved = v0.value_loss(scores + strength, outcomes, contexts, 0.0)
    assert not torch.isclose(moved, v0.value_loss(scores, outcomes, contexts, 0.0))


def topics(seed=0, n=240, dimension=12):
    """Questions of two topics, and two policies that each know one of them."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, 2, n)
    centre = rng.normal(size=(2, dimension))
    embedding = torch.tensor(centre[topic] + 0.7 * rng.normal(size=(n, dimension)))
    rates = [np.where(topic == own, 0.85, 0.15) for own in (0, 1)]
    return embedding, *(torch.tensor((rng.random(n) < rate).astype(float)) for rate in rates)


@pytest.mark.parametrize("config", HEADS, ids=by_head)
def test_values_are_the_policys_own(config):
    questions, first, second = topics()
    history, queries, one = questions[:160], questions[160:], torch.zeros(80, dtype=torch.long)
    own = v0.predict(history, first[:160], queries, config)
    other = v0.predict(history, second[:160], queries, config)
    assert bool(((own > 0) & (own < 1)).all()) and own.dtype == torch.float64
    assert v0.auc_within(own, first[160:], one) > 0.75 and v0.auc_within(other, second[160:], one) > 0.75
    assert v0.auc_within(other, first[160:], one) < 0.35  # another policy's history misleads
    generator = torch.Generator().manual_seed(1)
    shuffled = [first[:160][torch.randperm(160, generator=generator)] for _ in range(8)]
    chance = [v0.auc_within(v0.predict(history, y, queries, config), first[160:], one) for y in shuffled]
    assert 0.3 < np.mean(chance) < 0.7  # nothing else is known of a question here than how the policy did


@pytest.mark.parametrize("config", HEADS, ids=by_head)
def test_only_the_recent_history_counts_and_scale_and_place_of_embeddings_do_not(config):
    questions, first, second = topics()
    short = V0Config(config.head, context=100)
    queries = questions[200:]
    want = v0.predict(questions[100:200], first[100:200], queries, config)
    mixed = torch.cat([second[:100], first[100:200]])
    torch.testing.assert_close(v0.predict(questions[:200], mixed, queries, short), want)
    scaled = 1e3 * questions - 7
    got = v0.predict(scaled[100:200], first[100:200], scaled[200:], config)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    wide = torch.cat([questions, torch.full((len(questions), 2), 5.0, dtype=torch.float64)], 1)
    constant = v0.predict(wide[100:200], first[100:200], wide[200:], config)
    torch.testing.assert_close(constant, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("config", HEADS, ids=by_head)
def test_a_history_of_one_outcome_or_one_question_gives_a_value_within_bounds(config):
    questions, *_ = topics()
    for n in (1, 5, 100):
        won, lost = (v0.predict(questions[:n], torch.full((n,), y), questions[100:], config) for y in (1.0, 0.0))
        torch.testing.assert_close(won, 1 - lost, atol=1e-6, rtol=0)
        assert bool(((won > 0.5) & (won < 1)).all())
    few, many = (v0.predict(questions[:n], torch.ones(n), questions[100:], config).mean() for n in (1, 100))
    assert few < many


def test_neighbours_vote():
    history = torch.arange(10.0)[:, None]
    outcomes = torch.tensor([0.0] * 5 + [1.0] * 5)
    config = V0Config("knn", neighbours=3, prior=1.0)
    got = v0.predict(history, outcomes, torch.tensor([[-2.0], [4.6], [12.0]]), config)
    average = 5.5 / 11
    want = [(0 + average) / 4, (2 + average) / 4, (3 + average) / 4]
    assert got.tolist() == pytest.approx(want)


@pytest.mark.parametrize(("n", "dimension"), [(40, 6), (12, 30)])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_regression_is_where_its_loss_has_no_slope(n, dimension, share):
    """Against the gradient of the stated objective, over embeddings as wide as given."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, dimension, generator=generator, dtype=torch.float64)
    y = (torch.rand(n, generator=generator, dtype=torch.float64) * 5).round() / 5
    z = (x - x.mean(0)) / (x.std(0, correction=0) * math.sqrt(dimension))
    config = V0Config(ridge=0.5, rank_share=share, prior=2.0)
    probes = torch.cat([torch.zeros(1, dimension, dtype=torch.float64), torch.eye(dimension, dtype=torch.float64)])
    logits = v0.predict(x, y, x.mean(0) + probes * x.std(0, correction=0) * math.sqrt(dimension), config).logit()
    theta = torch.cat([logits[1:] - logits[0], logits[:1]]).requires_grad_()
    s = z @ theta[:-1] + theta[-1]
    neutral = torch.nn.functional.binary_cross_entropy_with_logits(theta[-1], torch.tensor(0.5, dtype=torch.float64))
    own = n * v0.value_loss(s, y, torch.zeros(n, dtype=torch.long), share)
    objective = own + 0.25 * theta[:-1].square().sum() + 2 * neutral
    assert float(torch.autograd.grad(objective, theta)[0].abs().max()) < 1e-5


def test_ranking_within_a_policy_is_not_helped_by_its_strength():
    contexts = torch.tensor([0, 0, 0, 1, 1, 1])
    outcomes = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    strength = torch.tensor([0.9] * 3 + [0.1] * 3)
    assert v0.auc_within(strength, outcomes, contexts) == 0.5
    assert v0.auc_within(outcomes, outcomes, contexts) == 1 and v0.auc_within(-outcomes, outcomes, contexts) == 0
    assert math.isnan(v0.auc_within(strength, torch.ones(6), contexts))


def test_residuals_are_held_against_what_should_not_explain_them():
    strength = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    values, outcomes = strength + torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4]), strength
    assert v0.residual_correlation(values, outcomes, strength) == pytest.approx(1)
    assert v0.residual_correlation(outcomes, values, strength) == pytest.approx(-1)
    assert v0.residual_correlation(values, values, strength) == 0
    tied = v0.residual_correlation(
        torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    )
    assert tied == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_what_is_no_history_is_refused():
    questions, first, _ = topics(n=20)
    wrong = [
        ((questions[:0], first[:0], questions), "the history is empty"),
        ((questions, first + 0.5, questions), "outcome . must lie in"),
        ((questions, first[:5], questions), "20 embeddings but outcomes"),
        ((questions, first, questions[:, :3]), r"must be \(N,D\) and \(Q,D\)"),
        ((questions, first, questions * math.inf), "embedding of the queries is not finite"),
    ]
    for given_, message in wrong:
        with pytest.raises(WorkbenchError, match=message) as caught:
            v0.predict(*given_)
        assert "\n" not in str(caught.value)
    assert v0.predict(questions, first, questions[:0]).shape == (0,)
    with pytest.raises(WorkbenchError, match=r"must be \(Q,\) all"):
        v0.value_loss(first, first, first[:3])
    for options in ({"head": "tabpfn"}, {"context": 0}, {"neighbours": 0}, {"ridge": 0.0}, {"prior": -1.0},
                    {"rank_share": 1.0}):  # fmt: skip
        with pytest.raises(WorkbenchError):
            V0Config(**options)


def test_routing_weighs_value_against_cost():
    values, costs = torch.tensor([[0.9, 0.5], [0.6, 0.55]]), torch.tensor([4.0, 1.0])
    torch.testing.assert_close(v0.routing_score(values, costs, 1.0), values)
    torch.testing.assert_close(v0.routing_score(values, costs, 0.75), 0.75 * values + 0.25 * torch.tensor([0.0, 1.0]))
    assert v0.routing_score(values, costs, 0.75).argmax(1).tolist() == [0, 1]
    assert v0.routing_score(values, costs, 0.0).argmax(1).tolist() == [1, 1]
    torch.testing.assert_close(v0.routing_score(values, torch.ones(2), 0.0), torch.ones(2, 2))
    for wrong in ((values + 1, costs, 0.5), (values, -costs, 0.5), (values, costs, 1.5), (values, costs[:1], 0.5)):
        with pytest.raises(WorkbenchError):
            v0.routing_score(*wrong)
