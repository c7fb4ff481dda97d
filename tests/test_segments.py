import math
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import by_token, make_batch, make_episodes, make_gaps, take_rows

from workbench.credit import agent_opsd
from workbench.credit.agent_opsd import AgentOPSDConfig
from workbench.errors import WorkbenchError
from workbench.records import Batch
from workbench.segments import runs_of, segment_sum, spread

tables = st.integers(1, 7).flatmap(
    lambda width: st.lists(st.lists(st.integers(-1, 2), min_size=width, max_size=width), min_size=1, max_size=5)
)


@settings(deadline=None)
@given(tables)
def test_runs_cover_the_table_and_end_where_the_label_or_the_row_does(rows):
    want = []
    for b, row in enumerate(rows):
        for t, label in enumerate(row):
            if t and row[t - 1] == label:
                want[-1][2] += 1
            else:
                want.append([b, t, 1, label])
    for dtype in (torch.int64, torch.int16):
        runs = runs_of(torch.tensor(rows, dtype=dtype))
        columns = (runs.rows, runs.columns, runs.lengths, runs.labels)
        assert [list(run) for run in zip(*(c.tolist() for c in columns), strict=True)] == want
        assert torch.equal(spread(runs.labels, runs), torch.tensor(rows))


def test_runs_of_a_table_that_is_a_view():
    labels = torch.tensor([[0, 1], [0, 1], [2, 1]]).T
    assert runs_of(labels).lengths.tolist() == [2, 1, 3]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**61), 2**61), max_size=4), min_size=1, max_size=5))
def test_segments_are_summed_apart_and_integers_exactly(segments):
    lengths = torch.tensor([len(s) for s in segments])
    values = torch.tensor([v for s in segments for v in s], dtype=torch.long)
    assert segment_sum(values % 2**40, lengths.int()).tolist() == [sum(v % 2**40 for v in s) for s in segments]
    got = segment_sum(values.double(), lengths)
    want = torch.tensor([float(sum(s)) for s in segments], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=4 * 2.0**61 * 2e-16)


def test_a_value_that_is_not_finite_stays_in_its_segment():
    values = torch.tensor([1.0, math.nan, 2.0, 3.0, math.inf, -math.inf, 4.0])
    sums = segment_sum(values, torch.tensor([2, 0, 2, 2, 1]))
    assert sums[[1, 2, 4]].tolist() == [0.0, 5.0, 4.0] and bool(sums[[0, 3]].isnan().all())


def test_sums_and_spreads_pass_gradients_on():
    runs = runs_of(torch.tensor([[0, 0, 1], [1, 1, 1]]))
    values = torch.arange(6.0, dtype=torch.float64).requires_grad_()
    segment_sum(values, runs.lengths).dot(torch.tensor([1.0, 2.0, 3.0]).double()).backward()
    assert values.grad.tolist() == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    values = torch.arange(3.0).requires_grad_()
    spread(values, runs).sum().backward()
    assert values.grad.tolist() == [2.0, 1.0, 3.0]


SPECIAL = [0.0, -0.0, 1e-3, -1e30, math.inf, -math.inf, math.nan, 3.0]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_spread_values_are_the_same_bits(dtype):
    values = torch.tensor(SPECIAL if dtype.is_floating_point else [0, 1, 1, 0, 1, 0, 0, 1]).to(dtype)
    runs = runs_of(torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 2], [2, 1, 1, 1, 1]]))
    want = values.repeat_interleave(runs.lengths).view(3, 5)
    memory = torch.full((3, 5), 7).to(dtype)
    for got in (spread(values, runs), spread(values, runs, memory)):
        assert got.dtype == dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert got.data_ptr() == memory.data_ptr()


# On batches


def split_and_copied(seed: int = 0) -> Batch:
    """Turns that masked tokens split, rows in disorder, some twice, and junk off the mask."""
    episodes = make_episodes(((0, 1, (5, 4, 6)), (0, 0, (3, 7)), (0, 1, (8,)), (1, 0, (4, 4))), seed)
    batch = make_batch(episodes, make_gaps(episodes, seed), layout="turn")
    turns = batch.turn_index.clone()
    for b in range(len(turns)):
        turns[b, batch.response_mask[b].nonzero()[1::3, 0]] = -1
    batch = batch.with_(turn_index=turns, response_mask=turns >= 0)
    batch = take_rows(batch, [3, 7, 0, 1, 3, 2, 6, 5, 4, 0, 3])
    junk = torch.tensor([math.nan, math.inf, -math.inf, 5.0]).double().repeat(turns.shape[1])[: turns.shape[1]]
    off = {
        name: torch.where(batch.response_mask, getattr(batch, name), junk)
        for name in ("old_logprobs", "teacher_logprobs")
    }
    return batch.with_(**off)


def first_cells(batch: Batch) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(row, column) of the tokens of each (episode, turn), in the first row that holds it."""
    out: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for b, t in batch.response_mask.nonzero().tolist():
        cells = out.setdefault((int(batch.episode_index[b]), int(batch.turn_index[b, t])), [])
        if not cells or cells[0][0] == b:
            cells.append((b, t))
    return out


def test_split_turns_copies_and_junk_off_the_mask():
    batch = split_and_copied()
    cells = first_cells(batch)
    counted = torch.zeros_like(batch.response_mask)
    for (e, k), own in cells.items():
        assert batch.turn_tokens[e, k] == len(own)
        want = sum(float(batch.old_logprobs[b, t]) for b, t in own)
        assert batch.turn_sum(batch.old_logprobs)[e, k] == pytest.approx(want, rel=1e-12)
        counted[tuple(zip(*own, strict=True))] = True
    assert torch.equal(batch.counted, counted) and bool((batch.response_mask & ~counted).any())
    assert batch.turn_sum(batch.response_mask.long()).sum() == batch.turn_tokens.sum() == counted.sum()
    values = torch.arange(batch.turn_mask.numel()).view(batch.turn_mask.shape) + 0.5
    tokens = batch.to_tokens(values)
    assert bool((tokens[~batch.response_mask] == 0).all())
    for b, t in batch.response_mask.nonzero().tolist():
        assert tokens[b, t] == values[batch.episode_index[b], batch.turn_index[b, t]]


def test_tokens_by_turn_come_turn_by_turn_and_copies_after_the_row_that_counts():
    batch = split_and_copied()
    places, owners, sizes = batch.tokens_by_turn()
    assert sorted(places.tolist()) == batch.response_mask.view(-1).nonzero()[:, 0].tolist()
    K, seen = batch.turn_mask.shape[1], set()
    assert owners.tolist() == sorted(owners.tolist())
    for owner, own in zip(owners.tolist(), places.split(sizes.tolist()), strict=True):
        got = [divmod(place, batch.input_ids.shape[1]) for place in own.tolist()]
        if owner not in seen:
            assert got == first_cells(batch)[divmod(owner, K)]
        seen.add(owner)
        assert len({b for b, _ in got}) == 1 and [t for _, t in got] == sorted(t for _, t in got)


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_token_granularity_does_not_depend_on_how_much_is_laid_out_at_once(block, monkeypatch):
    batch, config = split_and_copied(), AgentOPSDConfig(granularity="token", evidence="centred")
    want = agent_opsd.credit(batch, config)
    monkeypatch.setattr(agent_opsd, "_BLOCK", block)
    got = agent_opsd.credit(batch, config)
    torch.testing.assert_close(got.advantages, want.advantages, rtol=1e-9, atol=1e-12)
    for name, value in want.turns.items():
        torch.testing.assert_close(got.turns[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_credit_ignores_junk_off_the_mask_and_repeats_its_bits(granularity):
    config, batch = AgentOPSDConfig(granularity=granularity), split_and_copied()
    clean = {n: torch.where(batch.response_mask, getattr(batch, n), 0) for n in ("old_logprobs", "teacher_logprobs")}
    want = agent_opsd.credit(batch.with_(**clean), config)
    for got in (agent_opsd.credit(batch, config), agent_opsd.credit(batch, config)):
        assert torch.equal(got.advantages, want.advantages)
        assert all(torch.equal(got.turns[name], value) for name, value in want.turns.items())
    assert bool((want.advantages != 0).any())
    by_token(batch, want.advantages)


def test_a_small_integer_type_of_turn_index_gives_the_same_credit():
    batch = split_and_copied()
    small = batch.with_(turn_index=batch.turn_index.to(torch.int16))
    assert torch.equal(agent_opsd.credit(small).advantages, agent_opsd.credit(batch).advantages)


def test_credit_leaves_the_batch_as_it_was():
    batch = split_and_copied()
    before = {name: value.clone() for name, value in batch.tensors().items()}
    agent_opsd.credit(batch)
    agent_opsd.credit(batch, evidence_mask=batch.response_mask)
    for name, value in batch.tensors().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_gaps_that_are_finite_but_add_up_to_infinity_are_told_apart():
    episodes = make_episodes(((0, 1, (2, 1)), (0, 0, (2,))))
    batch = make_batch(episodes, make_gaps(episodes))
    teacher = torch.where(batch.turn_index == 0, -1.5e308, batch.teacher_logprobs)
    with pytest.raises(WorkbenchError, match="evidence of a turn is not finite"):
        agent_opsd.credit(batch.with_(teacher_logprobs=teacher))


def test_the_benchmark_agrees_with_its_loops(monkeypatch, capsys):
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    monkeypatch.setattr("sys.argv", ["credit.py", "--tokens", "12800", "--subset", "16", "--repeats", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(benchmarks / "credit.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("12,800 tokens in 128 turns") and int(lines[-1]) > 0
