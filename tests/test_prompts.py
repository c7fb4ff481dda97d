import numpy as np
import pytest

from workbench.envs.base import State
from workbench.errors import WorkbenchError
from workbench.prompts import Chat, PromptStyle

LOOK = State("You see a red cup .", ("take red cup", "look around"), info={"task": "Put the cup on the table ."})


def test_prompts_extend_each_other_and_read_like_the_template(tokenizer):
    chat = Chat(tokenizer, PromptStyle())
    first = chat.first(chat.style.message(LOOK, (), True))
    response = np.array([*tokenizer.encode("take red cup", add_special_tokens=False), chat.end_id], np.int32)
    following = chat.following("you see a table .", truncated=False)
    whole = np.concatenate([first, response, following])
    messages = [
        {"role": "user", "content": chat.style.message(LOOK, (), True)},
        {"role": "assistant", "content": "take red cup"},
        {"role": "user", "content": "you see a table ."},
    ]
    assert whole.tolist() == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    cut = chat.following("you see a table .", truncated=True)
    assert cut[0] == chat.end_id and np.array_equal(cut[1:], following)


def test_a_chatml_template_closes_turns_with_its_own_newline(tokenizer):
    import copy

    chatml = copy.deepcopy(tokenizer)
    chatml.chat_template = (
        "{% for m in messages %}<obs>{{ m['role'] }} {{ m['content'] }}<end> .{% endfor %}"
        "{% if add_generation_prompt %}<obs>assistant {% endif %}"
    )
    chat = Chat(chatml, PromptStyle())
    text = chatml.decode(np.concatenate([chat.first("look"), [chat.end_id], chat.following("around", False)]))
    want = chatml.apply_chat_template(
        [{"role": "user", "content": "look"}, {"role": "assistant", "content": ""},
         {"role": "user", "content": "around"}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert text.replace(" ", "") == chatml.decode(chatml.encode(want)).replace(" ", "")


def test_template_without_end_token_is_refused(tokenizer):
    import copy

    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(WorkbenchError, match="must close a turn"):
        Chat(broken, PromptStyle())
    broken.chat_template = None
    with pytest.raises(WorkbenchError, match="no chat template"):
        Chat(broken, PromptStyle())


def test_commands_are_spelt_as_the_environment_spells_them():
    plain, tagged = PromptStyle(), PromptStyle("action")
    assert plain.command(" take  tv remote", ["take TV remote"]) == "take TV remote"
    assert plain.command("fly", ["take TV remote"]) == "fly"
    assert plain.command("", ["look"]) == "(nothing)"
    assert tagged.command("hm <action>go\n north</action>", ["go north"]) == "go north"
    assert tagged.command("<action>a</action> then <action>b</action>", []) == "b"
    assert tagged.command("no tags", ["no tags"]) == "no tags"


def test_history_window_and_admissible_list():
    style = PromptStyle("action", history=1, show_admissible=True)
    text = style.message(LOOK, [("old room", "go"), ("hall", "open door")], True)
    assert "hall\n> open door" in text and "old room" not in text and "take red cup; look around" in text
