"""Write the TRL fixtures with TRL itself (requirements/trl.txt): python tests/formats/make_trl_fixtures.py

Two training steps of a tiny random model, on text and on chat prompts, leave trl/ and trl_chat/; the batch of a
two-turn `rollout_func`, whose second stretch of tokens is the environment's, is kept as trl_batch/batch.pt.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa  # noqa: E402
import torch  # noqa: E402
from conftest import SENTENCES  # noqa: E402
from datasets import Dataset  # noqa: E402
from tiny_models import tiny_model  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from workbench.warmstart import build_tokenizer  # noqa: E402

HERE = Path(__file__).parent / "fixtures"
CHAT = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


class Kept(GRPOTrainer):
    """Keeps the last batch of rollouts."""

    batch: dict = {}

    def _generate_and_score_completions(self, inputs):
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch


def length_reward(completions, **columns):
    return [float(len(str(c)) % 5) for c in completions]


def cup_reward(completions, **columns):
    return [None if i % 4 == 3 else float("cup" in str(c)) for i, c in enumerate(completions)]


def two_turns(prompts, trainer):
    """Two tokens of the model, two of the environment, then one to three of the model again."""
    ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    said = [[10 + i, 11 + i, 3, 4, *range(20, 21 + i % 3)] for i in range(len(prompts))]
    mask = [[1, 1, 0, 0, *[1] * (len(s) - 4)] for s in said]
    logprobs = [[-0.25 * (k + 1) if m else 0.0 for k, m in enumerate(row)] for row in mask]
    return {"prompt_ids": ids, "completion_ids": said, "logprobs": logprobs, "env_mask": mask}


def train(name, prompts, steps, tokenizer, folder, **options):
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_steps=steps, logging_steps=1,
            num_generations=2, per_device_train_batch_size=4, max_completion_length=8, log_completions=True, seed=1,
            save_strategy="no", beta=0.1,
        )  # fmt: skip
        trainer = Kept(
            model=str(folder),
            reward_funcs=[length_reward, cup_reward],
            args=args,
            train_dataset=Dataset(pa.table({"prompt": prompts}), fingerprint=name),
            processing_class=tokenizer,
            **options,
        )
        trainer.train()
        target = HERE / name
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(out, "completions").glob("*.parquet")):
            (target / file.name).write_bytes(file.read_bytes())
        return trainer.batch


def main():
    torch.manual_seed(0)
    tokenizer = build_tokenizer(sorted(set(SENTENCES.split())))
    tokenizer.chat_template = CHAT
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(tokenizer).save_pretrained(folder)
        texts = ["take the red cup", "you see a table"]
        train("trl", texts, 2, tokenizer, folder)
        chats = [[{"role": "system", "content": "go"}, {"role": "user", "content": t}] for t in texts]
        train("trl_chat", chats, 1, tokenizer, folder)
        batch = train("trl_rollout", texts, 1, tokenizer, folder, rollout_func=two_turns)
    target = HERE / "trl_batch"
    target.mkdir(parents=True, exist_ok=True)
    torch.save({k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}, target / "batch.pt")


if __name__ == "__main__":
    main()
