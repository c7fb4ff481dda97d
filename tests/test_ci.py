"""`workbench ci`: order, expectations, what it leaves for a service, and the pages a user copies."""

import json
import os
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from make_notebook import make_notebook

from workbench import ci, cli, expectations, shipped, trackers
from workbench.errors import WorkbenchError
from workbench.expectations import Expectation
from workbench.runs import RunFolder
from workbench.runs.execute import RunFailed

ROOT = Path(__file__).parent.parent
RECORD = {"steps": 2, "loss": 0.5, "final": {"heldout/student": 0.25}, "ends": [True, None], "seconds": 3.0}


@pytest.fixture
def folder(tmp_path):
    declared = {"train": "steps: int = 99", "beliefs": "run: str = ''", "compare": "runs: list = []"}
    for name, parameters in declared.items():
        make_notebook(tmp_path / "nb" / f"{name}.ipynb", f"run_dir: str = ''\n{parameters}")
    return tmp_path / "nb"


@pytest.fixture
def fake(monkeypatch):
    """Runs without a kernel: called is what was asked for; records, errors by notebook name decide what comes out."""
    called, records, errors = [], {}, {}

    def run_notebook(notebook, parameters, out, progress):
        name = Path(notebook).stem
        called.append((name, parameters, os.environ.get(trackers.VARIABLE)))
        run = RunFolder.create(out, name, {"parameters": parameters})
        run.update_manifest(result=records.get(name, {"run": run.path.name, **RECORD}), error=errors.get(name))
        if name in errors:
            raise RunFailed(f"run failed in cell 2 of 3\n  {errors[name]}", run, errors[name])
        (run.path / "report.html").write_text(name)
        return run

    monkeypatch.setattr(ci, "run_notebook", run_notebook)
    fake = type("Fake", (), {"called": called, "records": records, "errors": errors})
    return fake


SMALL = """
[compare]
needs = ["train", "other"]
[other]
notebook = "train"
parameters = { steps = 3 }
[train.parameters]
steps = 2
[train.expect]
steps = 2
final."heldout/student" = { min = 0, max = 1 }
"ends[0]" = true
[beliefs]
needs = "train"
"""


def test_runs_are_made_before_they_are_needed(folder, fake, tmp_path):
    (folder / "ci.toml").write_text(SMALL)
    outcomes = ci.check(folder, tmp_path / "ci", say=lambda line: None)
    assert [(o.label, o.status) for o in outcomes] == [(n, "ok") for n in ("train", "beliefs", "other", "compare")]
    runs = {o.label: str(o.run.path) for o in outcomes}
    asked = [parameters for _, parameters, _ in fake.called]
    assert asked[0] == {"steps": 2} and asked[2] == {"steps": 3} and asked[1] == {"run": runs["train"]}
    assert asked[3] == {"runs": [runs["train"], runs["other"]]}
    assert {tracked for *_, tracked in fake.called} == {"none"} and trackers.VARIABLE not in os.environ
    assert (tmp_path / "ci" / "reports" / "other.html").read_text() == "train"


def test_failures_are_told_everywhere(folder, fake, tmp_path, capsys, monkeypatch):
    (folder / "ci.toml").write_text(SMALL + "[train.expect2]\n")
    assert cli.main(["ci", "--notebooks", str(folder), "--out", str(tmp_path / "ci")]) == 2
    assert "expect2" in capsys.readouterr().err and not fake.called
    (folder / "ci.toml").write_text(SMALL.replace("steps = 2\nfinal", "steps = 4\nfinal"))
    fake.errors["compare"] = "ValueError: <b>\x1b & no runs"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert cli.main(["ci", "--notebooks", str(folder), "--out", str(tmp_path / "ci")]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^train +\d+\.\d  failed   steps is 2, 4 is expected$", told, re.M)
    assert re.search(r"^beliefs +\d+\.\d  ok$", told, re.M) and "2 ok, 2 failed, 0 skipped" in told
    suite = ElementTree.parse(tmp_path / "ci" / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "0")
    messages = {case.get("name"): case.find("failure").get("message") for case in suite if len(case)}
    assert messages == {"train": "steps is 2, 4 is expected", "compare": "ValueError: <b>? & no runs"}
    page = (tmp_path / "ci" / "reports" / "index.html").read_text()
    assert "<a href='train.html'>train</a>" in page and "ValueError: &lt;b&gt;" in page and "<b>" not in page
    summary = (tmp_path / "summary.md").read_text()
    assert re.search(r"^\| train \| \d+\.\d \| failed \| steps is 2, 4 is expected \|$", summary, re.M)


def test_what_needs_a_failed_run_is_skipped(folder, fake, tmp_path):
    (folder / "ci.toml").write_text(SMALL + 'skip = "no GPU here"')
    fake.errors["train"] = "out of memory"
    outcomes = ci.check(folder, tmp_path / "ci", only=["compare", "beliefs"], say=lambda line: None)
    assert [(o.label, o.status, o.why[0]) for o in outcomes] == [
        ("train", "failed", "out of memory"),
        ("other", "failed", "out of memory"),
        ("compare", "skipped", "needs train, other, which left no run"),
        ("beliefs", "skipped", "no GPU here"),
    ]


def test_a_stopped_check_leaves_what_it_has(folder, fake, tmp_path, monkeypatch):
    real, count = ci.run_notebook, []

    def stops(*args, **options):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(ci, "run_notebook", stops)
    assert cli.main(["ci", "--notebooks", str(folder), "--out", str(tmp_path / "ci")]) == 130
    assert len(ElementTree.parse(tmp_path / "ci" / "junit.xml").getroot()[0]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trian]", "did you mean 'train'"),
        ("[train]\nneed = 'x'", "did you mean 'needs'"),
        ("[train]\nneeds = 'x'", "unknown name that train needs"),
        ("[train]\nneeds = 'beliefs'\n[beliefs]\nneeds = 'train'", "in a circle: beliefs -> train -> beliefs"),
        ("[train]\nneeds = 'beliefs'", "declares no parameter run or runs"),
        ("[train.parameters]\nsteps = 'x'", "steps must be int"),
        ("[train.expect.loss]\nvalue = 1\ntol = 2", "unknown field of"),
        ("[train.expect]\nloss = { abs = 0.1 }", "must be a value"),
        ("[train.expect]\nloss = { value = 'a', abs = 0.1 }", "must be a value"),
        ("['../x']\nnotebook = 'train'", "must have no slash"),
        ("train = 1", "must be a table"),
        ("[train", "cannot be read as TOML"),
    ],
)
def test_bad_files_are_one_line_before_anything_runs(folder, fake, tmp_path, capsys, text, said):
    (folder / "ci.toml").write_text(text)
    assert cli.main(["ci", "--notebooks", str(folder), "--out", str(tmp_path / "ci")]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and not fake.called


def test_missing_files_and_names(folder, fake, tmp_path, capsys):
    missing = ["--small", "no.toml"], ["--tolerances", "no.toml"], ["--only", "trian"], ["--notebooks", str(tmp_path)]
    for argv in missing:
        assert cli.main(["ci", "--notebooks", str(folder), "--out", str(tmp_path / "ci"), *argv]) == 2
    assert "holds no notebooks" in capsys.readouterr().err and not fake.called


def test_a_notebook_may_say_it_itself(folder, tmp_path):
    path = folder / "beliefs.ipynb"
    notebook = json.loads(path.read_text())
    notebook["metadata"]["workbench"] = {"ci": {"needs": "train", "expect": {"steps": 3}, "parameters": {"run": "a"}}}
    path.write_text(json.dumps(notebook))
    case = ci.cases(folder, {"beliefs": {"parameters": {"run": "b"}}}, {})["beliefs"]
    assert case.needs == ("train",) and case.expect == {"steps": Expectation(3)} and case.parameters == {"run": "b"}


def test_update_writes_what_passes_next_time_and_keeps_the_rest(folder, fake, tmp_path):
    head = "# small\n[train.parameters]\nsteps = 2  # few\n\n[train.expect]\n# held closely\n"
    bound, tail = '"final.heldout/student" = { max = 1.0 }\n', '\n[beliefs]\nneeds = "train"\n'
    (folder / "ci.toml").write_text(f"{head}loss = {{ value = 9, abs = 0.01 }}\nsteps = 7\ngone = 1\n{bound}{tail}")
    ci.check(folder, tmp_path / "ci", update=True, say=lambda line: None)
    text = (folder / "ci.toml").read_text()
    assert text.startswith(f"{head}loss = {{ value = 0.5, abs = 0.01 }}\nsteps = 2\n{bound}{tail}")
    assert tomllib.loads(text)["beliefs"] == {
        "needs": "train",
        "expect": {
            "steps": 2, "loss": {"value": 0.5, "rel": 0.001}, "final.heldout/student": {"value": 0.25, "rel": 0.001},
            "ends[0]": True, "ends[1]": {"null": True},
        },
    }  # fmt: skip
    again = ci.check(folder, tmp_path / "ci", say=lambda line: None)
    assert {o.status for o in again} == {"ok"}
    fake.records["beliefs"] = RECORD | {"loss": 0.51}
    assert [o.why for o in ci.check(folder, tmp_path / "ci", say=print) if o.status == "failed"] == [
        ("loss is 0.51, 0.5 within 0.0005 is expected",)
    ]


def test_update_goes_to_the_file_of_tolerances_and_bounds_still_hold(folder, fake, tmp_path):
    (folder / "ci.toml").write_text("[train.expect]\nloss = { max = 0.1 }\n[beliefs.expect]\nloss = 9.0\n")
    kept = (folder / "ci.toml").read_text()
    outcomes = ci.check(folder, tmp_path / "ci", tolerances=tmp_path / "t.toml", update=True, say=lambda line: None)
    assert [o.why for o in outcomes if o.status == "failed"] == [("loss is 0.5, between -inf and 0.1 is expected",)]
    written = tomllib.loads((tmp_path / "t.toml").read_text())
    assert written["beliefs"]["expect"] == {"loss": 0.5} and kept == (folder / "ci.toml").read_text()
    inline = '[train]\nexpect = { loss = 1 }\n'
    with pytest.raises(WorkbenchError, match="cannot be updated"):
        expectations.rewrite(inline, {"train": {"loss": Expectation(2)}}, "ci.toml")


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        (3, [3, 3.0], [4, "3", None, True]),
        (True, [True], [1, False]),
        ("a", ["a"], ["b", None]),
        ({"value": 2.0, "abs": 0.1}, [2.1, 1.9, 2], [2.2, None, "2", True]),
        ({"value": -10, "abs": 0.1, "rel": 0.1}, [-9, -11], [-8.9, 10]),
        ({"min": 0}, [0, 5.5], [-0.1, None]),
        ({"min": 0, "max": 1}, [0, 1], [1.1, True]),
        ({"null": True}, [None], [0, "null"]),
    ],
)
def test_expectations(given, good, bad):
    (expectation,) = expectations.parse({"x": given}, "here").values()
    assert not [v for v in good if expectation.problem(v)] and all(expectation.problem(v) for v in bad)
    again = tomllib.loads(expectation.line('a "b".c'))
    assert expectations.parse(again, "here") == {'a "b".c': expectation}


def test_one_real_run(tmp_path):
    make_notebook(
        tmp_path / "nb" / "count.ipynb", "n: int = 9", "from workbench.runs import record_result",
        "record_result({'n': n, 'half': n / 2})",
    )  # fmt: skip
    (tmp_path / "nb" / "ci.toml").write_text("[count.parameters]\nn = 3\n[count.expect]\nn = 3\nhalf = 1.5\n")
    (outcome,) = ci.check(tmp_path / "nb", tmp_path / "ci", say=lambda line: None)
    assert outcome.status == "ok", outcome.why
    assert "<html" in outcome.report.read_text() and outcome.run.config == {"n": 3}


def test_every_shipped_notebook_has_a_small_form_that_could_run_and_an_expectation():
    path = shipped.root("notebooks") / "ci.toml"
    table = tomllib.loads(path.read_text())
    found = ci.cases(path.parent, table, table)
    assert set(found) >= set(shipped.notebooks()) and all(case.expect for case in found.values())
    for case in ci.ordered(found):
        ci._checked(case)


def test_the_pages_to_copy_name_what_there_is():
    workflow = yaml.safe_load((ROOT / "docs" / "workbench-ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    steps = {step["uses"].split("@")[0]: step for step in job["steps"] if "uses" in step}
    assert set(steps) == {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}
    assert steps["actions/upload-artifact"]["if"] == "always()"
    assert steps["actions/setup-python"]["with"]["cache"] == "pip"
    page = (ROOT / "docs" / "ci.md").read_text()
    gitlab = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.S)[1])
    commands = [step["run"] for step in job["steps"] if "run" in step]
    commands += [line for one in gitlab.values() if isinstance(one, dict) for line in one.get("script", [])]
    text = "\n".join(commands) + page
    for name, options in re.findall(r"(?m)^\s*workbench (\w+)(.*)$", text):
        parser = cli._parser()._subparsers._group_actions[0].choices[name]
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"--\w+", options)) <= known, (name, options)
    assert "workbench ci" in text and "download.pytorch.org/whl/cpu" in text
    for field in re.findall(r"^    (\w+) = ", page, re.M):
        assert field in (*ci._FIELDS, *expectations._FIELDS, "steps", "loss", "order", "kappa"), field


def test_hostile_labels_and_a_summary_that_takes_nothing(tmp_path, monkeypatch):
    outcomes = [ci.Outcome("a\x01|<b>", "ok", 1.0)]
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    ci._leave(tmp_path / "ci", outcomes)
    assert ElementTree.parse(tmp_path / "ci" / "junit.xml").find(".//testcase").get("name") == "a?|<b>"
    for written in ("summary", "ci/reports/index.html"):
        assert "<b>" not in (tmp_path / written).read_text()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    with pytest.raises(WorkbenchError, match="was not written"):
        ci._leave(tmp_path / "ci", outcomes)
