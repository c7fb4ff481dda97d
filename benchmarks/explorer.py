"""How fast the explorer opens a large run and answers its page, beside sending the turns table as JSON.

    python benchmarks/explorer.py [--tokens N] [--episodes N] [--steps N] [--repeats N] [--run FOLDER]

A made-up run is written (or a given one read), then both ways are timed in turn, `--repeats` times, after one time each
that is not counted; medians are printed. "Opening" is what a page asks before it shows anything: for the explorer,
reading the folder and answering its first requests; for the peer, reading the whole turns and episodes tables into
frames and writing them as JSON. A "window" is the tokens of one random episode; the peer's is the same rows as JSON, of
the frame that it holds in memory. No page is drawn, and files are in the system's cache for both.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from workbench.runs import RunFolder
from workbench.widgets import Explorer

GROUP, TURNS = 10, 10
WORDS = "take put open close look go the a in on red blue plate fork towel fridge drawer shelf counter basket".split()


def made_up(out: str, tokens: int, episodes: int, steps: int) -> RunFolder:
    """A run of that size: TURNS turns an episode, groups of GROUP."""
    run, rng = RunFolder.create(out, "benchmark", {"method": "agent_opsd"}), np.random.default_rng(0)
    per_step, length = episodes // steps, tokens // (episodes * TURNS)
    vocabulary = np.array(["Ġ" + w for w in WORDS])
    for step in range(steps):
        rows = per_step * TURNS
        episode, turn = np.repeat(np.arange(per_step), TURNS), np.tile(np.arange(TURNS), per_step)
        ids = rng.integers(0, len(WORDS), (rows, length))
        seen = [" ".join(rng.choice(WORDS, 60)) for _ in range(rows)]
        said = ["".join(vocabulary[i]).replace("Ġ", " ") for i in ids]

        def lists() -> pl.Series:
            return pl.Series(rng.normal(0, 0.5, (rows, length)).astype(np.float32)).arr.to_list()  # noqa: B023

        belief, before = rng.random(rows), rng.random(rows)
        frame = pl.DataFrame(
            {
                "step": step, "episode": episode, "group": episode // GROUP, "turn": turn, "observation": seen,
                "action": said, "response": said, "valid": True, "truncated": False, "reward": 0.0,
                "token_ids": pl.Series(ids.astype(np.int32)).arr.to_list(), "pieces": vocabulary[ids].tolist(),
                "old_logprobs": lists(), "teacher_logprobs": lists(), "gap": lists(), "gate": lists(),
                "advantage": lists(), "dloss_dlogp": lists(), "entropy": lists(), "evidence": rng.normal(0, 1, rows),
                "belief_before": before, "belief": belief, "revision": belief - before, "z": rng.normal(0, 1, rows),
                "weight": 1.0, "turn_advantage": rng.normal(0, 1, rows), "pivotal": rng.random(rows) > 0.8,
            }
        )  # fmt: skip
        run.write_table("turns", step, frame)
        won = rng.integers(0, 2, per_step)
        heads = {
            "step": step, "episode": np.arange(per_step), "group": np.arange(per_step) // GROUP, "task": "made/up",
            "outcome": won, "return": won + 0.0, "advantage": won - 0.5, "prior": 0.5, "n_turns": TURNS,
            "n_tokens": TURNS * length, "stop_reason": "won",
        }  # fmt: skip
        run.write_table("episodes", step, pl.DataFrame(heads))
    run.complete()
    return run


def size(answer: Any, buffers: list[bytes]) -> int:
    """Bytes of an answer as it is sent."""
    return len(json.dumps(answer)) + sum(map(len, buffers))


def ask(explorer: Explorer, request: str, **arguments: Any) -> int:
    return size(*explorer.answer(request, **arguments))


def open_explorer(run: RunFolder) -> tuple[Explorer, int]:
    """A new explorer and the bytes of what its page asks before and for the first view."""
    explorer = Explorer(run)
    step, episode = (int(part.split("=")[1]) for part in explorer.link.split("&")[1:])
    place = {"step": step, "episode": episode}
    sent = (
        ask(explorer, "open") + ask(explorer, "rows", at=[step, episode]) + ask(explorer, "scale", signal="advantage")
    )
    sent += ask(explorer, "notes") + ask(explorer, "episode", **place)
    return explorer, sent + ask(explorer, "window", **place, first=0, last=TURNS - 1)


def open_frames(run: RunFolder) -> tuple[pl.DataFrame, int]:
    """The turns table in memory, and the bytes of it and of the episodes table as JSON."""
    turns, episodes = run.read("turns"), run.read("episodes")
    return turns, len(turns.write_json()) + len(episodes.write_json())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    got = call()
    return time.perf_counter() - began, got


def main() -> int:
    parser = argparse.ArgumentParser(description="Opening and windows of the explorer, beside tables sent as JSON.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--episodes", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", default=None, help="a run folder to read instead of a made-up one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        made = (out, options.tokens, options.episodes, options.steps)
        run = RunFolder.open(options.run) if options.run else made_up(*made)
        compare(run, options.repeats)
    return 0


def compare(run: RunFolder, repeats: int) -> None:
    rng, times, sizes = random.Random(0), {}, {}

    def note(name: str, seconds: float, sent: int) -> None:
        times.setdefault(name, []).append(seconds)
        sizes.setdefault(name, []).append(sent)

    for repeat in range(repeats + 1):
        seconds, (explorer, sent) = timed(lambda: open_explorer(run))
        peer_seconds, (turns, peer_sent) = timed(lambda: open_frames(run))
        if not repeat:
            continue
        note("open, explorer", seconds, sent)
        note("open, frames as JSON", peer_seconds, peer_sent)
        for row in rng.sample(explorer.data.summaries.rows(named=True), 10):
            place = {"step": row["step"], "episode": row["episode"]}
            asked = {**place, "first": 0, "last": row["n_turns"] - 1}
            note("window, explorer", *timed(lambda: ask(explorer, "window", **asked)))  # noqa: B023
            mine = (pl.col("step") == row["step"]) & (pl.col("episode") == row["episode"])
            note("window, frame in memory", *timed(lambda: len(turns.filter(mine).write_json())))  # noqa: B023
        shape = {"where": [{"column": "return", "op": ">", "value": 0.5}], "sort": "revised", "descending": True}
        note("filter and sort, explorer", *timed(lambda: ask(explorer, "rows", **shape)))  # noqa: B023
        note("first text search, explorer", *timed(lambda: ask(explorer, "rows", text="red plate towel")))  # noqa: B023
    data = explorer.data.summaries
    print(f"{turns['token_ids'].list.len().sum():,} tokens, {data.height:,} episodes, {data['step'].n_unique()} steps")
    print(f"{'':28} {'median':>10} {'longest':>10} {'sent':>12}")
    for name, values in times.items():
        ms = f"{1000 * statistics.median(values):>7.1f} ms {1000 * max(values):>7.1f} ms"
        print(f"{name:28} {ms} {statistics.median(sizes[name]):>10,.0f} B")
    ratio = statistics.median(times["open, frames as JSON"]) / statistics.median(times["open, explorer"])
    less = statistics.median(sizes["open, frames as JSON"]) / statistics.median(sizes["open, explorer"])
    print(f"the explorer opens {ratio:.1f} times as fast and sends {less:,.0f} times less")


if __name__ == "__main__":
    raise SystemExit(main())
