"""What CreditTrainer relies on in TRL and transformers, part of it without a promise: this fails where it has moved."""

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed here; `make crosscheck` installs it")

import transformers  # noqa: E402
from packaging.specifiers import SpecifierSet  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer import utils  # noqa: E402

from workbench.engines.trl import RANGE, CreditTrainer  # noqa: E402

ROOT = Path(__file__).parents[2]
SIGNATURES = {
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_generate_single_turn": "prompt_ids images multimodal_fields num_generations",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep batch_size compute_entropy",
    "_prepare_inputs": "generation_batch",
    "_compute_loss": "model inputs",
    "_clip_grad_norm": "model",
    "_save_checkpoint": "model trial",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_get_output_dir": "trial",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
}
# What the methods above must still do, as a piece of their text, and why we care.
TEXT = {
    "_generate": ("self.rollout_func(prompts, self)", 'extra_fields.pop("env_mask"'),
    "_generate_and_score_completions": (
        "inp[key] = values[i]",  # a rollout's extra columns reach the reward function
        'output["tool_mask"] = tool_mask', "self.args.gradient_accumulation_steps % generate_every",
    ),
    "_compute_loss": (
        "if advantages.dim() == 1:",  # (B,C) advantages
        'completion_mask * inputs["tool_mask"]', 'inputs.get("old_per_token_logps")',
    ),
    "_prepare_inputs": ("self._buffered_inputs", "self._step % self.args.steps_per_generation"),
    "_generate_single_turn": ("self.generation_config", "self.vllm_generation.generate("),
}  # fmt: skip


def test_the_version_is_of_the_pinned_range():
    assert version("trl") in SpecifierSet(RANGE), f"TRL {version('trl')} was not tried; see docs/engines.md"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"trl{RANGE}" in extras["trl"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)[1:]
    wanted = SIGNATURES[name].split()
    assert found[: len(wanted)] == wanted, f"GRPOTrainer.{name} takes {found} in TRL {version('trl')}, not {wanted}"
    if name not in ("_generate", "_generate_single_turn", "_get_output_dir"):
        assert name in vars(CreditTrainer)


@pytest.mark.parametrize("name", TEXT)
def test_what_the_methods_do(name):
    source = inspect.getsource(getattr(GRPOTrainer, name))
    for piece in TEXT[name]:
        assert piece in source, f"GRPOTrainer.{name} of TRL {version('trl')} no longer has: {piece}"


def test_helpers():
    assert list(inspect.signature(utils.shuffle_sequence_dict).parameters) == ["seq_dict"]
    assert list(inspect.signature(utils.split_tensor_dict).parameters) == ["tensor_dict", "num_chunks"]
    assert "self.max_completion_length" in inspect.getsource(VLLMGeneration.generate)
    assert "rollout_func" in inspect.signature(GRPOTrainer.__init__).parameters


def test_gradients_are_clipped_before_the_step_and_the_callback_comes_after_it():
    source = inspect.getsource(transformers.Trainer)
    places = [
        source.index(piece) for piece in ("self._clip_grad_norm(model)", "self.optimizer.step()", ".on_optimizer_step(")
    ]
    assert places == sorted(places)
    assert "if self.args.max_grad_norm > 0:" in source
