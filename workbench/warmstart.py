"""Make the small default model: a word-level tokenizer from an environment's own text, and a transformer that cloned
a noisy expert.

    python -m workbench.warmstart --env twc --out data/models/twc-small
    python -m workbench.warmstart --env games --out data/models/games-small

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
from .envs.base import Env, SolvedEnv
from .policy import Policy
from .prompts import Chat, PromptStyle
from .skills import SkillBank, privileged_prompt

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<act> {{ m['content'] }}<end>"
    "{% else %}<obs> {{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<act>{% endif %}"
)


@dataclass(frozen=True)
class Stage:
    """Games to clone, half of them with the skill text in context.

    noise, skilled_noise: share of random commands without and with the text. text_weight: of predicting the
    environment's text beside the commands, which teaches the copying of names; it has no effect without history.
    """

    games: int
    noise: float
    skilled_noise: float
    text_weight: float


@dataclass(frozen=True)
class WarmStart:
    """How the default model is made. The last stage sets how well it plays; the first, noisier one, teaches words.

    history: as in prompts.PromptStyle. -1 clones whole games; 0 single turns, of games in which a share `wander` of the
    commands that are played are random, whatever is cloned there, so that the clone knows states off the shortest way.
    """

    env: str = "twc"  # several with commas between them are learnt by one model, as many games of each
    stages: tuple[Stage, ...] = (Stage(16000, 0.5, 0.15, 0.3), Stage(18000, 0.3, 0.05, 0.1))
    max_turns: int = 10
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    mlp: int = 384
    lr: float = 2e-3
    batch_tokens: int = 6000
    seed: int = 0
    history: int = -1
    wander: float = 0.4
    words: str = ""  # known besides those of the environment's texts


# One model for the three games. A board says all there is to know, so a turn is read without those before it.
GAMES = WarmStart(
    env="rush_hour,sokoban,minesweeper",
    stages=(Stage(6000, 0.15, 0.0, 0.0), Stage(9000, 0.15, 0.0, 0.0), Stage(8000, 0.15, 0.0, 0.0)),
    max_turns=8,
    history=0,
    words=" ".join("abcdefghijklmnopqrstuvwxyz0123456789"),
)


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
    """One noisy expert game as (ids, mask of the commands' tokens, outcome). It ends where no win is left."""
    style, tokenizer = chat.style, chat.tokenizer
    state = env.reset(task)
    ids = chat.first(style.message(state, (), True))
    if skill is not None:
        at = chat.insertion_point("user")
        ids = np.concatenate([ids[:at], skill, ids[at:]])
    pieces, masks = [ids], [np.zeros(len(ids), bool)]
    for turn in range(max_turns):
        best = env.expert()
        if best is None and turn and isinstance(env, SolvedEnv) and env.solution().dead:
            break
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


def turns(
    env: Env, task: str, chat: Chat, rng: random.Random, noise: float, wander: float, max_turns: int,
    skill: np.ndarray | None,
) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:  # fmt: skip
    """The turns of a wandering game, each as (ids, mask of the command's tokens) of what the noisy expert does there,
    and the outcome. It ends where the expert knows no command."""
    state, out = env.reset(task), []
    for _ in range(max_turns):
        if state.done or (best := env.expert()) is None:
            break
        prompt = chat.first(chat.style.message(state, (), True))
        if skill is not None:
            prompt = privileged_prompt(prompt, skill, chat.insertion_point("user"))
        learnt = rng.choice(state.admissible) if rng.random() < noise else best
        response = np.array([*chat.tokenizer.encode(learnt, add_special_tokens=False), chat.end_id], np.int32)
        out.append((np.concatenate([prompt, response]), np.arange(len(prompt) + len(response)) >= len(prompt)))
        state = env.step(rng.choice(state.admissible) if rng.random() < wander else best)
    return out, state.outcome


def clone(config: WarmStart, log=print) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make tokenizer and model, then play and fit one stage after the other."""
    rng = random.Random(config.seed)
    torch.manual_seed(config.seed)
    names = config.env.split(",")
    worlds = [(envs.make(name).envs[0], SkillBank.load(shipped.data("skills", name))) for name in names]
    words = {word for env, bank in worlds for word in words_of(env, bank, 1000, config.seed)} | {*config.words.split()}
    tokenizer = build_tokenizer(sorted(words))
    model = new_model(config, tokenizer)
    log(f"{len(tokenizer)} words, {sum(p.numel() for p in model.parameters()):,} parameters")
    policy = Policy(model, tokenizer)
    for stage in config.stages:
        fit(policy, play_stage(worlds, policy, stage, config, rng, log), stage, config, rng, log)
    return model, tokenizer


def play_stage(worlds: list[tuple[Env, SkillBank]], policy: Policy, stage: Stage, config: WarmStart, rng, log) -> list:
    """The stage's games as (ids, mask of the commands' tokens); every second one is played with the skill text."""
    chat, tokenizer = Chat(policy.tokenizer, PromptStyle(history=config.history)), policy.tokenizer
    tasks = [env.tasks(env.splits[0]) for env, _ in worlds]
    demos, played, wins, start = [], Counter(), Counter(), time.time()
    for i in range(stage.games):
        w, skilled = i // 2 % len(worlds), i % 2 == 1
        (env, bank), task, skill = worlds[w], rng.choice(tasks[w]).id, None
        if skilled:
            text = bank.text(env.reset(task).info["kind"])
            skill = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
        noise = stage.skilled_noise if skilled else stage.noise
        if config.history < 0:
            ids, mask, outcome = demonstration(env, task, chat, rng, noise, config.max_turns, skill)
            demos.append((ids, mask))
        else:
            own, outcome = turns(env, task, chat, rng, noise, config.wander, config.max_turns, skill)
            demos += own
        played[w, skilled] += 1
        wins[w, skilled] += outcome
    log(f"{stage.games} games in {time.time() - start:.0f} s")
    for w, name in enumerate(config.env.split(",")):
        plain, with_text = (wins[w, s] / max(1, played[w, s]) for s in (False, True))
        log(f"{name}: the expert wins {plain:.2f}, less noisy {with_text:.2f}")
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
        if config.history < 0:
            logprobs, _ = policy.score(ids, text)
            commands = -(logprobs * mask).sum() / mask.sum()
            loss = commands - stage.text_weight * logprobs.sum() / text.sum()
        else:
            loss = commands = -after_prefix(policy, ids, mask).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(commands.item())
        if step % 25 == 0 or step == len(batches) - 1:
            log(f"batch {step + 1}/{len(batches)}  loss {np.mean(recent[-25:]):.3f} nats  {time.time() - start:.0f} s")


def after_prefix(policy: Policy, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probs (N,) of the tokens in the mask; what all rows begin with goes through the model once."""
    same = (ids == ids[:1]).all(0).long().cumprod(0)
    shared = max(0, min(int(same.sum()), int(mask.any(0).long().argmax()) - 1))
    return policy.score(ids, mask, shared=shared)[0][mask]


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
    parser.add_argument("--env", default="twc", help="an environment, several with commas, or: games")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, nargs="*", help="games of each stage")
    given = parser.parse_args()
    config = replace(GAMES if given.env == "games" else WarmStart(env=given.env), seed=given.seed)
    if given.games:
        stages = tuple(replace(stage, games=n) for stage, n in zip(config.stages, given.games, strict=False))
        config = replace(config, stages=stages)
    model, tokenizer = clone(config, lambda line: print(line, flush=True))
    model.to(torch.bfloat16).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    (given.out / "warmstart.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    print(f"saved to {given.out}")


if __name__ == "__main__":
    main()
