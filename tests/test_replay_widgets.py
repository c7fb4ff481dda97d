"""The sliders: what a view shows for a value is what the library computes for it afresh."""

import json
from pathlib import Path

import ipywidgets
import numpy as np
import polars as pl
import pytest
import synthetic_run
import torch
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from workbench import shipped
from workbench.credit.agent_opsd import AgentOPSDConfig
from workbench.errors import WorkbenchError
from workbench.figures import beliefs, display, replay, tokens
from workbench.reuse.dgg import DGGConfig, Gate
from workbench.runs import RunFolder
from workbench.widgets import sliders
from workbench.widgets.replay import EVIDENCE, belief_view, gate_view, lm_head_view, regate


@pytest.fixture(scope="module")
def run():
    return RunFolder.open(shipped.data("recorded_run"))


@pytest.fixture(scope="module")
def tables(run):
    return {name: run.read(name) for name in ("turns", "episodes", "updates")}


def trace(figure, **meta):
    (found,) = [t for t in figure.data if t.meta and all(t.meta.get(k) == v for k, v in meta.items())]
    return found


# Beliefs


@pytest.mark.parametrize(
    "moved",
    [
        {"gamma": 0.8},
        {"gamma": 0.0, "evidence": "mean"},
        {"band": 0.75, "lam": 1.0},
        {"lam": 0.0},
        {"evidence": "centred", "gamma": 0.5},
    ],
)
def test_belief_sliders_show_what_the_rule_computes(run, tables, moved):
    view = belief_view(run, step=9, episode=34)
    for name, value in moved.items():
        view.controls[name].value = value
    mine = tables["turns"].filter(pl.col("step") == 9, pl.col("episode") == 34)
    fresh = replay.with_beliefs(mine, tables["episodes"], AgentOPSDConfig(**moved)).sort("turn")
    (figure,) = view.figures
    path = trace(figure, panel="belief", rule="with these settings")
    assert path.y == (fresh["belief_before"][0], *fresh["belief"])
    assert [s == "diamond" for s in path.marker.symbol[1:]] == fresh["pivotal"].to_list()
    bars = trace(figure, panel="advantage", rule="with these settings")
    assert np.allclose(np.add(bars.y, bars.base), fresh["turn_advantage"]) and fresh.height > 3
    assert trace(figure, panel="advantage", rule="as recorded").y == tuple(mine.sort("turn")["turn_advantage"])
    kind = next(name for name, rule in EVIDENCE.items() if rule == view.values["evidence"])
    said = f"gamma = {view.values['gamma']:g}, band = {view.values['band']:g}, lam = {view.values['lam']:g}"
    assert view.sentences[0] == f"{said}, evidence: {kind}."


def test_belief_view_starts_at_the_recorded_credit(run, tables):
    view = belief_view(run)
    step, _, episode = beliefs.choose(tables["turns"], tables["episodes"])
    (figure,) = view.figures
    assert f"Step {step}, episode {episode}" in figure.layout.meta["subtitle"]
    bars = trace(figure, panel="advantage", rule="with these settings")
    assert np.allclose(np.add(bars.y, bars.base), trace(figure, panel="advantage", rule="as recorded").y, atol=1e-4)
    assert "No turn's advantage differs" in view.sentences[2]


def test_a_run_starts_at_its_own_options_and_one_of_another_method_at_the_papers(tmp_path):
    own = synthetic_run.write(tmp_path, "own", "agent_opsd", n_steps=2, groups=1)
    config = json.loads((own.path / "config.json").read_text())
    config["config"]["method_options"] = {"gamma": 0.6, "lam": 0.25, "unrelated": 3}
    (own.path / "config.json").write_text(json.dumps(config))
    assert belief_view(own.path).values == {"gamma": 0.6, "band": 0.2, "lam": 0.25, "evidence": "sum"}
    assert gate_view(own.path).values["beta"] == 5
    config["config"]["method"] = "gigpo"
    (own.path / "config.json").write_text(json.dumps(config))
    assert belief_view(own.path).values["gamma"] == 0.95


def test_a_group_that_ended_alike_is_said_to_earn_nothing(run, tables):
    alike = tables["episodes"].join(tables["turns"], on=["step", "episode"], how="semi")
    view = belief_view(run, *alike.filter(pl.col("advantage") == 0).select("step", "episode").row(0))
    view.controls["band"].value = 1.0
    assert "no setting gives any credit" in view.sentences[-1]
    assert set(trace(view.figures[0], panel="advantage", rule="with these settings").y) == {0.0}


# Token gate


@pytest.mark.parametrize("beta", [0.0, 1.5, 12.0])
def test_gate_slider_shows_the_sigmoid_of_beta_times_gap(run, tables, beta):
    view = gate_view(run, step=9, episode=34)
    view.controls["beta"].value = beta
    spread, cells = view.figures
    rows = tables["turns"].filter(pl.col("step") == 9).join(tables["episodes"], on=["step", "episode"], how="left")
    for outcome in (0, 1):
        gap = rows.filter(pl.col("outcome") == outcome)["gap"].explode().cast(pl.Float64).to_numpy()
        gate = torch.sigmoid(beta * torch.from_numpy(gap.copy())).numpy()
        line = trace(spread, outcome=outcome)
        assert sum(line.y) == pytest.approx(1) and np.allclose(line.y, np.histogram(gate, 40, (0, 1))[0] / len(gate))
    turn = view.values["turn"]
    fresh = tokens.token_rows(tables["turns"], 9, 34, turn, beta)
    assert list(cells.data[0].customdata) == [t["gate"] for t in fresh]
    assert np.allclose([t["gate"] for t in fresh], [1 / (1 + np.exp(-beta * t["gap"])) for t in fresh], atol=1e-6)
    assert view.sentences[0].startswith(f"beta = {beta:g}: mean gate")
    view.controls["turn"].value = -1
    assert len(view.figures[1].data[0].customdata) > len(fresh), "all turns of the episode"


def test_hostile_actions_are_plain_options(tmp_path):
    source = synthetic_run.write(tmp_path, "hostile", n_steps=1, groups=1)
    turns = source.read("turns").with_columns(action=pl.lit("<script>alert(1)</script>\n" * 9))
    for step, part in turns.group_by("step"):
        source.write_table("turns", step[0], part)
    view = gate_view(source.path)
    labels = [label for label, _ in view.controls["turn"].options]
    assert all("\n" not in label and len(label) < 60 for label in labels)
    text = json.dumps([display.spec(f) for f in belief_view(source.path).figures])
    assert "<script" not in text and "&lt;script" in text


# Gate on the head's gradient


def test_the_recorded_gate_is_replayed_exactly(run, tables):
    view = lm_head_view(run)
    assert view.values == {"threshold": 0.1, "window": 6, "mode": "both"}
    now = regate(tables["updates"], DGGConfig(threshold=0.1, window=6))
    assert now.select("update", "applied", "stop").equals(tables["updates"].select("update", "applied", "stop"))
    for name in ("z", "increment"):
        assert np.allclose(now[name].fill_null(9e9), tables["updates"][name].fill_null(9e9))


@pytest.mark.parametrize("moved", [{"threshold": -0.5}, {"threshold": 0.0, "window": 3}, {"window": 2, "mode": "stop"}])
def test_gate_sliders_show_what_the_gate_decides(run, tables, moved):
    view = lm_head_view(run)
    for name, value in moved.items():
        view.controls[name].value = value
    config = DGGConfig(**{"threshold": 0.1, "window": 6} | moved)
    gate, kept, stopped = Gate(config), [], set()
    for row in tables["updates"].sort("update").to_dicts():
        if row["step"] not in stopped:
            decision = gate.observe(row["energy"], row["reuse"])
            kept.append((row["update"], decision))
            stopped |= {row["step"]} if decision.stop else set()
    assert stopped
    figure = view.figures[0]
    line = [t for t in figure.data if t.mode == "lines" and t.yaxis == "y3"][0]
    assert list(line.x) == [u for u, _ in kept] and list(line.y) == [d.z for _, d in kept]
    applied = [u for u, d in kept if d.apply and not d.stop]
    marks = [t for t in figure.data if t.mode == "markers" and t.yaxis == "y3" and t.name.startswith("applied (")][0]
    assert list(marks.x) == applied
    if view.values["threshold"] < 0:
        assert len(kept) < tables["updates"].height, "what follows a stop is left out"
    dropped = tables["updates"].height - len(kept)
    assert f"{dropped} not computed" in view.sentences[1] and f"threshold = {config.threshold:g}" in view.sentences[0]
    assert view.figures[1].layout.title.text.startswith("<b") and len(view.figures) == 2


def test_a_window_that_never_fills_is_said(run):
    view = lm_head_view(run)
    view.controls["window"].value = 60
    assert "No gradient was scored" in " ".join(view.sentences)


# The view


@pytest.fixture
def shown(monkeypatch):
    """What is displayed and updated, as (transient display id, data, update)."""
    calls = []

    class Recorder(DisplayPublisher):
        def publish(self, data, metadata=None, *, transient=None, update=False, **kwargs):
            calls.append(((transient or {}).get("display_id"), data, update))

    monkeypatch.setattr(InteractiveShell, "_instance", None, raising=False)
    shell = InteractiveShell.instance(display_pub_class=Recorder)
    yield calls
    type(shell).clear_instance()


def test_a_view_is_a_widget_and_plain_outputs_that_follow_it(run, shown):
    view = belief_view(run)
    view._ipython_display_()
    (_, live, _), (figure, first, _), (words, _, _) = shown
    assert "application/vnd.jupyter.widget-view+json" in live and "gamma" in live["text/plain"]
    assert display.MIME in first and display.MARK in first["text/html"] and figure and words
    shown.clear()
    view.controls["gamma"].value = 0.5
    assert [(i, u) for i, _, u in shown] == [(figure, True), (words, True)]
    assert shown[0][1][display.MIME] == display.spec(view.figures[0]) != first[display.MIME]
    assert "gamma = 0.5" in shown[1][1]["text/html"]
    (parts,) = [c for c in view.widget.children if isinstance(c, sliders.Figures)]
    assert parts.specs == [display.spec(view.figures[0])] and parts.sentences == list(view.sentences)
    shown.clear()
    view.reset()
    assert view.values["gamma"] == 0.95 and len(shown) == 2 and shown[0][1][display.MIME] == first[display.MIME]


def test_the_reset_button_and_a_second_display_follow_too(run, shown):
    view = belief_view(run)
    view._ipython_display_(), view._ipython_display_()
    view.controls["lam"].value = 1.0
    assert sum(update for *_, update in shown) == 4
    (button,) = [w for w in view.widget.children[0].children if isinstance(w, ipywidgets.Button)]
    button.click()
    assert view.values["lam"] == 0.5


def test_plotly_comes_from_the_kernel_and_data_is_never_markup(run, monkeypatch):
    view = belief_view(run)
    parts, sent = view.widget.children[1], []
    monkeypatch.setattr(parts, "send", lambda content, buffers=None: sent.append((content, buffers)))
    parts._hear(parts, {"request": "other"}, None)
    parts._hear(parts, {"request": "plotly"}, None)
    ((content, (library,)),) = sent
    assert content == {"library": "plotly"} and b"Plotly" in library[-5000:] and len(library) > 1e6
    assert len(json.dumps(parts.get_state(["specs", "sentences"]))) < 100_000, "the library is no part of the state"
    module = (Path(sliders.__file__).parent / "sliders.js").read_text()
    assert "innerHTML" not in module and "http" not in module and "import(" not in module


def test_what_a_run_lacks_is_said_in_one_line(tmp_path, run):
    plain = synthetic_run.write(tmp_path, "plain", "grpo", teacher=False, n_steps=2, groups=1)
    for view in (belief_view, gate_view):
        with pytest.raises(WorkbenchError, match="teacher"):
            view(plain.path)
        with pytest.raises(WorkbenchError, match="nearest is"):
            view(run, step=7)
        with pytest.raises(WorkbenchError, match="nearest is"):
            view(run, 9, 9999)
    with pytest.raises(WorkbenchError, match="not a run folder"):
        lm_head_view(tmp_path)
