"""Exponents and their figure from made-up power laws, and the benchmark's counts at tiny sizes."""

import math

import numpy as np
import polars as pl
import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.figures import scaling
from workbench.records import Batch

SIZES = [8, 16, 32, 64, 128]
POWERS = {("episodes", "rollout"): 0.8, ("episodes", "update"): 1.0, ("context", "rollout"): 0.7,
          ("context", "update"): 2.0}  # fmt: skip


def made_up(fixed: float = 0.0) -> pl.DataFrame:
    """Exact power laws, from `fixed` seconds on."""
    rows = [(axis, n, stage, fixed + 0.01 * n**power) for (axis, stage), power in POWERS.items() for n in SIZES]
    return pl.DataFrame(rows, schema=["axis", "size", "stage", "seconds"], orient="row")


def test_power_laws_have_their_exponents_in_any_order_of_rows():
    for frame in (made_up(), made_up().sample(fraction=1, shuffle=True, seed=1)):
        found = {(axis, stage): (power, above) for axis, stage, power, above in scaling.exponents(frame).rows()}
        assert found == {key: (pytest.approx(power, abs=1e-9), 32) for key, power in POWERS.items()}
        steps = scaling.local(frame)
        assert steps["exponent"].null_count() == len(POWERS)
        for (axis, stage), part in steps.group_by("axis", "stage"):
            assert part["size"].to_list() == SIZES and part["exponent"][0] is None
            assert part["exponent"][1:].to_list() == pytest.approx([POWERS[axis, stage]] * 4)


def test_small_sizes_where_fixed_costs_hide_the_power_are_left_out():
    found = scaling.exponents(made_up(fixed=0.02)).filter(axis="context", stage="update")["exponent"][0]
    line = made_up(fixed=0.02).filter(axis="context", stage="update")
    size, seconds = (np.log(line[name].to_numpy()) for name in ("size", "seconds"))
    assert abs(found - 2) < abs(np.polyfit(size, seconds, 1)[0] - 2)
    assert found == pytest.approx(np.polyfit(size[2:], seconds[2:], 1)[0])
    pair = made_up().filter(pl.col("size") < 32)
    assert scaling.exponents(pair)["above"].unique().to_list() == [8]


def test_the_figure_has_a_panel_an_axis_a_line_a_stage_and_the_exponents():
    fig = scaling.figure(made_up(), held="Held: <b>8</b> turns.")
    assert [(t.xaxis, t.name) for t in fig.data] == [
        ("x", "rollout"), ("x", "update"), ("x2", "rollout"), ("x2", "update")
    ]  # fmt: skip
    assert [t.showlegend for t in fig.data] == [True, True, False, False]
    for trace, (axis, stage) in zip(fig.data, POWERS, strict=True):
        assert list(trace.x) == SIZES
        assert list(trace.y) == pytest.approx([0.01 * n ** POWERS[axis, stage] for n in SIZES])
        filled = [colour == trace.line.color for colour in trace.marker.color]
        assert filled == [False, False, True, True, True]
        assert trace.customdata[0] == "" and f"{POWERS[axis, stage]:.2f}" in trace.customdata[1]
    titles = [note.text for note in fig.layout.annotations]
    assert ["episodes" in t for t in titles] == [True, False] and "context, tokens" in titles[1]
    assert all("rollout" in t and "update" in t for t in titles)
    assert "0.80" in titles[0] and "1.00" in titles[0] and "0.70" in titles[1] and "2.00" in titles[1]
    assert {fig.layout[a].type for a in ("xaxis", "xaxis2", "yaxis", "yaxis2")} == {"log"}
    assert fig.layout.yaxis.range == fig.layout.yaxis2.range
    low, high = fig.layout.yaxis.range
    assert low < math.log10(min(fig.data[0].y)) and high > math.log10(max(fig.data[3].y))
    assert "&lt;b&gt;8" in fig.layout.meta["subtitle"] and "cost grow" in fig.layout.meta["title"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (made_up().drop("seconds"), "no column seconds"),
        (made_up().clear(), "no rows"),
        (made_up().with_columns(seconds=pl.lit(0.0)), "episodes, rollout: seconds must be above 0"),
        (made_up().with_columns(size=-pl.col("size")), "size must be above 0"),
        (made_up().with_columns(seconds=pl.lit(math.nan)), "seconds must be above 0 and finite, got nan"),
        (made_up().with_columns(seconds=pl.when(pl.col("size") > 8).then("seconds")), "got None"),
        (made_up().with_columns(size=pl.lit("big")), "must be numbers"),
        (made_up().filter(pl.col("size") == 8), "two or more sizes"),
        (pl.concat([made_up(), made_up().tail(1)]), "context, update: two or more sizes, each once"),
        (pl.concat([made_up().with_columns(stage=pl.lit(str(i))) for i in range(9)]).unique(["axis", "size", "stage"]),
         "at most 8 stages"),
    ],
)  # fmt: skip
def test_a_frame_of_another_shape_is_refused_in_one_line(wrong, told):
    with pytest.raises(WorkbenchError, match=told) as caught:
        scaling.figure(wrong)
    assert "\n" not in str(caught.value)


@pytest.fixture
def benchmark(monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "benchmarks"))
    threads = torch.get_num_threads()
    import scaling as script

    yield script
    torch.set_num_threads(threads)
    script.policy_of.cache_clear()


def test_the_benchmark_plays_what_its_setting_says(benchmark):
    setting = benchmark.Setting(episodes=10, turns=3, message=5, response=4, vocabulary=64)
    episodes = benchmark.rollout(setting)
    batch = Batch.from_episodes(episodes, layout="episode")
    assert [len(e.turns) for e in episodes] == [3] * 10 and {e.stop_reason for e in episodes} == {"max_turns"}
    assert [e.group for e in episodes] == [0] * 8 + [1] * 2
    ids, mask = benchmark.rows(setting)
    assert ids.shape == batch.input_ids.shape == (10, setting.context) and torch.equal(mask, batch.response_mask)
    assert int(mask.sum()) == setting.sampled == 10 * 3 * 4
    for rows in (ids, batch.input_ids):  # a group begins with one message, and goes on in its own way
        assert (rows[:8, :5] == rows[0, :5]).all() and not torch.equal(rows[8, :5], rows[0, :5])
        assert len(rows[:8].unique(dim=0)) == 8
    messages = [batch.input_ids[row, at : at + 5].tolist() for row in (0, 1) for at in (9, 18)]
    assert len(set(map(tuple, messages))) == 4
    logprobs = benchmark.score(setting, batch)
    torch.testing.assert_close(logprobs[mask], batch.old_logprobs[mask], atol=1e-4, rtol=1e-4)
    gradient = benchmark.update(setting, batch).clone()
    assert gradient.shape[0] == 64 and gradient.abs().sum() > 0
    torch.testing.assert_close(benchmark.update(setting, batch), gradient)  # repeats add nothing up


def test_each_axis_of_the_benchmark_changes_what_it_names(benchmark):
    base = benchmark.Setting(episodes=2, turns=2, message=4, response=2, vocabulary=32)
    counts = {"episodes": [(8, 24), (16, 48)], "turns": [(16, 48), (32, 96)], "context": [(8, 16), (8, 32)],
              "vocabulary": [(8, 24), (8, 24)]}  # fmt: skip
    sizes = {"episodes": [2, 4], "turns": [4, 8], "context": [8, 16], "vocabulary": [32, 48]}
    assert set(sizes) == set(benchmark.SIZES)
    for axis, of in sizes.items():
        frame = benchmark.measured(axis, of, base, repeats=1)
        assert frame["stage"].to_list() == ["rollout", "scoring", "update"] * 2
        assert frame.filter(stage="rollout").select("sampled", "read").rows() == counts[axis]
        assert frame["size"].to_list() == [of[0]] * 3 + [of[1]] * 3 and (frame["seconds"] > 0).all()
        assert scaling.exponents(frame).height == 3
    assert benchmark.policy_of(48, base.context).lm_head.weight.shape[0] == 48
    assert benchmark.policy_of(32, 4096).model.config.max_position_embeddings == 4096
