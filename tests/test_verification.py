"""Self-verification: balanced batches, the capped reward and what cancels it, schedules, and asking a policy."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from make_batch import make_episodes

from workbench import verification
from workbench.credit import grpo
from workbench.errors import WorkbenchError
from workbench.prompts import Chat, PromptStyle
from workbench.records import Batch
from workbench.session import Sampled
from workbench.verification import Attempt, Sample, Schedule

GROUPS = st.lists(st.lists(st.sampled_from(["right", "wrong", "invalid"]), min_size=1, max_size=8), max_size=12)


def rng(seed=0):
    return np.random.default_rng(seed)


def attempts(groups):
    return [Attempt(g, kind == "right", kind != "invalid") for g, group in enumerate(groups) for kind in group]


@given(GROUPS, st.integers(0, 1000))
def test_a_batch_is_half_right_half_wrong_and_says_so(groups, seed):
    drawn = attempts(groups)
    batch = verification.build_batch(drawn, rng(seed))
    told = Counter(sample.label for sample in batch)
    assert told[True] == told[False] == len(batch) // 2
    answered = sum(any(kind != "invalid" for kind in group) for group in groups)
    assert len(batch) <= answered
    for sample in batch:
        own = drawn[sample.index]
        group = groups[own.group]
        assert own.correct == sample.label and own.valid and "right" in group
        assert sample.pass_rate == group.count("right") / len(group), "invalid answers count in the denominator"
    if not any("right" in group and "wrong" in group for group in groups):
        assert not batch, "only a mixed group gives a wrong attempt"
    assert verification.build_batch(drawn, rng(seed)) == batch


def test_mixed_groups_come_first_and_pools_fill_what_is_missing():
    mixed, right, wrong = ["right", "wrong"], ["right"] * 4, ["wrong"] * 4
    batch = verification.build_batch(attempts([mixed] * 4), rng())
    assert len(batch) == 4 and len({s.index for s in batch}) == 4
    # Six groups ask for three of each. One mixed group gives one of each; its second wrong attempt fills twice more.
    drawn = attempts([["right", "wrong", "wrong", "wrong"], right, right, right, wrong, wrong])
    batch = verification.build_batch(drawn, rng())
    assert len(batch) == 6 and Counter(s.label for s in batch) == {True: 3, False: 3}
    no = Counter(s.index for s in batch if not s.label)
    assert sorted(no.values()) == [1, 2] and set(no) <= {1, 2, 3}, "with replacement from the pool, not the core"
    for seed in range(20):
        yes = [s.index for s in verification.build_batch(drawn, rng(seed)) if s.label]
        assert len(set(yes)) == 3 and 0 in yes, "without replacement while the pool lasts"


def test_without_a_pool_a_batch_is_smaller_or_skipped_and_still_balanced():
    only_core = [["right", "wrong"]] + [["wrong", "wrong"]] * 5
    batch = verification.build_batch(attempts(only_core), rng())
    assert sorted(s.label for s in batch) == [False, True]
    for skipped in ([], [["right", "wrong"]], [["right"]] * 4, [["wrong"]] * 4, [["invalid"]] * 3):
        assert verification.build_batch(attempts(skipped), rng()) == []


def test_the_order_of_a_batch_tells_nothing():
    firsts = [verification.build_batch(attempts([["right", "wrong"]] * 4), rng(seed))[0].label for seed in range(60)]
    assert 15 < sum(firsts) < 45


def test_reward_is_a_pass_rate_up_to_one_half():
    for rate, earned in ((0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (0.875, 0.5), (1.0, 0.5)):
        assert verification.reward(True, Sample(0, True, rate)) == earned
        assert verification.reward(False, Sample(0, False, rate)) == earned
        assert (
            verification.reward(None, Sample(0, False, rate)) == 0 == verification.reward(True, Sample(0, False, rate))
        )
    assert verification.reward(True, Sample(0, True, 0.8), cap=1.0) == 0.8


def test_dividing_by_the_groups_deviation_cancels_the_pass_rate():
    right = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 1]).double()
    groups = torch.zeros(8, dtype=torch.long)

    def advantages(rate, std):
        earned = torch.tensor(
            [verification.reward(bool(r), Sample(0, True, rate)) for r in right.bool()], dtype=torch.float64
        )
        return grpo.group_advantage(earned, groups, std=std)

    torch.testing.assert_close(advantages(0.25, True), advantages(0.5, True), atol=2e-5, rtol=0)
    torch.testing.assert_close(2 * advantages(0.25, False), advantages(0.5, False))
    assert float((advantages(0.25, False) - advantages(0.5, False)).abs().max()) > 0.05


def test_schedules():
    def plan(steps, **options):
        letters = {("generate",): "g", ("verify",): "v", ("generate", "verify"): "m"}
        return "".join(letters[kind] for kind in verification.plan(Schedule(**options), steps))

    assert plan(13) == "gggggvgggggvg"
    assert plan(8, interval=2, loops=2) == "ggvvggvv"
    assert plan(6, kind="init", first=4) == "vvvvgg"
    assert plan(3, kind="mixed") == "mmm" and plan(3, kind="generate") == "ggg" and plan(3, kind="verify") == "vvv"
    alternate = Schedule(interval=2, loops=2)
    assert [n for n in range(8) if alternate.flushes(n)] == [3, 7]
    assert [n for n in range(12) if Schedule().flushes(n)] == [5, 11]
    assert Schedule("mixed").flushes(0) and not Schedule("generate").flushes(0)


def test_a_buffer_is_empty_after_each_verification():
    schedule, kept, sizes = Schedule(), [], []
    for step in range(12):
        if "generate" in schedule.trains(step):
            kept += [step]
        else:
            sizes.append(len(kept))
        if schedule.flushes(step):
            kept = []
    assert sizes == [5, 5] and kept == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fine. Answer: \\boxed{Yes}", True),
        ("\\boxed{Yes} no wait \\boxed{No}", False),
        ("\\boxed{ \\text{no} }", False),
        ("yes", True),
        ("No, no", False),
        ("yes or no", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_verdicts(text, said):
    assert verification.verdict(text) is said


class Saying:
    """Answers every prompt with the same tokens; remembers what it was asked."""

    def __init__(self, ids):
        self.ids, self.asked, self.uniforms = np.array(ids, np.int32), [], []

    def session(self, rows, length):
        return self

    def sample(self, prompts, uniforms, end_id, temperature):
        self.asked += list(prompts.values())
        self.uniforms += list(uniforms.values())
        return {row: Sampled(self.ids, np.full(len(self.ids), -0.5, np.float32), False) for row in prompts}


def chat_that_says(tokenizer, text):
    chat = Chat(tokenizer, PromptStyle())
    chat.decode = lambda ids: text
    return chat


def test_answers_are_episodes_that_a_batch_can_be_made_of(tokenizer):
    episodes = make_episodes()
    samples = [Sample(0, True, 0.5), Sample(1, False, 0.25)]
    policy = Saying([5, 6, 2])
    answers = verification.verify(
        policy, chat_that_says(tokenizer, "\\boxed{Yes}"), episodes, samples, (7,), 3, 8, live=4
    )
    assert [(e.group, e.outcome, e.total_reward) for e in answers] == [(0, 1, 0.5)] * 3 + [(1, 0, 0.0)] * 3
    assert [e.stop_reason for e in answers] == ["won"] * 3 + ["lost"] * 3
    batch = Batch.from_episodes(answers, reward="return")
    assert batch.reward.tolist() == [0.5] * 3 + [0.0] * 3 and batch.group_index.tolist() == [0, 0, 0, 1, 1, 1]
    draws = np.stack(policy.uniforms)
    assert len(np.unique(draws, axis=0)) == 6, "every answer has its own draws"
    again = Saying([5])
    verification.verify(again, chat_that_says(tokenizer, "?"), episodes, samples, (7,), 3, 8, live=1)
    assert np.array_equal(np.stack(again.uniforms), draws), "however many run beside it"


def test_no_verdict_is_wrong_and_a_real_policy_can_be_asked(policy):
    episodes = make_episodes()
    chat = Chat(policy.tokenizer, PromptStyle())
    (answer,) = verification.verify(policy, chat, episodes, [Sample(1, False, 0.5)], (0,), 1, 6, 512)
    turn = answer.turns[0]
    assert turn.valid == (verification.verdict(turn.info["response"]) is not None)
    assert answer.outcome == (turn.action == "No") and len(turn.response_ids) <= 6


def test_a_question_shows_the_commands_and_not_the_verdict():
    turns = [
        SimpleNamespace(observation=f"room {k}", action=command) for k, command in enumerate(["take cup", "put cup"])
    ]
    episode = SimpleNamespace(turns=turns)
    plain, whole = (verification.question(episode, shown) for shown in ("commands", "transcript"))
    assert "room 0" in plain and "> take cup" in plain and "> put cup" in plain and "room 1" not in plain
    assert whole.index("> take cup") < whole.index("room 1") < whole.index("> put cup")


def test_bad_input_is_one_line(tokenizer):
    episodes, chat = make_episodes(), Chat(tokenizer, PromptStyle())
    ask = lambda samples, **options: verification.verify(Saying([5]), chat, episodes, samples, (0,), **options)  # noqa: E731
    for call, message in (
        (lambda: verification.reward(True, Sample(0, True, 1.5)), r"must lie in \[0, 1\]"),
        (lambda: Schedule("alternating"), "did you mean 'alternate'"),
        (lambda: Schedule(interval=0), "interval must be at least 1"),
        (lambda: Schedule().trains(-1), "a step is at least 0"),
        (lambda: verification.question(episodes[0], "answer"), "what a verifier is shown"),
        (lambda: ask([Sample(99, True, 0.5)]), "sample 0 is about episode 99 of 7"),
        (lambda: ask([Sample(0, True, 0.5)], size=0), "must be at least 1"),
        (lambda: ask([Sample(0, True, 0.5)], max_context=20), "leaves no room for 64 in a context of 20"),
    ):
        with pytest.raises(WorkbenchError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
