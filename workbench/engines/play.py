"""Who plays the games of a training step, and with which engine tokens are sampled.

Turns go through the ordinary rollout (prompts, chat, environments); only where tokens come from differs. `Session`
draws (policy.py) keep keys and values over turns and depend on nothing but (seed, step, episode), so any number of
processes plays the same games. They need the whole model in each process. Where it is sharded, or vLLM samples,
`Lockstep` hands every round of turns to the engine's own generation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .. import shipped
from ..envs.base import EnvBatch, Task
from ..errors import WorkbenchError, unknown
from ..policy import Policy
from ..prompts import Chat
from ..rollout import Job, Limits, Teacher
from ..sampling import TRAIN, tasks_of
from ..session import Sampled
from ..skills import SkillBank
from .options import own_sampling


@dataclass(frozen=True)
class PlayConfig:
    """What is played and how; fields are those of train.TrainConfig with the same names and defaults."""

    env_options: dict = field(default_factory=dict)
    max_turns: int = 8
    max_response_tokens: int = 16
    max_context: int = 1024
    max_invalid: int = 3
    live_episodes: int = 96  # games live at once in each process
    prompt: str = "action"  # plain or action (prompts.PromptStyle)
    history: int = -1  # the whole conversation: an episode is one row of tokens
    reward: str = "outcome"
    skills: str = "auto"  # folder of skill texts, auto: the shipped ones of the environment
    skill_retrieval: str = "kind"
    skill_position: str = "user"
    teacher: bool = True  # score the rollouts under the teacher even where the method does not need it, for the record
    eval_games: int = 96
    eval_temperature: float = 1.0
    eval_seed: int = 20260101
    monitor_every: int = 1
    record_turns_every: int = 1
    sampler: str = "auto"  # session, engine, or auto: session where each process has the whole model and no vLLM

    def __post_init__(self):
        if self.history >= 0:
            raise WorkbenchError(
                f"history = {self.history} makes a row of tokens of every turn, and a rollout of TRL is one row: only "
                "-1, the whole conversation, is played there"
            )
        if self.sampler not in ("auto", "session", "engine"):
            raise unknown("sampler", str(self.sampler), ("auto", "session", "engine"))
        if self.prompt not in ("plain", "action"):
            raise unknown("prompt", str(self.prompt), ("plain", "action"))
        for name in ("max_turns", "max_response_tokens", "live_episodes", "eval_games", "record_turns_every"):
            if getattr(self, name) < 1:
                raise WorkbenchError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def limits(self) -> Limits:
        return Limits(self.max_turns, self.max_response_tokens, self.max_context, self.max_invalid)


def training_jobs(
    tasks: Sequence[Task], seed: int, step: int, per_step: int, group_size: int, numbers: range
) -> list[Job]:
    """Episodes `numbers` of a step of per_step * group_size: the games and draws of train.Trainer for this seed.

    A process plays its part of the numbers.
    """
    dealt = tasks_of(tasks, seed, step, per_step)
    return [Job(dealt[n // group_size], n // group_size, (seed, step, TRAIN, n)) for n in numbers]


class Engine(Protocol):
    """What samples one response to each prompt: as many prompts in every process at every call, as it may gather.

    most(count): the largest count of all processes. generate(prompts, temperature) -> token ids of each response, and
    their log-probs where the engine tells them.
    """

    def most(self, count: int) -> int: ...
    def generate(
        self, prompts: list[list[int]], temperature: float
    ) -> tuple[list[list[int]], list[list[float]] | None]: ...


class Lockstep:
    """Stands in for a Policy where an engine samples (rollout.play asks a policy for no more than this).

    Processes play different games of different lengths, but an engine that gathers prompts, or weights layer by layer,
    waits until all of them call it. So every call goes with the same number of prompts in each process, filled up with
    copies, and `finish` keeps a process that is done calling until all are. Log-probs that the engine does not tell are
    recorded as 0, and `sampled` is False then: they must be scored.
    """

    def __init__(self, engine: Engine, tokenizer: Any):
        self.engine, self.tokenizer = engine, tokenizer
        self.sampled = False
        self._filler = [int(tokenizer.eos_token_id)]
        self._asked: dict[int, tuple[list[int], int]] = {}  # of a row its prompt, and how many tokens at most

    def session(self, rows: int, max_length: int) -> "Lockstep":
        return self

    def begin(self, row: int, prompt: np.ndarray, uniforms: np.ndarray) -> None:
        """As Session.begin, but for the draws: they are the engine's own, so `uniforms` only say how many at most."""
        self._asked[row] = prompt.tolist(), len(uniforms)

    def step(self, end_id: int, temperature: float = 1.0) -> dict[int, Sampled]:
        """As Session.step, but that it samples whole responses, in every row that was begun."""
        asked = dict(sorted(self._asked.items()))
        self._asked.clear()
        given = [prompt for prompt, _ in asked.values()]
        self._filler = given[0]
        wide = self.engine.most(len(given))
        responses, logprobs = self.engine.generate(given + [self._filler] * (wide - len(given)), temperature)
        out = {}
        for i, (row, (_, most)) in enumerate(asked.items()):
            ids = np.asarray(responses[i][:most], np.int32)
            told = [0.0] * len(ids) if logprobs is None else logprobs[i][: len(ids)]
            if len(ids) == 0 or None in told:
                raise WorkbenchError("the engine returned no token, or a token without a log-prob")
            out[row] = Sampled(ids, np.asarray(told, np.float32), int(ids[-1]) != end_id)
        self.sampled = logprobs is not None
        return out

    def finish(self, temperature: float) -> None:
        """Answer the calls of processes that are still playing."""
        while wide := self.engine.most(0):
            self.engine.generate([self._filler] * wide, temperature)


def teacher_of(env: str | EnvBatch, settings: PlayConfig, chat: Chat) -> Teacher:
    """The skill texts of an environment and where in a prompt they go."""
    folder = settings.skills
    if folder == "auto":
        folder = shipped.data("skills", env) if isinstance(env, str) else None
        if folder is None or not Path(folder).is_dir():
            raise WorkbenchError("no skill texts are shipped for this environment: set skills to a folder")
    return Teacher(SkillBank.load(folder, settings.skill_retrieval), chat.insertion_point(settings.skill_position))


class TRLGeneration:
    """TRL's own generation as an Engine: transformers, vLLM in each process, or a vLLM server."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def most(self, count: int) -> int:
        accelerator = self.trainer.accelerator
        return int(accelerator.gather(torch.tensor([count], device=accelerator.device)).max())

    def generate(
        self, prompts: list[list[int]], temperature: float
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        trainer = self.trainer
        if trainer.use_vllm:
            trainer.vllm_generation.temperature = temperature
        else:
            trainer.generation_kwargs["temperature"] = trainer.generation_config.temperature = temperature
        return trainer._generate_single_turn(prompts, None, {}, 1)


def player_of(trainer: Any) -> Policy | Lockstep:
    """Who samples for a CreditTrainer: a Policy over its model where each process has all of it and `sampler` and
    TRL's options allow, else TRL's own generation, limited to a turn."""
    args, settings, model, tokenizer = trainer.args, trainer.settings, trainer.bare, trainer.processing_class
    engine = own_sampling(args) or trainer.sharded
    if engine and settings.sampler == "session":
        raise WorkbenchError(
            "sampler = 'session' needs the whole model in each process and no sampling options of TRL's own"
        )
    if not engine and settings.sampler != "engine":
        if not model._supports_attention_backend:
            raise WorkbenchError(
                f"{type(model).__name__}: its attention cannot be replaced, so only TRL's own generation samples from "
                "it: set sampler = 'engine'"
            )
        training = model.training
        policy = Policy(model, tokenizer, torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)
        model.train(training)
        return policy
    most = settings.max_response_tokens
    if trainer.use_vllm:
        trainer.vllm_generation.max_completion_length = most
    else:
        trainer.generation_kwargs["max_new_tokens"] = trainer.generation_config.max_new_tokens = most
        # transformers keeps processes in step while they generate where it knows that weights are sharded; of
        # accelerate's FSDP2 it does not.
        model._is_fsdp_managed_module = trainer.is_fsdp_enabled
    return Lockstep(TRLGeneration(trainer), tokenizer)
