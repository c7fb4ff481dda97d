"""The training loop: rollout -> teacher pass -> credit -> loss -> update -> record.

Every random draw derives from (seed, step, purpose, episode), never from a generator that carries state, so a run that
is killed and resumed draws what an unbroken one would.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from . import envs, shipped, tables
from . import loss as losses
from .budget.dynamic_sampling import mixed_groups
from .credit import agent_opsd, grpo
from .distill import sdar
from .envs.base import Task
from .errors import WorkbenchError
from .methods import make_gate, method
from .policy import Policy
from .prompts import Chat, PromptStyle
from .records import Batch, Episode
from .reuse.dgg import Decision
from .reuse.lm_head import IsolatedHead, WeightMonitor
from .rollout import Job, Limits, Teacher, play
from .runs.folder import RunFolder
from .settings import TrainConfig, load_policy
from .skills import SkillBank, privileged_inputs, skill_ids
from .update import Diverged, TeacherRows, UpdateConfig, accumulate, teacher_logprobs

_TASKS, _TRAIN, _PANEL = 1, 2, 3  # purposes of a random draw


class Trainer:
    """A run of one method in one environment, recorded in a run folder.

    `run()` trains to the last step, from the folder's last checkpoint where there is one; `message` receives progress,
    a line at a time. Raises WorkbenchError for bad input and Diverged when the loss is no longer a number.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, message: Callable[[str], Any] = print):
        self.config, self.folder, self.message = config, folder, message
        self.method = method(config.method, **config.method_options)
        self.policy = load_policy(config)
        style = config.prompt if config.prompt != "auto" else "plain" if config.model == "default" else "action"
        self.chat = Chat(self.policy.tokenizer, PromptStyle(style, config.history, show_admissible=style == "action"))
        self.envs = envs.make(config.env, config.live_episodes, **config.env_options)
        self.limits = Limits(config.max_turns, config.max_response_tokens, config.max_context, config.max_invalid)
        student_reads = self.method.skills != "never"
        self.teacher = self._teacher() if self.method.needs_teacher or config.teacher or student_reads else None
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
            config.micro_tokens,
        )  # fmt: skip
        self.step, self.updates, self.extra = 0, 0, 0  # extra: batches that dynamic sampling drew beside one a step
        self.drawn: list[Episode] = []  # everything played in this step, kept or not

    def run(self, on_step: Callable[["Trainer"], Any] | None = None) -> None:
        """Train to the last step. on_step is called after each, e.g. to redraw a curve."""
        with self.folder.lock():
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
                if on_step:
                    on_step(self)

    def rollout(self, step: int) -> list[Episode]:
        """The groups of a step: `tasks_per_step` tasks, `group_size` episodes each.

        Where the method samples dynamically, batches are drawn until that many groups are mixed or none may be drawn.
        """
        c, most, kept, self.drawn = self.config, self.method.sampling.max_batches, [], []
        for attempt in range(most):
            jobs = [
                Job(task, group, (c.seed, step, _TRAIN, group * c.group_size + member))
                for group, task in enumerate(self._tasks_of(step + self.extra + attempt), attempt * c.tasks_per_step)
                for member in range(c.group_size)
            ]
            skilled = self.teacher if self.method.skills != "never" else None
            episodes = play(self.policy, self.chat, self.envs, jobs, self.limits, c.temperature, skilled)
            self.drawn += episodes
            if most == 1:
                return episodes
            reward = torch.tensor([float(e.outcome if c.reward == "outcome" else e.total_reward) for e in episodes])
            mixed = mixed_groups(reward, torch.tensor([e.group for e in episodes]))
            kept += [e for e, keep in zip(episodes, mixed.tolist(), strict=True) if keep]
            if len(kept) >= len(jobs):
                break
            self.message(f"step {step + 1}: {len(kept) // c.group_size} of {c.tasks_per_step} groups are mixed")
        return kept[: len(jobs)] or episodes

    def batch(self, episodes: Sequence[Episode]) -> Batch:
        """Rows of tokens with old, teacher and reference log-probs."""
        c, policy = self.config, self.policy
        batch = Batch.from_episodes(episodes, c.layout, policy.pad_id, c.reward).to(policy.device)
        if c.old_logprobs == "scored" or (c.old_logprobs == "auto" and policy.compute_dtype is not None):
            scored, _ = policy.score_rows(batch.input_ids, batch.lengths, batch.response_mask, c.temperature)
            batch = batch.with_(old_logprobs=scored)
        if self.method.anchors:
            batch = batch.with_(anchors=self.method.anchors(episodes).to(policy.device))
        if self.scores_teacher:
            rows = self.teacher_rows(batch, episodes)
            batch = batch.with_(teacher_logprobs=teacher_logprobs(batch, rows, c.temperature))
        if self.reference:
            ref, _ = self.reference.score_rows(batch.input_ids, batch.lengths, batch.response_mask, c.temperature)
            batch = batch.with_(reference_logprobs=ref)
        return batch

    def _train_step(self) -> None:
        step, self.seconds = self.step, {}
        with self._timed("rollout"):
            episodes = self.rollout(step)
        with self._timed("score"):
            batch = self.batch(episodes)
        with self._timed("credit"):
            credit = self.method.credit(batch, step)
        with self._timed("update"):
            teacher = self.teacher_rows(batch, episodes) if self.divergence else None
            first, rows, modules = self._reuse(step, batch, credit.advantages, teacher)
        with self._timed("record"):
            self._record(step, episodes, batch, credit, first, rows, modules)
        self.folder.write_table(
            "timings", step, pl.DataFrame([{"step": step, "stage": k, "seconds": v} for k, v in self.seconds.items()])
        )
        self.step = step + 1
        self.extra += len(self.drawn) // (self.config.tasks_per_step * self.config.group_size) - 1
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
                gradient.logprobs, batch.old_logprobs, batch.counted, advantages, self.method.loss, batch.turn_index
            )
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

    def _record(self, step, episodes, batch, credit, first, rows, modules) -> None:
        c, mask = self.config, batch.counted
        gap = (
            None
            if batch.teacher_logprobs is None
            else torch.where(mask, batch.teacher_logprobs - batch.old_logprobs, 0)
        )
        own, aux = self.method.loss, self.method.aux
        gate = (aux and aux.gate) or sdar.SDARConfig()
        gates = None if gap is None else sdar.gate(gap, gate, first.entropy)
        weights = losses.token_weights(batch, own.aggregation, self.update.max_tokens)
        slope = losses.dloss_dlogp(
            batch.old_logprobs, batch.old_logprobs, credit.advantages, weights, own, batch.turn_index,
            batch.reference_logprobs, c.kl_coef,
        )  # fmt: skip
        if aux and aux.coef and aux.gradient:
            own_slope = aux.gradient(batch.old_logprobs, batch.teacher_logprobs, batch.old_logprobs, first.entropy)
            slope = slope + losses.token_weights(batch, "token_mean") * own_slope
        if self.divergence:
            slope = None  # its gradient is not one of the sampled token's log-prob alone
        summary = {
            "step": step,
            **tables.rollout_summary(self.drawn, credit.advantages, mask, batch),
            "updates": sum(r["applied"] for r in rows),
            "discarded": sum(r["signal"] and not r["applied"] for r in rows),
            "stopped_early": rows[-1]["stop"],
            **{name: rows[0][name] for name in ("loss", "pg_loss", "aux_loss", "grad_norm")},
            "kl_reference": rows[0]["kl_reference"],
            **{name: rows[-1][name] for name in ("kl", "clip_fraction", "ratio_max", "chi2")},
            "head_energy": rows[0]["energy"],
            "entropy": float(losses.masked_mean(first.entropy, mask)),
            "lr": self.optimizer.param_groups[0]["lr"],
            **tables.gap_summary(gap, gates, mask),
            **dict.fromkeys(("belief_saturated", "revision_tiny", "pivotal_share")),
        }
        if "belief" in credit.turns:
            summary |= agent_opsd.saturation(credit.turns, batch.turn_mask)
        write = self.folder.write_table
        write("steps", step, pl.DataFrame([summary], infer_schema_length=None, schema_overrides=_NULLABLE))
        write("updates", step, pl.DataFrame(rows, infer_schema_length=None, schema_overrides=_NULLABLE))
        if modules:
            write("modules", step, pl.DataFrame(modules, infer_schema_length=None, schema_overrides=_NULLABLE))
        advantage = grpo.group_advantage(batch.reward, batch.group_index)
        write("episodes", step, tables.episodes_frame(step, episodes, advantage, agent_opsd.prior(batch)))
        if step % c.record_turns_every == 0:
            tokens = {
                "old_logprobs": batch.old_logprobs, "teacher_logprobs": batch.teacher_logprobs, "gap": gap,
                "gate": gates, "advantage": credit.advantages, "dloss_dlogp": slope, "entropy": first.entropy,
            }  # fmt: skip
            pieces = self.policy.tokenizer.convert_ids_to_tokens
            write(
                "turns",
                step,
                tables.turns_frame(step, episodes, batch, credit, tokens, lambda ids: pieces(ids.tolist())),
            )

    def _evaluate(self) -> None:
        """Play the panels: heldout as student every time; at both ends unseen objects too, and the teacher."""
        ends = self.step in (0, self.config.steps)
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
        tasks = self.envs.tasks(panel)
        chosen = np.random.default_rng([c.eval_seed, _PANEL]).permutation(len(tasks))[: c.eval_games]
        jobs = [Job(tasks[i], n, (c.eval_seed, _PANEL, n)) for n, i in enumerate(chosen)]
        return play(self.policy, self.chat, self.envs, jobs, self.limits, c.eval_temperature, teacher)

    def _tasks_of(self, number: int) -> list[Task]:
        """Tasks of a numbered batch, in an order that passes over all of them before it repeats."""
        n, per = len(self.train_tasks), self.config.tasks_per_step
        out = []
        for position in range(number * per, (number + 1) * per):
            order = np.random.default_rng([self.config.seed, _TASKS, position // n]).permutation(n)
            out.append(self.train_tasks[order[position % n]])
        return out

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
        return Policy(model, self.policy.tokenizer, self.policy.compute_dtype)

    def _checkpoint(self) -> None:
        state = {
            "config": asdict(self.config),
            "step": self.step,
            "updates": self.updates,
            "extra": self.extra,
            "model": self.policy.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gate": self.gate.state_dict(),
            "monitor": self.monitor.state_dict(),
        }
        self.folder.save_checkpoint(self.step, lambda path: torch.save(state, path / "trainer.pt"))

    def _resume(self) -> bool:
        found = self.folder.latest_checkpoint()
        if found is None:
            return False
        state = torch.load(found / "trainer.pt", map_location=self.policy.device, weights_only=True)
        if state["config"] != asdict(self.config):
            changed = sorted(k for k, v in asdict(self.config).items() if state["config"].get(k) != v)
            raise WorkbenchError(
                f"{self.folder.path} was begun with other parameters ({', '.join(changed)}); start a new run"
            )
        for name in ("optimizer", "gate", "monitor"):
            getattr(self, name).load_state_dict(state[name])
        self.policy.model.load_state_dict(state["model"])
        self.step, self.updates, self.extra = state["step"], state["updates"], state["extra"]
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


_NULLABLE = dict.fromkeys(
    ("increment", "z", "threshold", "aux_loss", "kl_reference", "gap_mean", "gap_std", "gate_mean", "gate_active",
     "belief_saturated", "revision_tiny", "pivotal_share", "relative_change", "cumulative_change", "grad_norm"),
    pl.Float64,
)  # fmt: skip
