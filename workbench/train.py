"""The training loop: rollout -> teacher pass -> credit -> loss -> update -> record.

Every random draw derives from (seed, step, purpose, episode), never from a generator that carries state, so a run that
is killed and resumed draws what an unbroken one would.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from . import envs, sampling, shipped, tables, trackers, values
from . import loss as losses
from .budget.history import History, HistoryConfig
from .composition import make_gate
from .credit import cast
from .envs.base import Task
from .errors import WorkbenchError
from .methods import method
from .policy import Policy
from .prompts import Chat
from .recording import record, record_seconds
from .records import Batch, Episode
from .reuse.dgg import Decision
from .reuse.lm_head import IsolatedHead, WeightMonitor
from .rollout import Limits, Teacher, play
from .runs.folder import RunFolder
from .selection import Chosen, choose
from .settings import TrainConfig, load_policy, prompt_style, reads_skills
from .skills import SkillBank, privileged_inputs, skill_ids
from .update import Diverged, TeacherRows, UpdateConfig, accumulate, teacher_logprobs
from .verifying import Verifier


class Trainer:
    """A run of one method in one environment, recorded in a run folder.

    `run()` trains to the last step, from the folder's last checkpoint where there is one; `message` receives progress,
    a line at a time. Raises WorkbenchError for bad input and Diverged when the loss is no longer a number.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, message: Callable[[str], Any] = print):
        self.config, self.folder, self.message = config, folder, message
        self.method = method(config.method, **config.method_options)
        self.policy = load_policy(config)
        self.chat = Chat(self.policy.tokenizer, prompt_style(config))
        self.envs = envs.make(config.env, config.live_episodes, **config.env_options)
        self.asks_solver = config.record_solver in ("on", True) or self.method.needs_solver
        if self.asks_solver:
            envs.require_solver(config.env, self.envs.envs[0])
        self.limits = Limits(config.max_turns, config.max_response_tokens, config.max_context, config.max_invalid)
        student_reads = self.method.skills != "never"
        self.teacher = self._teacher() if reads_skills(config, self.method) else None
        # A student that reads the skill text itself has no teacher to differ from.
        self.scores_teacher = self.teacher is not None and not student_reads
        self.train_tasks = self.envs.tasks(self.envs.envs[0].splits[0])
        if not self.train_tasks:
            raise WorkbenchError(f"environment {config.env!r} has no training tasks")
        parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters, lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.99)
        )
        self.head = IsolatedHead(self.policy.model)
        self.monitor = WeightMonitor(self.policy.model, config.monitor_every)
        self.gate = make_gate(self.method, config.seed)
        self.reference = self._first_policy() if config.kl_coef else None
        aux = self.method.aux
        self.divergence = aux.divergence if aux and aux.coef else None
        frozen = self.divergence is not None and self.divergence.teacher == "frozen"
        self.reader = (self.reference or self._first_policy()) if frozen else self.policy
        self.update = UpdateConfig(
            config.kl_coef, config.entropy_coef, config.temperature, config.max_turns * config.max_response_tokens,
            self.policy.micro_tokens,
        )  # fmt: skip
        own = self.method.verification
        self.verifier = Verifier(own, config, self.chat, message) if own else None
        self.step, self.updates, self.extra = 0, 0, 0  # extra: batches that dynamic sampling drew beside one a step
        self.drawn: list[Episode] = []  # everything played in this step, kept or not
        self.chosen: Chosen | None = None  # which of this step's tokens are distilled, where the method chooses
        self.history = History(self.method.history or HistoryConfig())  # of the steps before this one

    def run(self, on_step: Callable[["Trainer"], Any] | None = None) -> None:
        """Train to the last step. on_step is called after each, e.g. to redraw a curve."""
        sinks = trackers.follow(self.folder, asdict(self.config), self.config.trackers, self.message)
        with self.folder.lock(), sinks as tell:
            if not self._resume():
                self.folder.truncate(-1)
                if self.config.group_size == 1:
                    self.message("groups of one: every advantage is 0, so nothing will be learnt")
                self._evaluate()
                self._checkpoint()
            while self.step < self.config.steps:
                self._train_step()
                last = self.step == self.config.steps
                if last or self.step % self.config.eval_every == 0:
                    self._evaluate()
                if last or self.step % self.config.checkpoint_every == 0:
                    self._checkpoint()
                tell(self.step)
                if on_step:
                    on_step(self)

    def rollout(self, step: int) -> list[Episode]:
        """The groups of a step: `tasks_per_step` tasks, `group_size` episodes each where sampling does not decide."""
        c, skilled = self.config, self.teacher if self.method.skills != "never" else None
        if self.method.values:
            texts = {t.id: self.envs.envs[0].reset(t.id).observation for t in self.tasks_of(step + self.extra)}
            self.history = values.foresee(self.history, self.policy, texts, self.method.values)
        dealer = sampling.Dealer(
            c.seed, step, c.group_size, c.reward,
            deal=lambda batch: self.tasks_of(step + self.extra + batch),
            play=lambda jobs: play(
                self.policy, self.chat, self.envs, jobs, self.limits, c.temperature, skilled, solver=self.asks_solver,
                say=self.message,
            ),
            kind=lambda task: self.envs.envs[0].reset(task.id).info.get("kind", task.kind),
            history=self.history, say=self.message,
        )  # fmt: skip
        self.sampled = sampling.draw(self.method.sampling, dealer)
        self.drawn = self.sampled.played
        return self.sampled.kept

    def rows(self, episodes: Sequence[Episode], reward: str) -> Batch:
        """Rows of tokens with old and reference log-probs."""
        c, policy = self.config, self.policy
        batch = Batch.from_episodes(episodes, c.layout, policy.pad_id, reward).to(policy.device)
        if c.old_logprobs == "scored" or (c.old_logprobs == "auto" and policy.compute_dtype is not None):
            scored, _ = policy.score_rows(batch.input_ids, batch.lengths, batch.response_mask, c.temperature)
            batch = batch.with_(old_logprobs=scored, sampled_logprobs=batch.old_logprobs)
        if self.reference:
            ref, _ = self.reference.score_rows(batch.input_ids, batch.lengths, batch.response_mask, c.temperature)
            batch = batch.with_(reference_logprobs=ref)
        return batch

    def batch(self, episodes: Sequence[Episode]) -> Batch:
        """The rows of played episodes, with teacher log-probs and what else the method reads."""
        c, policy = self.config, self.policy
        batch = self.rows(episodes, c.reward)
        if self.asks_solver:
            batch = batch.with_(solver_advantages=cast.solver_advantages(episodes).to(policy.device))
        if self.method.anchors:
            batch = batch.with_(anchors=self.method.anchors(episodes).to(policy.device))
        if self.method.reads_prior:
            rates = [self.history.rate(e.task, e.kind) for e in episodes]
            batch = batch.with_(prior_rate=torch.tensor(rates, dtype=torch.float64, device=policy.device))
        if self.scores_teacher:
            rows = self.teacher_rows(batch, episodes)
            batch = batch.with_(teacher_logprobs=teacher_logprobs(batch, rows, c.temperature))
        return batch

    def _train_step(self) -> None:
        c, step, self.seconds = self.config, self.step, {}
        with self._timed("rollout"):
            episodes = self.rollout(step)
        with self._timed("score"):
            batch = self.batch(episodes)
        with self._timed("credit"):
            credit = self.method.credit(batch, step)
        with self._timed("update"):
            teacher = self.teacher_rows(batch, episodes) if self.divergence else None
            if self.divergence and self.method.aux.keep:
                micro, keep = self.update.micro_tokens, self.method.aux.keep
                self.chosen = choose(self.policy, batch, teacher, keep, c.temperature, micro)
                teacher = replace(teacher, keep=self.chosen.keep)
            first, rows, modules = self._reuse(step, batch, credit.advantages, teacher)
        with self._timed("record"):
            record(
                self.folder, step, episodes, batch, credit, first.entropy, self.method, rows, modules,
                pieces=self.policy.tokenizer.convert_ids_to_tokens, lr=self.optimizer.param_groups[0]["lr"],
                max_tokens=self.update.max_tokens, kl_coef=c.kl_coef, drawn=self.drawn, chosen=self.chosen,
                budget=self.sampled.budget, turns=step % c.record_turns_every == 0,
            )  # fmt: skip
        if self.verifier:
            with self._timed("verify"):
                self.verifier.follow(self, step)
        record_seconds(self.folder, step, self.seconds)
        self.step = step + 1
        self.extra += self.sampled.batches - 1
        self.history = values.after(self.history, self.drawn, self.method.values)
        success = np.mean([e.outcome for e in self.drawn])
        self.message(
            f"step {self.step}/{self.config.steps}  success {success:.2f}  loss {rows[-1]['loss']:+.4f}  "
            f"updates {sum(r['applied'] for r in rows)}  {sum(self.seconds.values()):.1f} s"
        )

    def _reuse(self, step: int, batch: Batch, advantages: torch.Tensor, teacher: TeacherRows | None = None):
        """Up to max_reuse updates on one batch, as the gate decides; returns the first gradient and tables' rows.

        A batch without any signal has no gradient: nothing is applied, and the gate is not asked.
        """
        c, rows, modules, first = self.config, [], [], None
        for group in self.optimizer.param_groups:
            group["lr"] = c.lr * min(1.0, (step + 1) / max(1, c.warmup_steps))
        for reuse in range(1, self.gate.max_reuse + 1):
            self.optimizer.zero_grad(set_to_none=True)
            self.head.clear()
            gradient = accumulate(self.policy, self.head, batch, advantages, self.method, self.update, teacher)
            first = first or gradient
            signal = self.head.weight.grad is not None
            energy = self.head.energy() if signal else 0.0
            self.head.merge()
            self.monitor.measure_gradients()
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), c.grad_clip))
            if not (math.isfinite(energy) and math.isfinite(grad_norm)):
                raise Diverged(
                    f"step {step}: the gradient is not finite; the last checkpoint is kept in {self.folder.path}"
                )
            ratios = losses.ratio_metrics(
                gradient.logprobs, batch.old_logprobs, batch.counted, advantages, self.method.loss, batch.turn_index,
                batch.episode_index,
            )  # fmt: skip
            watched = {
                "energy": energy, "norm": math.sqrt(energy), "grad_norm": grad_norm, "kl": ratios["approx_kl"],
                "chi2": ratios["chi2"],
            }  # fmt: skip
            decision = self.gate.observe(watched[self.gate.statistic], reuse) if signal else Decision(False, False)
            if decision.apply:
                self.optimizer.step()
                modules += self.monitor.observe(step, self.updates, reuse, math.sqrt(energy))
            rows.append({
                "step": step, "update": self.updates, "reuse": reuse, "applied": decision.apply, "stop": decision.stop,
                "signal": signal, "energy": energy, "head_norm": math.sqrt(energy), "statistic": self.gate.statistic,
                "increment": decision.increment, "z": decision.z, "threshold": self.gate.threshold,
                "loss": gradient.loss, "pg_loss": gradient.pg_loss, "kl_reference": gradient.kl,
                "aux_loss": gradient.aux_loss, "kl": ratios["approx_kl"], "chi2": ratios["chi2"],
                "ratio_max": ratios["ratio_max"], "clip_fraction": ratios["clip_fraction"], "grad_norm": grad_norm,
            })  # fmt: skip
            self.updates += 1
            if decision.stop or not signal:
                break
        self.optimizer.zero_grad(set_to_none=True)
        return first, rows, modules

    def _evaluate(self) -> None:
        """Play the panels: heldout as student every time; at both ends unseen objects too, and the teacher."""
        ends = self.step in (0, self.config.steps) and self.config.eval_panels == "all"
        splits = self.envs.envs[0].splits
        panels = [(splits[1] if len(splits) > 1 else splits[0], "student")]
        if ends:
            panels += [(panels[0][0], "teacher")] if self.teacher else []
            panels += [(splits[-1], "student")] if len(splits) > 2 else []
        frames = []
        for panel, role in panels:
            skilled = role == "teacher" or self.method.skills == "always"
            episodes = self.evaluate(panel, self.teacher if skilled else None)
            frames.append(tables.evals_frame(self.step, panel, role, episodes))
            rate = np.mean([e.outcome for e in episodes])
            self.message(f"step {self.step}: {panel} success {rate:.2f} of {len(episodes)} games, as {role}")
        self.folder.write_table("evals", self.step, pl.concat(frames))

    def evaluate(self, panel: str, teacher: Teacher | None = None) -> list[Episode]:
        """One episode of each of the panel's fixed games, drawn by eval_seed and the same in every run."""
        c = self.config
        jobs = sampling.panel_jobs(self.envs.tasks(panel), c.eval_seed, c.eval_games)
        return play(self.policy, self.chat, self.envs, jobs, self.limits, c.eval_temperature, teacher)

    def tasks_of(self, number: int) -> list[Task]:
        """The training tasks of a numbered batch."""
        return sampling.tasks_of(self.train_tasks, self.config.seed, number, self.config.tasks_per_step)

    def _teacher(self) -> Teacher:
        folder = self.config.skills
        if folder == "auto":
            folder = shipped.data("skills", self.config.env)
            if not Path(folder).is_dir():
                raise WorkbenchError(
                    f"no skill texts are shipped for environment {self.config.env!r}: set skills to a folder"
                )
        bank = SkillBank.load(folder, self.config.skill_retrieval)
        return Teacher(bank, self.chat.insertion_point(self.config.skill_position))

    def teacher_rows(self, batch: Batch, episodes: Sequence[Episode]) -> TeacherRows:
        """The batch's rows with each episode's skill text in them, for the weights that read them as teacher."""
        skills = skill_ids(self.teacher.bank, self.policy.tokenizer, episodes)
        return TeacherRows(self.reader, *privileged_inputs(batch, skills, self.teacher.insert_at))

    def _first_policy(self) -> Policy:
        """A frozen copy of the policy: made before a checkpoint is read, it is the one that training began with."""
        model = copy.deepcopy(self.policy.model).requires_grad_(False)
        first = Policy(model, self.policy.tokenizer, self.policy.compute_dtype)
        first.micro_tokens = self.policy.micro_tokens
        return first

    def _checkpoint(self) -> None:
        state = {
            "config": asdict(self.config),
            "step": self.step,
            "updates": self.updates,
            "extra": self.extra,
            "history": self.history.state_dict(),
            "model": self.policy.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gate": self.gate.state_dict(),
            "monitor": self.monitor.state_dict(),
            "attempts": self.verifier.state() if self.verifier else [],
        }
        self.folder.save_checkpoint(self.step, lambda path: torch.save(state, path / "trainer.pt"))

    def _resume(self) -> bool:
        found = self.folder.latest_checkpoint()
        if found is None:
            return False
        state = torch.load(found / "trainer.pt", map_location=self.policy.device, weights_only=True)
        decides = {k: v for k, v in asdict(self.config).items() if k != "trackers"}
        if changed := sorted(k for k, v in decides.items() if state["config"].get(k) != v):
            raise WorkbenchError(
                f"{self.folder.path} was begun with other parameters ({', '.join(changed)}); start a new run"
            )
        for name in ("optimizer", "gate", "monitor"):
            getattr(self, name).load_state_dict(state[name])
        self.policy.model.load_state_dict(state["model"])
        self.step, self.updates, self.extra = state["step"], state["updates"], state["extra"]
        self.history = self.history.with_state(state["history"])
        if self.verifier:
            self.verifier.load(state["attempts"])
        self.folder.truncate(self.step)
        self.message(f"resumed at step {self.step} of {self.config.steps}")
        return True

    @contextmanager
    def _timed(self, stage: str):
        start = time.perf_counter()
        yield
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[stage] = time.perf_counter() - start
