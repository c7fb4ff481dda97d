"""Skill texts, and the privileged context the teacher reads them in.

The teacher is the policy itself with a skill text placed in its context; it never acts, it only scores the tokens that
the student sampled. AgentOPSD (2608.05987) and SDAR (2605.15155). Released code re-tokenises the prompt and cuts it
from the left, which can remove the skill itself; here skill tokens are inserted between tokens that stay as they are,
nothing is cut, and their presence is checked.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .errors import WorkbenchError, unknown
from .records import Batch, Episode

HEADING = "[Privileged Skill Information]"
RETRIEVALS = ("kind", "keyword", "random", "all")


@dataclass(frozen=True)
class SkillBank:
    """Skill texts of one environment: a general one and one for each kind of task.

    retrieval: which of them a task is given beside the general one: that of its own "kind" as the environment names it;
    by "keyword" in its first observation, all that match; a "random" one, drawn by the task's id, as the control that
    SDAR's paper has; or "all".
    """

    general: str
    by_kind: dict[str, str] = field(default_factory=dict)
    keywords: dict[str, tuple[str, ...]] = field(default_factory=dict)
    retrieval: str = "kind"

    def __post_init__(self):
        if self.retrieval not in RETRIEVALS:
            raise unknown("skill retrieval", str(self.retrieval), RETRIEVALS)

    @classmethod
    def load(cls, folder: str | Path, retrieval: str = "kind") -> "SkillBank":
        """Read `general.md` and `<kind>.md` files; spaces in a kind are underscores in its file name.

        A file may begin with a line `keywords: clean, wash`; without one, its keyword is the kind itself.
        """
        folder = Path(folder)
        if not (folder / "general.md").is_file():
            raise WorkbenchError(f"skills folder {folder}: general.md expected")
        texts, keywords = {}, {}
        for path in sorted(folder.glob("*.md")):
            kind = path.stem.replace("_", " ")
            first, _, rest = path.read_text(encoding="utf-8").strip().partition("\n")
            listed = first.lower().startswith("keywords:")
            texts[kind] = rest.strip() if listed else f"{first}\n{rest}".strip()
            words = first.partition(":")[2].split(",") if listed else [kind]
            keywords[kind] = tuple(w.strip().lower() for w in words if w.strip())
            if not texts[kind]:
                raise WorkbenchError(f"skills folder {folder}: {path.name} is empty")
        keywords.pop("general")
        return cls(texts.pop("general"), texts, keywords, retrieval)

    def retrieve(self, kind: str, observation: str = "", task: str = "") -> tuple[str, ...]:
        """The kinds whose texts a task is given, by its kind, its first observation and its id."""
        if self.retrieval == "all":
            return tuple(self.by_kind)
        if self.retrieval == "random":
            return (random.Random(f"skill of {task}").choice(sorted(self.by_kind)),) if self.by_kind else ()
        if self.retrieval == "keyword":
            text = observation.lower()
            return tuple(k for k, words in self.keywords.items() if any(_holds(text, word) for word in words))
        own = kind.replace("_", " ")
        return (own,) if own in self.by_kind else ()

    def text(self, kind: str, observation: str = "", task: str = "") -> str:
        """The privileged text of a task: heading, general skill, and the texts that are retrieved for it."""
        own = [self.by_kind[k] for k in self.retrieve(kind, observation, task)]
        return "\n\n".join([HEADING + "\n" + self.general, *own]) + "\n\n"

    def text_of(self, episode: Episode) -> str:
        """The privileged text of the task an episode played."""
        return self.text(episode.kind, episode.turns[0].observation, episode.task)


def _holds(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


def privileged_inputs(batch: Batch, skills: Sequence[np.ndarray], insert_at: int) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's rows: each row of the batch with its episode's skill tokens inserted after `insert_at` tokens.

    skills: one id array per episode. Returns input_ids (B,T'), lengths (B,) and shift (B,): token t of the batch is
    token t + shift of the teacher's row for every t >= insert_at. Raises WorkbenchError where a skill is empty, is not
    in the row that was built, or would come after a sampled token.
    """
    device = batch.input_ids.device
    shift = torch.tensor([len(s) for s in skills], device=device)[batch.episode_index]
    if bool((shift == 0).any()):
        raise WorkbenchError("the teacher needs a skill text for every episode; one has no tokens")
    if bool(batch.response_mask[:, :insert_at].any()):
        raise WorkbenchError("the skill text must stand before every sampled token")
    pad = max(len(s) for s in skills)
    table = np.stack([np.pad(s, (0, pad - len(s))) for s in skills]).astype(np.int64)
    table = torch.from_numpy(table).to(device)[batch.episode_index]
    lengths = batch.lengths + shift
    place = torch.arange(int(lengths.max()), device=device).expand(len(shift), -1)
    own = torch.where(place < insert_at, place, place - shift[:, None]).clamp(0, batch.input_ids.shape[1] - 1)
    inserted = (place >= insert_at) & (place < insert_at + shift[:, None])
    rows = torch.where(inserted, table.gather(1, (place - insert_at).clamp(0, pad - 1)), batch.input_ids.gather(1, own))
    rows = torch.where(place < lengths[:, None], rows, 0)
    check_privileged(rows, batch, skills, insert_at)
    return rows, lengths, shift


def check_privileged(rows: Tensor, batch: Batch, skills: Sequence[np.ndarray], insert_at: int) -> None:
    """Raise WorkbenchError unless each row (B,T') that the teacher reads holds its episode's whole skill text after
    `insert_at` tokens, and every sampled token of the batch as far behind as that text is long.

    A teacher whose context was cut, from whichever side, fails here.
    """
    last = rows.shape[1] - 1
    lengths = torch.tensor([len(s) for s in skills], device=rows.device)[batch.episode_index]
    wanted = torch.from_numpy(np.concatenate([skills[e] for e in batch.episode_index.tolist()]).astype(np.int64))
    row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths)
    place = torch.arange(len(row), device=rows.device) - (lengths.cumsum(0) - lengths)[row] + insert_at
    wrong = (place > last) | (rows[row, place.clamp(max=last)] != wanted.to(rows.device))
    if bool(wrong.any()):
        first = int(row[wrong.nonzero()[0, 0]])
        raise WorkbenchError(f"teacher row {first}: the skill text of its episode is not in what the teacher reads")
    b, t = torch.nonzero(batch.response_mask, as_tuple=True)
    there = t + lengths[b]
    wrong = (there > last) | (rows[b, there.clamp(max=last)] != batch.input_ids[b, t])
    if bool(wrong.any()):
        first = int(b[wrong.nonzero()[0, 0]])
        raise WorkbenchError(f"teacher row {first}: a sampled token is not where the skill text should put it")


def privileged_prompt(prompt_ids: np.ndarray, skill: np.ndarray, insert_at: int) -> np.ndarray:
    """A prompt with the skill in it, for measuring how well the teacher would play."""
    return np.concatenate([prompt_ids[:insert_at], skill, prompt_ids[insert_at:]])


def skill_ids(bank: SkillBank, tokenizer, episodes: Sequence[Episode]) -> list[np.ndarray]:
    """Token ids of the privileged text of each episode."""
    texts = [bank.text_of(e) for e in episodes]
    ids = {t: np.asarray(tokenizer.encode(t, add_special_tokens=False), np.int32) for t in set(texts)}
    return [ids[text] for text in texts]
