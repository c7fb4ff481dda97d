"""Random models of a few thousand parameters."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM


def tiny_model(tokenizer, kind: str = "qwen2", tied: bool = False, seed: int = 0, shared_heads: bool = True):
    """A random model of a few thousand parameters. shared_heads: two heads read the same keys."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2 if shared_heads else 4, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 2,
        "bos_token_id": None,
    }  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return Qwen2ForCausalLM(Qwen2Config(**shape))
