"""How old are the samples an asynchronous trainer learns from, and what does it gain by them? A simulator.

Rollout workers of long-tailed durations feed a trainer through a queue that bounds staleness, as DORA does (arXiv
2509.18883, 2601.16725): several versions of the policy live at once, each rollout is played to its end by the version
that began it, and no sample is trained on that is more than `max_staleness` updates old. How the reports enforce the
bound is not printed; here it is admission: at version k no more than (k + max_staleness + 1) batches of rollouts have
been begun. That alone does not keep it, as short rollouts overtake long ones (`late` says what then happens). With a
bound of 0 it is a synchronous trainer, which is what every result is compared with.
"""

import heapq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .errors import WorkbenchError, unknown

LATE = ("wait", "drop")


@dataclass(frozen=True)
class StalenessConfig:
    workers: int = 64  # rollouts played at once
    batch: int = 64  # samples of one update
    updates: int = 200  # updates to simulate
    max_staleness: int = 2  # updates between the policy that played a sample and the one it updates, at most
    late: str = "wait"  # of rollouts about to be too old: "wait", the trainer does, or "drop", they are given up
    rollout_seconds: float = 60.0  # median of the log-normal duration of a rollout
    tail: float = 0.8  # deviation of its logarithm: 0 all alike; .8 one in twenty takes 3.7 times the median or more
    update_seconds: float = 30.0  # of one update
    seed: int = 0

    def __post_init__(self):
        for name in ("workers", "batch", "updates"):
            if getattr(self, name) < 1:
                raise WorkbenchError(f"staleness: {name} must be at least 1, got {getattr(self, name)}")
        if self.max_staleness < 0:
            raise WorkbenchError(f"staleness: max_staleness must be at least 0, got {self.max_staleness}")
        if self.late not in LATE:
            raise unknown("way with late rollouts", str(self.late), LATE)
        if not 0 < self.rollout_seconds < float("inf"):
            raise WorkbenchError(f"staleness: rollout_seconds must be finite and above 0, got {self.rollout_seconds}")
        for name in ("tail", "update_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise WorkbenchError(f"staleness: {name} must be finite and at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class Simulation:
    """ages (updates, batch) int: of each sample trained on, the updates since its policy; durations (updates, batch):
    what its rollout took, seconds; begun (updates,): when each update began, seconds; seconds: until the last ended;
    busy: seconds that workers played, all together, dropped rollouts included; dropped: rollouts, `wasted` their
    seconds; synchronous: samples a second of the trainer with a bound of 0."""

    config: StalenessConfig
    ages: NDArray[np.int64]
    durations: NDArray[np.float64]
    begun: NDArray[np.float64]
    seconds: float
    busy: float
    dropped: int
    wasted: float
    synchronous: float

    @property
    def histogram(self) -> list[int]:
        """Samples of age 0, 1, .. max_staleness."""
        return np.bincount(self.ages.ravel(), minlength=self.config.max_staleness + 1).tolist()

    @property
    def throughput(self) -> float:
        """Samples trained on in a second."""
        return self.ages.size / self.seconds

    @property
    def speedup(self) -> float:
        """Throughput over that of the synchronous trainer."""
        return self.throughput / self.synchronous

    @property
    def worker_utilisation(self) -> float:
        """Share of the workers' time that went into rollouts, those that were dropped included."""
        return self.busy / (self.config.workers * self.seconds)

    @property
    def trainer_utilisation(self) -> float:
        """Share of the time that the trainer was updating."""
        return self.config.updates * self.config.update_seconds / self.seconds


def simulate(config: StalenessConfig = StalenessConfig()) -> Simulation:
    """Play the trainer and its workers through all updates. The n-th rollout begun takes the n-th duration drawn from
    the seed, whatever the bound, so that bounds differ by nothing but their schedule.

    "wait" trains on every rollout, at the latest allowed age, and is never slower than the synchronous trainer. "drop"
    gives up those that would be too old, and so on the longest ones: compare `durations` with those of "wait".
    """
    own = _run(config)
    plain = own if config.max_staleness == 0 else _run(replace(config, max_staleness=0))
    return replace(own, synchronous=plain.throughput)


def _run(config: StalenessConfig) -> Simulation:
    rng = np.random.default_rng(config.seed)
    lengths: list[float] = []

    def length(n: int) -> float:
        while n >= len(lengths):
            lengths.extend((config.rollout_seconds * np.exp(config.tail * rng.standard_normal(4096))).tolist())
        return lengths[n]

    playing: list[tuple[float, int]] = []  # (end, number of the rollout), the next to end first
    version_of, begun_at = {}, {}
    finished: list[int] = []
    alive: dict[int, int] = {}  # rollouts of each version that are played or wait in the queue
    now, busy, wasted, version, begun, dropped = 0.0, 0.0, 0.0, 0, 0, 0
    training_until: float | None = None
    ages, durations, times = [], [], []
    while version < config.updates:
        allowed = min(version + config.max_staleness + 1, config.updates) * config.batch
        while len(playing) < config.workers and begun - dropped < allowed:
            heapq.heappush(playing, (now + length(begun), begun))
            version_of[begun], begun_at[begun] = version, now
            alive[version] = alive.get(version, 0) + 1
            begun += 1
        ready, taken = training_until is None and len(finished) >= config.batch, []
        if ready:
            taken = sorted(finished)[: config.batch]  # in the order begun: the oldest first
            ready = config.late == "drop" or _leaves_room(taken, alive, version_of, version, config)
        if ready:
            finished = [n for n in finished if n > taken[-1]]
            for n in taken:
                alive[version_of[n]] -= 1
            ages.append([version - version_of[n] for n in taken])
            durations.append([length(n) for n in taken])
            times.append(now)
            training_until = now + config.update_seconds
        if training_until is not None and (not playing or training_until <= playing[0][0]):
            now, training_until = training_until, None
            version += 1
            late = {n for n in (*finished, *(n for _, n in playing)) if version_of[n] < version - config.max_staleness}
            busy += sum(now - begun_at[n] for _, n in playing if n in late)
            wasted += sum(min(now - begun_at[n], length(n)) for n in late)
            dropped += len(late)
            finished = [n for n in finished if n not in late]
            playing = [entry for entry in playing if entry[1] not in late]
            heapq.heapify(playing)
        else:
            now, n = heapq.heappop(playing)
            busy += length(n)
            finished.append(n)
    busy += sum(now - begun_at[n] for _, n in playing)
    return Simulation(
        config, np.array(ages), np.array(durations), np.array(times), now, busy, dropped, wasted, synchronous=np.nan
    )


def _leaves_room(
    taken: list[int], alive: dict[int, int], version_of: dict[int, int], version: int, config: StalenessConfig
) -> bool:
    """Whether the rollouts that a batch leaves fit into the batches that may still take them: those of versions up to v
    into the updates up to v + max_staleness. Newer ones that end early must not crowd them out."""
    left = 0
    for v in range(version - config.max_staleness, version + 1):
        left += alive.get(v, 0) - sum(version_of[n] == v for n in taken)
        if left > (v + config.max_staleness - version) * config.batch:
            return False
    return True
