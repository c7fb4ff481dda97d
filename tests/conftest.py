"""Small models and games that the tests share."""

import os

# The tests' models are too small for a second thread to help, and their processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from workbench import shipped
from workbench.policy import Policy
from workbench.warmstart import build_tokenizer

settings.register_profile("shared cores", deadline=None)  # how long an example takes says nothing there
settings.load_profile("shared cores")

SENTENCES = "take the red cup put it on table look around you see a . , : [ ] privileged skill information go"


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(sorted(set(SENTENCES.split())))


def tiny_model(tokenizer, kind: str = "qwen2", tied: bool = False, seed: int = 0):
    """A random model of a few thousand parameters."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": tied,
        "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None,
    }  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return Qwen2ForCausalLM(Qwen2Config(**shape))


@pytest.fixture
def policy(tokenizer):
    return Policy(tiny_model(tokenizer), tokenizer)


@pytest.fixture(scope="session")
def small_model_folder():
    return shipped.data("models", "twc-small")
