"""TRL's GRPOTrainer with a Method of this package in it: multi-turn games, credit by token, teacher, gate, run tables.

TRL scores, differentiates, clips, steps, saves and scales over processes; what a token is worth comes from the same
files as in train.Trainer. Extension points are those of the pinned range (RANGE); tests/engines/test_hooks.py says so
when one has moved.

What stays different from train.Trainer: a row is an episode with its whole conversation; after a trip of the gate
scheduler and global_step go on; a batch without any signal still lets the optimiser's momentum move.
"""

import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
import torch
from accelerate.utils import DistributedType, broadcast, gather_object, is_peft_model, reduce
from datasets import Dataset
from packaging.specifiers import SpecifierSet
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from .. import envs
from .. import loss as losses
from ..composition import Method, make_gate
from ..envs.base import EnvBatch
from ..errors import WorkbenchError
from ..prompts import Chat, PromptStyle
from ..recording import record, record_seconds
from ..records import Batch, Episode
from ..reuse.lm_head import WeightMonitor
from ..rollout import Job, Teacher, play
from ..runs.folder import RunFolder
from ..sampling import panel_jobs
from ..skills import privileged_inputs, skill_ids
from ..tables import evals_frame
from ..update import Diverged
from .heads import HeadEnergy
from .options import check_engine, fitted, gated
from .play import Lockstep, PlayConfig, player_of, teacher_of, training_jobs
from .rows import Rows, count_positions, episode_reward, trl_rows
from .step import Step, scored, step_of

RANGE = ">=1.16,<1.17"
STATE = "credit.pt"  # in a checkpoint: what TRL does not save of a run

if version("trl") not in SpecifierSet(RANGE):
    raise WorkbenchError(f"TRL {version('trl')} is installed; {RANGE} is what this works with (docs/engines.md)")


class CreditTrainer(GRPOTrainer):
    """GRPOTrainer that plays games of an environment and trains with a Method.

    model: as TRL's. env: a name of envs.ENVIRONMENTS, or an EnvBatch whose games this process plays. args: a
    GRPOConfig; options.fitted says what of it the method decides. settings: how games are played. folder: where tables
    go, or None. trl: callbacks, optimizers, peft_config, processing_class, quantization_config, as TRL's.

    A step is one batch of rollouts with all the updates made on it: num_generations episodes a task, the tasks and
    draws that train.Trainer has for the same seed. Raises WorkbenchError for options that cannot be kept, and Diverged
    where a gradient is not finite.
    """

    def __init__(
        self,
        model: Any,
        method: Method,
        env: str | EnvBatch,
        args: GRPOConfig,
        settings: PlayConfig | None = None,
        folder: RunFolder | None = None,
        message: Callable[[str], Any] = print,
        **trl: Any,
    ):
        settings = settings or PlayConfig()
        args, self.by_trl = fitted(args, method, settings.limits)
        self.method, self.settings, self.folder = method, settings, folder
        local = args.per_device_train_batch_size * args.steps_per_generation
        self.games = (
            envs.make(env, min(settings.live_episodes, local), **settings.env_options) if isinstance(env, str) else env
        )
        self.tasks = self.games.tasks(self.games.envs[0].splits[0])
        self.tasks_per_step, left = divmod(args.generation_batch_size, args.num_generations)
        if left or not self.tasks:
            raise WorkbenchError(
                f"a step has {args.generation_batch_size} episodes in groups of {args.num_generations}, and the "
                f"environment {len(self.tasks)} training tasks: whole groups and at least one task are needed"
            )
        self.step: Step | None = None  # the batch in use
        self.number, self.updates = 0, 0  # of the next step, and updates so far
        self.seconds: dict[str, float] = {}
        self._jobs: list[Job] = []
        self._seen: list[tuple[Tensor, Tensor]] = []  # log-probs and entropy of the forwards since it was cleared
        rows = Dataset.from_dict({"prompt": [""] * self.tasks_per_step})  # drives the loop; games are dealt here
        super().__init__(
            model, reward_funcs=episode_reward, args=args, train_dataset=rows,
            eval_dataset=None if args.eval_strategy == "no" else rows, rollout_func=self._rollout, **trl,
        )  # fmt: skip
        self.message = message if self.accelerator.is_main_process else lambda line: None
        bare = self.accelerator.unwrap_model(self.model)
        self.bare = bare.get_base_model() if is_peft_model(bare) else bare
        for one in filter(None, (self.bare, self.ref_model)):
            count_positions(self.accelerator.unwrap_model(one))
        self.gate = make_gate(method, args.seed)
        kind = self.accelerator.distributed_type
        self.sharded = kind == DistributedType.FSDP or self._dist.is_zero3
        whole = not self.sharded and kind != DistributedType.DEEPSPEED
        self.head = HeadEnergy(self.bare, whole and gated(method))
        check_engine(method, kind, self.head.weight.requires_grad, self._dist.fsdp_version)
        watched = folder is not None and settings.monitor_every and whole
        self.monitor = WeightMonitor(self.bare, settings.monitor_every) if watched else None
        self.chat = Chat(self.processing_class, PromptStyle(settings.prompt, -1, settings.prompt == "action"))
        skilled = method.skills != "never"
        needed = method.needs_teacher or settings.teacher or skilled
        self.teacher = teacher_of(env, settings, self.chat) if needed else None
        self.scores_teacher = self.teacher is not None and not skilled
        self.player = player_of(self)
        self.add_callback(_AfterUpdate(self))
        if self.head.tied and self.head.own is None:
            self.message("output head and embedding are one: the head's gradient energy holds the input path's too")

    # Rollouts

    def play(self, jobs: Sequence[Job], temperature: float, teacher: Teacher | None = None) -> list[Episode]:
        """Play this process's jobs; all processes must call it at once."""
        training = self.model.training
        self.bare.eval()
        try:
            episodes = play(
                self.player, self.chat, self.games, jobs, self.settings.limits, temperature, teacher,
                solver=self.method.needs_solver, say=self.message,
            )  # fmt: skip
            if isinstance(self.player, Lockstep):
                self.player.finish(temperature)
        finally:
            self.bare.train(training)
        return episodes

    def _rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's rollout_func: a row an episode; what the environment said is masked."""
        start = time.perf_counter()
        skilled = self.teacher if self.method.skills != "never" else None
        episodes = self.play(self._jobs, self.temperature, skilled)
        pad = self._tokenizer.pad_token_id
        self._episodes, self._local = episodes, Batch.from_episodes(episodes, "episode", pad, self.settings.reward)
        self.seconds = {"rollout": time.perf_counter() - start}
        known = not isinstance(self.player, Lockstep) or self.player.sampled
        return trl_rows(self._local, episodes) | ({} if known else {"logprobs": None})

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rank, count = self.accelerator.process_index, len(inputs)
        mine = slice(rank * count, (rank + 1) * count)
        self._jobs = training_jobs(
            self.tasks, self.args.seed, self.number, self.tasks_per_step, self.num_generations,
            range(mine.start, mine.stop),
        )  # fmt: skip
        self._seen.clear()
        out = super()._generate_and_score_completions([{"prompt": job.task.id} for job in self._jobs])
        start = time.perf_counter()
        rows = Rows.of(out["prompt_mask"], out["completion_ids"])
        local = self._local.to(self.accelerator.device)
        rows.check(local, out["completion_ids"], out["completion_mask"] * out["tool_mask"])
        if "old_per_token_logps" not in out:
            self._seen.clear()  # of adapters' reference, which is the same model without them
            ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
            self._score(ids, torch.cat([out["prompt_mask"], out["completion_mask"]], 1), rows.columns)
        width = local.input_ids.shape[1]
        old, entropy = (rows.tokens(x, width) for x in self._seen[0])
        reference = rows.tokens(out["ref_per_token_logps"], width) if "ref_per_token_logps" in out else None
        teacher = self._teacher_logprobs(local) if self.scores_teacher else None
        parts = scored(self._episodes, local.lengths.tolist(), old, entropy, teacher, reference)
        self.seconds["score"] = time.perf_counter() - start
        start = time.perf_counter()
        self.step = step = step_of(
            self.number, gather_object(parts), self.method, self._tokenizer.pad_token_id, self.settings.reward,
            self.max_completion_length, self.beta, isinstance(self.player, Lockstep) and self.player.sampled,
        )  # fmt: skip
        self.seconds["credit"] = time.perf_counter() - start
        self._started = time.perf_counter()
        self._begin_update()

        def cut(values: Tensor, fill: float = 0) -> Tensor:
            return rows.completions(values[mine].to(self.accelerator.device), fill)

        out["advantages"] = cut(step.advantages).float()
        out["row"] = torch.arange(mine.start, mine.stop, device=self.accelerator.device)
        out["old"], out["turn_index"] = cut(step.batch.old_logprobs), cut(step.batch.turn_index, -1)
        out["weights"] = cut(step.weights)
        if step.aux_weights is not None:
            out["aux_weights"], out["teacher"] = cut(step.aux_weights), cut(step.batch.teacher_logprobs)
        outcomes = [float(e.outcome) for e in step.episodes]
        self._metrics["train"]["success"].append(sum(outcomes) / len(outcomes))
        return out

    def _score(self, ids: Tensor, attention: Tensor, keep: int) -> Tensor:
        """(B,keep) log-probs of the last tokens of rows, without gradients."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(
                self.model, ids, attention, keep, batch_size=self.args.per_device_train_batch_size
            )[0]

    def _teacher_logprobs(self, batch: Batch) -> Tensor:
        """(B,T) log-probs of the sampled tokens under the live weights with each episode's skill text in the prompt.

        Rows are built one by one without padding inside, and that the text is in them is checked.
        """
        skills = skill_ids(self.teacher.bank, self.processing_class, self._episodes)
        ids, lengths, shift = privileged_inputs(batch, skills, self.teacher.insert_at)
        attention = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        b, t = torch.nonzero(batch.response_mask, as_tuple=True)
        there = t + shift[b]
        first = int(there.min())
        values = self._score(ids, attention, ids.shape[1] - first)
        out = torch.zeros_like(batch.old_logprobs)
        out[b, t] = values[b, there - first].to(out)
        return out

    # Updates

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any):
        if model is self.ref_model:
            return super()._get_per_token_logps_and_entropies(model, *args, **options)
        out = super()._get_per_token_logps_and_entropies(model, *args, **options | {"compute_entropy": True})
        self._seen.append((out[0], out[1]))
        return out

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # A batch is used until the gate or its last use drops it, not to a schedule of _step.
        if self._buffered_inputs is None:
            made = shuffle_sequence_dict(self._generate_and_score_completions(generation_batch))
            self._buffered_inputs = split_tensor_dict(made, self.args.steps_per_generation)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _begin_update(self) -> None:
        shape = (2, *self.step.batch.input_ids.shape)
        self._now = torch.zeros(shape, device=self.accelerator.device)
        self._loss = torch.zeros((), device=self.accelerator.device)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._seen.clear()
        with self.head.apart():
            loss = super()._compute_loss(model, inputs) if self.by_trl else self._own_loss(model, inputs)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        logp, entropy = (torch.where(mask, x, 0) for x in self._seen[0])
        if "teacher" in inputs:
            per_token = self.method.aux.loss(logp, inputs["teacher"], inputs["old"], entropy)
            loss = loss + (inputs["aux_weights"] * per_token).sum() * self.accelerator.num_processes
        rows = Rows.of(inputs["prompt_mask"], inputs["completion_ids"])
        for i, values in enumerate((logp, entropy)):
            self._now[i, inputs["row"]] = rows.tokens(values.detach().float(), self._now.shape[2])
        self._loss += loss.detach()
        return loss

    def _own_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The policy loss by loss.py, where TRL has none that is the same. Weights are of the whole batch, and
        processes are averaged over, hence their number."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        columns = inputs["completion_ids"].shape[1]
        logp, entropy, _ = self._get_per_token_logps_and_entropies(model, ids, attention, columns)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        logp, own = torch.where(mask, logp, 0), self.method.loss
        rows = torch.arange(len(logp), device=logp.device)
        form = losses.sequence_form(logp, inputs["old"], inputs["turn_index"], own.ratio, rows)
        per_token = own.pg_coef * losses.surrogate(form, inputs["old"], inputs["advantages"], **own.clip)
        if self.beta:
            reference = torch.where(mask, inputs["ref_per_token_logps"], 0)
            per_token = per_token + self.beta * losses.kl_k3(logp, reference)
        self._metrics["train"]["entropy"].append(float(losses.masked_mean(entropy.detach(), mask)))
        return (inputs["weights"] * per_token).sum() * self.accelerator.num_processes

    def _clip_grad_norm(self, model: Any) -> Any:
        """Before clipping: ask the gate; a discarded update leaves no gradient, and so no trace in the optimiser."""
        step, gate = self.step, self.gate
        energy = self.head.take()
        if self.monitor:
            self.monitor.measure_gradients()
        norm = super()._clip_grad_norm(model)
        told = torch.tensor(
            [math.nan if energy is None else energy, float(norm), float(reduce(self._loss, "mean"))],
            dtype=torch.float64, device=self.accelerator.device,
        )  # fmt: skip
        # What the gate reads is the first process's, so that all decide alike.
        energy, grad_norm, loss = broadcast(told).tolist()
        now = broadcast(reduce(self._now, "sum")).cpu()
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            raise Diverged(f"step {step.number}: the gradient is not finite; checkpoints are in {self.args.output_dir}")
        decision = step.decide(gate, self.updates, now[0], now[1], loss, grad_norm, energy)
        if not decision.apply:
            for parameter in model.parameters():
                parameter.grad = None
        self._begin_update()
        return norm

    def after_update(self) -> None:
        """Once the optimiser has stepped, or not: note how far weights moved, and end the step after its last use."""
        step = self.step
        row = step.updates[-1]
        if self.monitor and row["applied"]:
            step.modules += self.monitor.observe(step.number, self.updates, step.used, row["head_norm"])
        self.updates += 1
        if row["stop"] or step.used == self.gate.max_reuse:
            self.end_step()

    def end_step(self) -> None:
        """Drop the batch in use, if any, and write its tables."""
        step = self.step
        if self._buffered_inputs is None or step is None or not step.updates:
            return
        self._buffered_inputs, self.number = None, step.number + 1
        self.seconds["update"] = time.perf_counter() - self._started
        if self.folder is not None and self.accelerator.is_main_process:
            record(
                self.folder, step.number, step.episodes, step.batch, step.credit, step.entropy, step.method,
                step.updates, step.modules, pieces=self.processing_class.convert_ids_to_tokens,
                lr=self.optimizer.param_groups[0]["lr"], max_tokens=step.max_tokens, kl_coef=step.beta,
                turns=step.number % self.settings.record_turns_every == 0,
            )  # fmt: skip
            record_seconds(self.folder, step.number, self.seconds)
        row, success = step.updates[-1], sum(e.outcome for e in step.episodes) / len(step.episodes)
        self.message(
            f"step {self.number}  success {success:.2f}  loss {row['loss']:+.4f}  "
            f"updates {sum(r['applied'] for r in step.updates)}  {sum(self.seconds.values()):.1f} s"
        )

    # Evaluation and checkpoints

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Play the panel of held-out games as student, at both ends of a run as teacher too; each once."""
        s, n, rank = self.settings, self.accelerator.num_processes, self.accelerator.process_index
        splits = self.games.envs[0].splits
        panel = splits[min(1, len(splits) - 1)]
        ends = self.state.global_step in (0, self.state.max_steps) and self.teacher is not None
        metrics, frames = {}, []
        for role in ("student", "teacher") if ends else ("student",):
            skilled = role == "teacher" or self.method.skills == "always"
            jobs = panel_jobs(self.games.tasks(panel), s.eval_seed, s.eval_games)
            played = self.play(jobs[rank::n], s.eval_temperature, self.teacher if skilled else None)
            parts = sorted(gather_object([(rank + n * i, e) for i, e in enumerate(played)]), key=lambda x: x[0])
            episodes = [e for _, e in parts]
            frames.append(evals_frame(self.number, panel, role, episodes))
            rate = sum(e.outcome for e in episodes) / len(episodes)
            metrics[f"{metric_key_prefix}_success" + ("" if role == "student" else "_teacher")] = rate
            self.message(f"step {self.number}: {panel} success {rate:.2f} of {len(episodes)} games, as {role}")
        if self.folder is not None and self.accelerator.is_main_process:
            self.folder.write_table("evals", self.number, pl.concat(frames))
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            state = {
                "number": self.number, "updates": self.updates, "gate": self.gate.state_dict(),
                "monitor": self.monitor and self.monitor.state_dict(),
            }  # fmt: skip
            torch.save(state, Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}" / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """A batch that was in use when the checkpoint was made is dropped: its step is played anew."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        found = Path(checkpoint) / STATE
        if not found.is_file():
            raise WorkbenchError(f"{checkpoint} has no {STATE}: it is no checkpoint of a CreditTrainer")
        state = torch.load(found, map_location=self.accelerator.device, weights_only=True)
        self.number, self.updates = state["number"], state["updates"]
        self.gate.load_state_dict(state["gate"])
        if self.monitor and state["monitor"]:
            self.monitor.load_state_dict(state["monitor"])
        if self.folder is not None and self.accelerator.is_main_process:
            self.folder.truncate(self.number)


class _AfterUpdate(TrainerCallback):
    def __init__(self, trainer: CreditTrainer):
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.after_update()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.end_step()


if __name__ == "__main__":
    from .launch import main

    try:
        main()
    except WorkbenchError as error:
        raise SystemExit(f"workbench: {error}") from None
