"""The runner: parameters checked first, every way a notebook can stop early told as a failure, runs resumed."""

import contextlib
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import polars as pl
import pytest
from make_notebook import make_notebook

from workbench import shipped
from workbench.errors import WorkbenchError
from workbench.runs import RESULT_MIME, RunFolder, files, record_result
from workbench.runs.execute import RunFailed, run_notebook
from workbench.runs.parameters import declared

PARAMETERS = '''
from typing import Literal
method: Literal["grpo", "sdar"] = "grpo"  # which rule
steps: int = 3
lr: float = 1e-4
model: "str | None" = None
clip: list = [0.2, -0.28]
seed = 7
run_dir: str = ""
'''


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(given, said, notebook, **options):
    with pytest.raises(WorkbenchError) as error:
        run_notebook(notebook, given, "runs", progress=False, **options)
    assert said in str(error.value) and "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": "5"}, "unknown parameter of small.ipynb 'step'; did you mean 'steps'? known: clip, lr, method,"),
        ({"steps": "many"}, "small.ipynb: steps must be int, got 'many' (str)"),
        ({"steps": 2.5}, "steps must be int, got 2.5 (float)"),
        ({"method": "grop"}, "did you mean 'grpo'? known: grpo, sdar"),
        ({"seed": "x"}, "seed must be int"),
        ({"clip": "0.2"}, "clip must be list"),
        ({"run_dir": "x"}, "run_dir is set by the runner"),
    ],
)
def test_bad_parameters_are_refused_before_anything_exists(tmp_path, given, said):
    refused(given, said, make_notebook(tmp_path / "small.ipynb", PARAMETERS))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("x: Path = 1", "x is annotated 'Path'"),
        ("x = open('f')", "the default of x must be a plain value, got open('f')"),
        ("x: int = 'a'", "x must be int, got 'a'"),
        ("x: int = = 1", "is not Python: line 1"),
    ],
)
def test_bad_parameter_cells_are_refused(tmp_path, cell, said):
    refused({}, said, make_notebook(tmp_path / "bad.ipynb", cell))


def test_what_is_no_notebook_is_refused(tmp_path):
    two = make_notebook(tmp_path / "two.ipynb", "a = 1", "b = 1")
    content = json.loads(two.read_text())
    content["cells"][2]["metadata"]["tags"] = ["parameters"]
    two.write_text(json.dumps(content))
    refused({}, "2 cells are tagged 'parameters'", two)
    two.write_text(two.read_text()[:100])
    refused({}, "cannot be read as JSON", two)
    two.write_text("{}")
    refused({}, "is not a notebook of format 4", two)
    refused({}, "unknown notebook 'nowhere.ipynb'", "nowhere.ipynb")
    (tmp_path / "train.py").write_text("")
    refused({}, "train.py is not a notebook", "train.py")
    refused({"a": 1}, "declares no parameters", make_notebook(tmp_path / "none.ipynb", "# nothing"))
    assert not (tmp_path / "runs").exists()


def test_shipped_notebooks_are_found_by_name(tmp_path, monkeypatch):
    make_notebook(tmp_path / "shipped" / "train.ipynb", "a = 1")
    monkeypatch.setattr(shipped, "root", lambda folder: tmp_path / "shipped")
    assert shipped.notebook("train") == shipped.notebook("train.ipynb") == tmp_path / "shipped" / "train.ipynb"
    own = make_notebook(tmp_path / "train.ipynb", "a = 1")
    assert shipped.notebook("train.ipynb") == own
    with pytest.raises(WorkbenchError, match="did you mean 'train'"):
        shipped.notebook("trian")


def test_types_come_from_annotations_and_defaults(tmp_path):
    notebook = json.loads(make_notebook(tmp_path / "small.ipynb", PARAMETERS).read_text())
    found = declared(notebook, "small.ipynb")
    assert list(found) == ["method", "steps", "lr", "model", "clip", "seed", "run_dir"]
    assert found["model"].kind == (str | None) and found["seed"].kind is int
    assert found["clip"].default == [0.2, -0.28]


def test_a_run_from_start_to_end(tmp_path, capfd):
    hostile = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"
    notebook = make_notebook(
        tmp_path / "my notebook.ipynb",
        PARAMETERS + 'experiment: str = "first"\n',
        "import os, sys\nfrom pathlib import Path\nprint(method, steps, lr, model, clip, seed, sys.executable)\n"
        "assert type(lr) is float and model is None and Path.cwd() == Path(os.environ['PWD_OF_TEST'])",
        "from IPython.display import HTML\n"
        f"print({hostile!r}, chr(27) + ']0;gone' + chr(7) + chr(27) + '[31mred')\nHTML({hostile!r})",
        "import polars as pl\nfrom workbench.runs import RunFolder, record_result\nrun = RunFolder.open(run_dir)\n"
        "with run.lock():\n    run.write_table('steps', 1, pl.DataFrame({'loss': [0.5]}))\n"
        "record_result({'success': 0.5, 'text': " + repr(hostile) + "})",
        kernelspec=False,
    )
    os.environ["PWD_OF_TEST"] = str(tmp_path)
    run = run_notebook(notebook, {"steps": "5", "lr": 1, "model": "none"}, tmp_path / "out {x}")

    assert run.path.parent == tmp_path / "out {x}" / "first" and run.is_complete and not run.is_locked
    parameters = {"method": "grpo", "steps": 5, "lr": 1.0, "model": None, "clip": [0.2, -0.28], "seed": 7}
    parameters["experiment"] = "first"
    assert run.config == parameters
    manifest = run.manifest
    assert manifest["status"] == "complete" and manifest["error"] is None and manifest["notebook"] == "my notebook"
    assert manifest["parameters"] == parameters and manifest["seeds"] == {"seed": 7}
    assert run.path.name.endswith("-" + manifest["digest"])
    assert manifest["notebook_sha256"] == hashlib.sha256(notebook.read_bytes()).hexdigest()
    assert manifest["result"] == {"success": 0.5, "text": hostile}
    assert [cell["status"] for cell in manifest["cells"]] == ["completed"] * 5
    assert manifest["cells"][0]["line"].startswith("from typing import Literal")
    assert set(manifest["versions"]) >= {"python", "workbench", "torch", "transformers", "polars", "papermill"}
    assert manifest["device"] and manifest["seconds"] > 0 and len(manifest["attempts"]) == 1
    artifacts = {a["path"]: a for a in manifest["artifacts"]}
    made = {"executed.ipynb", "notebook.ipynb", "report.html", "tables/steps/step=000001.parquet"}
    assert set(artifacts) == {"config.json", *made}
    for name, artifact in artifacts.items():
        content = (run.path / name).read_bytes()
        assert artifact["bytes"] == len(content) and artifact["sha256"] == hashlib.sha256(content).hexdigest()

    told = capfd.readouterr()
    assert told.out == ""
    assert "[3/5] import os, sys\n" in told.err and f"grpo 5 1.0 None [0.2, -0.28] 7 {sys.executable}\n" in told.err
    assert "\x1b" not in told.err and "red\n" in told.err and "gone" not in told.err
    report = (run.path / "report.html").read_text()
    assert "<img src=x" not in report and "<script>alert" not in report and "&lt;img src=x" in report
    refused({}, "is complete; there is nothing to resume", None, resume=run.path)


def test_leaving_early_with_success_is_a_failure(tmp_path):
    notebook = make_notebook(tmp_path / "leaves.ipynb", "a = 1", "# why\n\nraise SystemExit(0)", "print('unreached')")
    with pytest.raises(RunFailed) as failure:
        run_notebook(notebook, progress=False)
    run, text = failure.value.run, str(failure.value)
    assert text.splitlines()[0] == "run failed in cell 2 of 3: raise SystemExit(0)"
    assert "SystemExit: 0 (leaving early counts as a failure)" in text
    assert f"resume: workbench run --resume runs/leaves/{run.path.name}" in text
    assert not run.is_complete and run.state == "failed"
    assert [cell["status"] for cell in run.manifest["cells"]] == ["completed", "failed", "pending"]


def test_an_error_is_told_and_the_run_resumed(tmp_path):
    notebook = make_notebook(
        tmp_path / "fails.ipynb",
        "steps: int = 3\nrun_dir: str = ''",
        "import polars as pl\nfrom pathlib import Path\nfrom workbench.runs import RunFolder, record_result\n"
        "run = RunFolder.open(run_dir)\n"
        "if 'steps' in run.tables:\n    record_result({'steps': steps, 'again': True})\n"
        "else:\n    run.write_table('steps', 1, pl.DataFrame({'a': [1]}))\n"
        "    raise ValueError('loss is\\nnot finite')",
    )
    with pytest.raises(RunFailed) as failure:
        run_notebook(notebook, {"steps": 9}, progress=False)
    run = failure.value.run
    raised = "raise ValueError('loss is\\nnot finite')"
    assert f"in cell 3 of 3: {raised}\n  ValueError: loss is not finite\n" in str(failure.value)
    assert run.manifest["traceback"] == ["Cell In[3], line 9: raise ValueError('loss is\\nnot finite')"]
    assert "  ValueError: loss is not finite\n    at Cell In[3], line 9: raise" in str(failure.value)
    assert run.manifest["error"] == "ValueError: loss is not finite" and run.manifest["result"] is None
    executed = nbformat.read(run.path / "executed.ipynb", as_version=4)
    assert [c.cell_type for c in executed.cells] == ["markdown", "code", "code", "code"]
    assert executed.cells[-1].outputs[-1].ename == "ValueError"

    refused({"steps": 4}, "a resumed run keeps its parameters: steps is 9, got 4", None, resume=run.path)
    other = make_notebook(tmp_path / "other.ipynb", "steps: int = 3")
    refused({}, "is a run of 'fails', not of 'other'", other, resume=run.path)

    again = run_notebook(resume=run.path, progress=False)
    assert again.path == run.path and again.is_complete
    assert again.manifest["result"] == {"steps": 9, "again": True} and again.manifest["error"] is None
    assert [a["status"] for a in again.manifest["attempts"]] == ["failed", "complete"]
    assert again.manifest["seconds"] == pytest.approx(sum(a["seconds"] for a in again.manifest["attempts"]), abs=0.01)


def test_a_dead_kernel_is_a_failure_of_its_cell(tmp_path):
    notebook = make_notebook(tmp_path / "dies.ipynb", "a = 1", "import os; os._exit(0)", "print('unreached')")
    with pytest.raises(RunFailed, match="in cell 2 of 3: import os.*\n  the kernel died") as failure:
        run_notebook(notebook, progress=False)
    assert [cell["status"] for cell in failure.value.run.manifest["cells"]] == ["completed", "failed", "pending"]


def test_a_full_disk_ends_the_run_in_one_line(tmp_path, monkeypatch):
    notebook = make_notebook(tmp_path / "small.ipynb", "a = 1", "print(1)")
    real = os.fsync

    def fsync(handle):
        if "executed.ipynb" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(RunFailed, match="executed.ipynb was not written: the disk is full") as failure:
        run_notebook(notebook, progress=False)
    assert failure.value.why.endswith("executed.ipynb was not written: the disk is full")
    kept = ["LOCK", "config.json", "manifest.json", "notebook.ipynb"]
    assert sorted(p.name for p in failure.value.run.path.iterdir()) == kept


@contextlib.contextmanager
def started(tmp_path: Path, name: str) -> Iterator[tuple[subprocess.Popen, RunFolder, int]]:
    """A runner process whose notebook sits in a long cell; its run folder and its kernel's process id."""
    waits = "import os, time\nprint('kernel', os.getpid(), flush=True)\nfor _ in range(600):\n    time.sleep(0.1)"
    notebook = make_notebook(tmp_path / f"{name}.ipynb", "a = 1", waits)
    command = [sys.executable, "-m", "workbench.cli", "run", str(notebook)]
    runner = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        kernel = next((int(line.split()[1]) for line in runner.stderr if line.startswith("kernel ")), None)
        assert kernel, "the notebook did not start"
        yield runner, RunFolder.open(next((tmp_path / "runs" / name).iterdir())), kernel
    finally:
        runner.kill()
        runner.wait()


def _gone(pid: int, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the kernel's process under /proc")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_run_to_resume(tmp_path, stop):
    with started(tmp_path, "waits") as (runner, run, kernel):
        assert run.state == "running" and run.manifest["status"] == "running"
        runner.send_signal(stop)
        _, told = runner.communicate(timeout=120)
    assert runner.returncode == 130
    assert "run interrupted in cell 2 of 2: " in told
    assert f"resume: workbench run --resume runs/waits/{run.path.name}" in told and "Traceback" not in told
    assert run.state == "interrupted" and run.manifest["cells"][-1]["status"] == "interrupted"
    assert _gone(kernel)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the kernel's process under /proc")
def test_a_killed_runner_takes_its_kernel_and_lock_with_it(tmp_path):
    with started(tmp_path, "killed") as (runner, run, kernel):
        runner.kill()
        runner.communicate(timeout=60)
    assert run.state == "interrupted" and not run.is_complete
    assert _gone(kernel)
    with run.lock():
        pass


def test_the_result_record_is_plain_json(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata, raw: shown.append(data))
    given = {"a": np.float32(0.5), "b": np.arange(2), "c": pl.Series([1, 2]), "d": float("nan")}
    record_result(given | {"e": {"f": (1, None)}})
    assert shown[0][RESULT_MIME] == {"a": 0.5, "b": [0, 1], "c": [1, 2], "d": None, "e": {"f": [1, None]}}
    assert json.loads(json.dumps(shown[0][RESULT_MIME], allow_nan=False))
    assert shown[0]["text/plain"].splitlines()[0] == "a  0.5"
    with pytest.raises(WorkbenchError, match=r"e\.f\[0\] must be a plain value, got object"):
        record_result({"e": {"f": [object()]}})
