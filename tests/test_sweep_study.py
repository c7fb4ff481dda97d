"""Studies: cells from TOML, everything that is wrong with one told before anything runs."""

import json

import pytest
from make_notebook import make_notebook

from workbench import cli, shipped
from workbench.config import digest
from workbench.errors import WorkbenchError
from workbench.sweep.study import Study

PARAMETERS = """
from typing import Literal
method: Literal["a", "b", "c"] = "a"
rate: float = 0.5
options: dict = {}
seed: int = 0
model: str = "m"
run_dir: str = ""
"""


@pytest.fixture(autouse=True)
def notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_notebook(tmp_path / "small.ipynb", PARAMETERS, "pass")


def study(tmp_path, text, head='notebook = "small.ipynb"\n'):
    path = tmp_path / "s.toml"
    path.write_text(head + text)
    return path


def test_cells_are_cases_by_the_grid(tmp_path):
    text = """
    [parameters]
    rate = 1
    [grid]
    seed = [0, 1]
    model = ["m", "n"]
    [[case]]
    method = "a"
    [[case]]
    method = "b"
    options = {k = 2}
    label = "b k=2"
    """
    found = Study.read(study(tmp_path, text))
    assert found.name == "s" and len(found.cells) == 8
    first, last = found.cells[0], found.cells[-1]
    whole = {"method": "a", "rate": 1.0, "options": {}, "seed": 0, "model": "m"}
    assert first.parameters == whole and type(first.parameters["rate"]) is float and first.label == "a"
    assert first.digest == digest(whole)
    assert last.label == "b k=2" and last.parameters["options"] == {"k": 2} and last.parameters["model"] == "n"
    assert found.varying == ("method", "options", "seed", "model")
    assert found.told(last) == "b k=2 (seed=1, model=n)"


def test_a_study_comes_back_from_its_folder(tmp_path):
    found = Study.read(study(tmp_path, "[grid]\nseed = [0, 1]\n"))
    found.save(tmp_path)
    assert Study.load(tmp_path) == found
    stored = json.loads((tmp_path / "study.json").read_text())
    assert stored["notebook"] == "small" and stored["cells"][1]["parameters"]["seed"] == 1
    del stored["cells"][0]["digest"]
    (tmp_path / "study.json").write_text(json.dumps(stored))
    with pytest.raises(WorkbenchError, match=r"study.json does not describe a study: .*digest"):
        Study.load(tmp_path)


def test_other_axes_stand_in_the_label(tmp_path):
    """Runs of one label are taken for replicates, so nothing but seeds and models may differ between them."""
    text = '[grid]\nrate = [0.1, 0.2]\nseed = [0, 1]\nmethod = ["a", "b"]\n'
    labels = {cell.label for cell in Study.read(study(tmp_path, text)).cells}
    assert labels == {"a rate=0.1", "a rate=0.2", "b rate=0.1", "b rate=0.2"}
    unnamed = Study.read(study(tmp_path, "[[case]]\nrate = 0.1\n[[case]]\nrate = 0.2\n"))
    assert [cell.label for cell in unnamed.cells] == ["rate=0.1", "rate=0.2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[grid]\nsede = [0]", "unknown parameter of small.ipynb 'sede'; did you mean 'seed'?"),
        ("[grid]\nseed = [0, 'x']", "s (seed=x): small.ipynb: seed must be int, got 'x' (str)"),
        ("[[case]]\nmethod = 'd'", "unknown value of method in small.ipynb 'd'"),
        ("[params]\nseed = 1", "unknown key of {path} 'params'; did you mean 'parameters'?"),
        ("[parameters]\nseed = 1\n[grid]\nseed = [0]", "seed stands in [parameters] and in [grid]; once is expected"),
        ("[grid]\nseed = [0]\n[[case]]\nseed = 1", "seed stands in [grid] and in a [[case]]"),
        ("[grid]\nseed = 3", "grid.seed must be a list of values, got 3"),
        ("[grid]\nseed = []", "grid.seed must be a list of values, got []"),
        ("[grid]\nseed = [0, 1, 0]", "cells 1 and 3 (both s) are the same run: they share method=a, seed=0, model=m"),
        ("[[case]]\nmethod = 'a'\n[[case]]\nmethod = 'a'\nrate = 0.1", "cases 1 and 2 are both 'a': give one a label"),
        ("[[case]]\nmethod = 'a'\nlabel = 3", "the label of case 1 must be text, got 3"),
        ("grid = 3", "grid must be a table, [grid]"),
        ("case = [1]", "case must be tables, [[case]]"),
        ("name = '../x'", "name must be letters, digits"),
        ("seed = [", "cannot be read as TOML"),
        ("seed = " + "[" * 5000, "cannot be read as TOML: maximum recursion depth"),
        ("[parameters]\nrun_dir = 'x'", "run_dir is set by the runner"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path, text, said):
    path = study(tmp_path, text)
    with pytest.raises(WorkbenchError) as error:
        Study.read(path)
    assert said.replace("{path}", str(path)) in str(error.value) and "\n" not in str(error.value), str(error.value)
    assert str(path) in str(error.value)


def test_a_study_without_a_notebook_is_refused(tmp_path, capsys):
    with pytest.raises(WorkbenchError, match="notebook must be a shipped notebook's name or a path"):
        Study.read(study(tmp_path, "", head=""))
    with pytest.raises(WorkbenchError, match="unknown notebook 'trian'; did you mean 'train'"):
        Study.read(study(tmp_path, "", head='notebook = "trian"\n'))
    assert cli.main(["sweep", "credti"]) == 2
    assert "unknown study 'credti'; did you mean 'credit'?" in capsys.readouterr().err


def test_training_is_checked_as_the_runner_does(tmp_path):
    text = '[grid]\nseed = [0]\n[[case]]\nmethod = "grpo_reuse"\nmethod_options = {max_reus = 2}\n'
    with pytest.raises(WorkbenchError, match=r"s.toml, grpo_reuse .*max_reus.*did you mean 'max_reuse'"):
        Study.read(study(tmp_path, text, head='notebook = "train"\n'))
    with pytest.raises(WorkbenchError, match="experiment is set by the sweep"):
        Study.read(study(tmp_path, '[parameters]\nexperiment = "x"\n', head='notebook = "train"\n'))


def test_shipped_studies_are_sound():
    assert "credit" in shipped.studies()
    for name in shipped.studies():
        found = Study.read(name)
        assert found.name == name and found.cells
        if found.notebook.stem == "train":
            assert {cell.parameters["experiment"] for cell in found.cells} == {name}
    credit = Study.read("credit")
    labels = [cell.label for cell in credit.cells]
    assert len(set(labels)) == 10 and all(labels.count(label) >= 8 for label in labels)


def test_a_dry_run_lists_cells_and_writes_nothing(tmp_path, capsys):
    path = study(tmp_path, "[grid]\nseed = [0, 1]\n[[case]]\nmethod = 'a'\n[[case]]\nmethod = 'b'\nrate = 0.1\n")
    assert cli.main(["sweep", str(path), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["state", "label", "method", "rate", "seed"]
    assert lines[3].split() == ["to", "run", "b", "b", "0.1", "0"]
    assert lines[-1] == "0 of 4 done already, 0 to resume"
    assert not (tmp_path / "runs").exists()
    assert cli.main(["sweep", str(path), "--jobs", "0"]) == 2
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err
