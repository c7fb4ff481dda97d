"""train.ipynb through the runner, small, and its result record."""

import json

import pytest

from workbench.errors import WorkbenchError
from workbench.runs.execute import RunFailed, run_notebook

SMALL = {
    "steps": 2, "tasks_per_step": 2, "group_size": 4, "eval_games": 4, "eval_every": 2, "checkpoint_every": 2,
    "more": {"live_episodes": 8, "max_turns": 4},
}  # fmt: skip


@pytest.mark.slow
def test_it_trains_records_and_resumes_to_the_same_result(tmp_path):
    run = run_notebook(
        "train", SMALL | {"method": "agent_opsd", "seed": 3, "experiment": "small"}, tmp_path, progress=False
    )
    result = run.manifest["result"]
    assert run.is_complete and run.path.parent.name == "small"
    assert result["steps"] == 2 and result["updates"] == 2 and result["method"] == "agent_opsd"
    assert set(result["start"]) == set(result["final"]) == {"heldout/student", "heldout/teacher", "unseen/student"}
    evals = run.read("evals")
    for panel, rate in result["final"].items():
        name, role = panel.split("/")
        rows = evals.filter((evals["panel"] == name) & (evals["role"] == role) & (evals["step"] == 2))
        assert rate == pytest.approx(rows["outcome"].mean())
    report = (run.path / "report.html").read_text()
    assert report.count("data-figure>") >= 3
    notebook = json.loads((run.path / "executed.ipynb").read_text())
    assert not [o for c in notebook["cells"] for o in c.get("outputs", []) if o["output_type"] == "error"]


@pytest.mark.usefixtures("in_process")
def test_bad_settings_fail_in_one_clear_account(tmp_path):
    with pytest.raises(RunFailed) as error:
        run_notebook("train", SMALL | {"more": {"skill_position": "end"}}, tmp_path, progress=False)
    assert "must be front or user" in str(error.value) and "resume" in str(error.value)
    with pytest.raises(WorkbenchError, match="skills folder no/such/folder: general.md expected"):
        run_notebook("train", SMALL | {"skills": "no/such/folder"}, tmp_path / "none", progress=False)
    with pytest.raises(WorkbenchError, match="unknown name in parameters 'learning_rate'"):
        run_notebook("train", SMALL | {"more": {"learning_rate": 1.0}}, tmp_path / "none", progress=False)
    assert not (tmp_path / "none").exists()
