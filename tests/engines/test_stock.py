"""With the method switched off CreditTrainer is GRPOTrainer, bit for bit, over several steps of the same games."""

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here; `make crosscheck` installs it")

from datasets import Dataset  # noqa: E402
from engine_cases import GAME, RUN, Parity, credit_trainer, prepare, trl_args, weights_of  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from workbench.engines.play import training_jobs  # noqa: E402
from workbench.engines.rows import trl_rows  # noqa: E402
from workbench.engines.trl import episode_reward  # noqa: E402
from workbench.envs.base import EnvBatch  # noqa: E402
from workbench.policy import Policy  # noqa: E402
from workbench.prompts import Chat, PromptStyle  # noqa: E402
from workbench.records import Batch  # noqa: E402
from workbench.rollout import Limits, play  # noqa: E402

TRLS = {"advantage_eps": 1e-4, "dual_clip": 0.0}  # what TRL's advantage and loss have at their defaults
OFF = {
    "grpo": ({}, 1), "agent_opsd": ({"lam": 0.0}, 1), "sdar": ({"coef": 0.0}, 1), "grpo_reuse": ({"max_reuse": 2}, 2),
}  # fmt: skip
STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("stock")
    prepare(path, tokenizer)
    return path


def stock(folder, uses: int):
    """TRL's trainer, which plays the same games by a rollout function of its own."""
    games, steps = EnvBatch([Parity() for _ in range(8)]), iter(range(STEPS))

    def rollout(prompts, trainer):
        policy = Policy(trainer.model, trainer.processing_class)
        jobs = training_jobs(games.tasks("train"), RUN["seed"], next(steps), 2, 4, range(8))
        limits = Limits(*(GAME[n] for n in ("max_turns", "max_response_tokens", "max_context", "max_invalid")))
        episodes = play(policy, Chat(policy.tokenizer, PromptStyle()), games, jobs, limits)
        trainer.model.train()
        return trl_rows(Batch.from_episodes(episodes, "episode"), episodes)

    args = trl_args(folder / "stock", STEPS, loss_type="grpo", num_iterations=uses, max_grad_norm=0.5)
    rows = Dataset.from_dict({"prompt": ["", ""]})
    return GRPOTrainer(
        str(folder / "model"), reward_funcs=episode_reward, args=args, train_dataset=rows, rollout_func=rollout
    )


@pytest.fixture(scope="module")
def stock_runs(folder):
    runs = {}
    for uses in (1, 2):
        runs[uses] = stock(folder, uses)
        runs[uses].train()
    return runs


@pytest.mark.parametrize("name", OFF)
def test_off_is_stock_trl_bit_for_bit(folder, stock_runs, name):
    options, uses = OFF[name]
    theirs = stock_runs[uses]
    trainer = credit_trainer(folder, name, STEPS, args={"max_grad_norm": 0.5}, **TRLS, **options)
    trainer.train()
    steps = trainer.folder.read("steps")
    assert trainer.updates == STEPS and (steps["n_mixed_groups"] > 0).all()
    start = weights_of(theirs.model)
    for key, value in weights_of(trainer.bare).items():
        assert torch.equal(value, start[key]), key
    for a, b in zip(trainer.optimizer.state.values(), theirs.optimizer.state.values(), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in ("step", "exp_avg", "exp_avg_sq"))


def test_on_is_not_stock_trl(folder, stock_runs):
    trainer = credit_trainer(folder, "agent_opsd", 2, record=False, args={"max_grad_norm": 0.5}, **TRLS)
    trainer.train()
    theirs = weights_of(stock_runs[1].model)
    assert any(not torch.equal(value, theirs[key]) for key, value in weights_of(trainer.bare).items())
