"""Runs in processes of their own, as many at once as cores, memory and GPUs allow."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from ..errors import WorkbenchError
from .cell import Job, Outcome

RUN_BYTES = 5 << 29  # 2.5 GiB: kernel, runner and game engine of a run of a small model take 2.1 at most


def fitting(bytes_per_run: int = RUN_BYTES) -> int:
    """How many runs fit: one a core and one a `bytes_per_run` of free memory; a GPU is used by one run at a time."""
    room = max(1, available_memory() // bytes_per_run)
    return int(min(gpus() or cores(), room))


def cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def gpus() -> int:
    """GPUs that runs may use: those of CUDA_VISIBLE_DEVICES, or all."""
    if shutil.which("nvidia-smi") is None:
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip()])
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def available_memory() -> int:
    """Bytes that new processes can take without swapping, within the container's limit where there is one."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
        stat = dict(line.split() for line in used.with_name("memory.stat").read_text().splitlines())
        free = min(free, int(most) - int(used.read_text()) + int(stat["inactive_file"]))
    return max(0, free)


class Pool:
    """`size` processes at most. `on_line(label, line)` gets what runs print, from the threads that read it.

    As a context it ends when every run has ended; an exception, Ctrl-C too, stops them first.
    """

    def __init__(self, size: int, on_line: Callable[[str, str], None] = lambda label, line: None):
        self.size, self.on_line = size, on_line
        self._threads = ThreadPoolExecutor(size)
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._stopping = False
        found = gpus()
        self._devices = [slot % found for slot in range(size)] if found > 1 else []

    def submit(self, job: Job, keep_open: int | None = None) -> Future[Outcome]:
        """Start the job when a process is free. keep_open: a file descriptor that lives as long as the run."""
        return self._threads.submit(self._run, job, keep_open)

    def stop(self) -> None:
        """Stop every run as Ctrl-C would and wait until each has left its folder to be resumed."""
        with self._lock:
            self._stopping = True
            for process in self._running:
                process.terminate()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        self._threads.shutdown()

    def _run(self, job: Job, keep_open: int | None) -> Outcome:
        with self._lock:
            if self._stopping:
                return Outcome("interrupted", None, "it was not started")
            device = self._devices.pop() if self._devices else None
            try:
                process = self._start(keep_open, device)
            except OSError as error:
                self._devices += [] if device is None else [device]
                return Outcome("failed", None, f"its process did not start: {error.strerror or error}")
            self._running.add(process)
        try:
            return self._followed(process, job)
        finally:
            with self._lock:
                self._running.discard(process)
                self._devices += [] if device is None else [device]

    def _start(self, keep_open: int | None, device: int | None) -> subprocess.Popen:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // self.size))
        own = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if device is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "workbench.sweep.cell"],  # -P: no imports from the working directory
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=os.environ | own, pass_fds=() if keep_open is None else (keep_open,),
            start_new_session=True,  # a terminal's Ctrl-C reaches the sweep, which stops its runs
        )  # fmt: skip

    def _followed(self, process: subprocess.Popen, job: Job) -> Outcome:
        """Hand the job over, pass lines on, and read the answer."""
        lines: list[str] = []
        try:
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; its words say why
        for line in process.stdout:
            lines = [*lines[-20:], line.rstrip()]
            self.on_line(job.label, line.rstrip())
        code = process.wait()
        process.stdin.close()
        return answer(lines, code)


def answer(lines: Sequence[str], code: int) -> Outcome:
    """The outcome that a process told last, if it is one for its exit code.

    A library may have more to say after it, and a notebook whose process was killed may have printed the like.
    """
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError):
            outcome = Outcome(**json.loads(line))
            if code == (0 if outcome.status == "complete" else 1):
                return outcome
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    why = f"signal {-code}" if code < 0 else f"exit status {code}"
    return Outcome("failed", None, f"its process ended ({why}); its last words: {last}")


def run_all(
    jobs: Sequence[Job], size: int, on_line: Callable[[str, str], None], keep_going: bool = False
) -> list[Outcome]:
    """Run the jobs, `size` at a time, and say in their order how each ended. Ctrl-C stops them all, resumable.

    Raises WorkbenchError at the first that does not finish, and stops the others, unless keep_going.
    """
    with Pool(size, on_line) as pool:
        futures = {pool.submit(job): job for job in jobs}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, 1.0)  # not for ever: a signal may have reached another thread
            for future in () if keep_going else done:
                folder_of(future.result(), futures[future].label)
        return [future.result() for future in futures]


def folder_of(outcome: Outcome, label: str) -> Path:
    """The finished run's folder. Raises WorkbenchError where it did not finish."""
    if outcome.status != "complete" or outcome.run is None:
        where = f" ({outcome.run})" if outcome.run else ""
        raise WorkbenchError(f"{label} failed: {outcome.error}{where}")
    return Path(outcome.run)
