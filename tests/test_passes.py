import pytest
import torch
from tiny_models import tiny_model
from transformers import MistralConfig, MistralForCausalLM

from workbench.errors import WorkbenchError
from workbench.passes import passes
from workbench.policy import Policy
from workbench.settings import TrainConfig, load_policy
from workbench.update import TeacherRows

PROMPTS = (20, 20, 20, 31, 20, 31, 5, 5)  # two prompts that rows share, and one too short to be worth it


@pytest.fixture(scope="module")
def rows():
    """Right-padded rows (B,T) that begin with one of three prompts, their lengths, and which tokens are sampled."""
    draw = torch.Generator().manual_seed(0)
    prompt = {n: torch.randint(3, 20, (n,), generator=draw) for n in set(PROMPTS)}
    lengths = torch.tensor([n + own for n, own in zip(PROMPTS, (4, 30, 9, 12, 10, 3, 6, 2), strict=True)])
    ids = torch.zeros(len(PROMPTS), int(lengths.max()), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, n in enumerate(PROMPTS):
        end = int(lengths[row])
        ids[row, :n], ids[row, n:end] = prompt[n], torch.randint(3, 20, (end - n,), generator=draw)
        mask[row, n:end] = torch.rand(end - n, generator=draw) < 0.6
        mask[row, n] = True
    return ids, lengths, mask


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_every_row_once_beside_those_of_its_prompt(rows, max_tokens):
    ids, lengths, mask = rows
    cut = [(part.tolist(), shared) for part, shared in passes(ids, lengths, mask, max_tokens)]
    assert sorted(row for part, _ in cut for row in part) == list(range(len(PROMPTS)))
    for part, shared in cut:
        assert {PROMPTS[row] for row in part} <= {5} if shared == 0 else {PROMPTS[row] for row in part} == {shared + 1}
    if max_tokens == 60:  # 19 shared, and 5 + 31 of their own; the next would be too many
        assert cut[:2] == [([0, 1], 19), ([2, 4], 19)]
    if max_tokens == 1:  # a prompt of 30 leaves room for 30 more
        assert ([3, 5], 30) in cut
    assert list(passes(ids[:0], lengths[:0], mask[:0], max_tokens)) == []


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_shared_prompt_changes_neither_scores_nor_gradients(tokenizer, rows, kind):
    ids, lengths, mask = rows
    policy = Policy(tiny_model(tokenizer, kind), tokenizer)

    def gradient(cut):
        policy.model.zero_grad()
        logprobs = torch.zeros(mask.shape)
        for part, shared in cut:
            scored, entropy = policy.score(ids[part], mask[part], shared=shared, entropy_grad=True)
            (scored.sin() + 0.1 * entropy).sum().backward()
            logprobs[part] = scored.detach()
        return logprobs, [p.grad.clone() for p in policy.model.parameters()]

    plain, want = gradient([(torch.arange(len(ids)), 0)])
    for max_tokens in (40, 10_000):
        found, got = gradient(passes(ids, lengths, mask, max_tokens))
        torch.testing.assert_close(found, plain, atol=2e-5, rtol=1e-5)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(policy.score_rows(ids, lengths, mask)[0], plain, atol=2e-5, rtol=1e-5)


def test_a_shared_token_cannot_be_scored(policy, rows):
    ids, _, mask = rows
    with pytest.raises(WorkbenchError, match="one of the 21 tokens that rows begin with has no context"):
        policy.score(ids[:2], mask[:2], shared=20)


def test_attention_that_a_shared_prompt_would_change_is_refused(tokenizer):
    model = tiny_model(tokenizer)
    model.set_attn_implementation("eager")  # adds a mask of booleans to its scores
    with pytest.raises(WorkbenchError, match="only 'sdpa' is supported"):
        Policy(model, tokenizer)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    with pytest.raises(WorkbenchError, match="sliding_attention"):
        Policy(MistralForCausalLM(MistralConfig(**shape, sliding_window=8)), tokenizer)
    Policy(MistralForCausalLM(MistralConfig(**shape, sliding_window=64)), tokenizer)


def test_a_teacher_reads_its_rows_in_parts_of_micro_tokens(tokenizer, rows, monkeypatch):
    ids, lengths, mask = rows
    policy, picked = Policy(tiny_model(tokenizer), tokenizer), torch.tensor([5, 0, 3])
    teacher = TeacherRows(policy, ids, lengths, torch.zeros_like(lengths))
    whole, hidden, seen = teacher.states(picked, mask[picked]), policy.hidden, []
    monkeypatch.setattr(policy, "hidden", lambda x: (seen.append(tuple(x.shape)), hidden(x))[1])
    policy.micro_tokens = 1
    torch.testing.assert_close(teacher.states(picked, mask[picked]), whole, atol=2e-5, rtol=1e-5)
    assert sorted(seen) == sorted((1, n) for n in lengths[picked].tolist())


def test_micro_tokens_of_a_run_are_those_of_every_pass(monkeypatch):
    policy = load_policy(TrainConfig(micro_tokens=50))
    ids, seen, hidden = torch.arange(3, 33).view(3, 10) % 20, [], policy.hidden
    lengths, mask = torch.full((3,), 10), (torch.arange(10) > 3).expand(3, 10)
    monkeypatch.setattr(policy, "hidden", lambda x: (seen.append(len(x)), hidden(x))[1])
    policy.score_rows(ids, lengths, mask)
    policy.micro_tokens = 10
    policy.score_rows(ids, lengths, mask)
    assert seen == [3, 1, 1, 1]
