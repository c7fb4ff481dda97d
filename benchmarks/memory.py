"""Whether a long run stays small in memory, and what a run of 10 million tokens costs to look into.

    python benchmarks/memory.py [--steps N] [--tokens N] [--episodes N]

First a run of `--steps` steps of a model of a few thousand weights in a scripted game, by the trainer itself with its
tables, checkpoints and live curve. Every few steps of its second half it is asked what the process holds: bytes of
resident memory, blocks of Python's allocator, and objects that Python's collector knows. Printed are the last value,
the least-squares slope a step with its standard error, and what 10,000 steps would add at that slope.

Then a made-up run of `--tokens` tokens, 10 turns an episode, of which a process each reads one step's columns, opens
the explorer, and takes one mean over all tokens, all by lazy scans; the peer is a process that reads all columns of the
table at once with polars' read_parquet and takes the same mean. Peaks are above what a process held before it read.
The files were just written, so the system has them in its cache. The last line holds the peer over the slowest and
largest of the three.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from explorer import made_up, open_explorer
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from workbench import envs, shipped
from workbench.envs.base import State, Task
from workbench.figures.live import Live
from workbench.runs import RunFolder
from workbench.runs.folder import step_of
from workbench.train import TrainConfig, Trainer

PER_STEP = 50  # episodes a step of the made-up run
EVERY = 5  # steps from one look at the memory to the next


class Scripted:
    """A game of two turns; the first command decides it, by the number of its letters."""

    splits = ("train", "heldout")

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"scripted/{split}/{n}", "scripted", split) for n in range(8)]

    def reset(self, task_id: str, seed: int = 0) -> State:
        self.turn, self.won = 0, False
        return State(f"you see door {task_id[-1]} .", ("go", "look around"))

    def step(self, action: str) -> State:
        self.turn += 1
        self.won |= self.turn == 1 and len(action) % 2 == 0
        done = self.turn == 2
        return State("you see the cup .", ("go",), float(done and self.won), done, int(done and self.won))

    def close(self) -> None:
        pass


class Page:
    """Takes a figure in place of a notebook's page and keeps none of it."""

    def update(self, figure: dict[str, Any], raw: bool) -> None:
        pass


def trainer(out: Path, steps: int) -> Trainer:
    disable_progress_bar()
    torch.set_num_threads(1)  # the model is too small for more
    envs.ENVIRONMENTS["scripted"] = Scripted
    tokenizer = AutoTokenizer.from_pretrained(shipped.data("models", "twc-small"))
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    config = TrainConfig(
        method="grpo_dgg", method_options={"max_reuse": 2}, env="scripted", model=str(out / "model"), prompt="plain",
        steps=steps, tasks_per_step=2, group_size=2, max_turns=2, max_response_tokens=2, max_context=96, max_invalid=0,
        eval_every=10, eval_games=4, checkpoint_every=10, record_turns_every=1, monitor_every=1, teacher=False,
    )  # fmt: skip
    return Trainer(config, RunFolder.create(out, "long", {}), lambda line: None)


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def slope(steps: np.ndarray, held: np.ndarray) -> tuple[float, float]:
    """Least-squares slope and its standard error, which takes deviations from the line to be independent."""
    x = steps - steps.mean()
    rate = float(x @ held / (x @ x))
    rest = held - held.mean() - rate * x
    return rate, float(np.sqrt(rest @ rest / (len(x) - 2) / (x @ x)))


def long_run(steps: int) -> None:
    rows: list[tuple[int, int, int, int]] = []
    with tempfile.TemporaryDirectory() as out:
        run = trainer(Path(out), steps)
        curve = Live(run.folder)
        curve.handle = Page()

        def look(trained: Trainer) -> None:
            curve(trained)
            if trained.step >= steps // 2 and trained.step % EVERY == 0:
                gc.collect()
                rows.append((trained.step, status("VmRSS"), sys.getallocatedblocks(), len(gc.get_objects())))

        began = time.perf_counter()
        run.run(look)
        seconds = time.perf_counter() - began
    at, *held = np.array(rows, float).T
    print(f"{steps} steps in {seconds:.0f} s, slopes over steps {at[0]:.0f} to {at[-1]:.0f}:")
    names = ("bytes resident", "blocks of Python's", "objects of Python's")
    for name, values in zip(names, held, strict=True):
        rate, error = slope(at, values)
        print(f"{name:20} {values[-1]:13,.0f}, {rate:9,.1f} ± {error:,.1f} a step, {1e4 * rate:13,.0f} in 10,000 steps")


def one_step(run: RunFolder) -> float:
    files = run.table_files("turns")
    middle = step_of(files[len(files) // 2])
    found = run.scan("turns").filter(pl.col("step") == middle).select("episode", "turn", "advantage", "gap").collect()
    return found["advantage"].list.sum().sum() / found["advantage"].list.len().sum()


def explorer(run: RunFolder) -> float:
    return float(open_explorer(run)[1])


MEAN = pl.col("advantage").list.sum().cast(pl.Float64).sum() / pl.col("advantage").list.len().sum()


def mean_of_all(run: RunFolder) -> float:
    """The mean advantage of the tokens of episodes that were won."""
    won = run.scan("episodes").filter(pl.col("outcome") == 1).select("step", "episode")
    turns = run.scan("turns").join(won, on=["step", "episode"], how="semi")
    return turns.select(MEAN).collect(engine="streaming").item()


def read_parquet(run: RunFolder) -> float:
    turns = pl.read_parquet(run.path / "tables" / "turns" / "*.parquet", hive_partitioning=False)
    won = pl.read_parquet(run.path / "tables" / "episodes" / "*.parquet", hive_partitioning=False)
    won = won.filter(pl.col("outcome") == 1)
    return turns.join(won, on=["step", "episode"], how="semi").select(MEAN).item()


READERS: dict[str, Callable[[RunFolder], float]] = {
    f.__name__: f for f in (one_step, explorer, mean_of_all, read_parquet)
}


def read(name: str, run: RunFolder) -> dict[str, float]:
    """Seconds, and the peak in bytes above what the process held before."""
    before, began = status("VmRSS"), time.perf_counter()
    answer = READERS[name](run)
    seconds = time.perf_counter() - began
    return {"answer": answer, "seconds": seconds, "peak": max(status("VmHWM") - before, 1)}


def large_tables(tokens: int, episodes: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        run = made_up(out, tokens, episodes, episodes // PER_STEP)
        size = sum(file.stat().st_size for file in run.path.rglob("*.parquet"))
        seconds = time.perf_counter() - began
        steps = len(run.table_files("turns"))
        print(f"{tokens:,} tokens, {episodes:,} episodes, {steps} steps: {size / 2**20:.0f} MiB in {seconds:.0f} s")
        found = {}
        for name in READERS:
            command = [sys.executable, __file__, "--read", name, "--run", str(run.path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stdout)
            print(f"{name:14} {found[name]['seconds']:7.2f} s, peak {found[name]['peak'] / 2**20:6.0f} MiB")
    peer = found.pop("read_parquet")
    assert np.isclose(found["mean_of_all"]["answer"], peer["answer"])
    longer, more = (peer[what] / max(each[what] for each in found.values()) for what in ("seconds", "peak"))
    print(f"read_parquet takes {longer:.1f} times as long as the slowest of the others and {more:.1f} times the memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--read", choices=READERS, help="one reader alone, of --run: prints JSON")
    parser.add_argument("--run", help="a run folder, for --read")
    given = parser.parse_args()
    if given.read:
        print(json.dumps(read(given.read, RunFolder.open(given.run))))
        return
    long_run(given.steps)
    large_tables(given.tokens, given.episodes)


if __name__ == "__main__":
    main()
