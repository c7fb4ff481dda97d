"""The cells of a study as tasks of a Ray cluster: the same runs, wherever there is room for one.

A task that loses its worker is tried again on another, which finds the run's folder and goes on from its checkpoint.
Nodes need this package, and for `out` a folder that all of them share or a URL.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .. import shipped
from ..errors import WorkbenchError
from ..runs import manifest
from .cell import Job, Outcome, do, state
from .mirror import is_url

RETRIES = 5  # workers that a cell may lose
_ORPHANED = 30.0  # seconds that a lost worker's run may still look as if it ran


class Cluster:
    """Runs as Ray tasks. As a context it ends when every run has ended; an exception, Ctrl-C too, stops them first.

    address: "local" starts Ray on this machine for as long as the context lasts; else as in `ray.init`.
    cpus, gpus: what a run asks for; fractions are Ray's. size: runs at once, 0 for what the cluster has room for now.
    Raises WorkbenchError where ray is not installed, the cluster cannot be reached, or has no room for a run.
    """

    def __init__(self, address: str, cpus: float = 1.0, gpus: float = 0.0, size: int = 0):
        try:
            import ray
        except ImportError:
            raise WorkbenchError("--ray needs the package ray: pip install 'credit-workbench[ray]'") from None
        if min(cpus, gpus) < 0:
            raise WorkbenchError(f"a run cannot ask for fewer than 0 CPUs or GPUs, got {cpus:g} and {gpus:g}")
        self._ray, self._refs = ray, {}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        where: dict[str, Any] = {"address": address}
        if address == "local":
            where |= {"include_dashboard": False, "object_store_memory": 100 << 20}
        terminate = signal.getsignal(signal.SIGTERM)
        for attempt in (3, 2, 1, 0):
            try:
                ray.init(**where, log_to_driver=False, logging_level="ERROR")
                break
            except Exception as error:  # of many kinds
                ray.shutdown()
                # Ray gives its own processes 15 seconds to start, which on a busy machine may take more than one try.
                if not (attempt and address == "local"):
                    why = " ".join(str(error).split())
                    raise WorkbenchError(f"--ray {address}: no cluster there: {why}") from None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray's ends the process without a word of how to go on
        try:
            self.size = size or room(ray.cluster_resources(), cpus, gpus)
        except WorkbenchError:
            ray.shutdown()
            raise
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": RETRIES, "retry_exceptions": False}
        self._task = ray.remote(**options)(_do)

    def submit(self, job: Job, claim: int) -> "Future[Outcome]":
        """Hand the job to the cluster; the claim stays with the sweep, with which its tasks end."""
        notebook = Path(job.notebook)
        name = notebook.stem if shipped.notebooks().get(notebook.stem) == notebook else job.notebook
        ref = self._task.remote(asdict(replace(job, notebook=name)), manifest.sha256(notebook), os.getcwd())
        future: Future[Outcome] = Future()
        self._refs[ref] = future
        ref.future().add_done_callback(lambda done: self._end(ref, done))
        return future

    def _end(self, ref: Any, done: "Future[dict[str, Any]]") -> None:
        try:
            outcome = Outcome(**done.result())
        except self._ray.exceptions.TaskCancelledError:
            outcome = Outcome("interrupted", None, "stopped")
        except Exception as error:
            why = " ".join(str(error).split())
            outcome = Outcome("failed", None, f"{type(error).__name__}: {why[:300]}")
        self._refs.pop(ref).set_result(outcome)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        refs = list(self._refs)
        if kind is not None:
            for ref in refs:
                self._ray.cancel(ref)  # KeyboardInterrupt in the task, which leaves its run to be resumed
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=None if kind is None else 60)
        self._ray.shutdown()


def room(have: Mapping[str, float], cpus: float, gpus: float) -> int:
    """How many runs of `cpus` and `gpus` fit a cluster of these resources. Raises WorkbenchError where none does."""
    fit = [have.get(kind, 0.0) / each for kind, each in (("CPU", cpus), ("GPU", gpus)) if each > 0]
    number = math.floor(min(fit, default=1.0))
    if number < 1:
        got = f"{have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs"
        raise WorkbenchError(
            f"a run asks for {cpus:g} CPUs and {gpus:g} GPUs, the cluster has {got} now: --jobs N says how many runs "
            "to hand to one that grows"
        )
    return number


def _do(asked: dict[str, Any], sha256: str, cwd: str) -> dict[str, Any]:
    """The job in a Ray worker, in the sweep's working directory where the node has it."""
    job = Job(**asked)
    if Path(cwd).is_dir():
        os.chdir(cwd)
    source = shipped.notebook(job.notebook)
    if manifest.sha256(source) != sha256:
        host = os.uname().nodename
        return asdict(Outcome("refused", None, f"{source} on {host} is not the notebook of this sweep"))
    until = time.monotonic() + _ORPHANED
    while not is_url(job.out) and state(job).state == "running" and time.monotonic() < until:
        time.sleep(0.5)
    return asdict(do(job, progress=False))
