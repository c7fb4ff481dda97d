"""How fast a credit rule is, against plain Python and against one pass over what it reads, in one run.

    python benchmarks/credit.py [--tokens N] [--subset N] [--repeats N] [--device cpu|cuda] [RULE ...]

The batch has one row an episode: 8 turns of 20 prompt and 100 sampled tokens each, groups of 8, float32 log-probs.

* loop: the same formula over rows and tokens (per_row.py) on the first episodes, scaled up by the number of tokens. It
  reads tensors as lists and writes one back, as it would have to.
* fresh: the rule on a batch just made, as callers meet it: validating it has found where turns begin, and it remembers.
  cold: after all that it remembers was dropped. Making the batch counts in neither and is timed by itself.
* pass: a clone of every tensor that the rule reads.
* extra: peak memory above what was held before, result included, in parts of the tensors that the rule reads.

Times are the best of the repeats, which alternate between rule, clone and loop. A rule and its loop must agree to 1e-5
on the subset, else the exit status is 1. The last line is how many times faster than its loop the first rule is on a
fresh batch: AgentOPSD by default.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import per_row
import torch
from torch import Tensor

from workbench.credit import agent_opsd, gigpo, grpo, reinforce_pp, rloo, rlsd, step_opsd
from workbench.records import Batch, Credit

TURNS, PROMPT, SAMPLED, GROUP = 8, 20, 100, 8
ROWS = ("response_mask", "turn_index", "episode_index", "group_index", "reward")
TEACHER = (*ROWS, "old_logprobs", "teacher_logprobs")


@dataclass(frozen=True)
class Rule:
    credit: Callable[[Batch], Credit]
    loop: Callable[[Batch], Tensor]
    reads: tuple[str, ...]


BY_TOKEN = agent_opsd.AgentOPSDConfig(granularity="token")
RULES = {
    "agent_opsd": Rule(agent_opsd.credit, per_row.agent_opsd, (*TEACHER, "outcome")),
    "agent_opsd_token": Rule(
        partial(agent_opsd.credit, config=BY_TOKEN), partial(per_row.agent_opsd, by_token=True), (*TEACHER, "outcome")
    ),
    "rlsd": Rule(rlsd.credit, partial(per_row.shaped, by_step=False), TEACHER),
    "step_opsd": Rule(step_opsd.credit, partial(per_row.shaped, by_step=True), TEACHER),
    "grpo": Rule(grpo.credit, partial(per_row.per_episode, rule="grpo"), ROWS),
    "rloo": Rule(rloo.credit, partial(per_row.per_episode, rule="rloo"), ROWS),
    "reinforce_pp": Rule(reinforce_pp.credit, partial(per_row.per_episode, rule="reinforce_pp"), ROWS),
    "gigpo": Rule(gigpo.credit, per_row.gigpo, (*ROWS, "turn_rewards", "anchors")),
}


def make_tensors(episodes: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    turn = torch.cat([torch.full((PROMPT,), -1), torch.zeros(SAMPLED, dtype=torch.long)])
    turns = torch.cat([torch.where(turn < 0, turn, k) for k in range(TURNS)]).repeat(episodes, 1)
    mask = turns >= 0
    old = torch.where(mask, -torch.rand(turns.shape, generator=draw), 0)
    teacher = (old + 0.05 * torch.randn(turns.shape, generator=draw)).clamp(max=0)
    outcome = (torch.rand(episodes, generator=draw) < 0.5).float()
    earned = torch.zeros(episodes, TURNS)
    earned[:, -1] = outcome
    return {
        "input_ids": torch.randint(0, 32000, turns.shape, generator=draw),
        "lengths": torch.full((episodes,), turns.shape[1]),
        "response_mask": mask,
        "turn_index": turns,
        "episode_index": torch.arange(episodes),
        "group_index": torch.arange(episodes) // GROUP,
        "outcome": outcome,
        "reward": outcome.clone(),
        "old_logprobs": old,
        "teacher_logprobs": torch.where(mask, teacher, 0),
        "turn_rewards": earned,
        "anchors": torch.randint(0, 20, (episodes, TURNS), generator=draw),
    }


def first_episodes(tensors: dict[str, Tensor], episodes: int) -> Batch:
    """Rows and episodes come in the same order here, so all tensors are cut alike."""
    return Batch(**{name: value[:episodes].cpu().clone() for name, value in tensors.items()})


def seconds(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def forget(batch: Batch) -> None:
    """Drop what the batch has cached."""
    kept = {f.name for f in fields(batch)}
    for name in [name for name in vars(batch) if name not in kept]:
        del batch.__dict__[name]


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def extra_bytes(work: Callable[[], Any], device: str) -> float:
    """Peak memory that a call adds, in bytes; nan where the system does not tell."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - held
    if not Path("/proc/self/clear_refs").exists():
        return float("nan")
    # Memory that was freed but not yet handed back would hide what the call takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    held = resident("VmRSS")
    work()
    return resident("VmHWM") - held


def measure(rule: Rule, tensors: dict[str, Tensor], subset: Batch, repeats: int, device: str) -> dict[str, float]:
    batch, inputs = Batch(**tensors), [tensors[name] for name in rule.reads]
    difference = float((rule.credit(subset).advantages.double() - rule.loop(subset)).abs().max())
    forget(batch)
    extra = extra_bytes(partial(rule.credit, batch), device)
    times: dict[str, list[float]] = {"loop": [], "fresh": [], "cold": [], "pass": []}
    for _ in range(repeats):
        batch = Batch(**tensors)
        times["fresh"].append(seconds(partial(rule.credit, batch), device))
        forget(batch)
        times["cold"].append(seconds(partial(rule.credit, batch), device))
        times["pass"].append(seconds(lambda: [value.clone() for value in inputs], device))
        times["loop"].append(seconds(lambda: rule.loop(subset), device))
    found = {name: min(values) for name, values in times.items()}
    found["loop"] *= batch.input_ids.numel() / subset.input_ids.numel()
    return found | {"extra": extra / sum(value.nbytes for value in inputs), "difference": difference}


def main() -> int:
    parser = argparse.ArgumentParser(description="Credit rules against plain Python and one pass over their inputs.")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="sampled tokens of the batch")
    parser.add_argument("--subset", type=int, default=96, help="episodes that the loops run on")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("rules", nargs="*", metavar="RULE", help=f"of {', '.join(RULES)}; default: all")
    options = parser.parse_args()
    if wrong := [name for name in options.rules if name not in RULES]:
        parser.error(f"unknown rule {wrong[0]!r}; known: {', '.join(RULES)}")
    groups = max(1, options.tokens // (TURNS * SAMPLED * GROUP))
    tensors = {name: value.to(options.device) for name, value in make_tensors(groups * GROUP).items()}
    made: list[Batch] = []
    making = min(seconds(lambda: made.append(Batch(**tensors)), options.device) for _ in range(3))
    batch = made[-1]
    subset = first_episodes(tensors, GROUP * max(1, min(groups, options.subset // GROUP)))
    print(
        f"{int(batch.response_mask.sum()):,} tokens in {int(batch.turn_mask.sum()):,} turns, "
        f"{batch.input_ids.numel():,} cells; {options.device}, {torch.get_num_threads()} threads; loops on "
        f"{len(subset.input_ids)} of {len(batch.input_ids)} episodes"
    )
    print(f"making and validating the batch: {1e3 * making:.0f} ms")
    print(
        f"{'rule':18} {'loop s':>7} {'fresh ms':>8} {'cold ms':>8} {'pass ms':>8} "
        f"{'loop/fresh':>10} {'loop/cold':>9} {'cold/pass':>9} {'extra':>6}"
    )
    ratio = None
    for name in options.rules or RULES:
        found = measure(RULES[name], tensors, subset, options.repeats, options.device)
        if found["difference"] > 1e-5:
            print(f"{name}: credit and loop differ by {found['difference']:.2g}", file=sys.stderr)
            return 1
        loop, cold, fresh, once = (found[key] for key in ("loop", "cold", "fresh", "pass"))
        ratio = ratio or loop / fresh
        print(
            f"{name:18} {loop:7.2f} {1e3 * fresh:8.1f} {1e3 * cold:8.1f} {1e3 * once:8.1f} "
            f"{loop / fresh:10.0f} {loop / cold:9.0f} {cold / once:9.2f} {found['extra']:6.2f}",
            flush=True,
        )
    print(f"{ratio:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
