import json
import random
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoTokenizer

from workbench import envs, shipped
from workbench.policy import Policy
from workbench.prompts import Chat, PromptStyle
from workbench.warmstart import Stage, WarmStart, clone, demonstration


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
