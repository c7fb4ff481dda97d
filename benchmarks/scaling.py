"""How the cost of rollout, scoring and update grows with episodes, turns, context and vocabulary, and what power it is.

    python benchmarks/scaling.py [--threads 1] [--quick] [--figure FILE.html]

One of the four is varied, the rest stays at the setting that is printed first; more turns make a longer context, a
longer context alone comes from longer messages. The model has the shipped small model's config and random weights; the
environment is a script of random tokens that never ends early, and a response ends at its token limit, so that counts
are exact whatever is sampled. Groups of 8 begin with the same message. Rollout is `rollout.play`, scoring
`Policy.score_rows`, update `update.accumulate` with GRPO's loss. Times are CPU seconds, the least of up to 3 repeats in
about 2 seconds.

An axis's exponent is the slope of a least squares line through log seconds and log size, over the upper half of its
sizes: below, costs that do not grow hide it. Then the memory that scoring adds at its peak, in a process of its own
each, beside transformers' forward of the same rows, with logits of all their tokens: the rows at once, and in passes of
as many tokens as ours. null is not measured. The last line is the ratio to the former. --quick leaves out the two
largest sizes of each axis.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import polars as pl
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from workbench import methods, shipped
from workbench.envs.base import EnvBatch, State, Task
from workbench.figures import scaling
from workbench.policy import Policy, load_tokenizer
from workbench.prompts import PromptStyle
from workbench.records import Batch, Episode
from workbench.reuse.lm_head import IsolatedHead
from workbench.rollout import Job, Limits, play
from workbench.update import UpdateConfig, accumulate

MODEL, GROUP = shipped.data("models", "twc-small"), 8
SIZES = {
    "episodes": [8, 16, 32, 64, 128],
    "turns": [2, 4, 8, 16, 32],
    "context": [256, 512, 1024, 2048, 4096],
    "vocabulary": [512, 1024, 2048, 4096, 8192, 16384, 32768],
}
WAYS = ("ours", "transformers", "transformers, in passes")
PEER = WAYS[1]
# episodes, tokens of context, and the ways that are measured there
MEMORY = [(8, 256, WAYS), (16, 256, WAYS[:2]), (32, 256, WAYS[:2]), (64, 256, WAYS), (64, 1024, WAYS[::2])]


@dataclass(frozen=True)
class Setting:
    """How many episodes, turns of each, tokens of a message and of a response, and tokens that the model knows."""

    episodes: int = GROUP
    turns: int = 8
    message: int = 24
    response: int = 8
    vocabulary: int = 396

    @property
    def context(self) -> int:
        """Tokens of an episode's row."""
        return self.turns * (self.message + self.response)

    @property
    def sampled(self) -> int:
        """Tokens of all episodes that the policy samples."""
        return self.episodes * self.turns * self.response

    def at(self, axis: str, size: int) -> "Setting":
        if axis == "context":
            return replace(self, message=size // self.turns - self.response)
        return replace(self, **{axis: size})

    def __str__(self) -> str:
        return (
            f"{self.episodes} episodes of {self.turns} turns, messages of {self.message} tokens, responses of "
            f"{self.response}, context {self.context}, vocabulary {self.vocabulary:,}"
        )


class Script:
    """An environment whose messages name themselves, and the chat that turns a name into random tokens."""

    splits, style, end_id = ("train",), PromptStyle(), -1  # no token ends a response

    def __init__(self, setting: Setting, number: int = 0):
        self.setting, self.number, self.turn = setting, number, 0

    def reset(self, task: str, seed: int = 0) -> State:
        self.turn = 0
        return State(task, ())

    def step(self, action: str) -> State:
        self.turn += 1
        return State(f"{self.number} {self.turn}", ())

    def first(self, text: str) -> np.ndarray:
        rng = np.random.default_rng(crc32(text.encode()))
        return rng.integers(self.setting.vocabulary, size=self.setting.message, dtype=np.int32)

    def following(self, text: str, truncated: bool) -> np.ndarray:
        return self.first(text)

    def decode(self, ids: np.ndarray) -> str:
        return ""


@cache
def policy_of(vocabulary: int, context: int) -> Policy:
    config = AutoConfig.from_pretrained(MODEL)
    config.vocab_size, config.max_position_embeddings = vocabulary, max(context, config.max_position_embeddings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return Policy(model, load_tokenizer(MODEL))


def rollout(setting: Setting) -> list[Episode]:
    policy = policy_of(setting.vocabulary, setting.context)
    jobs = [Job(Task(f"task {e // GROUP}", "script", "train"), e // GROUP, (0, e)) for e in range(setting.episodes)]
    limits = Limits(setting.turns, setting.response, setting.context, max_invalid=0)
    return play(policy, Script(setting), EnvBatch([Script(setting, e) for e in range(setting.episodes)]), jobs, limits)


def score(setting: Setting, batch: Batch) -> Tensor:
    policy = policy_of(setting.vocabulary, setting.context)
    return policy.score_rows(batch.input_ids, batch.lengths, batch.response_mask)[0]


def update(setting: Setting, batch: Batch) -> Tensor:
    """The gradient of the model's embedding, which is its output head too."""
    policy = policy_of(setting.vocabulary, setting.context)
    policy.model.zero_grad()
    head = IsolatedHead(policy.model)
    signs = 1.0 - 2.0 * (torch.arange(setting.episodes) % 2)
    config = UpdateConfig(micro_tokens=policy.micro_tokens)
    accumulate(policy, head, batch, batch.episodes_to_tokens(signs), methods.method("grpo"), config)
    head.merge()
    return policy.lm_head.weight.grad


def seconds(work: Callable[[], Any], repeats: int = 3, enough: float = 2.0) -> tuple[float, Any]:
    """The least CPU time of up to `repeats` calls, while they have not taken `enough` seconds, and what they return."""
    best, spent, calls, done = float("inf"), 0.0, 0, None
    while calls < repeats and spent < enough:
        begun = time.process_time()
        done = work()
        taken = time.process_time() - begun
        best, spent, calls = min(best, taken), spent + taken, calls + 1
    return best, done


def measured(axis: str, sizes: Sequence[int], base: Setting, repeats: int = 3) -> pl.DataFrame:
    """A row a size and stage: axis, size, stage, CPU seconds, and the tokens that were sampled and those of all rows.
    Exits where these are not what the setting says."""
    out = []
    for size in sizes:
        setting = base.at(axis, size)
        played, episodes = seconds(lambda: rollout(setting), repeats)  # noqa: B023
        batch = Batch.from_episodes(episodes, layout="episode")
        scored, logprobs = seconds(lambda: score(setting, batch), repeats)  # noqa: B023
        batch = batch.with_(old_logprobs=logprobs)
        updated, _ = seconds(lambda: update(setting, batch), repeats)  # noqa: B023
        sampled, read = int(batch.response_mask.sum()), int(batch.lengths.sum())
        if (sampled, read) != (setting.sampled, setting.episodes * setting.context):
            sys.exit(f"{setting}: {sampled} tokens of {read} were sampled, another number than was asked for")
        for stage, taken in (("rollout", played), ("scoring", scored), ("update", updated)):
            out.append((axis, size, stage, taken, sampled, read))
    return pl.DataFrame(out, schema=["axis", "size", "stage", "seconds", "sampled", "read"], orient="row")


def rows(setting: Setting) -> tuple[Tensor, Tensor]:
    """Ids and the mask of sampled tokens (B,T) of random episodes."""
    shape = setting.episodes, setting.context
    ids = torch.randint(setting.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    ids[:, : setting.message] = ids[::GROUP, : setting.message].repeat_interleave(GROUP, 0)[: setting.episodes]
    mask = torch.arange(setting.context) % (setting.message + setting.response) >= setting.message
    return ids, mask.expand(shape)


def kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


@torch.no_grad()
def added_memory(way: str, episodes: int, context: int, vocabulary: int) -> float:
    """MiB that this process held at its peak beyond those before."""
    setting = Setting(episodes=episodes, vocabulary=vocabulary).at("context", context)
    policy = policy_of(vocabulary, context)
    ids, mask = rows(setting)
    before = kib("VmRSS")
    if way == "ours":
        policy.score_rows(ids, torch.full((episodes,), context), mask)
    else:
        for part in ids.split(episodes if way == PEER else max(1, policy.micro_tokens // context)):
            policy.model(input_ids=part, use_cache=False)
    return (kib("VmHWM") - before) / 1024


def memories(vocabulary: int, threads: int) -> pl.DataFrame:
    """A row of MEMORY each: what every way of scoring adds at its peak, MiB."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workbench.policy", "workbench.update"])  # imported once, before each child's fork
    cases = [(way, *size, vocabulary) for *size, ways in MEMORY for way in ways]
    with context.Pool(1, torch.set_num_threads, (threads,), maxtasksperchild=1) as pool:
        taken = dict(zip(cases, pool.starmap(added_memory, cases, chunksize=1), strict=True))
    schema = dict.fromkeys(("episodes", "context"), pl.Int64) | dict.fromkeys(WAYS, pl.Float64)
    out = [(*size, *(taken.get((way, *size, vocabulary)) for way in WAYS)) for *size, _ in MEMORY]
    return pl.DataFrame(out, schema=schema, orient="row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--figure", type=Path, help="write it as a page, FILE.html")
    given = parser.parse_args()
    if given.figure and given.figure.suffix != ".html":
        parser.error(f"--figure: a file that ends in .html is expected, got {given.figure}")
    torch.set_num_threads(given.threads)
    base = Setting()
    print(f"{base}; {given.threads} threads, torch {torch.__version__}")
    frames = (measured(axis, sizes[: -2 if given.quick else None], base) for axis, sizes in SIZES.items())
    frame = pl.concat(frames)
    pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True)
    pl.Config(float_precision=3, tbl_formatting="ASCII_BORDERS_ONLY_CONDENSED")
    print(scaling.local(frame))
    print("exponents over the upper half of the sizes, from `above` on, where costs that do not grow hide them less:")
    print(scaling.exponents(frame).pivot("stage", index=["axis", "above"], values="exponent"))
    if given.figure:
        scaling.figure(frame, f"Where not varied: {base}.").write_html(given.figure, include_plotlyjs=True)
    vocabulary = SIZES["vocabulary"][-1]
    found = memories(vocabulary, given.threads)
    print(f"MiB that scoring adds at its peak at a vocabulary of {vocabulary:,}, and the logits of all tokens:")
    logits = pl.col("episodes") * pl.col("context") * vocabulary * 4 / 2**20
    with pl.Config(float_precision=0):
        print(found.with_columns(logits.alias("all logits")))
    most = found.filter(pl.col(PEER).is_not_null()).row(-1, named=True)
    what = f"scoring {most['episodes']} episodes at a vocabulary of {vocabulary:,}"
    print(f"{what}: {most[PEER] / most['ours']:.1f} times less memory than transformers' forward")


if __name__ == "__main__":
    main()
