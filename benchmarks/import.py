"""How long it takes to import a large JSONL file, against the time polars takes to scan it, in one run.

    python benchmarks/import.py [--size MB] [--format verl_agent|messages] [--rounds N]

Writes a file of about --size MB (1000) into a temporary folder, then lets polars scan it (every value parsed and
reduced, nothing kept, by its streaming engine) and imports it, in turns, each in a process of its own. Prints the
seconds of each round, by the clock and of all cores, the highest resident memory of the import, and last the ratio of
the best import to the best scan, by the clock. On a machine that others use, the cores' seconds say more.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

WORDS = "the door opens onto a dim kitchen with two cupboards, a knife lies on the counter, it smells of bread".split()


def verl_agent(rng: random.Random, mean: int = 200, turns: int = 20) -> Iterator[str]:
    """Per-turn dumps of trajectories of `turns` turns of about `mean` tokens; the same few turns again and again."""

    def logprob() -> float:
        return -round(rng.expovariate(1.0), 7) - 1.2345678e-9

    def numbers() -> dict[str, object]:
        tokens = rng.randint(mean // 2, mean * 3 // 2)
        student, teacher = [[logprob() for _ in range(tokens)] for _ in range(2)]
        return {
            "tokens": [" " + rng.choice(WORDS) for _ in range(tokens)],
            "token_ids": [rng.randrange(150_000) for _ in range(tokens)],
            "gaps": [t - s for t, s in zip(teacher, student, strict=True)],
            "teacher_log_probs": teacher,
            "student_log_probs": student,
            "token_advantages": [rng.gauss(0, 1) for _ in range(tokens)],
        }

    stock = [json.dumps(numbers(), ensure_ascii=False)[1:] for _ in range(64)]
    row = 0
    while True:
        head = {
            "global_step": 5,
            "sample_idx": row,
            "turn_step": row % turns,
            "traj_uid": f"{row // turns:032x}",
            "episode_reward": 10.0 * (row // turns % 2),
            "episode_length": float(turns),
            "seq_advantage": 0.5,
        }
        yield json.dumps(head)[:-1] + ", " + stock[row % len(stock)]
        row += 1


def messages(rng: random.Random, turns: int = 10) -> Iterator[str]:
    """Chats of ten turns with a reward."""

    def said(role: str, size: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choices(WORDS, k=size))}

    row = 0
    while True:
        chat = [said("system", 100)] + [m for _ in range(turns) for m in (said("user", 60), said("assistant", 40))]
        yield json.dumps({"id": row, "group": row // 8, "messages": chat, "reward": float(row % 2)})
        row += 1


def write(path: Path, rows: Iterator[str], size: int) -> None:
    with open(path, "w") as handle:
        while size > 0:
            line = next(rows) + "\n"
            size -= handle.write(line)


def scan(path: str) -> None:
    import polars as pl
    import polars.selectors as cs

    numbers = cs.by_dtype(pl.List(pl.Float64), pl.List(pl.Int64)).list.sum().sum()
    others = (~cs.by_dtype(pl.List(pl.Float64), pl.List(pl.Int64))).count()
    pl.scan_ndjson(path).select(numbers, others).collect(engine="streaming")


def read(path: str, out: str) -> None:
    from workbench.formats.write import import_run

    import_run(path, out)


def timed(*arguments: str) -> tuple[float, float, float]:
    """Seconds and seconds of all cores, without the start of Python and its imports, and the highest memory in MB."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cores, peak = map(float, done.stdout.split())
    return seconds, cores, peak


def child(what: str, path: str, out: str) -> None:
    import polars  # noqa: F401

    import workbench.formats.write  # noqa: F401

    began, used = time.perf_counter(), time.process_time()
    scan(path) if what == "scan" else read(path, out)
    print(time.perf_counter() - began, time.process_time() - used)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds to import a large JSONL file and to scan it with polars.")
    parser.add_argument("--size", type=float, default=1000, help="megabytes of the file")
    parser.add_argument("--format", choices=("verl_agent", "messages"), default="verl_agent")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    make = {"verl_agent": verl_agent, "messages": messages}[options.format]
    scans, imports = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step_5.jsonl")
        write(path, make(random.Random(0)), int(options.size * 1e6))
        for index in range(options.rounds):
            scans.append(timed("--child", "scan", str(path), ""))
            imports.append(timed("--child", "import", str(path), str(Path(folder, f"run{index}"))))
            (scan_s, scan_cores, _), (seconds, cores, peak) = scans[-1], imports[-1]
            print(f"scan {scan_s:.2f} s ({scan_cores:.2f} of all cores)  ", end="")
            print(f"import {seconds:.2f} s ({cores:.2f})  at most {peak:.0f} MB", flush=True)
    best = [[min(row[i] for row in rows) for i in (0, 1)] for rows in (imports, scans)]
    print(f"{options.format}, {options.size:.0f} MB: at most {max(peak for *_, peak in imports):.0f} MB of memory")
    print(f"ratio of all cores' seconds: {best[0][1] / best[1][1]:.2f}")
    print(f"{best[0][0] / best[1][0]:.2f}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        sys.exit(main())
