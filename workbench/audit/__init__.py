"""Checks for what silently goes wrong in rollouts: any reader's episodes, a run folder, or a batch in memory.

`audit(source)` streams: it keeps counts, a few examples, and a few numbers a turn of the groups that are open. A check
that a source gives nothing to look at says so instead of passing. What an episode's or turn's `info` may hold for the
checks: "prior", "return", "n_turns", "optimizer_steps" (taken, discarded), "privileged" (text) or "privileged_ids";
of a turn "belief", "belief_before", "turn_advantage", "scored_logprobs", "teacher_context" (text, with the student's
as "context") or "teacher_context_ids", and "where".
"""

from collections.abc import Iterable
from typing import Any

from ..errors import WorkbenchError
from ..formats import Source, SourceEpisode
from ..records import Batch
from ..runs.folder import RunFolder
from .checks import CHECKS, Check
from .groups import HELD_TURNS, Groups, Steps
from .report import Finding, Report, section
from .sources import batch_episodes, run_episodes, run_notes
from .tally import Example, Place, Tally
from .turns import Lengths, Presence, look_at_episode, look_at_turn

__all__ = [
    "CHECKS", "Check", "Example", "Finding", "Report", "audit", "batch_episodes", "run_episodes", "section",
]  # fmt: skip


def audit(
    source: RunFolder | Source | Batch | Iterable[SourceEpisode],
    *,
    name: str = "",
    tokenizer: Any = None,
    minibatch: int | None = None,
    epochs: int = 1,
) -> Report:
    """Run every check over a run folder, what `formats.open_source` opened, a batch, or a reader's episodes.

    name: what the report calls the source. tokenizer: with a Hugging Face tokenizer's `decode`, compares text with
    tokens; it must be the policy's. minibatch: turns a trainer takes for one optimizer step, with epochs over the
    batch, where the source does not hold the steps that were taken.
    Raises WorkbenchError where the source cannot be read.
    """
    if minibatch is not None and minibatch < 1 or epochs < 1:
        raise WorkbenchError(f"audit: minibatch and epochs must be at least 1, got {minibatch} and {epochs}")
    notes: list[str] = []
    if isinstance(source, RunFolder):
        notes += run_notes(source)
        name, source = name or source.path.name, run_episodes(source)
    elif isinstance(source, Source):
        notes += source.notes
        name, source = name or f"{source.path.name} ({source.format})", source.episodes()
    elif isinstance(source, Batch):
        name, source = name or "batch", batch_episodes(source)
    tally, lengths, presence = Tally(), Lengths(), Presence()
    groups, episodes, turns, bare = Groups(tally), 0, 0, 0
    steps = Steps(minibatch, epochs)
    for episode in source:
        place = Place.of(episode)
        episodes += 1
        turns += len(episode.turns)
        bare += not episode.turns
        for index, turn in enumerate(episode.turns):
            look_at_turn(tally, place, turn, index, tokenizer)
            lengths.add(place, turn, index, episode.stop_reason)
            presence.add(place, turn, index)
        look_at_episode(tally, place, episode)
        groups.add(place, episode)
        steps.add(place, episode)
    groups.close()
    for rest in (lengths, presence, steps):
        rest.close(tally)
    if bare:
        notes.append(f"{bare} of {episodes} episodes come without turns: only groups were looked at there")
    if groups.closed_early:
        notes.append(
            f"too large to hold: {groups.closed_early} groups were compared before the source ended, so what lies more "
            f"than about {HELD_TURNS} turns apart was not held against each other"
        )
    return Report.of(name or "source", tally, episodes, turns, groups.count, notes)
