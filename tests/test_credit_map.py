"""Maps of credit: what is drawn is what the methods gave, equals are said to be equal, and no rollout text gets out."""

import json
import re
from dataclasses import replace

import polars as pl
import pytest
import synthetic_run
import torch

from workbench.errors import WorkbenchError
from workbench.figures import beliefs, credit_compare, credit_map, display, gates
from workbench.replay import batch_of, credit_by_method

STEP = 4
VARYING = ["gigpo", "agent_opsd", "agent_opsd_dgg", "rlsd", "sdar", "skill_sd", "opd"]


class Run:
    """One replayed step of a made-up run."""

    def __init__(self, names=None, step=STEP, change=None, **options):
        tables = synthetic_run.tables(n_steps=4, groups=2, size=6, **options)
        self.turns, self.episodes = tables["turns"], tables["episodes"]
        if change is not None:
            self.turns = self.turns.with_columns(**change)
        self.batch, self.order = batch_of(self.turns, self.episodes, step)
        self.done, self.left_out = credit_by_method(self.batch, names)
        self.step, self.episode = credit_map.choose(self.turns, self.episodes, step)

    def by_turn(self, **options):
        return credit_map.by_turn(
            self.batch, self.order, self.done, self.turns, self.episodes, self.step, self.episode, **options
        )

    def by_token(self, turn, **options):
        return credit_map.by_token(
            self.batch, self.order, self.done, self.turns, self.step, self.episode, turn, **options
        )

    @property
    def kinds(self):
        return credit_compare.kinds(self.batch, self.done)


@pytest.fixture(scope="module")
def run():
    return Run()


@pytest.fixture(scope="module")
def plain():
    return Run(teacher=False, gate=False)


def rows_of(fig, trace=0):
    """{name: (shares, texts)} of a heat map, its headings left out."""
    heat, names = fig.data[trace], dict(zip(fig.layout.yaxis.tickvals, fig.layout.yaxis.ticktext, strict=True))
    return {names[y].strip(): (list(heat.z[y]), list(heat.text[y])) for y in heat.y if y in names}


def beside(fig):
    """What is written at the right of each row."""
    names = dict(zip(fig.layout.yaxis.tickvals, fig.layout.yaxis.ticktext, strict=True))
    out = {name.strip(): [] for name in names.values()}
    for note in fig.layout.annotations:
        if note.x == 1 and note.y in names:
            out[names[note.y].strip()].append(note.text)
    return out


def test_kinds_say_what_a_method_tells_apart(run, plain):
    told = run.kinds
    assert {n for n, k in told.items() if k == "turn"} == {"gigpo", "agent_opsd", "agent_opsd_dgg"}
    assert {n for n, k in told.items() if k == "token"} == {"rlsd", "step_opsd", "sdar", "skill_sd", "opd"}
    assert credit_compare.in_order(told)[0] == "grpo" and credit_compare.in_order(told)[-1] == "opd"
    assert set(plain.kinds.values()) == {"episode", "turn"} and plain.kinds["gigpo"] == "turn"
    assert credit_compare.counts(plain.kinds) == {"episode": len(plain.done) - 1, "turn": 1, "token": 0}


def test_relations_name_the_first_of_a_kind_and_the_factor():
    rows = {
        "a": [1.0, -2.0], "b": [0.5, -1.0], "c": [-1.0, 2.0], "d": [1.0, 2.0], "e": [0.0, 0.0], "f": [0.0, 0.0],
        "g": [1.0, -2.0 + 1e-9],
    }  # fmt: skip
    got = credit_compare.relations(rows)
    assert got == {
        "a": None,
        "b": ("a", 0.5),
        "c": None,
        "d": None,
        "e": None,
        "f": ("e", 1.0),
        "g": ("a", got["g"][1]),
    }
    assert got["g"][1] == pytest.approx(1)


def test_the_turn_map_shows_each_methods_credit_on_its_own_scale(run):
    fig = run.by_turn()
    mine = run.turns.filter(pl.col("step") == run.step, pl.col("episode") == run.episode).sort("turn")
    rows, notes = rows_of(fig), beside(fig)
    assert list(rows) == credit_compare.in_order(run.kinds) and "opsd" not in rows
    assert {n.text for n in fig.layout.annotations if n.text.startswith("<i>")} == {
        f"<i>{words}</i>" for words in credit_compare.KINDS.values()
    }
    place = credit_map.place(run.order, run.episode)
    for name, (shares, texts) in rows.items():
        want = credit_compare.turn_tables(run.batch, run.done)[name][place, : mine.height]
        assert shares == pytest.approx((want / want.abs().max()).tolist()), name
        assert len(shares) == mine.height and max(map(abs, shares)) == pytest.approx(1)
        assert [float(t.replace("−", "-")) for t in texts] == pytest.approx(want.tolist(), abs=0.0051), name
        assert float(notes[name][0]) == pytest.approx(want.abs().max().item(), rel=0.01)
    recorded = mine["turn_advantage"].to_numpy()
    assert rows["agent_opsd"][0] == pytest.approx(recorded / abs(recorded).max(), abs=1e-4)
    assert notes["dapo"][1] == "= grpo" and notes["agent_opsd_dgg"][1] == "= agent_opsd"
    assert len(notes["grpo"]) == len(notes["agent_opsd"]) == 1
    assert re.fullmatch(r"= 0\.\d+ × grpo", notes["dr_grpo"][1])
    heat = fig.data[0]
    assert (heat.zmin, heat.zmax) == (-1, 1) and "share of the row's largest |credit|" in heat.colorbar.title.text
    label = heat.hovertext[fig.layout.yaxis.tickvals[-1]][0]
    first = mine.row(0, named=True)
    assert "<b>opd</b>" in label and first["action"] in label and "evidence" in label and "ΔB" in label
    assert fig.layout.xaxis.ticktext[0].endswith("<b>1</b>")


def test_the_centred_map_holds_only_methods_that_tell_the_turns_apart(run, plain):
    fig = run.by_turn(centred=True)
    rows, notes = rows_of(fig), beside(fig)
    assert list(rows) == VARYING
    assert f"Not drawn: {len(run.done) - len(VARYING)} methods" in fig.layout.meta["subtitle"]
    place = credit_map.place(run.order, run.episode)
    credit = credit_compare.turn_tables(run.batch, run.done)["agent_opsd"][place][run.batch.turn_mask[place]]
    want = 100 * (credit - credit.mean()) / credit.abs().mean()
    assert rows["agent_opsd"][0] == pytest.approx((want / want.abs().max()).tolist())
    assert notes["agent_opsd"][0].endswith(" %") and float(notes["agent_opsd"][0][:-2]) < 21, "within its band"
    assert list(rows_of(plain.by_turn(centred=True))) == ["gigpo"]
    flat = Run(["grpo", "rloo"]).by_turn(centred=True)
    assert list(rows_of(flat)) == ["grpo", "rloo"] and "No method tells its turns apart" in flat.layout.meta["subtitle"]
    assert all(not any(shares) for shares, _ in rows_of(flat).values())


def test_a_group_without_signal_is_drawn_as_zeros():
    run = Run(["grpo", "agent_opsd"])
    run.episodes = run.episodes.with_columns(outcome=1, advantage=0.0, prior=0.9999)
    run.batch, run.order = batch_of(run.turns, run.episodes, STEP)
    run.done, _ = credit_by_method(run.batch, ["grpo", "agent_opsd"])
    assert all(not any(shares) for shares, _ in rows_of(run.by_turn()).values())
    assert credit_compare.favoured(run.batch, run.done, 0) == {}
    frame = credit_compare.agreement_frame(run.batch, run.done)
    assert frame["correlation"].null_count() == 3 and credit_compare.least_agreement(frame) is None
    assert "no method here tells turns" in credit_compare.agreement(frame, STEP).layout.annotations[0].text
    assert credit_compare.sentences(run.kinds, frame)[-1].startswith("No two methods")


def test_the_token_map_shows_what_each_loss_adds(run):
    turn = gates.pick_turn(run.turns, run.step, run.episode)
    fig = run.by_token(turn)
    mine = run.turns.filter(
        pl.col("step") == run.step, pl.col("episode") == run.episode, pl.col("turn") == turn
    ).row(0, named=True)  # fmt: skip
    rows, notes = rows_of(fig), beside(fig)
    assert list(rows) == ["teacher gap (nats)", "rlsd", "step_opsd", "sdar, its loss", "grpo_opsd, its loss",
                          "skill_sd, its loss", "opd, its loss"]  # fmt: skip
    gap = torch.tensor(mine["teacher_logprobs"]).double() - torch.tensor(mine["old_logprobs"]).double()
    gate = torch.sigmoid(5 * gap)
    assert rows["teacher gap (nats)"][0] == pytest.approx((gap / gap.abs().max()).tolist(), abs=1e-5)
    assert rows["sdar, its loss"][0] == pytest.approx((gate / gate.max()).tolist(), abs=1e-5)
    assert float(notes["sdar, its loss"][0]) == pytest.approx(0.01 * gate.max().item(), rel=0.01)
    assert float(notes["grpo_opsd, its loss"][0]) == 0.005 and notes["opd, its loss"][1] == "= teacher gap"
    ticks = [t.replace("&lt;", "<").replace("&gt;", ">") for t in fig.layout.xaxis.ticktext]
    assert ticks == [p.strip() for p in mine["pieces"]]
    assert "raises a token" in fig.layout.meta["subtitle"] and f"turn {turn + 1} of" in fig.layout.meta["subtitle"]


def test_a_long_turn_takes_several_lines():
    columns = ("token_ids", "pieces", "old_logprobs", "teacher_logprobs", "entropy")
    many = Run(change={c: pl.concat_list([pl.col(c)] * 17) for c in columns})
    count = many.turns.filter(pl.col("step") == many.step, pl.col("episode") == many.episode, pl.col("turn") == 1)
    count = len(count["token_ids"][0])
    fig = many.by_token(1)
    assert len(fig.data) == -(-count // credit_map.TOKENS_A_LINE) > 1
    assert sum(len(trace.x) for trace in fig.data) == count
    assert [trace.showscale for trace in fig.data] == [True] + [False] * (len(fig.data) - 1)
    assert fig.layout.yaxis2.ticktext == fig.layout.yaxis.ticktext
    assert max(abs(v) for trace in fig.data for v in trace.z[0]) == pytest.approx(1), "one scale for all lines"
    cut = many.by_token(1, limit=10)
    assert len(cut.data[0].x) == 10 and f"The last {count - 10} tokens" in cut.layout.meta["subtitle"]


def test_rank_correlations_are_within_episodes(run):
    frame = credit_compare.agreement_frame(run.batch, run.done)
    pairs = {frozenset((r["one"], r["other"])): r for r in frame.to_dicts()}
    assert len(pairs) == len(run.done) * (len(run.done) + 1) / 2
    assert {n for n in run.done if pairs[frozenset([n])]["correlation"] is not None} == set(VARYING)
    assert pairs[frozenset(["grpo", "rlsd"])]["correlation"] is None
    assert pairs[frozenset(["agent_opsd", "agent_opsd_dgg"])]["correlation"] == pytest.approx(1)
    tables, found = credit_compare.turn_tables(run.batch, run.done), []
    for e, there in enumerate(run.batch.turn_mask):
        both = pl.DataFrame({n: tables[n][e][there].numpy().round(9) for n in ("agent_opsd", "opd")})
        if all(both[n].n_unique() > 1 for n in both.columns):
            found.append(both.select(pl.corr("agent_opsd", "opd", method="spearman")).item())
    row = pairs[frozenset(["agent_opsd", "opd"])]
    assert row["episodes"] == len(found) > 3 and row["correlation"] == pytest.approx(sum(found) / len(found))
    turned = {"opd": run.done["opd"], "turned": replace(run.done["opd"], push=-run.done["opd"].push)}
    low = credit_compare.least_agreement(credit_compare.agreement_frame(run.batch, turned))
    assert low["correlation"] == pytest.approx(-1)


def test_the_matrix_and_the_sentences_say_the_same(run):
    frame = credit_compare.agreement_frame(run.batch, run.done)
    fig = credit_compare.agreement(frame, run.step)
    heat = fig.data[0]
    assert [t.strip() for t in fig.layout.xaxis.ticktext] == VARYING
    assert [heat.z[i][i] for i in range(len(VARYING))] == pytest.approx([1] * len(VARYING))
    assert all(heat.z[i][j] == heat.z[j][i] for i in range(7) for j in range(7))
    assert "grpo, dr_grpo" in fig.layout.meta["subtitle"] and "step_opsd" in fig.layout.meta["subtitle"]
    said, low = credit_compare.sentences(run.kinds, frame), credit_compare.least_agreement(frame)
    assert said[0] == "Of 24 methods 16 give an episode one value, 3 one for each turn and 5 one for each token."
    assert f"{low['one']} and {low['other']}" in said[1] and said[1].startswith("7 of them")
    assert min(min(row) for row in heat.z) == low["correlation"]


def test_favoured_turns_are_the_largest_credits(run):
    place = credit_map.place(run.order, run.episode)
    got = credit_compare.favoured(run.batch, run.done, place)
    assert set(got) == set(VARYING)
    tables = credit_compare.turn_tables(run.batch, run.done)
    assert all(got[n] - 1 == tables[n][place][run.batch.turn_mask[place]].argmax() for n in got)


def test_an_episode_is_chosen_with_and_without_a_teacher(run, plain):
    step, _, episode = beliefs.choose(run.turns, run.episodes)
    assert credit_map.choose(run.turns, run.episodes) == (step, episode)
    assert credit_map.choose(run.turns, run.episodes, 2, 3) == (2, 3)
    turns, episodes = plain.turns, plain.episodes
    step, episode = credit_map.choose(turns, episodes)
    assert step == turns["step"].max()
    here = episodes.filter(pl.col("step") == step)
    groups = here.group_by("group").agg(pl.col("outcome").n_unique().alias("kinds")).filter(pl.col("kinds") > 1)
    good = here.filter(pl.col("group").is_in(groups["group"].to_list()), pl.col("outcome") == 1)
    assert (
        episode in good["episode"]
        and here.row(by_predicate=pl.col("episode") == episode, named=True)["n_turns"] == good["n_turns"].max()
    )
    assert credit_map.choose(turns, episodes, 2, 3) == (2, 3)
    with pytest.raises(WorkbenchError, match="no episode 99 here"):
        credit_map.choose(turns, episodes, 2, 99)
    longest = credit_map.choose_turn(turns, 2, 3)
    lengths = turns.filter(pl.col("step") == 2, pl.col("episode") == 3).sort("turn")["token_ids"].list.len()
    assert lengths[longest] == lengths.max()


def test_a_run_without_teacher_is_drawn_too(plain):
    assert list(rows_of(plain.by_turn())) == [*(n for n in plain.done if n != "gigpo"), "gigpo"]
    assert "no method tells its tokens apart" in plain.by_token(0).layout.meta["subtitle"]
    alike = Run(["grpo", "dr_grpo", "rloo"], teacher=False).by_token(0)
    assert list(rows_of(alike)) == ["grpo"], "one row stands for all that differ by a factor"


HOSTILE = '</script><img src=x onerror="alert(1)"> <a href="javascript:alert(2)">go</a> $x^2$ %{x} \u202e'


def test_hostile_text_stays_text(run):
    texts = {c: pl.lit(HOSTILE) for c in ("action", "observation", "response")}
    bad = Run(change=texts | {"pieces": pl.col("pieces").list.eval(pl.lit(HOSTILE))})
    for fig in (bad.by_turn(), bad.by_turn(centred=True), bad.by_token(0)):
        spec, page = display.spec(fig), display.html(fig)
        text = json.dumps(spec, ensure_ascii=False)
        tags = set(re.findall(r"<\s*/?\s*([a-z]+)", text, re.I))
        assert tags <= {"b", "i", "br", "span", "sub", "sup"} and "$x" not in text and "\u202e" not in text
        assert "&lt;img" in text and page.count("<script") == page.count("</script>") == 2
    made = credit_compare.table({"grpo": "episode"}, {"opsd": HOSTILE})
    assert "<img" not in made and "<a " not in made and "&lt;img" in made


def test_the_table_holds_a_sentence_a_method(run, monkeypatch):
    shown = []
    monkeypatch.setattr(credit_compare, "display", lambda data, raw: shown.append(data))
    credit_compare.show_table(run.kinds, run.left_out)
    (data,) = shown
    assert data["text/html"].startswith('<div data-workbench-figure="text">')
    assert data["text/html"].count("<tr>") == 1 + len(run.done) + len(run.left_out)
    for name, each in run.done.items():
        assert f"<b>{name}</b>" in data["text/html"] and each.method.paper.split(" (")[0] in data["text/html"]
    assert "GRPO without its two normalisers" in data["text/html"]
    assert "Not computed here: it compares whole distributions" in data["text/html"] and "opsd" in data["text/plain"]
