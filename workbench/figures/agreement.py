"""Do a method's pivotal turns agree with a person who read the episodes?

Labels are notes on turns (workbench/notes.py). Every signal flags as many turns of an episode as the recorded rule
does, those where it is largest, so that signals differ in which turns they pick and not in how many; the controls pick
the episode's last turns, and turns at random. Flags are chosen among all turns of an episode and compared on the
labelled ones.
"""

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..errors import WorkbenchError, unknown
from ..links import Link
from . import style
from .replay import KEY, with_beliefs, with_gap

TURN = [*KEY, "turn"]
SIGNALS = {
    "pivotal": "pivotal by the rule, |z| > 1",
    "revision": "largest |revision|",
    "gap": "largest sum of |gap|",
    "last": "last turns",
    "random": "turns at random",
}
CONTROLS = ("last", "random")
METRICS = {"kappa": "Cohen's kappa", "precision": "precision", "recall": "recall"}
AXES = {"kappa": "1 is full agreement", "precision": "of flagged, pivotal", "recall": "of pivotal, flagged"}
ENOUGH_EPISODES, ENOUGH_LABELS = (
    10,
    10,
)  # below: too few episodes, or turns called pivotal or not, to tell signals apart
NO_LABELS = "a person has labelled no turn of this run as pivotal or not"


def labels(notes: pl.DataFrame, author: str = "", turns: pl.DataFrame | None = None) -> pl.DataFrame:
    """One row a labelled turn, from NoteBook.frame(): step, episode, turn, person (bool: pivotal), people.

    The last label of each person on a turn counts, a label on tokens as one on their turn; where people differ the
    majority decides and a tie leaves the turn out. "wrong credit" says nothing on whether a turn was pivotal, so it is
    no label here. author: that person's labels alone. turns: fill in, as not pivotal, all turns of labelled episodes
    that bear no note with a label. Raises WorkbenchError on an author who wrote no note.
    """
    if author and author not in notes["author"].to_list():
        raise unknown("author of notes", author, notes["author"].unique().to_list())
    rows = notes.filter(pl.col("author") == author) if author else notes
    rows = rows.filter(pl.col("turn").is_not_null(), pl.col("label").is_not_null()).sort("time", "id")
    votes = rows.filter(pl.col("label").is_in(["pivotal", "not pivotal"]))
    votes = votes.group_by(*TURN, "author").agg((pl.col("label").last() == "pivotal").alias("person"))
    share = votes.group_by(TURN).agg(pl.col("person").mean().alias("share"), pl.len().cast(pl.Int64).alias("people"))
    out = share.filter(pl.col("share") != 0.5).with_columns((pl.col("share") > 0.5).alias("person"))
    out = out.select(*TURN, "person", "people")
    if turns is not None:
        rest = turns.select(TURN).join(out.select(KEY).unique(), on=KEY, how="semi").join(rows, on=TURN, how="anti")
        out = pl.concat(
            [out, rest.with_columns(person=pl.lit(False), people=pl.lit(0, pl.Int64))], how="vertical_relaxed"
        )
    return out.sort(TURN)


def flags(turns: pl.DataFrame, episodes: pl.DataFrame) -> pl.DataFrame:
    """One row a turn: step, episode, turn and by signal whether it flags the turn (0 or 1; `random`: the chance).

    The rule's flags are those recorded, or AgentOPSD's from the recorded log-probs. Among equal values the earlier turn
    is flagged. Raises WorkbenchError where the run has no teacher's log-probs.
    """
    recorded = "pivotal" in turns.columns and turns["pivotal"].null_count() < turns.height
    rows = with_gap(turns if recorded else with_beliefs(turns, episodes))
    size = pl.col("gap").list.eval(pl.element().abs()).list.sum().alias("gap")
    rows = rows.select(
        *TURN,
        pl.col("pivotal").fill_null(False),
        pl.col("revision").abs().fill_null(0.0),
        size,
        pl.col("turn").alias("last"),
    )
    count = pl.col("pivotal").sum().over(KEY)
    chosen = [
        (pl.col(name).rank("ordinal", descending=True).over(KEY, order_by="turn") <= count).cast(pl.Float64).alias(name)
        for name in ("revision", "gap", "last")
    ]
    chance = (count / pl.len().over(KEY)).alias("random")
    return rows.select(*TURN, pl.col("pivotal").cast(pl.Float64), *chosen, chance).sort(TURN)


def kappa(tp: np.ndarray, fp: np.ndarray, fn: np.ndarray, tn: np.ndarray) -> np.ndarray:
    """Cohen's kappa of 2 x 2 counts: 1 is full agreement, 0 what the two rates would give by chance; NaN where both
    sides call every turn the same, or where there is none."""
    n = tp + fp + fn + tn
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = (tp + tn) / n
        chance = ((tp + fp) * (tp + fn) + (fn + tn) * (fp + tn)) / n**2
        return np.where(np.isclose(chance, 1), np.nan, (seen - chance) / (1 - chance))


def _metrics(counts: np.ndarray) -> dict[str, np.ndarray]:
    """counts (..., 4) as tp, fp, fn, tn -> each of METRICS (...)."""
    tp, fp, fn, tn = np.moveaxis(np.asarray(counts, float), -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"kappa": kappa(tp, fp, fn, tn), "precision": tp / (tp + fp), "recall": tp / (tp + fn)}


def agree(labelled: pl.DataFrame, flagged: pl.DataFrame, resamples: int = 2000, seed: int = 0) -> pl.DataFrame:
    """One row a signal: signal, episodes, turns, pivotal (by the person), tp, fp, fn, tn, and of each of METRICS and of
    gain the value and its 95 % interval, such as kappa, kappa_low, kappa_high.

    gain is kappa less that of random flags, which is above 0 where the rule and the person merely flag more turns in
    the same episodes. labelled: of `labels`; flagged: of `flags`. The interval is a percentile bootstrap over episodes,
    the same draws for every signal; None where the value, or one draw in twenty, is not defined. Counts of random flags
    are expectations.
    Raises WorkbenchError where no label is on a turn of the run.
    """
    rows = labelled.join(flagged, on=TURN)
    style.need(rows, [], "notes", NO_LABELS)
    person = rows["person"].cast(pl.Float64).to_numpy()
    owner = rows.select(pl.struct(KEY).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    n = int(owner.max()) + 1
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), resamples)
    tables = {name: np.zeros((n, 4)) for name in SIGNALS}
    for name, table in tables.items():
        flag = rows[name].to_numpy()
        cells = (flag * person, flag * (1 - person), (1 - flag) * person, (1 - flag) * (1 - person))
        np.add.at(table, owner, np.stack(cells, 1))
    chance = tables["random"]
    chance = kappa(*chance.sum(0)), kappa(*(weights @ chance).T)
    out = []
    for name, table in tables.items():
        total = table.sum(0)
        row = {"signal": name, "episodes": n, "turns": len(person), "pivotal": int(person.sum())}
        row |= dict(zip(("tp", "fp", "fn", "tn"), total.tolist(), strict=True))
        value, drawn = _metrics(total), _metrics(weights @ table)
        value, drawn = value | {"gain": value["kappa"] - chance[0]}, drawn | {"gain": drawn["kappa"] - chance[1]}
        for metric in value:
            row |= _interval(metric, float(value[metric]), drawn[metric])
        out.append(row)
    return pl.DataFrame(out, infer_schema_length=None)


def _interval(metric: str, value: float, drawn: np.ndarray) -> dict[str, float | None]:
    known = drawn[np.isfinite(drawn)]
    names = (metric, f"{metric}_low", f"{metric}_high")
    if not np.isfinite(value):
        return dict.fromkeys(names)
    if len(known) < 0.95 * len(drawn):
        return dict(zip(names, (value, None, None), strict=True))
    return dict(zip(names, (value, *np.quantile(known, [0.025, 0.975]).tolist()), strict=True))


def between_people(notes: pl.DataFrame) -> pl.DataFrame:
    """One row a pair of people who labelled the same turns: author, other, turns, kappa (None where undefined)."""
    people = notes["author"].unique().sort().to_list()
    each = {p: labels(notes, p).select(*TURN, "person") for p in people}
    out = []
    for i, author in enumerate(people):
        for other in people[i + 1 :]:
            both = each[author].join(each[other], on=TURN, suffix="_other")
            if both.height:
                a, b = both["person"].to_numpy(), both["person_other"].to_numpy()
                value = float(kappa(*(np.float64(np.sum(c)) for c in (a & b, ~a & b, a & ~b, ~a & ~b))))
                value = value if np.isfinite(value) else None
                out.append({"author": author, "other": other, "turns": both.height, "kappa": value})
    schema = {"author": pl.String, "other": pl.String, "turns": pl.Int64, "kappa": pl.Float64}
    return pl.DataFrame(out, schema=schema)


def disagreements(labelled: pl.DataFrame, flagged: pl.DataFrame, turns: pl.DataFrame, run: str) -> pl.DataFrame:
    """Labelled turns that the person and the rule call differently: step, episode, turn, person, action, link."""
    rows = labelled.join(flagged.select(*TURN, "pivotal"), on=TURN)
    rows = rows.filter(pl.col("person") != (pl.col("pivotal") == 1)).join(turns.select(*TURN, "action"), on=TURN)
    rows = rows.select(*TURN, "person", "action").sort(TURN)
    return rows.with_columns(pl.Series("link", [str(Link(run, *r[:3])) for r in rows.rows()], pl.String))


# What is shown


def too_few(frame: pl.DataFrame) -> str:
    """What is missing before signals can be told apart, as a sentence; empty where there is enough."""
    row = frame.row(0, named=True)
    yes, no = row["pivotal"], row["turns"] - row["pivotal"]
    if row["episodes"] >= ENOUGH_EPISODES and min(yes, no) >= ENOUGH_LABELS:
        return ""
    return (
        f"Too few labels to tell signals apart: {yes} pivotal and {no} not pivotal in {row['episodes']} "
        f"episode{'s' * (row['episodes'] != 1)}; at least {ENOUGH_LABELS} of each in {ENOUGH_EPISODES} are wanted."
    )


def sentences(frame: pl.DataFrame, labelled: pl.DataFrame, pairs: pl.DataFrame | None = None) -> list[str]:
    """What the labels say, in words: how many, whether they suffice, what agrees, and whether people agree."""
    rows = {r["signal"]: r for r in frame.to_dicts()}
    rule, n = rows["pivotal"], style.number
    out = [
        f"{rule['turns']} labelled turns in {rule['episodes']} episodes, {rule['pivotal']} of them pivotal by the "
        f"person; the rule flags {rule['tp'] + rule['fp']:.0f}."
    ]
    lost = labelled.height - rule["turns"]
    if lost:
        out.append(f"{lost} more labels are on turns that this run's tables do not hold; they are left out.")
    if too_few(frame):
        out.append(too_few(frame))
    if rule["kappa"] is None:
        out.append("Kappa is not defined: the person and the rule each gave one and the same answer everywhere.")
    elif not too_few(frame):
        span = f"[{n(rule['gain_low'], '+.2f')}, {n(rule['gain_high'], '+.2f')}]"
        above = rule["gain_low"] is not None and rule["gain_low"] > 0
        verdict = "better than turns at random" if above else "not clearly better than turns at random"
        out.append(
            f"The rule agrees with the person {verdict}: kappa {n(rule['kappa'], '+.2f')}, of turns at random "
            f"{n(rows['random']['kappa'], '+.2f')}, 95 % interval of the difference {span}."
        )
        best = max((r for r in rows.values() if r["kappa"] is not None), key=lambda r: r["kappa"])
        if best["signal"] != "pivotal":
            name = SIGNALS[best["signal"]]
            out.append(f"At as many flags, “{name}” agrees at least as well: kappa {n(best['kappa'], '+.2f')}.")
    for row in pairs.to_dicts() if pairs is not None else []:
        out.append(
            f"{row['author']} and {row['other']} labelled {row['turns']} turns both: kappa {n(row['kappa'], '+.2f')}."
        )
    return out


def listed(apart: pl.DataFrame, limit: int = 8) -> list[str]:
    """The first of `disagreements` as sentences, with how many more there are. Turns count from 1, in links from 0."""
    if apart.is_empty():
        return ["The person and the rule call every labelled turn the same."]
    out = [
        f"Step {r['step']}, episode {r['episode']}, turn {r['turn'] + 1}, “{' '.join(r['action'].split())[:60]}”: "
        f"{'the person alone' if r['person'] else 'the rule alone'} calls it pivotal ({r['link']})."
        for r in apart.head(limit).to_dicts()
    ]
    return out + ([f"{apart.height - limit} more turns differ."] if apart.height > limit else [])


def agreement(frame: pl.DataFrame) -> go.Figure:
    """Kappa, precision and recall of each signal against the person's labels, with 95 % intervals over episodes."""
    style.need(frame, ["turns"], "notes", NO_LABELS)
    if frame["signal"].to_list() != list(SIGNALS):
        raise WorkbenchError(f"agreement: one row for each of {', '.join(SIGNALS)} is expected, as agree() gives them")
    fig = make_subplots(
        1, len(METRICS), shared_yaxes=True, horizontal_spacing=0.035, subplot_titles=list(METRICS.values())
    )
    data, lows = frame.to_dicts(), [0.0]
    for col, metric in enumerate(METRICS, 1):
        for row in data:
            value, low, high = (row[metric + end] for end in ("", "_low", "_high"))
            colour = style.MUTED if row["signal"] in CONTROLS else style.BLUE
            known = value is not None and low is not None
            lows += [v for v in (value, low) if metric == "kappa" and v is not None]
            fig.add_scatter(
                x=[value],
                y=[SIGNALS[row["signal"]]],
                mode="markers",
                marker=dict(color=colour, size=11, symbol="diamond" if row["signal"] == "pivotal" else "circle"),
                error_x=dict(
                    array=[high - value if known else None],
                    arrayminus=[value - low if known else None],
                    color=colour,
                    thickness=2,
                    width=5,
                ),
                showlegend=False,
                meta=dict(signal=row["signal"], metric=metric),
                hoverinfo="text",
                hovertext=f"<b>{style.escape(SIGNALS[row['signal']])}</b><br>{METRICS[metric]} {style.number(value)}, "
                f"95 % interval {style.number(low)} to {style.number(high)}<br>flagged and pivotal {row['tp']:.1f}, "
                f"flagged only {row['fp']:.1f}, missed {row['fn']:.1f}, neither {row['tn']:.1f}",
                row=1,
                col=col,
            )
        left = min(lows) - 0.06 if metric == "kappa" else -0.04
        fig.update_xaxes(range=[left, 1.04], title_text=AXES[metric], col=col)
        if data[-1][metric] is not None:
            fig.add_vline(x=data[-1][metric], line=dict(color="#9aa5b1", width=1, dash="dot"), row=1, col=col)
    first = data[0]
    style.dress(
        fig,
        "Do the flags agree with the person who read the episodes?",
        f"{first['turns']} labelled turns of {first['episodes']} episodes, {first['pivotal']} pivotal. Each signal "
        f"flags as many turns of an episode as the rule; bars: 95 % intervals over episodes; dotted: turns at random. "
        f"{too_few(frame)}",
        height=36 * len(data) + 24,
        legend=False,
        panel_titles=True,
    )
    style.panel_titles(fig)
    fig.update_yaxes(
        categoryorder="array", categoryarray=list(SIGNALS.values())[::-1], range=[-0.6, len(data) - 0.4], ticks=""
    )
    return fig
