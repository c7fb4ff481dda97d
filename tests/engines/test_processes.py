"""Two processes against one with the same batch: the same update, the same decisions, as DDP and as FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here; `make crosscheck` installs it")

from engine_cases import adam_steps, credit_trainer, prepare, weights_of  # noqa: E402
from two_processes import KINDS  # noqa: E402

UPDATES = 6
pytestmark = pytest.mark.filterwarnings("ignore")


def alone(folder, kind: str) -> tuple[dict, dict]:
    """What one process sees, and the episodes it plays in each step."""
    home, name, options = KINDS[kind]
    one = credit_trainer(folder / home, name, UPDATES, **options)
    played, updates, after = {}, [], one.after_update

    def watched():
        played[one.step.number] = one.step.episodes
        updates.append(dict(one.step.updates[-1]))
        after()

    one.after_update = watched
    one.train()
    return {"updates": updates, "weights": weights_of(one.bare), "adam": adam_steps(one.optimizer)}, played


@pytest.fixture(scope="module")
def seen(tokenizer, tmp_path_factory):
    """Of each kind what one process saw and what two did."""
    folder = tmp_path_factory.mktemp("processes")
    for name in ("tied", "untied"):
        (folder / name).mkdir()
        prepare(folder / name, tokenizer, tied=name == "tied")
    ones = {kind: alone(folder, kind)[0] for kind in ("ddp", "ddp-own-loss")}
    ones["fsdp2"], played = alone(folder, "fsdp2")
    torch.save(played, folder / "script.pt")
    script = Path(__file__).with_name("two_processes.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(UPDATES), *KINDS],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    both = {kind: [torch.load(folder / f"{kind}-{rank}.pt", weights_only=True) for rank in (0, 1)] for kind in KINDS}
    return ones, both


@pytest.mark.parametrize("kind", ("ddp", "ddp-own-loss", "fsdp2"))
def test_two_processes_make_the_update_of_one(seen, kind):
    ones, both = seen
    one = ones[kind]
    for rank in both[kind]:
        assert rank["world"] == 2 and rank["sharded"] == (kind == "fsdp2")
        for theirs, ours in zip(rank["updates"], one["updates"], strict=True):
            assert {k: theirs[k] for k in ("step", "reuse", "applied", "stop", "signal")} == {
                k: ours[k] for k in ("step", "reuse", "applied", "stop", "signal")
            }
            for name in ("energy", "loss", "grad_norm", "kl", "pg_loss", "aux_loss"):
                assert (theirs[name] or 0) == pytest.approx(ours[name] or 0, rel=1e-3, abs=1e-5), name
        for name, weight in one["weights"].items():
            if name.endswith("k_proj.bias"):  # softmax cancels it: its gradient is rounding alone, which Adam scales up
                continue
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=5e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_decide_alike_and_a_trip_leaves_no_trace(seen, kind):
    ones, both = seen
    first, second = both[kind]
    assert first["updates"] == second["updates"]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    applied = sum(u["applied"] for u in first["updates"])
    for rank in (first, second):
        assert set(rank["adam"]) == {float(applied)}
    if kind == "fsdp2-engine":
        assert torch.equal(first["tokens"], second["tokens"])
        assert not torch.equal(first["tokens"], both["fsdp2"][0]["tokens"])
    elif kind != "ddp-own-loss":
        assert applied == UPDATES - 1 and set(ones[kind]["adam"]) == {float(applied)}
        tripped = [u["reuse"] for u in first["updates"] if not u["applied"]]
        following = first["updates"][[u["applied"] for u in first["updates"]].index(False) + 1]
        assert tripped[0] > 1 and following["reuse"] == 1 and following["step"] == 1
