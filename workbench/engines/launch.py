"""`python -m workbench.engines.trl`: a run of one method under TRL, in one process or as accelerate starts them."""

import argparse
import os
import shutil
import tomllib
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

from .. import methods
from ..config import from_mapping
from ..errors import WorkbenchError, unknown
from ..runs import manifest
from ..runs.files import read_toml
from ..runs.folder import RunFolder
from ..settings import TrainConfig, small_model
from .play import PlayConfig
from .trl import CreditTrainer

_TABLES = ("options", "play", "grpo")


def main(argv: list[str] | None = None) -> RunFolder | None:
    """Train as the command line says; see `run`."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engines.trl", description=__doc__)
    parser.add_argument("--config", help="TOML file: what is set here, and tables options, play, grpo")
    for name in ("method", "env", "model", "out", "experiment"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--resume", help="run folder to go on with, from its newest checkpoint")
    parser.add_argument(
        "set", nargs="*", metavar="TABLE.NAME=VALUE", help="e.g. options.lam=0.25 play.max_turns=30 grpo.max_steps=2"
    )
    given = parser.parse_intermixed_args(argv)
    return run(_asked(given), given.resume)


def _asked(given: argparse.Namespace) -> dict[str, Any]:
    asked: dict[str, Any] = {"method": "grpo", "env": "twc", "model": "default", "out": "runs", "experiment": "trl"}
    asked |= {name: {} for name in _TABLES}
    known = list(asked)
    if given.config:
        asked |= read_toml(Path(given.config))
        for name in set(asked) - set(known):
            raise unknown(f"name in {given.config}", name, known)
        for name in known:
            kind = dict if name in _TABLES else str
            if not isinstance(asked[name], kind):
                what = "a table" if kind is dict else "a string"
                raise WorkbenchError(f"{given.config}: {name} must be {what}, got {asked[name]!r}")
    asked |= {k: v for k in ("method", "env", "model", "out", "experiment") if (v := getattr(given, k))}
    for setting in given.set:
        name, equals, value = setting.partition("=")
        table, _, key = name.partition(".")
        if not (equals and key and table in _TABLES):
            raise WorkbenchError(f"{setting!r} must be TABLE.NAME=VALUE, a table being one of {', '.join(_TABLES)}")
        asked[table] = asked[table] | {key: _value(value)}
    options = [field.name for field in fields(GRPOConfig) if field.init]
    for name in asked["grpo"]:
        if name not in options:
            raise unknown("option of GRPOConfig", name, options)
    return asked


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def run(asked: dict[str, Any], resume: str | None = None) -> RunFolder | None:
    """Train as asked; returns the run folder in the main process. Raises WorkbenchError for what cannot be done."""
    state = PartialState()
    folder = path = None
    if resume:
        folder = RunFolder.open(resume)
        asked = folder.config["asked"]
        path = str(folder.path)
    small = small_model(TrainConfig(env=asked["env"], model=asked["model"]))
    play = from_mapping(PlayConfig, ({"prompt": "plain"} if small else {}) | asked["play"])
    method = methods.method(asked["method"], **asked["options"])
    if state.is_main_process and folder is None:
        folder = RunFolder.create(asked["out"], asked["experiment"], described(asked, play))
        path = str(folder.path)
    (path,) = broadcast_object_list([path])
    output = f"{path}/trl"
    args = GRPOConfig(**{"output_dir": output, "report_to": [], "disable_tqdm": True} | asked["grpo"])
    try:
        trainer = CreditTrainer(
            str(small) if small else asked["model"], method, asked["env"], args, play,
            folder if state.is_main_process else None,
        )  # fmt: skip
    except BaseException as error:
        if state.is_main_process and not resume:  # nothing was begun
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise WorkbenchError(f"model {asked['model']!r} could not be loaded: {line}") from None
        raise
    checkpoint = get_last_checkpoint(output) if os.path.isdir(output) else None
    if not state.is_main_process:
        trainer.train(resume_from_checkpoint=checkpoint)
        return None
    with folder.lock():
        folder.update_manifest(status="running", versions=manifest.versions() | {"trl": version("trl")})
        if checkpoint is None:
            folder.truncate(-1)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            folder.update_manifest(status="interrupted" if stopped else "failed", error=str(error) or repr(error))
            raise
        result = {"method": method.name, "seed": args.seed, "steps": trainer.number, "updates": trainer.updates}
        folder.update_manifest(status="complete", result=result)
        folder.complete()
    trainer.message(f"run folder  {folder.path}")
    return folder


def described(asked: dict[str, Any], play: PlayConfig) -> dict[str, Any]:
    """The configuration of the run folder: what was asked, and the fields of TrainConfig by which notebooks read it."""
    grpo = asked["grpo"]
    return {
        "engine": "trl", "asked": asked, "method": asked["method"], "method_options": asked["options"],
        "env": asked["env"], "env_options": play.env_options, "model": asked["model"], "skills": play.skills,
        "seed": grpo.get("seed", 42), "steps": grpo.get("max_steps"), "group_size": grpo.get("num_generations", 8),
        "max_turns": play.max_turns, "max_response_tokens": play.max_response_tokens, "max_context": play.max_context,
        "reward": play.reward, "lr": grpo.get("learning_rate", 1e-6), "kl_coef": grpo.get("beta", 0.0),
        "eval_games": play.eval_games,
    }  # fmt: skip
