"""What decides a training run, and the model it names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import shipped, smollm2, trackers
from .composition import Method
from .config import from_mapping
from .envs import ENVIRONMENTS
from .errors import WorkbenchError, unknown
from .methods import method
from .policy import Policy, check_folder
from .prompts import PromptStyle
from .runs.files import read_json
from .sampling import check
from .skills import RETRIEVALS, SkillBank

# One small model learnt the three games; those of other environments have the environment's name.
SMALL_MODELS = dict.fromkeys(("rush_hour", "sokoban", "minesweeper"), "games-small")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run. Fields are the parameters of notebooks/train.ipynb."""

    method: str = "grpo"  # a name of methods.METHODS
    method_options: dict = field(default_factory=dict)  # options of that method
    env: str = "twc"  # a name of envs.ENVIRONMENTS
    env_options: dict = field(default_factory=dict)
    model: str = "default"  # hub name, folder, shipped model ("default": the small one of the environment), "smollm2"
    random_init: bool = False  # build the model from its config alone
    device: str = "auto"
    dtype: str = "auto"  # of the computation: auto, float32 or bfloat16; weights are float32
    skills: str = "auto"  # folder of skill texts; auto: the shipped ones of the environment
    skill_retrieval: str = "kind"  # which skill texts a task is given: kind, keyword, random or all (skills.SkillBank)
    skill_position: str = "user"  # privileged text in the first "user" message, or in "front" of everything
    teacher: bool = True  # score the rollouts under the teacher even where the method does not need it, for the record
    seed: int = 0
    steps: int = 20
    tasks_per_step: int = 12
    group_size: int = 8
    live_episodes: int = 96  # games live at once
    max_turns: int = 8
    max_response_tokens: int = 16
    max_context: int = 1024
    max_invalid: int = 3  # invalid actions that end an episode; 0 never
    temperature: float = 1.0
    prompt: str = "auto"  # plain or action (see prompts.PromptStyle); auto: plain for the default model, else action
    history: int = -1  # k the last k turns in a fresh prompt; -1 the whole conversation, or as the small model learnt
    reward: str = "outcome"  # what advantages compare: outcome (0/1) or return
    record_solver: str | bool = "auto"  # ask an exact solver around every turn: on, off; auto: if the method reads it
    layout: str = "auto"  # rows of a batch: auto, episode or turn
    old_logprobs: str = (
        "auto"  # sampled, scored, or auto: sampled in float32, else scored (rounding differs in bfloat16)
    )
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    lora_rank: int = 0  # train adapters of this rank in all linear layers but the head, which is frozen; 0: everything
    lr: float = 3e-4
    warmup_steps: int = 0
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_tokens: int = 0  # tokens that go through the model at once; 0: what suits the device (policy.micro_tokens)
    eval_every: int = 5
    eval_games: int = 96  # games of each panel
    eval_panels: str = "all"  # heldout: no unseen objects and no teacher at both ends, for studies of many runs
    eval_temperature: float = 1.0
    eval_seed: int = 20260101
    checkpoint_every: int = 5
    monitor_every: int = 1  # updates between rows of the modules table
    record_turns_every: int = 1  # steps between turn tables
    trackers: list = field(default_factory=list)  # sinks beside the tables: names of trackers.TRACKERS; decide nothing

    def __post_init__(self):
        if self.env not in ENVIRONMENTS:
            raise unknown("environment", self.env, ENVIRONMENTS)
        if self.seed < 0 or self.eval_seed < 0:
            raise WorkbenchError(f"seeds must be at least 0, got {self.seed} and {self.eval_seed}")
        for name in ("steps", "tasks_per_step", "group_size", "live_episodes", "max_turns", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise WorkbenchError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_every", "checkpoint_every", "monitor_every", "record_turns_every"):
            if getattr(self, name) < 1:
                raise WorkbenchError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_tokens < 0:
            raise WorkbenchError(f"micro_tokens must be at least 0, got {self.micro_tokens}")
        if self.prompt not in ("auto", "plain", "action"):
            raise WorkbenchError(f"prompt must be auto, plain or action, got {self.prompt!r}")
        if self.record_solver not in ("auto", "on", "off", True, False):
            raise WorkbenchError(f"record_solver must be auto, on or off, got {self.record_solver!r}")
        if self.eval_panels not in ("all", "heldout"):
            raise WorkbenchError(f"eval_panels must be all or heldout, got {self.eval_panels!r}")
        if self.old_logprobs not in ("auto", "sampled", "scored"):
            raise WorkbenchError(f"old_logprobs must be auto, sampled or scored, got {self.old_logprobs!r}")
        if not self.temperature > 0:
            raise WorkbenchError(f"temperature must be above 0, got {self.temperature}")
        if self.kl_coef < 0 or not self.lr > 0:
            raise WorkbenchError(f"lr must be above 0 and kl_coef at least 0, got {self.lr} and {self.kl_coef}")
        if self.skill_retrieval not in RETRIEVALS:
            raise unknown("skill_retrieval", str(self.skill_retrieval), RETRIEVALS)
        trackers.check(self.trackers)
        if self.lora_rank < 0:
            raise WorkbenchError(f"lora_rank must be at least 0, got {self.lora_rank}")
        built = method(self.method, **self.method_options)
        if built.needs_solver and self.record_solver in ("off", False):
            raise WorkbenchError(f"method {self.method!r} reads an exact solver's values, and record_solver is off")
        check(built.sampling, self.tasks_per_step, self.group_size, self.reward, built.reads_prior)


def from_parameters(parameters: Mapping[str, Any]) -> TrainConfig:
    """What the parameters of notebooks/train.ipynb configure. Raises WorkbenchError as TrainConfig does."""
    names = {field.name for field in fields(TrainConfig)}
    given = {name: value for name, value in parameters.items() if name in names}
    return from_mapping(TrainConfig, given | parameters.get("more", {}))


def small_model(config: TrainConfig) -> Path | None:
    """The folder of the shipped small model that a configuration names, None where it names another."""
    name = SMALL_MODELS.get(config.env, f"{config.env}-small") if config.model == "default" else config.model
    folder = shipped.data("models", name)
    return folder if folder.parent == shipped.data("models") and folder.is_dir() else None


def prompt_style(config: TrainConfig) -> PromptStyle:
    """How a game becomes a conversation: as the configuration says, and where that is left open, as the shipped small
    model learnt it (one that learnt single turns is shown no earlier ones)."""
    small = small_model(config)
    style = config.prompt if config.prompt != "auto" else "plain" if small else "action"
    history = config.history
    if small and config.prompt == "auto" and history < 0:
        history = read_json(small / "warmstart.json").get("history", -1)
    return PromptStyle(style, history, show_admissible=style == "action")


def _model_name(config: TrainConfig) -> str:
    """A folder, a hub name or "smollm2"."""
    small = small_model(config)
    if config.model == "default" and not small:
        raise WorkbenchError(
            f"no small model is shipped for environment {config.env!r}: set model to a folder, a hub name or "
            f"'smollm2', or make one with: python -m workbench.warmstart --env {config.env} --out FOLDER"
        )
    return str(small or config.model)


def reads_skills(config: TrainConfig, built: Method) -> bool:
    """Whether a run of this method reads skill texts, as teacher or as student."""
    return built.needs_teacher or config.teacher or built.skills != "never"


def check_folders(config: TrainConfig) -> None:
    """Raise WorkbenchError where the model's or the skills' folder lacks what a run reads of it; loads no model."""
    if (name := _model_name(config)) != "smollm2":
        check_folder(name, config.random_init)
    if config.skills != "auto" and reads_skills(config, method(config.method, **config.method_options)):
        SkillBank.load(config.skills, config.skill_retrieval)


def load_policy(config: TrainConfig) -> Policy:
    """The policy a configuration names: a shipped small one, "smollm2", a hub name or a folder."""
    name = _model_name(config)
    name = smollm2.folder() if name == "smollm2" else name
    policy = Policy.load(name, config.device, config.dtype, random_init=config.random_init, seed=config.seed)
    policy.micro_tokens = config.micro_tokens or policy.micro_tokens
    if config.lora_rank:
        add_adapters(policy.model, config.lora_rank, config.seed)
    return policy


def add_adapters(model: nn.Module, rank: int, seed: int = 0) -> None:
    """Freeze the model and put a LoRA adapter (arXiv 2106.09685) in every linear layer but the head, in place.

    Raises WorkbenchError where peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise WorkbenchError("lora_rank needs the package peft: pip install 'credit-workbench[lora]'") from None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), model)
