"""Which method is better, and is the difference more than chance? Tables and sentences on several runs of one panel.

`evals` is the table of workbench.collected: one row a game, with the label, warm start, seed and name of its run. All
runs must have played the same games.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from . import statistics
from .collected import Collected
from .errors import WorkbenchError, unknown
from .statistics import Runs

ENOUGH_SEEDS = 3  # below this, an interval over seeds says too little for a winner to be named
TARGET = 0.5
COSTS = ("rollouts", "tokens", "updates", "seconds")
_TOLERANCE = {"rollouts": 0.01, "updates": 0.01, "tokens": 0.1, "seconds": 0.1}


def finished(data: Collected) -> Collected:
    """Without the runs that did not finish, each named in the notes; all where none finished."""
    late = data.runs.filter(pl.col("state") != "complete")
    if late.is_empty():
        return data
    if late.height == data.runs.height:
        return data.only(pl.lit(True), "Beware: none of these runs is finished.")
    listed = "; ".join(f"{r['label']} seed {r['seed']} on {r['model']} ({r['error'] or r['state']})"
                       for r in late.head(5).to_dicts())  # fmt: skip
    more = f"; and {late.height - 5} more" if late.height > 5 else ""
    note = f"Beware: {late.height} runs that did not finish are left out, which favours their methods: {listed}{more}."
    return data.only(pl.col("state") == "complete", note)


def pick_control(evals: pl.DataFrame, control: str = "") -> str:
    """The named control, else grpo where it is among the labels, else the first by name."""
    labels = evals["label"].unique().sort().to_list()
    if control and control not in labels:
        raise unknown("control", control, labels)
    return control or ("grpo" if "grpo" in labels else labels[0])


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on the parameters that runs differ in besides method, its options, warm start and seed."""
    apart = {"method", "method_options", "model", "seed", "run_dir", "experiment"}
    names = sorted({n for c in configs for n in c} - apart)
    values = {n: sorted({json.dumps(c.get(n), default=str) for c in configs}) for n in names}
    return [
        f"Beware: the runs differ in {n} too ({' / '.join(v[:4])}{' …' * (len(v) > 4)}), not in method and seed alone."
        for n, v in values.items()
        if len(v) > 1
    ]


def unbalanced(evals: pl.DataFrame, control: str) -> list[str]:
    """A sentence a label whose runs are spread over warm starts otherwise than the control's."""
    spread = {
        label: dict(part.group_by("model").agg(pl.col("run").n_unique()).sort("model").rows())
        for (label,), part in evals.group_by("label", maintain_order=True)
    }
    return [
        f"Beware: {label} has {_counted(own)}, {control} {_counted(spread[control])}: their warm starts weigh unevenly."
        for label, own in sorted(spread.items())
        if own != spread[control]
    ]


def _counted(spread: Mapping[str, int]) -> str:
    return ", ".join(f"{n} run{'s' * (n > 1)} of {model or 'one model'}" for model, n in spread.items())


def describe(evals: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1) -> list[str]:
    """What is compared: methods, runs, warm starts, games, the step."""
    rows = at_step(evals, panel, step)
    counts = rows.group_by("label").agg(pl.col("run").n_unique()).sort("label").rows()
    listed = ", ".join(f"{label} ({n} run{'s' * (n > 1)})" for label, n in counts)
    models = rows["model"].n_unique()
    return [
        f"{listed}; {models} warm start{'s' * (models > 1)}; panel {rows['panel'][0]}, "
        f"{rows['task'].n_unique()} games, compared at step {rows['step'][0]}.",
        f"The control is {control}.",
    ]


def on_panel(evals: pl.DataFrame, panel: str = "") -> pl.DataFrame:
    """The student's games on one panel ("" is the first), after a check that every run played the same ones."""
    missing = [c for c in ("label", "model", "seed", "run", "outcome") if c not in evals.columns]
    if missing or evals.is_empty():
        lack = f"no column {', '.join(missing)}" if missing else "no rows"
        raise WorkbenchError(f"evals: {lack}; compare needs runs that were evaluated")
    known = evals["panel"].unique(maintain_order=True).to_list()
    panel = panel or known[0]
    if panel not in known:
        raise unknown("panel", panel, known)
    rows = evals.filter(pl.col("panel") == panel, pl.col("role") == "student")
    games = rows.group_by("run").agg(pl.col("task").unique().sort().alias("tasks"))
    if games["tasks"].n_unique() > 1:
        names = ", ".join(games.sort("run")["run"].to_list()[:4])
        raise WorkbenchError(
            f"compare: runs {names} played different games on panel {panel}; give them one eval_seed, or look at a "
            "study of several environments with `workbench run games -p study FOLDER`"
        )
    return rows


def last_shared_step(rows: pl.DataFrame) -> int:
    """The last step at which every run was evaluated; WorkbenchError where there is none."""
    runs = rows["run"].n_unique()
    steps = rows.group_by("step").agg(pl.col("run").n_unique()).filter(pl.col("run") == runs)
    if steps.is_empty():
        raise WorkbenchError("compare: the runs share no evaluated step; give them one eval_every")
    return steps["step"].max()


def at_step(evals: pl.DataFrame, panel: str = "", step: int = -1) -> pl.DataFrame:
    """The panel's games at `step`, or at the last step that all runs share."""
    rows = on_panel(evals, panel)
    known = rows["step"].unique().sort().to_list()
    step = last_shared_step(rows) if step < 0 else step
    if step not in known:
        raise WorkbenchError(f"evals: no step {step} here; evaluated at {', '.join(map(str, known))}")
    rows = rows.filter(pl.col("step") == step)
    absent = evals["run"].n_unique() - rows["run"].n_unique()
    if absent:
        raise WorkbenchError(f"compare: {absent} of the runs were not evaluated at step {step}")
    return rows


def matrices(rows: pl.DataFrame) -> dict[str, Runs]:
    """Of each label the outcomes (runs, G) at one step, games in one order, and the runs' warm starts (runs,)."""
    out = {}
    for (label,), part in rows.sort("label", "model", "seed", "run", "task", "episode").group_by(
        "label", maintain_order=True
    ):
        runs = part.group_by("run", "model", maintain_order=True).agg("outcome")
        out[label] = (np.array(runs["outcome"].to_list(), float), runs["model"].to_numpy())
    return out


def _pair(method: Runs, control: Runs) -> tuple[Runs, Runs]:
    """Both on the warm starts that they share; as one stratum each where they share none."""
    shared = np.intersect1d(method[1], control[1])
    if not len(shared):
        return tuple((games, np.zeros(len(games), int)) for games, _ in (method, control))
    return tuple((games[np.isin(s, shared)], s[np.isin(s, shared)]) for games, s in (method, control))


def differences(
    evals: pl.DataFrame, control: str = "grpo", panel: str = "", step: int = -1, resamples: int = 10_000, seed: int = 0
) -> pl.DataFrame:
    """One row a label but the control: label, runs, control_runs, games, success, control, difference, low, high, p,
    corrected_low, corrected_high, named.

    success, control: interquartile means over runs. low, high: 95 %, of this comparison alone; corrected_: at Holm's
    level (statistics.differences, which says how often the verdict errs). named: whether a winner may be.
    """
    runs = matrices(at_step(evals, panel, step))
    if control not in runs:
        raise unknown("control", control, runs)
    labels = [label for label in runs if label != control]
    pairs = [_pair(runs[label], runs[control]) for label in labels]
    found = statistics.differences(pairs, resamples, seed)
    schema = {"label": pl.String, "runs": pl.Int64, "control_runs": pl.Int64, "games": pl.Int64}
    floats = ("success", "control", "difference", "low", "high", "p", "corrected_low", "corrected_high")
    rows = []
    for label, ((new, _), (base, _)), d in zip(labels, pairs, found, strict=True):
        few = min(len(new), len(base)) < ENOUGH_SEEDS
        means = (float(statistics.iqm(new.mean(1))), float(statistics.iqm(base.mean(1))))
        numbers = (d.difference, d.low, d.high, d.p, d.corrected_low, d.corrected_high)
        rows.append((label, len(new), len(base), new.shape[1], *means, *numbers, d.clear and not few))
    schema |= dict.fromkeys(floats, pl.Float64) | {"named": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")


def points(value: float | None) -> str:
    """A difference of shares in points, with its sign."""
    return "–" if value is None or not np.isfinite(value) else f"{100 * value:+.1f}".replace("-", "−")


def verdict(evals: pl.DataFrame, control: str = "grpo", panel: str = "", step: int = -1,
            table: pl.DataFrame | None = None) -> list[str]:  # fmt: skip
    """What the runs show: in short, then a plain sentence a method (`table`: its differences, where known already).

    No winner is named where the interval, corrected for the number of comparisons, includes zero, nor on fewer than
    three runs of either method.
    """
    table = differences(evals, control, panel, step) if table is None else table
    if table.is_empty():
        return [f"Only {control} was run, so there is nothing to compare it with."]
    out, many = [], table.height > 1
    for row in table.to_dicts():
        few = min(row["runs"], row["control_runs"])
        runs = f"{row['runs']} run{'s' * (row['runs'] > 1)}"
        head = (
            f"{row['label']} succeeds in {100 * row['success']:.1f} % of {row['games']} games (interquartile mean of "
            f"{runs}), {control} in {100 * row['control']:.1f} % ({row['control_runs']}): {points(row['difference'])} "
            f"points, 95 % interval {points(row['low'])} to {points(row['high'])}"
        )
        if many:
            head += f", corrected {points(row['corrected_low'])} to {points(row['corrected_high'])}"
        if few == 1:
            tail = "; with one seed that covers the draw of games only, so no winner is named."
        elif few < ENOUGH_SEEDS:
            tail = f"; {few} seeds are too few for an interval to be trusted, so no winner is named."
        elif row["low"] <= 0 <= row["high"]:
            tail = "; the interval includes zero, so no winner is named."
        elif not row["named"]:
            tail = "; corrected for the other comparisons it includes zero, so no winner is named."
        else:
            tail = f"; {row['label'] if row['difference'] > 0 else control} is ahead on this panel."
        out.append(head + tail)
    if many:
        out.insert(0, _headline(table, control))
        out.append(
            f"{table.height} methods are held against one control; the corrected intervals, which decide, aim to keep "
            "the chance of any wrong winner among them at 5 % (Holm); few seeds that end far apart make it more."
        )
    return out


def _headline(table: pl.DataFrame, control: str) -> str:
    """Which of several methods are told apart from the control at all."""
    apart = table.filter("named")
    told = [
        f"{', '.join(part['label'])} {'are' if part.height > 1 else 'is'} {where} {control}"
        for where, part in (
            ("ahead of", apart.filter(pl.col("difference") > 0)),
            ("behind", apart.filter(pl.col("difference") <= 0)),
        )
        if not part.is_empty()
    ]
    if not told:
        return f"None of {table.height} methods is told apart from {control}: no winner is named."
    rest = table.height - apart.height
    return f"{' and '.join(told)} by more than chance" + (f"; {rest} more are not told apart." if rest else ".")


def budget(data: Collected) -> pl.DataFrame:
    """One row a label: label, runs, and the medians over its runs of rollouts drawn, tokens trained on, updates applied
    and seconds of training (null where not recorded)."""
    totals = data.steps.group_by("label", "run").agg(
        *[pl.when(pl.col(c).null_count() == 0).then(pl.col(c).sum()).alias(c) for c in COSTS]
    )
    medians = totals.group_by("label").agg(*[pl.col(c).median() for c in COSTS])
    runs = data.runs.group_by("label").agg(pl.len().alias("runs"))
    return runs.join(medians, on="label", how="left").sort("label")


def recorded(table: pl.DataFrame) -> list[str]:
    """Which of COSTS the runs of any label recorded, of a table of `budget`."""
    return [name for name in COSTS if table[name].null_count() < table.height]


def budget_sentences(table: pl.DataFrame, control: str) -> list[str]:
    """One sentence a label that trained at another budget than the control: over 1 % apart in rollouts or updates, over
    10 % in tokens or seconds."""
    base = table.filter(pl.col("label") == control).row(0, named=True)
    if not recorded(table):
        return ["None of the runs recorded what it spent, so nothing says that the methods had the same budget."]
    if all(base[c] is None for c in COSTS):
        return [f"The budget of {control} was not recorded, so nothing says that the methods had the same."]
    out = []
    for row in table.filter(pl.col("label") != control).to_dicts():
        ratios = {c: row[c] / base[c] for c in COSTS if row[c] is not None and base[c]}
        apart = [f"{r:.2f} times the {c}" for c, r in ratios.items() if abs(r - 1) > _TOLERANCE[c]]
        if apart:
            out.append(f"Beware: {row['label']} did not train at {control}'s budget: {', '.join(apart)} (medians).")
    return out


def costs(data: Collected, target: float = TARGET, panel: str = "") -> pl.DataFrame:
    """One row a run: label, run, reached, and what it had spent by then: step, rollouts, tokens, updates, seconds.

    A target is reached at the first evaluation whose success is at least `target`; a run that never got there has
    reached = false and the cost at its last evaluation. Costs are null where the run did not record them.
    """
    if not 0 < target <= 1:
        raise WorkbenchError(f"target must be a success rate above 0 and at most 1, got {target}")
    rates = on_panel(data.evals, panel).group_by("label", "run", "step").agg(pl.col("outcome").mean())
    rates = rates.sort("label", "run", "step")
    there = pl.col("outcome") >= target - 1e-9
    first = rates.group_by("label", "run", maintain_order=True).agg(
        there.any().alias("reached"),
        pl.when(there.any()).then(pl.col("step").filter(there).min()).otherwise(pl.col("step").max()).alias("step"),
    )
    spent = data.steps.join(first.select("run", pl.col("step").alias("until")), on="run")
    before = pl.col("step") < pl.col("until")
    sums = spent.group_by("run").agg(
        *[pl.when(pl.col(c).null_count() == 0).then(pl.col(c).filter(before).sum()).alias(c) for c in COSTS]
    )
    return first.join(sums, on="run", how="left", maintain_order="left")


def to_target(data: Collected, target: float = TARGET, panel: str = "", cost: str = "rollouts",
              table: pl.DataFrame | None = None) -> dict[str, statistics.Reached]:  # fmt: skip
    """Kaplan-Meier curves of a cost ("step", or one of COSTS) until the target, by label; labels of which a run did not
    record that cost are left out."""
    table = costs(data, target, panel) if table is None else table
    return {
        label: statistics.time_to_target(part[cost].to_numpy(), part["reached"].to_numpy())
        for (label,), part in table.group_by("label", maintain_order=True)
        if part[cost].null_count() == 0
    }


def summary(data: Collected, control: str = "grpo", panel: str = "", step: int = -1, target: float = TARGET):
    """One row a label, the control first: label, runs, success (mean), iqm, low, high, better, better_low, better_high
    (chance that a run ends above one of the control), reached (runs that got to the target), rollouts, seconds (medians
    to the target, null where fewer than half got there)."""
    runs = matrices(at_step(data.evals, panel, step))
    table, rows = costs(data, target, panel), []
    got = dict(table.group_by("label").agg(pl.col("reached").sum()).rows())
    spent = {c: to_target(data, target, panel, c, table) for c in ("rollouts", "seconds")}
    for label, (games, strata) in sorted(runs.items(), key=lambda item: (item[0] != control, item[0])):
        better = (None,) * 3
        if label != control:
            better = statistics.improvement(*_pair(runs[label], runs[control]))
        medians = [spent[c][label].median if label in spent[c] else None for c in ("rollouts", "seconds")]
        rows.append(
            (label, len(games), games.mean(), *statistics.aggregate(games, strata), *better, got[label], *medians)
        )
    floats = ("success", "iqm", "low", "high", "better", "better_low", "better_high")
    schema = {"label": pl.String, "runs": pl.Int64} | dict.fromkeys(floats, pl.Float64) | {"reached": pl.Int64}
    return pl.DataFrame(rows, schema=schema | {"rollouts": pl.Float64, "seconds": pl.Float64}, orient="row")


def kinds(evals: pl.DataFrame, control: str = "grpo", panel: str = "", step: int = -1) -> pl.DataFrame:
    """label, kind, games, success (mean over runs and games), difference (to the control): a row each task type."""
    rows = at_step(evals, panel, step).with_columns(pl.col("kind").fill_null("all"))
    table = rows.group_by("label", "kind").agg(pl.col("task").n_unique().alias("games"), pl.col("outcome").mean())
    base = table.filter(pl.col("label") == control).select("kind", pl.col("outcome").alias("base"))
    table = table.join(base, on="kind", how="left").with_columns(difference=pl.col("outcome") - pl.col("base"))
    return table.rename({"outcome": "success"}).drop("base").sort("label", "kind")


def needed_turns(evals: pl.DataFrame, panel: str = "") -> pl.DataFrame:
    """task, needed: the fewest turns in which any run, at any evaluation and in any role, won a game of the panel.

    The length is the game's, the same for every method; turns of an episode would not do, as lost ones run to the
    limit. Games that nobody ever won have no row.
    """
    chosen = on_panel(evals, panel)["panel"][0]
    won = evals.filter(pl.col("panel") == chosen, pl.col("outcome") == 1)
    return won.group_by("task").agg(pl.col("turns").min().alias("needed")).sort("task")


def horizon(evals: pl.DataFrame, panel: str = "", step: int = -1) -> pl.DataFrame:
    """label, slope, low, high, games: change of success for each further turn that a game needs (see `needed_turns`),
    a line over games by least squares, with a 95 % interval over runs and games; null where all need the same."""
    rows = at_step(evals, panel, step).join(needed_turns(evals, panel), on="task")
    out = []
    for label, (games, strata) in matrices(rows).items():
        length = rows.filter(pl.col("label") == label).unique(["task", "episode"]).sort("task", "episode")["needed"]
        found = statistics.slope(games, strata, length.to_numpy().astype(float))
        out.append((label, *(v if np.isfinite(v) else None for v in found), games.shape[1]))
    schema = {"label": pl.String, "slope": pl.Float64, "low": pl.Float64, "high": pl.Float64, "games": pl.Int64}
    return pl.DataFrame(out, schema=schema, orient="row")
