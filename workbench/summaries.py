"""One row an episode of a run, from its tables without a token column, and which of them are worth opening first."""

from collections.abc import Iterable

import polars as pl

from .errors import WorkbenchError
from .runs import RunFolder

KEY = ["step", "episode"]
TURN_NUMBERS = (
    "valid truncated reward evidence belief_before belief revision z weight turn_advantage pivotal".split()
)  # fmt: skip
PICKS = ("best", "median", "worst", "most revised")


def turn_numbers(run: RunFolder) -> pl.LazyFrame:
    """The turns table without text and without a token column, lazily."""
    scan = run.scan("turns")
    known = scan.collect_schema().names()
    return scan.select([name for name in (*KEY, "turn", *TURN_NUMBERS) if name in known])


def episodes(run: RunFolder) -> pl.DataFrame:
    """The episodes table in order of step, group and episode, and from the turns' numbers `recorded` (turns there are,
    0 for an episode whose turns were not kept), `path` (belief before the first turn, then after each), `revised`
    (largest |revision|), `pivotal` and `invalid` (turns).

    Raises WorkbenchError where the run lacks the tables or one of the columns that place an episode.
    """
    turns = turn_numbers(run).sort(*KEY, "turn").collect()
    has = set(turns.columns)
    floats = sorted({"belief", "belief_before", "revision"} & has)
    turns = turns.with_columns(pl.col(floats).cast(pl.Float64).fill_nan(None))
    parts = []
    if len(floats) == 3:
        path = pl.concat_list(pl.col("belief_before").first(), pl.col("belief").implode())
        parts += [path.alias("path"), pl.col("revision").abs().max().alias("revised")]
    parts += [pl.col("pivotal").sum().alias("pivotal")] if "pivotal" in has else []
    parts += [(~pl.col("valid")).sum().alias("invalid")] if "valid" in has else []
    found = turns.group_by(KEY, maintain_order=True).agg(pl.len().cast(pl.Int64).alias("recorded"), *parts)
    frame = run.read("episodes")
    missing = {*KEY, "group", "outcome", "return"} - set(frame.columns)
    if missing:
        raise WorkbenchError(f"{run.path}, table episodes: no column {', '.join(sorted(missing))}")
    frame = frame.join(found, on=KEY, how="left").sort("step", "group", "episode")
    frame = frame.with_columns(pl.col("recorded").fill_null(0))
    return frame if "n_turns" in frame.columns else frame.with_columns(n_turns=pl.col("recorded"))


def picks(frame: pl.DataFrame) -> dict[str, tuple[int, int]]:
    """(step, episode) of the best, median, worst and most revised of the episodes whose turns were recorded; the latest
    step wins among equals. Empty where there are none."""
    found = frame.filter(pl.col("recorded") > 0)
    by = found.with_columns(pl.col("return").cast(pl.Float64).fill_nan(None)).drop_nulls("return")
    if by.is_empty():
        return {}
    by = by.sort(["return", "n_turns", "step", "episode"], descending=[True, False, True, False])
    low = by.filter(pl.col("return") == by["return"].min())
    low = low.sort(["n_turns", "step", "episode"], descending=[True, True, False])
    rows = {"best": by[0], "median": by[by.height // 2], "worst": low[0]}
    most = found.drop_nulls("revised") if "revised" in found.columns else found.clear()
    if most.height:
        rows["most revised"] = most.sort(["revised", *KEY], descending=[True, True, False])[0]
    return {name: row.select(KEY).row(0) for name, row in rows.items()}


def choose(frame: pl.DataFrame, limit: int | None = None, first: Iterable[tuple[int, int]] = ()) -> pl.DataFrame:
    """(step, episode) of at most `limit` episodes whose turns were recorded; None: all of them.

    Taken in this order while there is room: those named in `first`, such as the ones with notes; the best, median,
    worst and most revised of each step whose turns were recorded, of steps spread over the run where they are too many;
    then the other members of the groups of these, so that a group can be compared.
    """
    recorded = frame.filter(pl.col("recorded") > 0)
    if limit is None or recorded.height <= limit:
        return recorded.select(KEY)
    there = set(recorded.select(KEY).iter_rows())
    taken = dict.fromkeys(key for key in first if key in there)
    steps = recorded["step"].unique().sort().to_list()
    room = min(max(1, (limit - len(taken)) // len(PICKS)), len(steps))
    for i in range(room):
        step = steps[-1 - round(i * (len(steps) - 1) / max(room - 1, 1))]
        taken |= dict.fromkeys(picks(recorded.filter(pl.col("step") == step)).values())
    groups = {(step, episode): (step, group) for step, episode, group in recorded.select(*KEY, "group").iter_rows()}
    members: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
    for key, group in groups.items():
        members.setdefault(group, {})[key] = None
    for key in list(taken):
        taken |= members[groups[key]]
    return pl.DataFrame(list(taken)[:limit], schema=dict.fromkeys(KEY, pl.Int64), orient="row").sort(KEY)
