"""Tokens per second of each stage of a training step, for a model of Qwen2.5-0.5B's shape with random weights.

    python benchmarks/device.py [--env twc|alfworld] [--episodes 64] [--layers 24]

Nothing is downloaded: the config is written here and the shipped word-level tokenizer stands in for the model's own,
with the output head at its full 151,936 words. Prints one line a stage and the peak memory.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig

from workbench import shipped
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="twc", choices=("twc", "alfworld"))
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model(model, given.layers)
        config = TrainConfig(
            method="agent_opsd", env=given.env, model=str(model), random_init=True, dtype="bfloat16", prompt="plain",
            tasks_per_step=max(1, given.episodes // 8), group_size=8, live_episodes=given.episodes,
            max_turns=given.turns, max_response_tokens=given.response_tokens, max_context=4096,
            max_invalid=0, lr=1e-6, micro_tokens=32768,
        )  # fmt: skip
        trainer = Trainer(config, RunFolder.create(scratch, "device", {}), print)
        where = torch.cuda.get_device_name() if trainer.policy.device.type == "cuda" else "cpu"
        size = sum(p.numel() for p in trainer.policy.model.parameters())
        print(
            f"{where}, torch {torch.__version__}, {size / 1e6:.0f} M parameters, env {given.env}, "
            f"{given.episodes} episodes"
        )
        for repeat in range(given.repeats):
            measure(trainer, repeat)
        if trainer.policy.device.type == "cuda":
            print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the device")
        print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of the process")


def write_model(folder: Path, layers: int) -> None:
    """A config of Qwen2.5-0.5B's shape, as a Llama with biases (a qwen2 config imposes its own tokenizer)."""
    tokenizer = AutoTokenizer.from_pretrained(shipped.data("models", "twc-small"))
    LlamaConfig(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
        attention_bias=True, architectures=["LlamaForCausalLM"],
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)


def measure(trainer: Trainer, repeat: int) -> None:
    """One step by stages; the first repeat pays for warming up."""
    episodes, rollout = timed(trainer, lambda: trainer.rollout(repeat))
    sampled = sum(len(t.response_ids) for e in episodes for t in e.turns)
    seen = sum(len(e.turns[-1].prompt_ids) + len(e.turns[-1].response_ids) for e in episodes)
    batch, scoring = timed(trainer, lambda: trainer.batch(episodes))
    credit, crediting = timed(trainer, lambda: trainer.method.credit(batch))
    _, updating = timed(trainer, lambda: trainer._reuse(repeat, batch, credit.advantages))
    total = rollout + scoring + crediting + updating
    print(f"repeat {repeat}: {seen} tokens, {sampled} of them sampled, {total:.2f} s")
    for stage, tokens, seconds in (
        ("rollout, sampled", sampled, rollout),
        ("rollout, all", seen, rollout),
        ("old log-probs and teacher pass", 2 * seen, scoring),
        ("credit", seen, crediting),
        ("update", seen, updating),
    ):
        print(f"  {stage:<32} {tokens / seconds:12,.0f} tokens/s  {seconds:8.3f} s")


def timed(trainer: Trainer, work):
    start = time.perf_counter()
    out = work()
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize()
    return out, time.perf_counter() - start


if __name__ == "__main__":
    main()
