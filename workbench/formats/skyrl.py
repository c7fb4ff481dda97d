"""SkyRL: dumped evaluations, one JSONL file a data set under dumped_evals/global_step_<N>_evals.

Fields input_prompt, output_response, score, stop_reason, env_class, env_extras, data_source (github NovaSky-AI/SkyRL,
a9564572, skyrl/train/utils/trainer_utils.py). The texts are decoded with their special tokens; a score may be a list
with a reward a token, whose sum is the rollout's. aggregated_results.jsonl beside them holds means only and is passed
over. The training batches of dumped_data/*.pkl are pickles, which can run any code when loaded, and are refused.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .base import SourceEpisode, SourceTurn, first_record, floats, is_record, jsonl, number, text
from .chat import digest_of

NAME = "skyrl"
DESCRIPTION = "SkyRL's dumped evaluations: text and a score a rollout"
LACKS = (
    "token_ids", "context_ids", "mask", "logprobs", "teacher_logprobs", "trainer_logprobs", "reference_logprobs",
    "advantages", "valid",
)  # fmt: skip

_STEP = re.compile(r"global_step_(\d+)")


def sniff(path: Path, head: bytes) -> bool:
    return is_record(first_record(head), "input_prompt", "output_response", "score")


def read(path: Path) -> Iterator[SourceEpisode]:
    """An episode of one turn a line; its step is that of the folder's name, 0 for eval_only."""
    found = _STEP.search(path.parent.name)
    for where, record in jsonl(path):
        score = record.get("score")
        rewards = floats(score, "score", where) if isinstance(score, list) else None
        reward = number(record, "score", where) if rewards is None else float(np.sum(rewards, dtype=np.float64))
        stop = text(record, "stop_reason", where, "")
        prompt = text(record, "input_prompt", where)
        truncated = stop == "length" if stop else None
        yield SourceEpisode(
            turns=(SourceTurn(text(record, "output_response", where), prompt, truncated=truncated),),
            step=int(found[1]) if found else 0,
            episode=where.rpartition(":")[2],
            group=digest_of([record.get("data_source"), prompt]),
            task=text(record, "data_source", where, "") or text(record, "env_class", where, ""),
            reward=reward,
            stop_reason=stop,
            where=where,
            info={"env_class": record.get("env_class"), "env_extras": record.get("env_extras")}
            | ({} if rewards is None else {"token_rewards": rewards.tolist()}),
        )
