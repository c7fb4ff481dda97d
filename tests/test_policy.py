import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model

from workbench.errors import WorkbenchError
from workbench.passes import microbatches
from workbench.policy import Policy
from workbench.session import draw
from workbench.slots import Slots

END = 2


def uniforms(seed, rows, tokens):
    return dict(zip(rows, np.random.default_rng(seed).random((len(rows), tokens)), strict=True))


def prompts_of(seed, lengths, vocabulary):
    rng = np.random.default_rng(seed)
    return {i: rng.integers(3, vocabulary, n).astype(np.int32) for i, n in enumerate(lengths)}


@pytest.mark.parametrize(
    ("kind", "tied", "shared_heads", "alone"),
    [("qwen2", False, True, True), ("qwen2", True, False, False), ("llama", False, False, True)]
    + [("llama", False, True, False)],
)
def test_sampling_and_scoring_agree_over_turns(tokenizer, kind, tied, shared_heads, alone):
    """Log-probs of cached sampling over ragged turns are those of one plain forward of the whole sequence, where each
    row attends alone (as on a CPU) and where rows of like length do together."""
    policy = Policy(tiny_model(tokenizer, kind, tied, shared_heads=shared_heads), tokenizer)
    rows = prompts_of(0, [9, 17, 4, 30], len(tokenizer))
    session, rng = policy.session(4, 256), np.random.default_rng(1)
    session._slots = Slots(policy.model, 4, 256, alone)
    sampled = {i: [] for i in rows}
    for turn in range(4):
        live = [i for i in rows if not (turn == 2 and i == 1)]  # a row that skips a turn must not disturb the others
        out = session.sample({i: rows[i] for i in live}, uniforms(turn, live, 7), END)
        for i, s in out.items():
            sampled[i].append((len(rows[i]), s))
            rows[i] = np.concatenate([rows[i], s.ids, rng.integers(3, len(tokenizer), 1 + i).astype(np.int32)])
    for i, turns in sampled.items():
        with torch.no_grad():
            logits = policy.model(torch.from_numpy(rows[i].astype(np.int64))[None]).logits[0]
        logp = F.log_softmax(logits, -1)
        for start, s in turns:
            assert np.array_equal(rows[i][start : start + len(s.ids)], s.ids)
            want = [logp[start + j - 1, t].item() for j, t in enumerate(s.ids)]
            np.testing.assert_allclose(s.logprobs, want, atol=2e-5)


def test_score_equals_plain_forward_with_padding_and_chunks(policy):
    torch.manual_seed(1)
    lengths = torch.tensor([12, 5, 9])
    ids = torch.randint(3, 20, (3, 12))
    mask = (torch.arange(12) < lengths[:, None]) & (torch.rand(3, 12) < 0.6)
    mask[:, 0] = False
    for b, n in enumerate(lengths):
        ids[b, n:] = 0
    policy.model.requires_grad_(False)
    rows, rows_entropy = policy.score_rows(ids, lengths, mask, max_tokens=15)
    for chunk in (1, 40, 2**20):
        logprobs, entropy = policy.score(ids, mask, temperature=1.0, chunk=chunk)
        for b, n in enumerate(lengths):
            logp = F.log_softmax(policy.model(ids[b : b + 1, :n]).logits[0], -1)
            for t in range(1, n):
                want = logp[t - 1, ids[b, t]] if mask[b, t] else 0.0
                assert abs(float(logprobs[b, t] - want)) < 1e-5
                want_h = -(logp[t - 1].exp() * logp[t - 1]).sum() if mask[b, t] else 0.0
                assert abs(float(entropy[b, t] - want_h)) < 1e-4
        assert torch.allclose(rows, logprobs, atol=1e-5) and torch.allclose(rows_entropy, entropy, atol=1e-4)


def test_chunked_scoring_has_the_same_gradient(policy):
    torch.manual_seed(2)
    ids, mask = torch.randint(3, 20, (2, 10)), torch.ones(2, 10, dtype=torch.bool)
    mask[:, 0] = False
    grads = []
    for chunk in (2**20, 64):
        policy.model.zero_grad()
        logprobs, _ = policy.score(ids, mask, chunk=chunk)
        (logprobs * torch.linspace(-1, 1, 20).view(2, 10)).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
    assert torch.allclose(*grads, atol=1e-6)


def test_a_draw_does_not_depend_on_its_neighbours(policy, tokenizer):
    prompts = prompts_of(3, [8, 21, 13], len(tokenizer))
    numbers = uniforms(4, [0, 1, 2], 9)
    together = policy.session(3, 64).sample(prompts, numbers, END)
    for i in prompts:
        alone = policy.session(1, 64).sample({0: prompts[i]}, {0: numbers[i]}, END)[0]
        assert np.array_equal(alone.ids, together[i].ids)


def test_what_rows_share_is_computed_once(policy, tokenizer, monkeypatch):
    """Rows with the same tokens go through the model as one, until they draw different ones."""
    prompt = prompts_of(5, [20], len(tokenizer))[0]
    session, widths = policy.session(4, 64), []
    body = policy.body.forward
    counted = lambda **given: widths.append(given["input_ids"].numel()) or body(**given)  # noqa: E731
    monkeypatch.setattr(policy.body, "forward", counted)
    numbers = {i: np.array([0.3, [0.2, 0.9][i > 1], 0.5, 0.5]) for i in range(4)}
    out = session.sample(dict.fromkeys(range(4), prompt), numbers, -1)
    assert out[0].ids[1] != out[2].ids[1]
    assert widths == [20, 1, 2, 2]
    for i in range(4):
        alone = policy.session(1, 64).sample({0: prompt}, {0: numbers[i]}, -1)[0]
        assert np.array_equal(out[i].ids, alone.ids)
        assert np.allclose(out[i].logprobs, alone.logprobs, atol=1e-5)


def test_responses_begin_and_end_on_their_own(policy, tokenizer):
    """A row that begins while others are in the middle of theirs draws what it draws alone."""
    prompts, numbers = prompts_of(8, [8, 21, 13, 5], len(tokenizer)), uniforms(9, range(4), 12)
    session, ended = policy.session(4, 64), {}
    for step in range(20):
        if step < 8 and step % 2 == 0:
            session.begin(step // 2, prompts[step // 2], numbers[step // 2][: 12 - step])
        ended |= {row: (step, sampled) for row, sampled in session.step(-1).items()}
    assert {row: step for row, (step, _) in ended.items()} == dict.fromkeys(range(4), 11)
    for row, (_, sampled) in ended.items():
        alone = policy.session(1, 64).sample({0: prompts[row]}, {0: numbers[row][: 12 - 2 * row]}, -1)[0]
        assert np.array_equal(alone.ids, sampled.ids) and np.allclose(alone.logprobs, sampled.logprobs, atol=1e-5)


def test_draw_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    for temperature in (1.0, 0.5):
        ids, logp = draw(logits.expand(len(u), 4), u, temperature)
        share = torch.bincount(ids, minlength=4) / len(u)
        want = torch.softmax(logits[0] / temperature, -1)
        assert torch.allclose(share.float(), want, atol=1e-4)
        assert torch.allclose(logp, want.log()[ids], atol=1e-6)
    assert int(draw(logits, torch.tensor([0.99999], dtype=torch.float64), 0)[0]) == 2
    assert int(draw(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1 - 1e-16], dtype=torch.float64), 1.0)[0]) == 0


def test_a_cut_response_is_marked(policy, tokenizer):
    never = -1
    out = policy.session(1, 64).sample({0: prompts_of(6, [5], len(tokenizer))[0]}, {0: np.full(4, 0.5)}, never)[0]
    assert out.truncated and len(out.ids) == 4
    with pytest.raises(WorkbenchError, match="leaves no room"):
        policy.session(1, 5).sample({0: np.arange(3, 8)}, {0: np.full(4, 0.5)}, END)


def test_microbatches_cover_every_row_once_within_the_limit():
    lengths = torch.tensor([5, 30, 7, 30, 12, 1])
    groups = list(microbatches(lengths, 40))
    assert sorted(torch.cat(groups).tolist()) == list(range(6))
    assert all(len(g) == 1 or len(g) * int(lengths[g].max()) <= 40 for g in groups)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("model.safetensors", "no weights"), ("config.json", "no config.json"), ("tokenizer*", "no a tokenizer")],
)
def test_an_incomplete_model_folder_is_named(tmp_path, tokenizer, missing, said):
    tiny_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for path in tmp_path.glob(missing):
        path.unlink()
    with pytest.raises(WorkbenchError, match=said) as error:
        Policy.load(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_torn_weights_and_unknown_models_are_one_line(tmp_path, tokenizer):
    tiny_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for name in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(WorkbenchError) as error:
            Policy.load(name)
        assert "\n" not in str(error.value)


def test_a_model_whose_logits_are_not_its_head_is_refused(tokenizer):
    model = tiny_model(tokenizer)
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) * 2
    with pytest.raises(WorkbenchError, match="logits"):
        Policy(model, tokenizer)
