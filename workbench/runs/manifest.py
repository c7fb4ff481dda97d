"""What a run's manifest.json says about where, from what and with what it ran.

    format_version, experiment, digest, notebook, notebook_path, notebook_sha256, parameters, seeds
    cwd, command, git {commit, dirty} or null, versions, device, host
    machine      {arch, cpu, cores, environment}: with `versions` what the last bits of a number depend on
    status       "running", "complete", "failed" or "interrupted"
    started, ended (UTC), seconds of all attempts
    attempts     [{started, status, seconds, notebook_sha256, versions, git}]: more than one where the run was resumed;
                 notebook_sha256 is of what that attempt executed, versions and git say what differs from the run's
    cells        [{cell, status, seconds, line}], code cells only, numbered from 1 as in the executed notebook;
                 line is the first of its code, of a cell that raised the one that did
    error        one line where the run failed, or the signal that stopped it
    traceback    the innermost frames of the failed cell, a line each
    result       what the notebook passed to `record_result`
    artifacts    [{path, bytes, sha256}]; sha256 is null above 512 MiB
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__, shipped

PACKAGES = ("torch", "transformers", "polars", "papermill", "plotly", "numpy")
HASH_LIMIT = 512 * 2**20
_NOT_ARTIFACTS = {"manifest.json", "LOCK", "COMPLETE"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DECISIVE = (*THREADS, "MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG",
            "PYTHONHASHSEED")  # fmt: skip


def versions() -> dict[str, str | None]:
    """Versions of Python, this package and the packages that numbers depend on; null for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "workbench": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Architecture, processor, cores of this process, and the environment variables that sums and their order obey.

    cores: how many threads torch takes where no variable of THREADS says another number.
    """
    environment = {name: os.environ[name] for name in DECISIVE if name in os.environ}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {"arch": platform.machine(), "cpu": _processor(), "cores": cores, "environment": environment}


def device() -> str:
    """The accelerator torch would use, such as "cuda: NVIDIA H200", else "cpu". Asked in a process of its own."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    ask = "import torch; print('cuda: ' + torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
    return _output([sys.executable, "-c", ask]) or "cpu"


def git_state(folder: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the checkout that holds `folder`, or None outside one."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_output(["git", "-C", str(folder), "status", "--porcelain"]))}


def code_state(notebook: Path) -> dict[str, Any] | None:
    """`git_state` of the code that a run of the notebook executes: the package's checkout, else the notebook's."""
    checkout = Path(shipped.__file__).parent.parent
    checkout = checkout if (checkout / "pyproject.toml").is_file() else notebook.parent
    return None if "site-packages" in checkout.parts else git_state(checkout)


def seeds(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that name seeds."""
    return {name: value for name, value in parameters.items() if name.rpartition("_")[2] in ("seed", "seeds")}


def sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def artifacts(folder: Path) -> list[dict[str, Any]]:
    """Every file a run left except its manifest and marks, with sizes in bytes and hashes."""
    rows = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name in _NOT_ARTIFACTS or path.name.startswith("."):
            continue
        size = path.stat().st_size
        digest = sha256(path) if size <= HASH_LIMIT else None
        rows.append({"path": path.relative_to(folder).as_posix(), "bytes": size, "sha256": digest})
    return rows


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
