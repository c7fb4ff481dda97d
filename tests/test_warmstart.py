import json
import random
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoTokenizer

from workbench import envs, shipped
from workbench.policy import Policy
from workbench.prompts import Chat, PromptStyle
from workbench.skills import SkillBank
from workbench.warmstart import GAMES, Stage, WarmStart, after_prefix, clone, demonstration, play_stage, turns


def test_a_tiny_warm_start_learns_and_its_folder_reads_back(tmp_path):
    said = []
    stages = (Stage(100, 0.4, 0.1, 0.3), Stage(20, 0.2, 0.0, 0.1))
    config = replace(WarmStart(), stages=stages, hidden=32, layers=1, mlp=32, batch_tokens=1500, lr=1e-2)
    model, tokenizer = clone(config, said.append)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    read = Policy.load(tmp_path).tokenizer
    for text in ("take dirty teal dress", "put kettle on counter", "you see a fridge, that is closed."):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert read.encode(text, add_special_tokens=False) == ids and tokenizer.unk_token_id not in ids


def test_the_shipped_model_is_small_and_knows_every_word():
    folder = shipped.data("models", "twc-small")
    assert sum(p.stat().st_size for p in folder.iterdir()) < 4 * 2**20
    assert json.loads((folder / "warmstart.json").read_text())["env"] == "twc"
    tokenizer, env = AutoTokenizer.from_pretrained(folder), envs.make("twc").envs[0]
    for split in env.splits:
        for task in env.tasks(split)[:30]:
            state = env.reset(task.id)
            for text in (state.info["task"], state.observation, *state.admissible):
                assert tokenizer.unk_token_id not in tokenizer.encode(text), text


def test_a_demonstration_masks_the_commands_alone(small_model_folder):
    tokenizer, env = AutoTokenizer.from_pretrained(small_model_folder), envs.make("twc").envs[0]
    chat, skill = Chat(tokenizer, PromptStyle()), np.array([7, 8, 9], np.int32)
    ids, mask, outcome = demonstration(env, env.tasks("train")[0].id, chat, random.Random(0), 0.0, 10, skill)
    assert outcome == 1 and ids[1:4].tolist() == [7, 8, 9]
    commands = tokenizer.decode(ids[mask]).split("<end>")
    state = env.reset(env.tasks("train")[0].id)
    for command in commands[:-1]:
        action = chat.style.command(command, state.admissible)
        assert action in state.admissible
        state = env.step(action)
    assert state.outcome == 1


def test_single_turns_are_labelled_by_the_expert_whatever_was_played():
    folder, env = shipped.data("models", "games-small"), envs.make("sokoban").envs[0]
    chat = Chat(AutoTokenizer.from_pretrained(folder), PromptStyle(history=0))
    skill = np.array([7, 8, 9], np.int32)
    task = env.tasks("train")[0].id
    rows, outcome = turns(env, task, chat, random.Random(0), 0.0, 0.0, 10, skill)
    assert outcome == 1
    state = env.reset(task)
    for ids, mask in rows:
        assert ids[1:4].tolist() == [7, 8, 9]
        assert chat.decode(ids[mask]) == env.expert() and chat.decode(ids).count("#") > 16
        state = env.step(env.expert())
    assert state.outcome == 1
    # A game that wanders visits other states; what is learnt there is still the expert's command.
    seen = set()
    for seed in range(8):
        for ids, mask in turns(env, task, chat, random.Random(seed), 0.0, 0.8, 10, None)[0]:
            cells = chat.decode(ids[~mask]).split()[-41:]
            board = tuple("".join(cells).replace("_", " ").split("/"))
            env.restore((task, board))
            assert chat.decode(ids[mask]) == env.expert()
            seen.add(board)
    assert len(seen) > len(rows)


def test_a_shared_beginning_gives_the_log_probs_and_gradients_of_whole_rows():
    policy = Policy.load(shipped.data("models", "games-small"))
    worlds = [(envs.make("sokoban").envs[0], SkillBank.load(shipped.data("skills", "sokoban")))]
    config = replace(GAMES, env="sokoban")
    demos = play_stage(worlds, policy, Stage(6, 0.2, 0.0, 0.0), config, random.Random(0), lambda line: None)
    width = max(len(ids) for ids, _ in demos)
    ids, mask = torch.zeros(len(demos), width, dtype=torch.long), torch.zeros(len(demos), width, dtype=torch.bool)
    for b, (row, own) in enumerate(demos):
        ids[b, : len(row)], mask[b, : len(row)] = torch.from_numpy(row.astype(np.int64)), torch.from_numpy(own)
    plain = [b for b in range(len(demos)) if len(demos[b][0]) == min(len(ids) for ids, _ in demos)]
    assert 1 < len(plain) < len(demos)
    for rows in (plain, list(range(len(demos)))):  # with a long beginning in common, and with one token
        got = after_prefix(policy, ids[rows], mask[rows])
        want = policy.score(ids[rows], mask[rows])[0][mask[rows]]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        weights = list(policy.model.parameters())
        for a, b in zip(*(torch.autograd.grad(x.mean(), weights) for x in (got, want)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
