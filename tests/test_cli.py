"""The command line: exit codes, one-line errors, and no heavy import before it is needed."""

import json
import subprocess
import sys
import time
import types

import pytest
from make_notebook import make_notebook

from workbench import __version__, cli
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder, execute


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def called(monkeypatch):
    """What the command line hands to the runner."""
    calls = []

    def run_notebook(*args, **options):
        calls.append((args, options))
        return RunFolder.create("runs", "train", {})

    monkeypatch.setattr(execute, "run_notebook", run_notebook)
    return calls


def test_run_hands_over_names_and_text(called, capsys):
    argv = ["run", "train", "-p", "method", "agent_opsd", "--out", "o", "-p", "lr", "-1e-3", "-p", "note", "--quiet"]
    assert cli.main([*argv, "-p", "steps", "5", "--quiet"]) == 0
    args, options = called[0]
    assert args == ("train", {"method": "agent_opsd", "lr": "-1e-3", "note": "--quiet", "steps": "5"}, "o", None)
    assert options == {"progress": False, "changed_notebook": "refuse"}
    run, report = capsys.readouterr().out.splitlines()
    assert run.startswith("run     runs/train/") and report == f"report  {run.split()[1]}/report.html"


def test_resume_needs_no_notebook(called):
    assert cli.main(["run", "--resume", "runs/train/x"]) == 0
    options = {"progress": True, "changed_notebook": "refuse"}
    assert called == [((None, {}, "runs", "runs/train/x"), options)]


def test_exit_codes(monkeypatch, capsys):
    run = RunFolder.create("runs", "train", {})
    for raised, code, said in (
        (WorkbenchError("one line"), 2, "workbench: one line\n"),
        (execute.RunFailed("cell 3\n  why", run), 1, "cell 3\n  why\n"),
        (execute.RunInterrupted("stopped\n  resume: …", run), 130, "stopped\n  resume: …\n"),
        (KeyboardInterrupt(), 130, ""),
    ):
        def stop(*args, raised=raised, **options):
            raise raised

        monkeypatch.setattr(execute, "run_notebook", stop)
        assert cli.main(["run", "train"]) == code
        told = capsys.readouterr()
        assert told.out == "" and told.err == said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run"], "which notebook?"),
        (["run", "small.ipynb", "-p", "step", "3"], "did you mean 'steps'"),
        (["run", "small.ipynb", "-p", "steps", "x"], "steps must be int, got 'x' (str)"),
        (["run", "small.ipynb", "-p", "steps", "1", "-p", "steps", "2"], "steps is given more than once"),
        (["run", "--resume", "nowhere"], "is not a run folder"),
        (["report", "."], "is not a run folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, argv, said):
    make_notebook(tmp_path / "small.ipynb", "steps: int = 3")
    assert cli.main(argv) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and said in told.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("argv", [["fly"], ["run", "a", "b"], ["run", "x", "-p", "steps"], []])
def test_wrong_usage_is_bad_input(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2 and "usage:" in capsys.readouterr().err


def test_runs_are_listed(capsys):
    assert cli.main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs under runs\n"
    first, second = (RunFolder.create("runs", "train", {"seed": seed}) for seed in (1, 2))
    first.complete()
    second.update_manifest(status="failed", error="ValueError: loss", seconds=12.0)
    assert cli.main(["runs"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines[f"runs/train/{first.path.name}"].split()[1:] == ["complete"]
    assert lines[f"runs/train/{second.path.name}"].split(maxsplit=4)[1:] == ["failed", "12", "s", "ValueError: loss"]


def test_methods_are_listed(capsys):
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("agent_opsd ") and "2608.05987" in line for line in lines)
    assert {"grpo", "sdar", "grpo_opsd", "grpo_dgg", "agent_opsd_dgg", "grpo_reuse", "grpo_random_stop"} <= {
        line.split()[0] for line in lines
    }


def test_one_method_says_what_it_sees_and_takes(capsys):
    assert cli.main(["methods", "sdar"]) == 0
    said = capsys.readouterr().out
    assert "arXiv 2605.15155" in said and "beta " in said and "GRPO exactly with {'coef': 0.0}" in said
    assert cli.main(["methods", "sdra"]) == 2
    assert "did you mean 'sdar'" in capsys.readouterr().err


def test_demo_passes_its_options_on(monkeypatch):
    given = {}
    demo = types.SimpleNamespace(main=lambda **options: given.update(options))
    monkeypatch.setitem(sys.modules, "workbench.demo", demo)
    assert cli.main(["demo"]) == 0 and given == {}
    assert cli.main(["demo", "--env", "alfworld", "--out", "o", "--steps", "2"]) == 0
    assert given == {"env": "alfworld", "out": "o", "steps": 2}


def test_nothing_heavy_is_imported_to_refuse_a_parameter(tmp_path):
    make_notebook(tmp_path / "small.ipynb", "steps: int = 3")
    code = (
        "import sys; from workbench import cli; code = cli.main(['run', 'small.ipynb', '-p', 'step', '3']); "
        "print(code, sorted({'torch', 'transformers', 'papermill', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"


def test_version_and_help_of_the_installed_command():
    command = [sys.executable, "-m", "workbench.cli"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"workbench {__version__}\n"
    usage = subprocess.run([*command, "run", "--help"], capture_output=True, text=True, check=True)
    assert all(word in usage.stdout for word in ("-p NAME VALUE", "--out", "--resume RUN", "--quiet"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("method", "sdra", "did you mean 'sdar'"), ("steps", "0", "steps must be at least 1"), ("env", "twcc", "'twc'"),
     ("method_options", '{"gamm": 1}', "unknown option"), ("more", '{"lora_rnk": 1}', "lora_rank"),
     ("model", "./nothere", "does not exist"), ("env", "coin", "no small model"),
     ("skills", "nothere", "skills folder nothere: general.md expected")],
)  # fmt: skip
def test_training_that_cannot_start_leaves_no_run(tmp_path, capsys, name, value, said):
    assert cli.main(["run", "train", "-p", name, value, "--out", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_options_of_a_replay_are_numbers_however_they_are_spelt():
    assert cli.rollouts._options(["gamma=.8", "lam=1", "signed=false", "prior=half"]) == {
        "gamma": 0.8, "lam": 1, "signed": False, "prior": "half",
    }  # fmt: skip


def test_a_name_with_control_characters_is_told_in_one_plain_line(tmp_path, capsys):
    assert cli.main(["import", str(tmp_path / "e\nvil\x1b[31m"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "\x1b" not in error and "e\\nvil\\x1b[31m" in error


def test_a_stopped_import_leaves_nothing(tmp_path):
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    line = json.dumps({"messages": said, "reward": 1})
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * 200_000)
    command = [sys.executable, "-m", "workbench.cli", "import", "a.jsonl", "--out", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".out.*")):
        time.sleep(0.02)
    process.terminate()
    assert process.wait() == 130 and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
