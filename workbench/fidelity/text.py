"""A measured fidelity in words and as a table for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from .frames import CEILING, HALF, Fidelity
from .signals import TEACHERS

COLUMNS = (("correlation", "rank corr."), ("sign", "sign"), ("precision", "precision"), ("recall", "recall"),
           ("brier", "belief error"))  # fmt: skip
_ORDER = {"method": 0, "recorded": 1, "signal": 2, "solver": 3, "baseline": 4, "ceiling": 5}


def merged(scores: pl.DataFrame) -> pl.DataFrame:
    """Scores with methods that give the same ones on one row, `signal` naming them all, best correlation first.

    What was credited again under another skill text is left out (`by_teacher`).
    """
    metrics = [name for name, _ in COLUMNS]
    scores = scores.filter(~pl.col("teacher").is_in(TEACHERS))
    keys = [pl.col(name).round(6).alias(f"_{name}") for name in metrics]
    rows = scores.with_columns(*keys, pl.col("kind").replace_strict(_ORDER, return_dtype=pl.Int64).alias("_kind"))
    by = ["env", "kind", "teacher", *[f"_{name}" for name in metrics]]
    rows = rows.group_by(by, maintain_order=True).agg(
        pl.col("signal").alias("signals"), pl.all().exclude("signal", "signals", *by).first()
    )
    rows = rows.with_columns(pl.col("signals").map_elements(_named, return_dtype=pl.String).alias("signal"))
    rows = rows.sort(
        "env", "_kind", "correlation", descending=[False, False, True], nulls_last=True, maintain_order=True
    )
    return rows.drop("_kind", *[f"_{name}" for name in metrics])


def _named(names: Sequence[str]) -> str:
    names = list(names)
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more alike"


def table(scores: pl.DataFrame) -> list[str]:
    """`score_rows` as aligned lines."""
    return _aligned(score_rows(scores))


def score_rows(scores: pl.DataFrame) -> list[list[str]]:
    """Scores as rows of cells, a heading first; the interval of the correlation beside it."""
    heads = ["", "rank corr.", "95 %", "told", *[title for _, title in COLUMNS[1:]]]
    rows = [heads]
    for row in merged(scores).to_dicts():
        low, high = row["correlation_low"], row["correlation_high"]
        span = "" if low is None else f"{low:+.2f} to {high:+.2f}"
        told = "" if row["told"] is None else f"{100 * row['told']:.0f} %"
        values = ["" if row[name] is None else f"{row[name]:.2f}" for name, _ in COLUMNS[1:]]
        corr = "" if row["correlation"] is None else f"{row['correlation']:+.2f}"
        rows.append([row["signal"], corr, span, told, *values])
    return rows


def across_rows(found: Sequence[Fidelity]) -> list[list[str]]:
    """Rank correlations with their intervals, a row a signal and a column a measurement; methods that score the same in
    all of them share a row. The first row is the heading."""
    columns = [f.scores.filter(~pl.col("teacher").is_in(TEACHERS)) for f in found]
    tables = [{row["signal"]: row for row in frame.to_dicts()} for frame in columns]
    kinds = {name: row["kind"] for table in tables for name, row in table.items()}
    alike: dict[tuple, list[str]] = {}
    for name in kinds:
        shown = tuple(_spanned(table[name]) if name in table else "" for table in tables)
        alike.setdefault((_ORDER[kinds[name]], shown), []).append(name)
    rows = sorted(alike.items(), key=lambda item: (item[0][0], -_best(item[1][0], tables)))
    heads = [f"{f.facts['env']} ({f.facts['episodes']} episodes)" for f in found]
    return [["rank correlation", *heads], *[[_named(names), *shown] for (_, shown), names in rows]]


def across(found: Sequence[Fidelity]) -> list[str]:
    """`across_rows` as aligned lines."""
    return _aligned(across_rows(found))


def _best(name: str, tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> float:
    return max((t[name]["correlation"] for t in tables if name in t and t[name]["correlation"] is not None), default=-1)


def by_teacher(found: Fidelity) -> list[str]:
    """`teacher_rows` as aligned lines; none where no teacher was read."""
    return _aligned(teacher_rows(found))


def teacher_rows(found: Fidelity) -> list[list[str]]:
    """Rank correlations of the signals that read a teacher, by the skill text it was given, and by how much the right
    one is above the wrong one; rows of cells, a heading first."""
    scores = found.scores
    rows = scores.filter(pl.col("teacher").is_in(TEACHERS)).to_dicts()
    texts = [t for t in TEACHERS if any(row["teacher"] == t for row in rows)]
    gains = found.facts["teacher_gains"]
    out = [["skill text", *texts, "right less wrong"]]
    for name in dict.fromkeys(row["signal"] for row in rows):
        own = {row["teacher"]: row for row in rows if row["signal"] == name}
        if any(own[t]["told"] for t in texts):
            gain = gains.get(name, {}).get("wrong")
            out.append([name, *[_spanned(own[t]) for t in texts], _span(*gain) if gain else ""])
    return out if len(texts) > 1 else []


def _spanned(row: Mapping[str, Any]) -> str:
    return "" if row["correlation"] is None else _span(*(row[f"correlation{end}"] for end in ("", "_low", "_high")))


def _span(value: float, low: float | None, high: float | None) -> str:
    return f"{value:+.2f}" + ("" if low is None else f" [{low:+.2f}, {high:+.2f}]")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))).rstrip()
        for r in rows
    ]


def sentences(found: Fidelity) -> list[str]:
    """What was measured, how noisy the truth is, and what is above chance."""
    facts, scores = found.facts, found.scores
    out = [*_facts(facts)]
    top = scores.filter(pl.col("signal") == CEILING).row(0, named=True)
    pivotal = found.turns["pivotal"].sum()
    out.append(
        f"{top['counted']} of {facts['episodes']} episodes have turns of different worth, by which orders are judged; "
        f"{pivotal} of {facts['turns']} turns are pivotal: their advantage is at least {facts['threshold']:g} in size "
        "and its interval leaves out 0."
    )
    if top["correlation"] is not None:
        half = scores.filter(pl.col("signal") == HALF)["correlation"].to_list()
        halves = f"two halves of the rolls agree by {half[0]:+.2f}, and " if half and half[0] is not None else ""
        out.append(
            f"Noise bounds what can be seen: {halves}with {facts['rolls']} rolls perfect credit would reach a rank "
            f"correlation of about {top['correlation']:.2f}."
        )
    rows = merged(scores.filter(pl.col("kind").is_in(["method", "signal", "solver"]))).to_dicts()
    chance = scores.filter(pl.col("signal") == "random").row(0, named=True)
    above = [r["signal"] for r in rows if _above(r, chance)]
    out.append(f"Above random credit beyond their intervals: {', '.join(above) or 'none'}.")
    if facts["left_out"]:
        out.append(f"Left out: {', '.join(facts['left_out'])}, whose credit the tables do not determine.")
    return out


def _above(row: Mapping[str, Any], chance: Mapping[str, Any]) -> bool:
    low = row["correlation_low"]
    return low is not None and chance["correlation_high"] is not None and low > chance["correlation_high"]


def _facts(facts: Mapping[str, Any]) -> list[str]:
    pairs = facts["policies"]
    exact = [s for s, p in pairs.items() if p is not None and int(s) == p]
    who = [f"step {', '.join(exact)} by the policy that sampled it"] if exact else []
    who += [f"step {s} by that of step {p}" for s, p in pairs.items() if p is not None and int(s) != p]
    who += [f"step {s} by {facts['model']}" for s, p in pairs.items() if p is None]
    out = [
        f"{facts['env']}: {facts['episodes']} episodes of {facts['groups']} groups, {facts['turns']} turns. "
        f"{facts['rolled_states']} different undecided states were played on {facts['rolls']} times each: "
        f"{'; '.join(who)}, whose log-probs are {facts['logprob_gap']:.1e} nats a token from those recorded."
    ]
    if facts["groups"] == 1:
        out.append("All episodes are of one group, which says nothing of others: no interval can be told.")
    for what, why in (("are excluded", facts["excluded"]), ("have no solver's value", facts["unsolved"])):
        if why:
            first = next(iter(why.items()))
            out.append(f"{len(why)} episodes {what}, the first: {first[0]}, {first[1]}")
    return out
