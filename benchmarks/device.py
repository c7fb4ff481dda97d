"""Tokens a second of each stage of a training step, for a model of Qwen2.5's shape with random weights, and of
sampling beside transformers' own generate and continuous batching.

    python benchmarks/device.py [--size 0.5b|1.5b] [--env twc|alfworld] [--episodes 64] [--layers 24]

Nothing is downloaded: the config is written here and the shipped word-level tokenizer stands in for the model's own,
with the output head at its full 151,936 words. Prints one line a stage, the peak memory, and last sampled tokens a
second over generate's. Without a GPU it takes 2 layers and little text, which only shows that it runs.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from workbench import shipped
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="twc", choices=("twc", "alfworld"))
    gpu = torch.cuda.is_available()
    parser.add_argument("--size", default="0.5b", choices=SHAPES)
    parser.add_argument("--episodes", type=int, default=64 if gpu else 8)
    parser.add_argument("--turns", type=int, default=6 if gpu else 1)
    parser.add_argument("--response-tokens", type=int, default=32 if gpu else 8)
    parser.add_argument("--layers", type=int, default=None if gpu else 2)
    parser.add_argument("--repeats", type=int, default=2 if gpu else 1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model(model, given.size, given.layers)
        config = TrainConfig(
            method="agent_opsd", env=given.env, model=str(model), random_init=True, prompt="plain",
            dtype="bfloat16" if gpu else "float32",
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
        beside_generate(trainer)


def write_model(folder: Path, size: str, layers: int | None) -> None:
    """A config of Qwen2.5's shape, as a Llama with biases (a qwen2 config imposes its own tokenizer)."""
    tokenizer = AutoTokenizer.from_pretrained(shipped.data("models", "twc-small"))
    shape = SHAPES[size] | ({"num_hidden_layers": layers} if layers else {})
    LlamaConfig(
        vocab_size=151936, num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, **shape,
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


def beside_generate(trainer: Trainer) -> None:
    """One response of full length to each episode's first prompt: ours, generate, and continuous batching."""
    policy, limit = trainer.policy, trainer.limits.max_response_tokens
    prompts = [e.turns[0].prompt_ids for e in trainer.rollout(0)]
    draws = np.random.default_rng(0).random((len(prompts), limit))
    tokens = len(prompts) * limit

    def ours():
        session = policy.session(len(prompts), max(map(len, prompts)) + limit)
        sampled = session.sample(dict(enumerate(prompts)), dict(enumerate(draws)), end_id=-1)
        assert sum(len(s.ids) for s in sampled.values()) == tokens

    options = {
        "do_sample": True, "top_k": 0, "max_new_tokens": limit, "eos_token_id": -1, "pad_token_id": policy.pad_id,
    }  # fmt: skip

    def generate():
        width = max(map(len, prompts))
        rows = [np.pad(p, (width - len(p), 0), constant_values=policy.pad_id) for p in prompts]
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=policy.device)
        ids = torch.from_numpy(np.stack(rows)).long().to(policy.device)
        with torch.no_grad(), policy.autocast():
            out = policy.model.generate(ids, attention_mask=mask, **options)
        assert out.shape[1] == width + limit

    def continuous():
        with policy.autocast():
            policy.model.generate_batch(
                [p.tolist() for p in prompts], generation_config=GenerationConfig(**options), progress_bar=False
            )

    rates = {}
    for name, work in (("ours", ours), ("generate", generate), ("continuous batching", continuous)):
        try:
            work()
            rates[name] = tokens / min(timed(trainer, work)[1] for _ in range(2))
        except Exception as error:  # what a version of transformers, or a device, does not run
            print(f"sampling, {name}: not run ({type(error).__name__}: {str(error).splitlines()[0][:120]})")
            continue
        print(f"sampling, {name}: {rates[name]:,.0f} tokens/s")
    if {"ours", "generate"} <= rates.keys():
        print(f"sampling: {rates['ours'] / rates['generate']:.2f} times transformers' generate")


def timed(trainer: Trainer, work):
    start = time.perf_counter()
    out = work()
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize()
    return out, time.perf_counter() - start


if __name__ == "__main__":
    main()
