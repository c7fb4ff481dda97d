"""verl's rows as a Batch and back, which methods it takes, and, where it is installed, our policy losses in it."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from make_batch import make_batch, make_episodes, make_gaps
from packaging.specifiers import SpecifierSet

from workbench.engines import verl
from workbench.errors import WorkbenchError
from workbench.methods import METHODS, method

ROOT = Path(__file__).parents[2]
TAKEN = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "agent_opsd", "rlsd", "step_opsd", "grpo_reuse")


def verl_rows(batch):
    """The columns that verl has of a batch, its prompt cut off, and keys of its rows; and where its columns begin."""
    first = batch.response_mask.int().argmax(1)
    width = int((batch.lengths - first).max())
    place = first[:, None] + torch.arange(width)

    def cut(values):
        return torch.where(place < values.shape[1], values.gather(1, place.clamp(max=values.shape[1] - 1)), 0)

    mask, reward = cut(batch.response_mask.int()), batch.reward[batch.episode_index]
    last = torch.arange(width).mul(mask).argmax(1)
    seen: dict[int, int] = {}
    keys = []
    for e in batch.episode_index.tolist():
        keys.append(f"task_{int(batch.group_index[e])}_{e}_{seen.setdefault(e, 0)}")
        seen[e] += 1
    # only the last row of a session has the score, as its other outputs end before the game does
    final = torch.tensor([int(k.rsplit("_", 1)[1]) + 1 == seen[int(k.split("_")[2])] for k in keys])
    scores = torch.zeros(mask.shape, dtype=reward.dtype).scatter(1, last[:, None], (reward * final)[:, None])
    columns = {"response_mask": mask, "old_log_probs": cut(batch.old_logprobs), "scores": scores}
    return keys, columns | {"teacher_log_probs": cut(batch.teacher_logprobs)}, cut


@pytest.mark.parametrize("layout", ("episode", "turn"))
@pytest.mark.parametrize("name", TAKEN)
def test_advantages_are_those_of_our_own_batch(name, layout):
    episodes = make_episodes()
    batch = make_batch(episodes, make_gaps(episodes), layout=layout)
    ours = method(name)
    verl.check(ours)
    keys, columns, cut = verl_rows(batch)
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    shuffled = {k: v[order] for k, v in columns.items()}
    own, rows = verl.batch_of([keys[i] for i in order], **shuffled)
    values = verl.advantages(ours, own, rows, shuffled["response_mask"].shape)
    wanted = cut(ours.credit(batch, 0).advantages)
    assert wanted.any()
    torch.testing.assert_close(values, wanted[order], rtol=0, atol=1e-12)


def test_padding_rows_get_nothing_and_keys_are_checked():
    batch = make_batch(make_episodes(), make_gaps(make_episodes()))
    keys, columns, _ = verl_rows(batch)
    padded = {k: torch.cat([v, torch.zeros_like(v[:2])]) for k, v in columns.items()}
    own, rows = verl.batch_of([*keys, "pad_0_0", "pad_1_0"], **padded)
    values = verl.advantages(method("grpo"), own, rows, padded["response_mask"].shape)
    assert len(own.lengths) == len(keys) and not values[-2:].any() and values.any()
    with pytest.raises(WorkbenchError, match="uid_session_index"):
        verl.batch_of(["a"] * len(keys), **columns)
    with pytest.raises(WorkbenchError, match="no row"):
        verl.batch_of(keys, **columns | {"response_mask": torch.zeros_like(columns["response_mask"])})


def test_every_method_is_either_taken_or_refused_with_a_reason():
    refused = set()
    for name in METHODS:
        try:
            verl.check(method(name))
        except WorkbenchError as error:
            assert name in str(error)
            refused.add(name)
    assert set(METHODS) - refused == {*TAKEN}


def test_the_extra_is_the_pinned_range():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["verl"] == [f"verl{verl.RANGE}"]


def test_overrides_name_what_the_method_is():
    lines = verl.overrides("agent_opsd", method("agent_opsd", lam=0.25, dual_clip=0.0), 512, lam=0.25)
    assert "trainer.v1.trainer_mode=workbench" in lines and "+algorithm.workbench.options.lam=0.25" in lines
    assert "actor_rollout_ref.actor.clip_ratio_c=1000000000.0" in lines
    assert "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean" in lines
    assert "actor_rollout_ref.actor.loss_scale_factor=512" in verl.overrides("dr_grpo", method("dr_grpo"), 512)
    with pytest.raises(WorkbenchError, match="aggregation"):
        verl.overrides("grpo", method("grpo", aggregation="turn_mean"), 512)


@pytest.fixture(scope="module")
def seen():
    python = os.environ.get("VERL_PYTHON") or str(ROOT / ".venv-verl" / "bin" / "python")
    if not Path(python).exists():
        pytest.skip("verl is not installed: `make crosscheck` installs it, or set VERL_PYTHON to a Python that has it")
    done = subprocess.run(
        [python, str(Path(__file__).with_name("verl_hooks.py"))],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_our_policy_losses_in_verls_registry_are_verls(seen):
    for name, (value, gradient) in seen["losses"].items():
        assert value < 1e-7 and gradient < 1e-7, f"{name}: {value}, {gradient}"


def test_what_the_adapter_relies_on_in_verl(seen):
    found = seen["signatures"]
    assert found["version"][0] in SpecifierSet(verl.RANGE)
    assert found["_compute_advantage"] == ["self", "batch", "metrics"]
    assert found["register_trainer"] == found["get_trainer_cls"] == ["name"]
    assert found["response_to_nested"] == ["tensor", "response_mask"]
    assert found["agg_loss"][:3] == ["loss_mat", "loss_mask", "loss_agg_mode"]
    assert found["fields"] == ["response_mask", "old_log_probs", "rm_scores"]
