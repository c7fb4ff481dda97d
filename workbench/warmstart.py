"""Make the small default model: a word-level tokenizer from an environment's own text, and a transformer that cloned
a noisy expert.

    python -m workbench.warmstart --env twc --out data/models/twc-small

The expert plays a random admissible command with some probability, so that the clone succeeds sometimes: a clone of the
clean expert gives groups that all win or all lose, and then group-relative advantages are zero. Half of the games are
played with the skill text in context by a less noisy expert, so that the text means something to the clone: the same
weights with the text in context (the teacher) are better than without it.
"""

import argparse
import json
import random
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import envs, shipped
from .envs.base import Env
from .policy import Policy
from .prompts import Chat, PromptStyle
from .skills import SkillBank

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<act> {{ m['content'] }}<end>"
    "{% else %}<obs> {{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<act>{% endif %}"
)


@dataclass(frozen=True)
class Stage:
    """Games to clone, half of them with the skill text in context.

    noise, skilled_noise: share of random commands without and with the text. text_weight: of predicting the
    environment's text beside the commands, which teaches the copying of names.
    """

    games: int
    noise: float
    skilled_noise: float
    text_weight: float


@dataclass(frozen=True)
class WarmStart:
    """How the default model is made. The last stage sets how well it plays; the first, noisier one, teaches words."""

    env: str = "twc"
    stages: tuple[Stage, ...] = (Stage(16000, 0.5, 0.15, 0.3), Stage(18000, 0.3, 0.05, 0.1))
    max_turns: int = 10
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    mlp: int = 384
    lr: float = 2e-3
    batch_tokens: int = 6000
    seed: int = 0


def words_of(env: Env, bank: SkillBank, games: int, seed: int) -> list[str]:
    """Every word of the environment's texts, commands and skills, by playing games of every split at random."""
    rng, words = random.Random(seed), Counter()
    texts = [bank.text(kind) for kind in (*bank.by_kind, "")]
    for split in env.splits:
        tasks = list(env.tasks(split))
        for task in tasks if len(tasks) <= games else rng.sample(tasks, games):
            state = env.reset(task.id)
            texts += [state.info.get("task", ""), state.observation, *state.admissible]
            for _ in range(4):
                if state.done:
                    break
                state = env.step(rng.choice(state.admissible))
                texts += [state.observation, *state.admissible]
            state = env.step("?")
            texts.append(state.observation)
    for text in texts:
        words.update(re.findall(r"[\w'-]+|[^\w\s]", text.lower()))
    return sorted(words)


def build_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A lower-casing word-level tokenizer with a chat template, as an ordinary Hugging Face fast tokenizer."""
    special = ["<pad>", "<unk>", "<end>", "<obs>", "<act>"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[\w'-]+|[^\w\s]"), "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<obs>", "<act>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def demonstration(
    env: Env, task: str, chat: Chat, rng: random.Random, noise: float, max_turns: int, skill: np.ndarray | None
):
    """One noisy expert game as (ids, mask of the commands' tokens, outcome)."""
    style, tokenizer = chat.style, chat.tokenizer
    state = env.reset(task)
    ids = chat.first(style.message(state, (), True))
    if skill is not None:
        at = chat.insertion_point("user")
        ids = np.concatenate([ids[:at], skill, ids[at:]])
    pieces, masks = [ids], [np.zeros(len(ids), bool)]
    for turn in range(max_turns):
        best = env.expert()
        others = [a for a in state.admissible if a != best]
        action = rng.choice(others) if others and (best is None or rng.random() < noise) else best
        response = np.array([*tokenizer.encode(action, add_special_tokens=False), chat.end_id], np.int32)
        state = env.step(action)
        pieces.append(response)
        masks.append(np.ones(len(response), bool))
        if state.done or turn == max_turns - 1:
            break
        following = chat.following(style.message(state, (), False), False)
        pieces.append(following)
        masks.append(np.zeros(len(following), bool))
    return np.concatenate(pieces), np.concatenate(masks), state.outcome


def clone(config: WarmStart, log=print) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make tokenizer and model, then play and fit one stage after the other."""
    rng = random.Random(config.seed)
    torch.manual_seed(config.seed)
    env = envs.make(config.env).envs[0]
    bank = SkillBank.load(shipped.data("skills", config.env))
    tokenizer = build_tokenizer(words_of(env, bank, 1000, config.seed))
    model = new_model(config, tokenizer)
    log(f"{len(tokenizer)} words, {sum(p.numel() for p in model.parameters()):,} parameters")
    policy = Policy(model, tokenizer)
    for stage in config.stages:
        fit(policy, play_stage(env, bank, policy, stage, config, rng, log), stage, config, rng, log)
    return model, tokenizer


def play_stage(env: Env, bank: SkillBank, policy: Policy, stage: Stage, config: WarmStart, rng: random.Random, log):
    """The stage's games as (ids, mask of the commands' tokens); every second one is played with the skill text."""
    chat, tokenizer = Chat(policy.tokenizer, PromptStyle()), policy.tokenizer
    tasks = env.tasks(env.splits[0])
    skills = {k: np.asarray(tokenizer.encode(bank.text(k), add_special_tokens=False), np.int32) for k in bank.by_kind}
    demos, wins, start = [], Counter(), time.time()
    for i in range(stage.games):
        skilled = i % 2 == 1
        task = rng.choice(tasks).id
        skill = skills[env.reset(task).info["kind"]] if skilled else None
        noise = stage.skilled_noise if skilled else stage.noise
        ids, mask, outcome = demonstration(env, task, chat, rng, noise, config.max_turns, skill)
        demos.append((ids, mask))
        wins[skilled] += outcome
    plain, with_text = (2 * wins[s] / max(1, len(demos)) for s in (False, True))
    log(
        f"{len(demos)} games in {time.time() - start:.0f} s; the expert wins {plain:.2f}, less noisy {with_text:.2f}"
    )
    return demos


def fit(policy: Policy, demos: list, stage: Stage, config: WarmStart, rng: random.Random, log) -> None:
    """One pass over the games."""
    model = policy.model
    batches = _batches(demos, config.batch_tokens, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=len(batches) + 1, pct_start=0.05)
    start, recent = time.time(), []
    for step, rows in enumerate(batches):
        width = max(len(demos[r][0]) for r in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask, text = torch.zeros(ids.shape, dtype=torch.bool), torch.zeros(ids.shape, dtype=torch.bool)
        for b, r in enumerate(rows):
            ids[b, : len(demos[r][0])] = torch.from_numpy(demos[r][0].astype(np.int64))
            mask[b, : len(demos[r][1])] = torch.from_numpy(demos[r][1])
            text[b, 1 : len(demos[r][0])] = True
        logprobs, _ = policy.score(ids, text)
        commands = -(logprobs * mask).sum() / mask.sum()
        loss = commands - stage.text_weight * logprobs.sum() / text.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(commands.item())
        if step % 25 == 0 or step == len(batches) - 1:
            log(f"batch {step + 1}/{len(batches)}  loss {np.mean(recent[-25:]):.3f} nats  {time.time() - start:.0f} s")


def new_model(config: WarmStart, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights. Embeddings are tied, so that what is read can be copied out from the first step on."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            intermediate_size=config.mlp,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def _batches(demos: list, batch_tokens: int, rng: random.Random) -> list[list[int]]:
    """Batches of games of like length, in random order."""
    order = sorted(range(len(demos)), key=lambda r: len(demos[r][0]) + rng.random() * 8)
    batches, rows = [], []
    for r in order:
        if rows and (len(rows) + 1) * len(demos[r][0]) > batch_tokens:
            batches.append(rows)
            rows = []
        rows.append(r)
    rng.shuffle(batches := [*batches, rows])
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--env", default="twc")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, nargs="*", help="games of each stage (default: 16000 18000)")
    given = parser.parse_args()
    stages = WarmStart.stages
    if given.games:
        stages = tuple(replace(stage, games=n) for stage, n in zip(stages, given.games, strict=False))
    config = WarmStart(env=given.env, stages=stages, seed=given.seed)
    model, tokenizer = clone(config, lambda line: print(line, flush=True))
    model.to(torch.bfloat16).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    (given.out / "warmstart.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    print(f"saved to {given.out}")


if __name__ == "__main__":
    main()
