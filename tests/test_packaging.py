"""What an installation gets: a wheel with notebooks and data, locked requirements, a Makefile that sets itself up."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from file_order import LONGEST
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                package, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()
                assert canonicalize_name(package) not in found, f"{package} is pinned twice"
                found[canonicalize_name(package)] = version
    return found


def test_every_package_folder_is_listed():
    marks = (ROOT / "workbench").rglob("__init__.py")
    folders = {mark.parent.relative_to(ROOT).as_posix().replace("/", ".") for mark in marks}
    beside = {"workbench.notebooks", "workbench.studies", "workbench.data", "workbench.widgets"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders | beside


def test_the_test_files_that_go_first_are_there():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert [names.count(name) for name in LONGEST] == [1] * len(LONGEST)


@pytest.mark.parametrize(
    ("extras", "locks"),
    [
        ((), ("base",)),
        (("alfworld",), ("base", "alfworld")),
        (("ray",), ("base", "ray")),
        (("smollm2", "lora", "ray", "dev"), ("base", "alfworld", "ray", "test")),
    ],
)
def test_locks_hold_what_the_project_asks_for(extras, locks):
    locked = pins(*locks)
    wanted = PROJECT["project"]["dependencies"] + [
        r for extra in extras for r in PROJECT["project"]["optional-dependencies"][extra]
    ]
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), f"{requirement}: locked {version}"
    assert not [name for name in locked if name.startswith(("nvidia", "triton", "llama-cpp"))]
    assert "+" not in "".join(locked.values())


def test_the_wheel_holds_notebooks_and_data(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for folder in ("workbench", "notebooks", "studies", "data", "widgets"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, source)
    (source / "README.md").write_text("# credit-workbench\n")
    (source / "notebooks" / "probe.ipynb").write_text("{}")
    (source / "data" / "probe" / "deep").mkdir(parents=True)
    (source / "data" / "probe" / "deep" / "text.md").write_text("deep")
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", *offline, "-w", tmp_path, "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(target)
    for folder, kept in (("notebooks", "*.ipynb"), ("studies", "*.toml"), ("data", "**/*")):
        files = {f"workbench/{p.relative_to(source).as_posix()}" for p in (source / folder).glob(kept) if p.is_file()}
        assert files <= names, sorted(files - names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "notebooks/", "studies/", "data/", "widgets/"))]

    code = (
        "import workbench; from workbench import shipped, cli; print(workbench.__file__); "
        "print(shipped.notebook('probe')); print(shipped.data('probe', 'deep', 'text.md').read_text()); "
        "cli.main(['run', 'prob'])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    package, notebook, text = done.stdout.splitlines()
    assert Path(package).is_relative_to(target), "the wheel was not the one imported"
    assert Path(notebook) == target / "workbench" / "notebooks" / "probe.ipynb" and text == "deep"
    assert "unknown notebook 'prob'; did you mean 'probe'?" in done.stderr


# The Makefile, with stand-ins for Python so that nothing is downloaded


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + body)
    path.chmod(0o755)
    return path


def python_of(path: Path, version: str, has_venv: bool = True) -> Path:
    """A stand-in that answers the Makefile's questions as that version would, and logs every other call."""
    minor = int(version.split(".")[1])
    return script(
        path,
        f"""
case "$*" in
  *"sys.exit(not"*) exit {0 if 11 <= minor < 14 else 1} ;;
  *platform*) echo "{version} at {path}" ;;
  *ensurepip*) exit {0 if has_venv else 1} ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *) echo "$*" >> calls.log ;;
esac
""",
    )


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def make(checkout: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    if path:
        env["PATH"] = f"{path}:{env['PATH']}"
    return subprocess.run(["make", *arguments], cwd=checkout, env=env, capture_output=True, text=True, check=False)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_a_python_too_old_is_said(checkout):
    old = python_of(checkout / "bin" / "python3", "3.10.13")
    done = make(checkout, f"PYTHON={old}", "test")
    assert f"Python 3.11 to 3.13 is needed, found 3.10.13 at {old}; set PYTHON=" in done.stderr
    done = make(checkout, f"PYTHON={python_of(checkout / 'bin' / 'python3', '3.14.0')}", "test")
    assert "found 3.14.0" in done.stderr and done.returncode != 0
    done = make(checkout, f"PYTHON={checkout / 'nowhere'}", "demo")
    assert "Python 3.11 to 3.13 is needed, found none" in done.stderr
    assert not (checkout / ".venv").exists()


@needs_make
def test_a_python_without_venv_is_said(checkout):
    done = make(checkout, f"PYTHON={python_of(checkout / 'bin' / 'python3', '3.11.2', has_venv=False)}", "test")
    assert "the venv module is missing from" in done.stderr and "python3-venv" in done.stderr
    assert not (checkout / ".venv").exists()


@needs_make
def test_the_first_python_that_runs_is_taken(checkout):
    python_of(checkout / "bin" / "python3", "3.9.1")
    script(checkout / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    python_of(checkout / "bin" / "python3.11", "3.11.4")
    python_of(checkout / "bin" / "python3.13", "3.13.0")
    done = make(checkout, ".venv/bin/python", path=checkout / "bin")
    assert done.returncode == 0, done.stderr
    assert "3.11.4" in (checkout / ".venv" / "bin" / "python").read_text()


@needs_make
def test_packages_are_installed_once_and_again_when_a_lock_changes(checkout):
    python = python_of(checkout / "bin" / "python3", "3.12.1")

    def calls(*arguments: str) -> list[str]:
        (checkout / "calls.log").write_text("")
        done = make(checkout, f"PYTHON={python}", *arguments)
        assert done.returncode == 0, done.stderr
        return [c.removeprefix("-m pip install -qq ") for c in (checkout / "calls.log").read_text().splitlines()]

    base = ["-r requirements/base.txt", "--no-deps --no-build-isolation --editable ."]
    engines = ["-r requirements/alfworld.txt", "-r requirements/ray.txt"]
    test = ["-r requirements/test.txt", "--no-deps -r requirements/no-deps.txt"]
    assert calls(".venv/.installed-base") == base
    pytest_ = "-m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder"
    assert calls("test", "TESTS=tests/test_cli.py", "ARGS=-x") == [*engines, *test, f"{pytest_} tests/test_cli.py -x"]
    assert calls("test") == [f"{pytest_} tests"]
    changed = checkout / "requirements" / "test.txt"
    os.utime(changed, (changed.stat().st_atime, (checkout / ".venv" / ".installed-test").stat().st_mtime + 5))
    assert calls(".venv/.installed-test") == test


@needs_make
def test_help_names_every_target(checkout):
    done = make(checkout)
    targets = "help demo test crosscheck lab bench lint clean"
    assert [line.split()[1] for line in done.stdout.splitlines()] == targets.split()


def test_ci_runs_the_tests_by_make():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"
