"""A long run holds no more in memory than a short one: nothing of a step outlives the next."""

import gc

import pytest
import torch
from killed_trainer import Echo
from tiny_models import tiny_model

from workbench import envs
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

EVERY, STEPS = 6, 30


@pytest.fixture
def seen(tmp_path, tokenizer, monkeypatch):
    """(objects, bytes of tensors) that are alive after every sixth step of a run that records all it can."""
    monkeypatch.setitem(envs.ENVIRONMENTS, "echo", Echo)
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = TrainConfig(
        method="grpo_dgg", method_options={"window": 4, "max_reuse": 2}, env="echo", model=str(tmp_path / "model"),
        prompt="plain", steps=STEPS, tasks_per_step=2, group_size=2, max_turns=3, max_response_tokens=2, max_context=96,
        max_invalid=0, eval_every=5, eval_games=2, checkpoint_every=5, record_turns_every=1, monitor_every=1,
        trackers=["tensorboard"], teacher=False,
    )  # fmt: skip
    alive = []

    def look(trainer):
        if trainer.step % EVERY == 0:
            gc.collect()
            objects = gc.get_objects()
            held = sum(o.numel() * o.element_size() for o in objects if type(o) is torch.Tensor)
            alive.append((len(objects), held))

    Trainer(config, RunFolder.create(tmp_path, "long", {}), lambda line: None).run(look)
    return alive


def test_a_run_keeps_nothing_of_its_steps(seen):
    assert len(seen) == STEPS // EVERY
    (objects, held), (later, held_later) = seen[2], seen[-1]  # all windows are full by then
    assert held_later <= held * 1.02
    assert later - objects < STEPS - 3 * EVERY  # less than one object a step
