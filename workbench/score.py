"""Log-probs that a run was recorded without: of its sampled tokens under a model, and under it with a skill text.

Imported rollouts seldom hold a teacher. A run whose turns hold their context tokens can be scored exactly as it was
sampled; nothing is tokenised but the skill text. The result is a new run beside the old one, which stays as it is.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from .credit import agent_opsd
from .distill import sdar
from .errors import WorkbenchError
from .policy import Policy
from .prompts import Chat, PromptStyle
from .records import Batch, Episode
from .replay import episodes_of, knows_outcomes
from .runs import RunFolder
from .skills import SkillBank, privileged_inputs, skill_ids
from .tables import TURN_SCALARS, token_lists, turn_scalars
from .update import TeacherRows, teacher_logprobs

TOKEN_COLUMNS = ("old_logprobs", "scored_logprobs", "teacher_logprobs", "gap", "gate", "entropy")
# what replays and figures ask of a run's configuration
KEPT = ("method", "method_options", "reward", "max_turns", "max_response_tokens", "kl_coef")


def score_run(
    run: RunFolder,
    out: str | Path,
    model: str | Path,
    skills: str | Path,
    *,
    position: str = "user",
    retrieval: str = "kind",
    temperature: float = 1.0,
    device: str = "auto",
    dtype: str = "auto",
    message: Callable[[str], Any] = print,
) -> RunFolder:
    """Score every recorded turn of a run; returns the new run, in folder `out`/score.

    scored_logprobs: of the model in the recorded context, and of old_logprobs where the run has none; teacher_logprobs:
    of the same weights with the skill text at `position`; gap: their difference; then gates and, where groups and
    outcomes are known, beliefs as a training run records them. position: "user", after the tokens that the model's own
    chat template puts before the first message, which every context must begin with, or "front". Raises WorkbenchError
    where a run holds text alone, was recorded without its context tokens, or a token is not in the model's vocabulary.
    """
    if "turns" not in run.tables:
        raise WorkbenchError(f"{run.path}: no turns are recorded in it, so there is nothing to score")
    bank, policy = SkillBank.load(skills, retrieval), Policy.load(model, device, dtype)
    chat = Chat(policy.tokenizer, PromptStyle("plain"))
    insert_at = chat.insertion_point(position)
    opening = chat.opening(insert_at)
    config = {
        "scored": run.path.name, "model": str(model), "skills": str(skills), "position": position,
        "retrieval": retrieval, "temperature": temperature,
    }  # fmt: skip
    config |= {name: run.config[name] for name in KEPT if name in run.config}
    steps = run.scan("turns").select("step").unique().collect()["step"].sort().to_list()
    scored = RunFolder.create(out, "score", config)
    try:
        with scored.lock():
            for step in steps:
                turns, heads = (
                    run.scan(name).filter(pl.col("step") == step).collect() for name in ("turns", "episodes")
                )
                turns = turns.sort("episode", "turn")
                episodes = episodes_of(turns, heads, step, contexts=True, stand_ins=True)
                _check(episodes, policy, opening, step)
                own = turns["old_logprobs"] if "old_logprobs" in turns.columns else None
                columns = _scores(policy, bank, insert_at, episodes, own, temperature)
                if heads["group"].null_count() or not knows_outcomes(heads):
                    # No prior, so no belief.
                    columns |= {name: pl.lit(None, dtype=columns[name].dtype) for name in TURN_SCALARS}
                kept = turns.drop(*TOKEN_COLUMNS, *TURN_SCALARS, strict=False)
                scored.write_table("turns", step, kept.with_columns(**columns))
                scored.write_table("episodes", step, heads)
                message(f"step {step}: {turns.height} turns of {heads.height} episodes scored")
            scored.update_manifest(status="complete", result={"steps": len(steps)} | config)
            scored.complete()
    except BaseException:
        shutil.rmtree(scored.path, ignore_errors=True)
        raise
    return scored


def _check(episodes: list[Episode], policy: Policy, opening: np.ndarray, step: int) -> None:
    size = policy.lm_head.weight.shape[0]
    for n, episode in enumerate(episodes):
        for k, turn in enumerate(episode.turns):
            highest = int(max(turn.prompt_ids.max(), turn.response_ids.max()))
            if highest >= size:
                raise WorkbenchError(
                    f"step {step}, episode {n}, turn {k}: token {highest} is not among the model's {size} tokens; "
                    "the rollouts are of a model with another tokenizer"
                )
            if not np.array_equal(turn.prompt_ids[: len(opening)], opening):
                raise WorkbenchError(
                    f"step {step}, episode {n}, turn {k}: the context does not begin with the {len(opening)} tokens of "
                    "the model's chat template; put the skill text in front (position front)"
                )


def _scores(
    policy: Policy,
    bank: SkillBank,
    insert_at: int,
    episodes: list[Episode],
    recorded: pl.Series | None,
    temperature: float,
) -> dict[str, Any]:
    """Columns of the turns, in order of episode and turn."""
    batch = Batch.from_episodes(episodes, "auto", policy.pad_id).to(policy.device)
    scored, entropy = policy.score_rows(batch.input_ids, batch.lengths, batch.response_mask, temperature)
    batch = batch.with_(old_logprobs=scored)
    rows = TeacherRows(policy, *privileged_inputs(batch, skill_ids(bank, policy.tokenizer, episodes), insert_at))
    teacher = teacher_logprobs(batch, rows, temperature)
    batch = batch.with_(teacher_logprobs=teacher)
    gap = torch.where(batch.response_mask, teacher - scored, 0)
    tokens = {
        "scored_logprobs": scored, "teacher_logprobs": teacher, "gap": gap, "gate": sdar.gate(gap), "entropy": entropy,
    }  # fmt: skip
    columns: dict[str, Any] = token_lists(batch, tokens)
    whole = recorded is not None and not recorded.null_count()
    columns["old_logprobs"] = recorded if whole else columns["scored_logprobs"]
    return columns | turn_scalars(batch, agent_opsd.credit(batch).turns)
