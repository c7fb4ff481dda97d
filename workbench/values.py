"""What V0 expects of a step's tasks: by the texts that tasks begin with, as the policy itself reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .budget import v0
from .budget.history import History
from .budget.v0 import V0Config
from .embeddings import embed
from .policy import Policy
from .records import Episode


def foresee(history: History, policy: Policy, texts: Mapping[str, str], config: V0Config) -> History:
    """The history with the value of each task to come: texts by task id. Without any value while it is empty.

    Past texts are embedded anew, as the policy that reads the new ones has moved on: each step costs it a pass over as
    many different texts as the latest `context` rollouts had, and no rollout.
    """
    if not history.recent:
        return replace(history, values={})
    past, queries = history.recent[-config.context :], list(texts.values())
    different = list(dict.fromkeys([text for text, _ in past] + queries))
    vectors, place = embed(policy, different), {text: i for i, text in enumerate(different)}
    found = v0.predict(
        vectors[[place[text] for text, _ in past]],
        torch.tensor([float(outcome) for _, outcome in past]),
        vectors[[place[text] for text in queries]],
        config,
    )
    return replace(history, values=dict(zip(texts, found.tolist(), strict=True)))


def after(history: History, played: Sequence[Episode], config: V0Config | None) -> History:
    """The history with one more step: rates of the past, and for V0 (`config`) the latest texts and outcomes too."""
    history = history.after((e.task, e.kind, e.outcome) for e in played)
    if config is None:
        return history
    recent = (*history.recent, *((e.turns[0].observation, e.outcome) for e in played))
    return replace(history, recent=recent[-config.context :])
