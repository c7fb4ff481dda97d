"""A game that any policy wins about half of the time, and the same small runs of it in our Trainer and under TRL."""

from pathlib import Path

import torch
from tiny_models import tiny_model

from workbench import envs
from workbench.envs.base import State, Task
from workbench.methods import method
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

ROOMS = ("red cup", "table", "look around", "the red table", "put it on", "a cup")
GAME = {"max_turns": 3, "max_response_tokens": 4, "max_context": 96, "max_invalid": 0, "prompt": "plain"}
RUN = {"seed": 3, "lr": 1e-2, "group_size": 4, "tasks_per_step": 2}
GATED = {"max_reuse": 4, "window": 2, "threshold": 0.1}


class Parity:
    """Three turns in a room; won where the words that were said have an odd number of letters in all."""

    splits = ("train", "heldout")

    def tasks(self, split):
        return [Task(f"{split}/{i}", "kitchen", split) for i in range(len(ROOMS))]

    def reset(self, task_id, seed=0):
        self.room, self.letters, self.turn = ROOMS[int(task_id[-1])], 0, 0
        return self._state()

    def step(self, action):
        self.letters += len(action.replace(" ", ""))
        self.turn += 1
        return self._state()

    def _state(self):
        done = self.turn == 3
        won = int(done and self.letters % 2 == 1)
        text = f"you see {self.room} {'cup ' * (self.letters % 3)}."
        return State(text, ("go", "look around"), float(won), done, won, True, {"kind": "kitchen"})

    def close(self):
        pass


def prepare(folder: Path, tokenizer, tied: bool = False) -> None:
    """Put a small model and its skill texts into a folder, and the game among the environments."""
    tiny_model(tokenizer, tied=tied).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "skills").mkdir()
    (folder / "skills" / "general.md").write_text("put the red cup on table")
    (folder / "skills" / "kitchen.md").write_text("look around . take it")
    register()


def register() -> None:
    envs.ENVIRONMENTS["parity"] = Parity


def ours(folder: Path, name: str, steps: int = 1, **options) -> Trainer:
    """Our Trainer, before its first step."""
    config = TrainConfig(
        method=name, method_options=options, env="parity", model=str(folder / "model"), skills=str(folder / "skills"),
        steps=steps, eval_games=2, **GAME, **RUN,
    )  # fmt: skip
    return Trainer(config, RunFolder.create(folder / "ours", name, {"method": name}), lambda line: None)


def trl_args(output: Path, steps: int = 1, processes: int = 1, **changes):
    """GRPOConfig with what RUN and our Trainer have."""
    from trl import GRPOConfig

    batch = RUN["group_size"] * RUN["tasks_per_step"] // processes
    own = {
        "output_dir": str(output), "max_steps": steps, "seed": RUN["seed"], "learning_rate": RUN["lr"],
        "num_generations": RUN["group_size"], "per_device_train_batch_size": batch, "lr_scheduler_type": "constant",
        "adam_beta2": 0.99, "weight_decay": 0.0, "max_grad_norm": 1.0, "gradient_checkpointing": False,
        "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    return GRPOConfig(**own | changes)


def credit_trainer(
    folder: Path, name: str, steps: int = 1, record: bool = True, kind=None, args=None, peft_config=None, env="parity",
    **options,
):  # fmt: skip
    """The same run under TRL. kind: a subclass of CreditTrainer; args: changes to GRPOConfig; options: the method's."""
    from workbench.engines.play import PlayConfig
    from workbench.engines.trl import CreditTrainer

    given = dict(args or {})
    sampler = given.pop("sampler", "auto")
    output = Path(given.pop("output_dir", folder / "trl"))
    play = PlayConfig(skills=str(folder / "skills"), eval_games=2, sampler=sampler, **GAME)
    run = RunFolder.create(folder / "runs", "trl", {"method": name, "seed": RUN["seed"]}) if record else None
    return (kind or CreditTrainer)(
        str(folder / "model"), method(name, **options), env, trl_args(output, steps, **given), play, run,
        lambda line: None, peft_config=peft_config,
    )  # fmt: skip


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def adam_steps(optimizer) -> list[float]:
    """How often each parameter's moments were updated."""
    return [float(state["step"]) for state in optimizer.state.values()]
