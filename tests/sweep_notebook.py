"""A small notebook that records three steps with a checkpoint each, and a study of it."""

from pathlib import Path

import polars as pl
from make_notebook import make_notebook
from polars.testing import assert_frame_equal

from workbench.runs import RunFolder
from workbench.sweep.study import Study

PARAMETERS = """
method: str = "a"
seed: int = 0
fail: bool = False
wait_for: str = ""  # a file without which step 1 does not begin
run_dir: str = ""
"""

CODE = """
import time
from pathlib import Path
import polars as pl
from workbench.runs import RunFolder, checkpoint_step, record_result

folder = RunFolder.open(run_dir)
assert not fail, "told to fail"
with folder.lock():
    newest = folder.latest_checkpoint()
    first = 0 if newest is None else checkpoint_step(newest) + 1
    for step in range(first, 3):
        while wait_for and step == 1 and not Path(wait_for).exists():
            time.sleep(0.05)
        folder.write_table("steps", step, pl.DataFrame({"value": [seed * 100 + step], "first": [first]}))
        folder.save_checkpoint(step, lambda path: (path / "state").write_text(str(step)))
        print("step", step)
record_result({"seed": seed, "first": first})
"""


def write_study(folder: Path, text: str = "", seeds: int = 2, **parameters) -> Study:
    """The notebook and a study `tiny` of it in a folder."""
    if not (folder / "small.ipynb").exists():
        make_notebook(folder / "small.ipynb", PARAMETERS, CODE)
    given = "".join(f"{name} = {value!r}\n".replace("True", "true") for name, value in parameters.items())
    head = f'name = "tiny"\nnotebook = "small.ipynb"\n[parameters]\n{given}[grid]\nseed = {list(range(seeds))}\n'
    (folder / "tiny.toml").write_text(head + text)
    return Study.read(folder / "tiny.toml")


def finished(folder: Path) -> dict[int, RunFolder]:
    """The one finished run of every seed."""
    runs = [RunFolder.open(path.parent) for path in folder.glob("*/COMPLETE")]
    found = {run.config["seed"]: run for run in runs}
    assert len(found) == len(runs), "a cell was run twice"
    return found


def assert_whole(run: RunFolder) -> None:
    """The tables of the run are those of an undisturbed one."""
    seed = run.config["seed"]
    want = pl.DataFrame({"step": [0, 1, 2], "value": [seed * 100 + k for k in range(3)]})
    assert_frame_equal(run.read("steps").select("step", "value"), want)
