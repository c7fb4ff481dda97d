"""Credit of this package inside verl's v1 trainer: its tensors as a Batch, a policy loss, and a trainer that uses both.

verl's advantage registry hands an estimator neither log-probs nor turns, so the trainer is subclassed instead
(`register` below; VERL_USE_EXTERNAL_MODULES=workbench.engines.verl_plugin). Everything up to there is plain tensors and
imports no verl. What its agent loops do not give is refused: texts, solvers, and a teacher's log-probs, unless they
leave a column `teacher_log_probs` in the batch; a loss beside the policy loss, since verl's registry has no teacher
tensor; gates, since its workers own the optimiser's step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import loss as losses
from ..composition import Method
from ..errors import WorkbenchError
from ..loss import PolicyLossConfig
from ..records import Batch
from .options import check_groups, gated

RANGE = ">=0.9.1,<0.10"
TRAINER = "workbench"  # trainer.v1.trainer_mode
RATIOS = ("token", "turn", "row")  # actor.policy_loss.loss_mode is workbench_ and one of these
MODES = {"episode_mean": "seq-mean-token-mean", "token_mean": "token-mean", "token_sum_norm": "seq-mean-token-sum-norm"}
TEACHER = "teacher_log_probs"
NO_BOUND = 1e9  # verl's clip_ratio_c must be a number


def turns_of(response_mask: Tensor) -> Tensor:
    """(B,R) mask of sampled tokens -> (B,R) long, the turn of each within its row, -1 elsewhere: a turn is a stretch of
    sampled tokens, with the environment's between."""
    mask = response_mask.bool()
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return torch.where(mask, begins.cumsum(1) - 1, -1)


def batch_of(
    keys: Sequence[str],
    response_mask: Tensor,
    old_log_probs: Tensor,
    scores: Tensor,
    teacher_log_probs: Tensor | None = None,
    success: float = 1.0,
) -> tuple[Batch, Tensor]:
    """The batch of verl's rows, for credit, and (N,) which rows it holds: those with a sampled token.

    keys: of the rows, `<uid>_<session>_<index>`: a session is an episode, of a uid's group, its outputs in order of
    their index; scores (B,R): rm_scores, an episode's reward being the sum over its last row, as in verl; success: the
    least reward that counts as a win. All others (B,R). A placeholder token stands for the prompt. Raises
    WorkbenchError for keys of another form.
    """
    rows = response_mask.bool().any(1).nonzero()[:, 0]
    if not len(rows):
        raise WorkbenchError("verl: no row has a sampled token")
    parts = []
    for row in rows.tolist():
        uid, *place = keys[row].rsplit("_", 2)
        if len(place) != 2 or not place[1].isdigit():
            raise WorkbenchError(f"verl: row key {keys[row]!r} is not of the form uid_session_index")
        parts.append((uid, place[0], int(place[1])))
    sessions = list(dict.fromkeys(part[:2] for part in parts))
    groups = list(dict.fromkeys(uid for uid, _ in sessions))
    episode = torch.tensor([sessions.index(part[:2]) for part in parts], device=rows.device)
    index = torch.tensor([part[2] for part in parts], device=rows.device)
    turns = turns_of(response_mask[rows])
    counts, reward = turns.max(1).values + 1, scores[rows].sum(1)
    rewards = reward.new_zeros(len(sessions))
    for e in range(len(sessions)):
        own = (episode == e).nonzero()[:, 0]
        own = own[index[own].argsort()]
        before = counts[own].cumsum(0) - counts[own]
        turns[own] = torch.where(turns[own] >= 0, turns[own] + before[:, None], -1)
        rewards[e] = reward[own[-1]]

    def beside(values: Tensor, fill: float = 0) -> Tensor:
        return torch.nn.functional.pad(values, (1, 0), value=fill)

    def masked(values: Tensor) -> Tensor:
        return beside(torch.where(turns >= 0, values[rows], 0))

    place = torch.arange(1, turns.shape[1] + 1, device=rows.device)
    batch = Batch(
        input_ids=torch.zeros(len(rows), turns.shape[1] + 1, dtype=torch.long, device=rows.device),
        lengths=torch.where(turns >= 0, place, 0).max(1).values + 1,
        response_mask=beside(turns, -1) >= 0,
        turn_index=beside(turns, -1),
        episode_index=episode,
        group_index=torch.tensor([groups.index(uid) for uid, _ in sessions], device=rows.device),
        outcome=(rewards >= success).to(old_log_probs.dtype),
        reward=rewards,
        old_logprobs=masked(old_log_probs),
        teacher_logprobs=None if teacher_log_probs is None else masked(teacher_log_probs),
    )
    return batch, rows


def advantages(method: Method, batch: Batch, rows: Tensor, shape: torch.Size, step: int = 0) -> Tensor:
    """(B,R) advantages of verl's rows, 0 off the mask and in rows that the batch left out."""
    out = batch.old_logprobs.new_zeros(shape)
    out[rows] = method.credit(batch, step).advantages[:, 1:].to(out)
    return out


def check(method: Method) -> None:
    """Raise WorkbenchError where a method asks for what is not done under verl."""
    check_groups(method, "verl")
    where = f"method {method.name} under verl"
    if method.anchors or method.needs_solver or method.skills != "never":
        raise WorkbenchError(f"{where}: its rule needs texts or states of games, which an agent loop keeps to itself")
    if method.aux and method.aux.coef:
        raise WorkbenchError(f"{where}: a policy loss there is given no teacher, so it can have no loss beside it")
    if gated(method):
        raise WorkbenchError(f"{where}: its workers step without asking a gate")
    if method.loss.pg_coef != 1 or method.loss.engine_cap or method.loss.ratio not in RATIOS:
        raise WorkbenchError(f"{where}: pg_coef must be 1, engine_cap 0 and ratio one of {', '.join(RATIOS)}")
    if method.loss.aggregation not in MODES:
        raise WorkbenchError(f"{where}: aggregation must be one of {', '.join(MODES)}")


def overrides(name: str, method: Method, max_tokens: int, **options: Any) -> list[str]:
    """Command-line overrides of verl's main_ppo that mean this method with these options; `check` is called.

    max_tokens: the most an episode may sample. Aggregations are verl's: over rows, so they are ours where a session has
    one row.
    """
    check(method)
    own = method.loss
    actor = {
        "policy_loss.loss_mode": f"workbench_{own.ratio}", "clip_ratio_low": own.clip_low,
        "clip_ratio_high": own.clip_high, "clip_ratio_c": own.dual_clip or NO_BOUND,
        "loss_agg_mode": MODES[own.aggregation], "ppo_epochs": method.reuse.max_reuse,
    }  # fmt: skip
    if own.aggregation == "token_sum_norm":
        actor["loss_scale_factor"] = max_tokens
    lines = ["trainer.use_v1=true", f"trainer.v1.trainer_mode={TRAINER}", f"+algorithm.workbench.method={name}"]
    lines += [f"+algorithm.workbench.options.{key}={value}" for key, value in options.items()]
    return lines + [f"actor_rollout_ref.actor.{key}={value}" for key, value in actor.items()]


def policy_loss(ratio: str, aggregate: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """A policy loss for verl's registry: loss.py's clipped surrogate with the importance ratio of `ratio`, aggregated
    by `aggregate`, verl's agg_loss."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        turns, mask = turns_of(response_mask), response_mask.bool()
        log_prob, old = torch.where(mask, log_prob, 0), torch.where(mask, old_log_prob, 0)
        own = PolicyLossConfig(
            clip_low=config.clip_ratio_low, clip_high=config.clip_ratio_high, dual_clip=config.clip_ratio_c, ratio=ratio
        )
        form = losses.sequence_form(log_prob, old, turns, ratio)
        per_token = losses.surrogate(form, old, advantages, **own.clip)
        if rollout_is_weights is not None:
            per_token = per_token * rollout_is_weights
        value = aggregate(
            loss_mat=per_token, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        if not bool(mask.any()):
            return value, {}
        seen = losses.ratio_metrics(log_prob, old, mask, advantages, own, turns)
        return value, {"actor/pg_clipfrac": seen["clip_fraction"], "actor/ppo_kl": seen["approx_kl"]}

    return loss


def register_losses() -> None:
    """Put workbench_token, workbench_turn and workbench_row into verl's registry of policy losses."""
    from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

    for ratio in RATIOS:
        register_policy_loss(f"workbench_{ratio}")(policy_loss(ratio, agg_loss))


def register_trainer() -> type:
    """Put the trainer into verl's registry as `workbench` and return it: PPOTrainerSync with a Method's advantages.

    The method is that of `algorithm.workbench.method` with `algorithm.workbench.options`.
    """
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl.trainer.ppo.v1.trainer_base import register_trainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.workers.utils.padding import response_to_nested

    from ..methods import method

    class CreditTrainer(PPOTrainerSync):
        def __init__(self, config: Any):
            asked = OmegaConf.to_container(config.algorithm.workbench)
            self.method = method(asked["method"], **asked.get("options", {}))
            self.success = float(asked.get("success", 1.0))
            check(self.method)
            for name in ("use_kl_in_reward", "rollout_correction"):
                if config.algorithm.get(name):
                    raise WorkbenchError(f"algorithm.{name} has no effect beside a Method's own advantage: unset it")
            super().__init__(config)

        def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
            fields = ["response_mask", "old_log_probs", "rm_scores", *([TEACHER] if self.method.needs_teacher else [])]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            if self.method.needs_teacher and TEACHER not in data.keys():
                raise WorkbenchError(f"method {self.method.name}: the agent loop left out the column {TEACHER}")
            nested, padded = data["response_mask"], data.to_padded_tensor()
            own, rows = batch_of(
                batch.keys, padded["response_mask"], padded["old_log_probs"], padded["rm_scores"],
                padded.get(TEACHER, None), self.success,
            )  # fmt: skip
            values = advantages(self.method, own, rows, padded["response_mask"].shape, self.global_steps)
            metrics["critic/advantages/spread"] = float(values[padded["response_mask"].bool()].std(correction=0))
            made = {name: response_to_nested(values, nested) for name in ("advantages", "returns")}
            return tq.kv_batch_put(
                keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(made, batch_size=len(batch))
            )

    return register_trainer(TRAINER)(CreditTrainer)
