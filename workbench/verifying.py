"""Self-verification beside the training of a task (arXiv 2602.07594): attempts are kept, asked about and learnt from.

Where the paper's mixed schedule makes one update on games and questions together, here one on questions follows the one
on games. Answers are credited by GRPO within the group of one question, and never count as episodes of a step. Nor are
these updates in the table `updates`; what they change is in the next row of `modules`. On a step that only verifies,
games are played and recorded, but their credit is 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from . import verification
from .credit import grpo
from .errors import WorkbenchError
from .prompts import Chat
from .records import Batch, Episode
from .update import Diverged, accumulate
from .verification import Sample, VerificationConfig

if TYPE_CHECKING:
    from .settings import TrainConfig
    from .train import Trainer

VERIFY, PICK = 5, 6  # purposes of a random draw: an answer, and which attempts are asked about

# The table `verifications`, a row an answer: loop counts the updates of a step; played and episode name the attempt.
# verdict is null where none could be read; applied: whether the batch moved the weights.
VERIFICATIONS = {
    "step": pl.Int64, "loop": pl.Int64, "question": pl.Int64, "played": pl.Int64, "episode": pl.Int64,
    "task": pl.String, "truth": pl.Boolean, "verdict": pl.Boolean, "pass_rate": pl.Float64, "reward": pl.Float64,
    "advantage": pl.Float64, "n_tokens": pl.Int64, "truncated": pl.Boolean, "response": pl.String,
    "applied": pl.Boolean,
}  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """What a question shows of a turn."""

    observation: str
    action: str


@dataclass(frozen=True)
class Kept:
    """A played episode as far as a question about it needs it; step and episode say which it was, valid whether it can
    be asked about. group is its own in its step."""

    step: int
    episode: int
    group: int
    task: str
    seed: int
    split: str
    outcome: int
    valid: bool
    turns: tuple[Shown, ...]


class Verifier:
    """Keeps the attempts of steps, and trains on questions about them when the schedule says so.

    Raises WorkbenchError where the model has no token for a verdict.
    """

    def __init__(self, config: VerificationConfig, run: "TrainConfig", chat: Chat, say: Callable[[str], Any] = print):
        self.config, self.run, self.chat, self.say = config, run, chat, say
        self.kept: list[Kept] = []
        tokenizer = chat.tokenizer
        lacking = [w for w in (config.yes, config.no) if tokenizer.unk_token_id in tokenizer.encode(w)]
        if lacking:
            raise WorkbenchError(
                f"self-verification: the model's vocabulary lacks {' and '.join(map(repr, lacking))}, so it cannot say "
                "whether an attempt succeeded: set the options yes and no to two words that it has"
            )

    def follow(self, trainer: "Trainer", step: int) -> None:
        """Keep what was played in a training step and make the verification updates that follow it."""
        self.keep(step, trainer.drawn)
        loops = self.config.plan.verifications(step)
        frames = [self._update(trainer, step, loop) for loop in range(loops)]
        if found := [f for f in frames if f is not None]:
            trainer.folder.write_table("verifications", step, pl.concat(found))
        if loops or self.config.schedule != "alternate":
            self.kept = []

    def keep(self, step: int, episodes: Sequence[Episode]) -> None:
        """Episodes of a step, to be asked about. One that leaves no room for an answer counts as invalid."""
        for i, (episode, attempt) in enumerate(zip(episodes, verification.attempts_of(episodes), strict=True)):
            text = verification.question(episode, self.config.shown, self.config.yes, self.config.no)
            fits = len(self.chat.first(text)) + self.config.max_tokens <= self.run.max_context
            turns = tuple(Shown(t.observation, t.action) for t in episode.turns)
            self.kept.append(
                Kept(step, i, episode.group, episode.task, episode.seed, episode.split, episode.outcome,
                     attempt.valid and fits, turns)
            )  # fmt: skip

    def batch(self, step: int, loop: int) -> list[Sample]:
        """The balanced questions of an update, about `kept`."""
        groups: dict[tuple[int, int], int] = {}
        attempts = [
            verification.Attempt(groups.setdefault((k.step, k.group), len(groups)), k.outcome == 1, k.valid)
            for k in self.kept
        ]
        return verification.build_batch(attempts, np.random.default_rng([self.run.seed, step, PICK, loop]))

    def state(self) -> list[dict[str, Any]]:
        return [asdict(k) for k in self.kept]

    def load(self, state: Sequence[dict[str, Any]]) -> None:
        self.kept = [Kept(**{**k, "turns": tuple(Shown(**t) for t in k["turns"])}) for k in state]

    def _update(self, trainer: "Trainer", step: int, loop: int) -> pl.DataFrame | None:
        own, run = self.config, self.run
        samples = self.batch(step, loop)
        if not samples:
            self.say(f"step {step + 1}: nothing to verify: it takes two groups, and a success and a failure in one")
            return None
        answers = verification.verify(
            trainer.policy, self.chat, self.kept, samples, (run.seed, step, VERIFY, loop), own.size, own.max_tokens,
            run.max_context, run.temperature, own.shown, own.cap, run.live_episodes, own.yes, own.no,
        )  # fmt: skip
        batch = trainer.rows(answers, "return")
        advantage = grpo.group_advantage(batch.reward, batch.group_index)
        applied = learn(trainer, batch, batch.episodes_to_tokens(advantage))
        right = np.mean([a.outcome for a in answers])
        read = np.mean([a.turns[0].valid for a in answers])
        self.say(
            f"step {step + 1}: verified {len(samples)} attempts, {right:.2f} of the verdicts right, {read:.2f} readable"
        )
        return self._frame(step, loop, samples, answers, advantage.tolist(), applied)

    def _frame(
        self, step: int, loop: int, samples: Sequence[Sample], answers: Sequence[Episode], advantage: Sequence[float],
        applied: bool,
    ) -> pl.DataFrame:  # fmt: skip
        rows = []
        for answer, value in zip(answers, advantage, strict=True):
            (turn,), sample = answer.turns, samples[answer.group]
            about = self.kept[sample.index]
            rows.append({
                "step": step, "loop": loop, "question": answer.group, "played": about.step, "episode": about.episode,
                "task": about.task, "truth": sample.label, "verdict": turn.action == self.config.yes if turn.valid
                else None, "pass_rate": sample.pass_rate, "reward": answer.total_reward, "advantage": value,
                "n_tokens": len(turn.response_ids), "truncated": turn.truncated, "response": turn.info["response"],
                "applied": applied,
            })  # fmt: skip
        return pl.DataFrame(rows, schema=VERIFICATIONS)


def learn(trainer: "Trainer", batch: Batch, advantages: Tensor) -> bool:
    """One update on a batch; False, and nothing is moved, where it has no signal. Raises Diverged as training does."""
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.head.clear()
    accumulate(trainer.policy, trainer.head, batch, advantages, trainer.method, trainer.update)
    signal = trainer.head.weight.grad is not None
    trainer.head.merge()
    norm = torch.nn.utils.clip_grad_norm_(trainer.policy.model.parameters(), trainer.config.grad_clip)
    if not torch.isfinite(norm):
        raise Diverged(f"a verification gradient is not finite; the last checkpoint is kept in {trainer.folder.path}")
    if signal:
        trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    return signal
