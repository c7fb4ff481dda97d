"""A training step of ours beside one of TRL's GRPOTrainer: the same model, tasks, limits and settings, taking turns.

    python benchmarks/train_step.py [--env twc] [--steps 4] [--threads 2] [--stages]

TRL (`pip install "credit-workbench[trl]"`) plays through its own `rollout_func`, all games of a batch in step, and
generates in its own way, which encodes the conversation anew at every turn. Both learn at a rate of 1e-6, so that
their policies, and with them the lengths of games, stay alike. Every stage's rate and its ratio are medians over steps
after a first one that warms up; the last line is the whole step's ratio. --stages needs no TRL: it prints what the
teacher's pass, credit and recording add to a step, and each stage's share of this machine's matrix product and copy.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path

import torch

from workbench import envs, shipped
from workbench.rollout import Limits
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

GROUP, TASKS = 8, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="twc")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trl-batch", type=int, default=GROUP * TASKS, help="episodes in one of TRL's passes")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--only", choices=("ours", "trl"), help="one alone: prints its peak memory in MiB")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if given.stages:
            stages(trainer_of(given, scratch, "agent_opsd"), given)
        elif given.only == "ours":
            ours = trainer_of(given, scratch, "grpo")
            for _ in range(2):
                ours._train_step()
        else:
            beside_trl(given, scratch)
    if given.only:
        print(peak_memory())


def trainer_of(given: argparse.Namespace, scratch: str, method: str) -> Trainer:
    config = TrainConfig(
        method=method, env=given.env, model=str(shipped.data("models", "twc-small")), tasks_per_step=TASKS,
        group_size=GROUP, lr=1e-6, dtype="float32", teacher=method != "grpo", record_turns_every=1, steps=given.steps,
    )  # fmt: skip
    return Trainer(config, RunFolder.create(scratch, method, {}), lambda line: None)


class Clock:
    """Seconds and amounts of each trainer's stages, a list a step."""

    def __init__(self):
        self.seconds = {"ours": defaultdict(list), "trl": defaultdict(list)}
        self.played: dict[str, list[tuple[int, int, int]]] = {"ours": [], "trl": []}

    def step(self, who: str, **seconds: float) -> None:
        for stage, taken in seconds.items():
            self.seconds[who][stage].append(taken)

    def per_episode(self, who: str, stage: str) -> float:
        """Median seconds an episode, without the first step."""
        pairs = zip(self.seconds[who][stage][1:], self.played[who][1:], strict=True)
        return statistics.median(seconds / episodes for seconds, (episodes, _, _) in pairs)

    def per_token(self, who: str, stage: str, which: int) -> float:
        pairs = zip(self.seconds[who][stage][1:], self.played[who][1:], strict=True)
        return statistics.median(seconds / amounts[which] for seconds, amounts in pairs)


def amounts(lengths: list[int], sampled: list[int]) -> tuple[int, int, int]:
    """Episodes, sampled tokens, and tokens of the rows that are trained on."""
    return len(lengths), sum(sampled), sum(lengths)


def beside_trl(given: argparse.Namespace, scratch: str) -> None:
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    warnings.filterwarnings("ignore")
    try:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        sys.exit(f'{error}: pip install "credit-workbench[trl]"')

    ours, clock = trainer_of(given, scratch, "grpo"), Clock()
    games = envs.make(given.env, GROUP * TASKS)
    tasks = [task.id for step in range(given.steps) for task in ours.tasks_of(step)]
    limits = ours.limits

    class Turns(TrainerCallback):
        """Takes our step after each of TRL's."""

        def on_step_begin(self, args, state, control, **kwargs):
            self.begun = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            whole = time.perf_counter() - self.begun
            clock.step("trl", step=whole, rollout=peer.rollout_seconds, update=whole - peer.rollout_seconds)
            clock.played["trl"].append(peer.played)
            if given.only:
                return
            begun = time.perf_counter()
            ours._train_step()
            whole = time.perf_counter() - begun
            clock.step("ours", step=whole, rollout=ours.seconds["rollout"], update=whole - ours.seconds["rollout"])
            turns = [t for e in ours.drawn for t in e.turns]
            lengths = [len(e.turns[-1].prompt_ids) + len(e.turns[-1].response_ids) for e in ours.drawn]
            clock.played["ours"].append(amounts(lengths, [len(t.response_ids) for t in turns]))

    def rollout(prompts, trainer):
        begun = time.perf_counter()
        played = play(trainer, ours.chat, games, [prompt[0]["content"] for prompt in prompts], limits)
        peer.rollout_seconds = time.perf_counter() - begun
        lengths = [len(p) + len(c) for p, c in zip(played["prompt_ids"], played["completion_ids"], strict=True)]
        peer.played = amounts(lengths, [sum(mask) for mask in played["env_mask"]])
        return played

    config = GRPOConfig(
        output_dir=str(Path(scratch) / "trl"), per_device_train_batch_size=given.trl_batch,
        gradient_accumulation_steps=GROUP * TASKS // given.trl_batch, num_generations=GROUP, max_steps=given.steps,
        max_completion_length=limits.max_response_tokens, learning_rate=1e-6, beta=0.0, bf16=False, use_cpu=True,
        temperature=1.0, top_k=0, loss_type="grpo", shuffle_dataset=False, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_strategy="no", gradient_checkpointing=False, lr_scheduler_type="constant",
    )  # fmt: skip
    peer = GRPOTrainer(
        model=str(shipped.data("models", "twc-small")), reward_funcs=lambda outcome, **kwargs: outcome, args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": task}]} for task in tasks]),
        rollout_func=rollout, callbacks=[Turns()],
    )  # fmt: skip
    peer.model.float()
    peer.train()
    if not given.only:
        report(given, clock)


def play(trainer, chat, games, tasks: list[str], limits: Limits) -> dict[str, list]:
    """All games in step; at each turn TRL generates for every live one from its whole conversation."""
    states = games.reset(tasks)
    prompts = [chat.first(chat.style.message(state, [], True)).tolist() for state in states]
    rows, masks = [list(p) for p in prompts], [[] for _ in tasks]
    past: list[list] = [[] for _ in tasks]
    invalid, live = [0] * len(tasks), list(range(len(tasks)))
    for turn in range(limits.max_turns):
        if not live:
            break
        completions, _ = trainer._generate_single_turn([rows[i] for i in live], None, {}, GROUP)
        going = []
        for i, ids in zip(live, completions, strict=True):
            rows[i] += ids
            masks[i] += [1] * len(ids)
            text = chat.tokenizer.decode(ids, skip_special_tokens=True)
            action = chat.style.command(text, states[i].admissible)
            past[i].append((states[i].observation, action))
            states[i] = games.envs[i].step(action)
            invalid[i] += not states[i].valid
            cut = ids[-1] != chat.end_id
            room = len(rows[i]) + 2 * limits.max_response_tokens <= limits.max_context
            spoilt = limits.max_invalid and invalid[i] >= limits.max_invalid
            if states[i].done or spoilt or not room or turn + 1 == limits.max_turns:
                continue
            new = chat.following(chat.style.message(states[i], past[i], False), cut).tolist()
            rows[i] += new
            masks[i] += [0] * len(new)
            going.append(i)
        live = going
    return {
        "prompt_ids": prompts, "completion_ids": [row[len(p) :] for row, p in zip(rows, prompts, strict=True)],
        "logprobs": None, "env_mask": masks, "outcome": [float(state.outcome) for state in states],
    }  # fmt: skip


def report(given: argparse.Namespace, clock: Clock) -> None:
    print(
        f"{given.env}, {GROUP * TASKS} episodes a step, {given.steps - 1} steps each, {given.threads} threads, torch "
        f"{torch.__version__}"
    )
    print(f"{'':34}{'ours':>10}{'TRL':>10}{'ratio':>8}")
    rates = (
        ("episodes a second, rollout", lambda who: 1 / clock.per_episode(who, "rollout")),
        ("sampled tokens a second, rollout", lambda who: 1 / clock.per_token(who, "rollout", 1)),
        ("trained tokens a second, the rest", lambda who: 1 / clock.per_token(who, "update", 2)),
        ("episodes a second, whole step", lambda who: 1 / clock.per_episode(who, "step")),
    )
    for name, rate in rates:
        mine, theirs = rate("ours"), rate("trl")
        print(f"{name:34}{mine:10,.1f}{theirs:10,.1f}{mine / theirs:8.2f}")
    peaks = {who: peak(given, who) for who in ("ours", "trl")}
    print(f"{'peak memory, MiB':34}{peaks['ours']:10,}{peaks['trl']:10,}{peaks['trl'] / peaks['ours']:8.2f}")
    print(f"whole step: {clock.per_episode('trl', 'step') / clock.per_episode('ours', 'step'):.2f} times TRL's")


def stages(trainer: Trainer, given: argparse.Namespace) -> None:
    """What the teacher's pass, credit and recording add, and each stage's share of what this machine does at best."""
    taken, sums = defaultdict(list), []
    for _ in range(given.steps):
        trainer._train_step()
        for stage, seconds in trainer.seconds.items():
            taken[stage].append(seconds)
        sums.append(sum(trainer.seconds.values()))
    seconds = {stage: statistics.median(values[1:]) for stage, values in taken.items()}
    plain = seconds["rollout"] + seconds["update"] + seconds["record"]
    steps = f"{GROUP * TASKS} episodes a step, median of {given.steps - 1}"
    print(f"{given.env}, agent_opsd, {steps}, {given.threads} threads")
    product, copy = matrix_product(trainer.policy.model.config.hidden_size), copied()
    best = f"{product / 1e9:.0f} GFLOP/s in a matrix product of the model's width, {copy / 1e9:.1f} GB/s copied"
    print(f"this machine: {best}")
    flops = model_flops(trainer)
    for stage, each in seconds.items():
        share = f"{flops[stage] / each / product:8.0%} of the matrix product" if stage in flops else ""
        print(f"{stage:10}{each:8.3f} s {each / sum(seconds.values()):6.1%} of the step{share}")
    print(f"credit and recording: {(seconds['credit'] + seconds['record']) / sum(seconds.values()):.1%} of the step")
    print(f"the teacher's pass adds {seconds['score'] / plain:.1%} to a step without it")


def model_flops(trainer: Trainer) -> dict[str, float]:
    """What the last step's rows ask of the model, each row by itself: 2 a weight and token forward, 6 with backward,
    and attention's products over what lies before a token."""
    config = trainer.policy.model.config
    weights = sum(
        p.numel() for n, p in trainer.policy.model.named_parameters() if "embed" not in n and "lm_head" not in n
    )
    lengths = [len(e.turns[-1].prompt_ids) + len(e.turns[-1].response_ids) for e in trainer.drawn]
    attention = sum(2 * config.num_hidden_layers * config.hidden_size * n * n for n in lengths)
    forward = 2 * weights * sum(lengths) + attention
    return {"rollout": forward, "score": forward, "update": 3 * forward}


def matrix_product(width: int, seconds: float = 1.0) -> float:
    """FLOP a second of (2048,width) times (width,3 width)."""
    a, b = torch.randn(2048, width), torch.randn(width, 3 * width)
    times, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        a @ b
        times += 1
    return 2 * 2048 * width * 3 * width * times / (time.perf_counter() - begun)


def copied(seconds: float = 1.0) -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    a = torch.empty(2**25)
    times, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        a.clone()
        times += 1
    return 2 * a.nbytes * times / (time.perf_counter() - begun)


def peak_memory() -> int:
    """MiB this process held at most (ru_maxrss would count its parent's as well)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) // 1024


def peak(given: argparse.Namespace, who: str) -> int:
    command = [sys.executable, __file__, "--env", given.env, "--steps", "2", "--threads", str(given.threads)]
    command += ["--trl-batch", str(given.trl_batch), "--only", who]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
