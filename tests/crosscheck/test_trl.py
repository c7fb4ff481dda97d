"""Our losses and advantages against TRL's own GRPOTrainer and RLOOTrainer, on the same tensors."""

import dataclasses

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here; `make crosscheck` installs it")

from datasets import Dataset  # noqa: E402
from shared_tensors import (  # noqa: E402
    Case,
    assert_same,
    assert_same_loss,
    make_case,
    our_loss,
    row_aggregation,
    value_and_gradient,
)
from tiny_models import tiny_model  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from trl.trainer.utils import split_tensor_dict  # noqa: E402

from workbench.credit.grpo import group_advantage  # noqa: E402
from workbench.credit.rloo import leave_one_out  # noqa: E402
from workbench.loss import MAX_KL, PolicyLossConfig  # noqa: E402

LAYOUTS = ("episode", "turn")
DTYPES = (torch.float32, torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WIDTH = 40  # TRL's max_completion_length; no row is as long

# What TRL's loss types do with the tokens of a row; its sequence is a row.
LOSSES = {"grpo": "mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "sum_norm", "luspo": "sum"}
LEVELS = {"token": "token", "sequence": "row"}  # importance_sampling_level, and ours


class GivenLogprobs(GRPOTrainer):
    """GRPOTrainer whose policy log-probs are given, not computed by its model."""

    given: torch.Tensor | None = None

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **options):
        logps = torch.zeros(len(input_ids), logits_to_keep) if self.given is None else self.given
        return logps, torch.zeros_like(logps), None


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-model")
    tiny_model(tokenizer).save_pretrained(path)
    return path


@pytest.fixture
def trainer(folder, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def make(kind, config, rewards, rows, **options):
        args = config(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, **options.pop("args")
        )
        return kind(
            model=str(folder),
            reward_funcs=lambda prompts, **columns: list(rewards),
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "go"}] * rows),
            processing_class=tokenizer,
            **options,
        )

    return make


def roll_out(make, case: Case, steps: int = 1, **args):
    """A trainer, and the inputs that it makes of the case's rows in `steps` micro-batches.

    The prompt is the row's first token and the completion all others, those of the environment masked.
    """
    batch = case.batch
    rows = len(batch.lengths)

    def rollout(prompts, _):
        spans = [slice(1, n) for n in batch.lengths.tolist()]
        return {
            "prompt_ids": batch.input_ids[:, :1].tolist(),
            "completion_ids": [batch.input_ids[b, s].tolist() for b, s in enumerate(spans)],
            "logprobs": [batch.old_logprobs[b, s].tolist() for b, s in enumerate(spans)],
            "env_mask": [batch.response_mask[b, s].int().tolist() for b, s in enumerate(spans)],
        }

    options = {
        "per_device_train_batch_size": rows // steps,
        "gradient_accumulation_steps": steps,
        "num_generations": 2,
        "max_completion_length": WIDTH,
        "beta": 0.0,
        "epsilon": 0.2,
    }
    trainer = make(
        GivenLogprobs, GRPOConfig, [float(b % 2) for b in range(rows)], rows, args=options | args, rollout_func=rollout
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = steps  # set by train()
    inputs = trainer._generate_and_score_completions([{"prompt": "go"}] * rows)
    assert torch.equal((inputs["completion_mask"] * inputs["tool_mask"]).bool(), batch.response_mask[:, 1:])
    return trainer, inputs


def trl_loss(trainer, inputs: dict, case: Case, advantages=None) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's loss on the case's tensors and its gradient (B,T) for the log-probs, micro-batches summed."""
    given = {
        "advantages": case.row_advantages if advantages is None else advantages[:, 1:],
        "old_per_token_logps": case.batch.old_logprobs[:, 1:],
        "ref_per_token_logps": case.reference[:, 1:],
    }

    def loss(logp):
        parts = split_tensor_dict(inputs | given | {"logp": logp[:, 1:]}, trainer.args.gradient_accumulation_steps)
        total = 0
        for part in parts:
            trainer.given = part.pop("logp")
            total = total + trainer._compute_loss(trainer.model, part)
        return total

    return value_and_gradient(loss, case.logp)


def ours_of(case: Case, loss_type: str, level: str = "token", advantages=None, kl_coef: float = 0.0, **clip):
    """`our_loss` for TRL's loss_type and importance_sampling_level."""
    config = PolicyLossConfig(ratio=LEVELS[level], **{"dual_clip": 0} | clip)
    aggregation = row_aggregation(LOSSES[loss_type], case, WIDTH)
    return our_loss(case, config, **aggregation, advantages=advantages, kl_coef=kl_coef)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient(trainer, loss_type, level, layout):
    theirs = roll_out(trainer, make_case(layout), loss_type=loss_type, importance_sampling_level=level)
    for dtype in DTYPES:
        case = make_case(layout, dtype)
        assert_same_loss(ours_of(case, loss_type, level), trl_loss(*theirs, case))


@pytest.mark.parametrize("level", LEVELS)
def test_clips(trainer, level):
    """TRL's epsilon, epsilon_high and delta (two-sided clipping) are our clip_low, clip_high and dual_clip."""
    case = make_case()
    options = {"loss_type": "grpo", "importance_sampling_level": level}
    theirs = roll_out(trainer, case, epsilon=0.1, epsilon_high=0.28, delta=1.5, **options)
    ours = ours_of(case, "grpo", level, clip_low=0.1, clip_high=0.28, dual_clip=1.5)
    assert_same_loss(ours, trl_loss(*theirs, case))
    symmetric = ours_of(case, "grpo", level, clip_low=0.1, clip_high=0.1, dual_clip=1.5)
    unbounded = ours_of(case, "grpo", level, clip_low=0.1, clip_high=0.28)
    assert ours[0] < unbounded[0] - 1e-4 and ours[0] < symmetric[0] - 1e-4


@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "dr_grpo"))
def test_advantages_of_tokens(trainer, loss_type):
    case = make_case()
    theirs = roll_out(trainer, case, loss_type=loss_type)
    advantages = torch.where(case.batch.response_mask, case.reference - case.logp, 0)
    assert_same_loss(ours_of(case, loss_type, advantages=advantages), trl_loss(*theirs, case, advantages))


def test_trl_spreads_token_advantages_over_a_sequence_and_ours_does_not(trainer):
    """With one ratio a row TRL differentiates s * mean(A), so every token gets the row's mean; ours is GSPO-token."""
    case = make_case()
    case = dataclasses.replace(case, logp=case.batch.old_logprobs)
    theirs = roll_out(trainer, case, loss_type="grpo", importance_sampling_level="sequence")
    mask = case.batch.response_mask
    advantages = torch.where(mask, case.reference, 0)
    loss, gradient = trl_loss(*theirs, case, advantages)
    ours = ours_of(case, "grpo", "sequence", advantages)
    weights = mask.double() / (mask.sum(1, keepdim=True) * len(mask))
    assert_same(ours[0], loss)
    assert_same(ours[1], -weights * advantages)
    assert_same(gradient, -weights * (advantages.sum(1, keepdim=True) / mask.sum(1, keepdim=True)))


@pytest.mark.parametrize("loss_type", ("grpo", "dapo"))
def test_kl(trainer, loss_type):
    case = make_case()
    theirs = roll_out(trainer, case, loss_type=loss_type, beta=0.3, use_bias_correction_kl=False)
    assert_same_loss(ours_of(case, loss_type, kl_coef=0.3), trl_loss(*theirs, case))


def test_trl_weighs_the_kl_by_the_ratio_and_ours_is_plain_and_bounded(trainer):
    """TRL's default multiplies k3 by the importance ratio (use_bias_correction_kl), and neither form has a bound."""
    case = make_case()
    case = dataclasses.replace(case, row_advantages=torch.zeros_like(case.row_advantages))
    weighed = trl_loss(*roll_out(trainer, case, loss_type="grpo", beta=1.0), case)
    assert abs(weighed[0] - ours_of(case, "grpo", kl_coef=1.0)[0]) > 1e-3

    case = dataclasses.replace(case, reference=torch.where(case.batch.response_mask, case.logp + 4.0, 0))
    theirs = trl_loss(*roll_out(trainer, case, loss_type="grpo", beta=1.0, use_bias_correction_kl=False), case)
    ours = ours_of(case, "grpo", kl_coef=1.0)
    assert theirs[0] > 4 * MAX_KL and ours[0].item() == pytest.approx(MAX_KL)
    assert theirs[1].any() and not ours[1].any()


@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "dr_grpo", "bnpo"))
def test_micro_batches(trainer, loss_type):
    """Two micro-batches add up to our one batch; TRL's bnpo alone means their means, which is another loss."""
    case = make_case()
    theirs = trl_loss(*roll_out(trainer, case, steps=2, loss_type=loss_type), case)
    ours = ours_of(case, loss_type)
    if loss_type == "bnpo":
        assert (ours[1] - theirs[1]).abs().max() > 1e-3
    else:
        assert_same_loss(ours, theirs)


def scored(make, kind, config, rewards, **args):
    """(N,) advantages that a TRL trainer gives two groups of equal size, generation and all."""
    n = len(rewards)
    options = {"per_device_train_batch_size": n, "num_generations": n // 2, "max_completion_length": 2, "beta": 0.0}
    trainer = make(kind, config, rewards.tolist(), n, args=options | args)
    return trainer._generate_and_score_completions([{"prompt": "go"}] * n)["advantages"]


def halves(rewards) -> torch.Tensor:
    return torch.arange(len(rewards)) // (len(rewards) // 2)


REWARDS = (
    torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
    torch.tensor([0.3, -2.0, 7.5, 0.1, 0.0, 0.0, 0.0, 1e-3]),
)


@pytest.mark.parametrize("rewards", REWARDS, ids=("outcome", "scaled"))
@pytest.mark.parametrize("scale", ("group", "none"))
def test_group_advantage(trainer, scale, rewards):
    theirs = scored(trainer, GRPOTrainer, GRPOConfig, rewards, scale_rewards=scale)
    ours = group_advantage(rewards, halves(rewards), std=scale == "group", eps=1e-4, ddof=1)
    assert_same(ours, theirs)


def test_equal_rewards_have_no_advantage_here_and_a_residue_in_trl(trainer):
    """TRL divides the rounding error of the mean by a deviation made of it too; ours is exactly 0."""
    rewards = torch.tensor([0.0] * 5 + [1.0] + [1e4 + 0.1] * 6)
    theirs = scored(trainer, GRPOTrainer, GRPOConfig, rewards)
    ours = group_advantage(rewards, halves(rewards), eps=1e-4)
    assert_same(ours[:6], theirs[:6])
    assert theirs[6:].all() and not ours[6:].any()


@pytest.mark.parametrize("rewards", REWARDS, ids=("outcome", "scaled"))
def test_leave_one_out(trainer, rewards):
    theirs = scored(trainer, RLOOTrainer, RLOOConfig, rewards, normalize_advantages=False)
    assert_same(leave_one_out(rewards, halves(rewards)), theirs)
