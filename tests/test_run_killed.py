"""SIGKILL at random moments, many times in one run: what is on disk in the end is what an undisturbed run leaves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from polars.testing import assert_frame_equal
from tiny_models import tiny_model

from workbench.runs import RunFolder

SCRIPT = Path(__file__).with_name("killed_trainer.py")
OPTIONS = {
    "method": "agent_opsd_dgg", "method_options": {"window": 2, "max_reuse": 3}, "env": "echo", "prompt": "plain",
    "steps": 40, "tasks_per_step": 2, "group_size": 3, "live_episodes": 6, "max_turns": 3, "max_response_tokens": 2,
    "max_context": 96, "max_invalid": 0, "eval_every": 3, "eval_games": 2, "checkpoint_every": 2, "seed": 5, "lr": 1e-3,
}  # fmt: skip


@pytest.fixture
def config(tmp_path, tokenizer) -> Path:
    folder = tmp_path / "echo"
    tiny_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "skills").mkdir()
    (folder / "skills" / "general.md").write_text("look around you go")
    path = folder / "config.json"
    path.write_text(json.dumps(OPTIONS | {"model": str(folder / "model"), "skills": str(folder / "skills")}))
    return path


@pytest.mark.timeout(900)  # half a minute of one core, minutes where many share it
def test_killed_twenty_times_the_tables_are_those_of_an_undisturbed_run(tmp_path, config):
    whole, broken = (RunFolder.create(tmp_path, name, {}) for name in ("whole", "broken"))
    command = [sys.executable, str(SCRIPT), str(whole.path), str(broken.path), str(config), "20", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["20"], done.stderr[-2000:]
    assert whole.tables == broken.tables and set(whole.tables) >= {"steps", "updates", "modules", "turns", "evals"}
    assert len(whole.read("steps")) == OPTIONS["steps"] and 0 < whole.read("steps")["success"].mean() < 1
    for name in whole.tables:
        one, other = whole.read(name), broken.read(name)
        if name == "timings":
            one, other = one.drop("seconds"), other.drop("seconds")
        assert_frame_equal(one, other, check_exact=True)
    states = [torch.load(run.latest_checkpoint() / "trainer.pt", weights_only=True) for run in (whole, broken)]
    assert states[0]["step"] == OPTIONS["steps"] and states[0]["model"].keys() == states[1]["model"].keys()
    assert all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in states[0]["model"])
    assert not list(broken.path.rglob(".*"))  # nothing half-written is left
