import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from workbench.errors import WorkbenchError
from workbench.reuse.lm_head import IsolatedHead, WeightMonitor

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
KINDS = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def build(kind="qwen2", tied=False, seed=0):
    torch.manual_seed(seed)
    config, model = KINDS[kind]
    return model(config(**SIZES, tie_word_embeddings=tied)).double()


IDS = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(1))


def loss_of(logits):
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])
    return -(logp[..., 0] * torch.linspace(-1, 2, 8).double()).mean()


def isolated_loss(model, head):
    return loss_of(F.linear(model.base_model(IDS).last_hidden_state, head.weight, head.bias))


def plain_gradients(model):
    model.zero_grad()
    loss_of(model(IDS).logits).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def logits_path_gradient(model):
    """d loss / d W of the head alone, from the hidden states and the gradient of the logits."""
    hidden = model.base_model(IDS).last_hidden_state.detach()
    logits = F.linear(hidden, model.get_output_embeddings().weight.detach()).requires_grad_()
    (g,) = torch.autograd.grad(loss_of(logits), logits)
    return torch.einsum("btv,bth->vh", g, hidden)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_isolated_gradient_is_the_logits_path_and_merging_gives_the_plain_one(kind, tied):
    model = build(kind, tied)
    head = IsolatedHead(model)
    assert head.tied == tied
    plain = plain_gradients(model)
    isolated_loss(model, head).backward()
    want = logits_path_gradient(model)
    torch.testing.assert_close(head.weight.grad, want, rtol=1e-10, atol=1e-14)
    assert head.energy() == pytest.approx(float(want.square().sum()), rel=1e-10)
    real = model.get_output_embeddings().weight
    if tied:
        # Only the embedding's own path has reached the shared parameter so far.
        torch.testing.assert_close(real.grad + want, plain["model.embed_tokens.weight"])
        assert not torch.allclose(plain["model.embed_tokens.weight"], want)
    else:
        assert real.grad is None
    head.merge()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name])
    assert head.weight.grad is None
    before = real.grad.clone()
    head.merge()
    assert torch.equal(real.grad, before), "a gradient moves once"


@pytest.mark.parametrize("tied", [False, True])
def test_micro_batches_accumulate(tied):
    model = build(tied=tied)
    head = IsolatedHead(model)
    plain = plain_gradients(model)
    for weight in (0.5, 0.5):  # powers of two round alike at every scale
        (weight * isolated_loss(model, head)).backward()
    head.merge()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_head_has_an_energy_and_no_gradient(tied):
    model = build(tied=tied)
    model.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    head = IsolatedHead(model)
    isolated_loss(model, head).backward()
    assert head.energy() == pytest.approx(float(logits_path_gradient(model).square().sum()), rel=1e-10)
    head.merge()
    assert model.get_output_embeddings().weight.grad is None
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("tied", [False, True])
def test_training_through_the_alias_equals_plain_training(tied):
    plain, through = build(tied=tied), build(tied=tied)
    head = IsolatedHead(through)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, through)]
    for _ in range(4):
        loss_of(plain(IDS).logits).backward()
        isolated_loss(through, head).backward()
        head.merge()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain.parameters(), through.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_the_alias_follows_a_model_whose_weights_move_to_new_storage():
    model = build()
    head = IsolatedHead(model)
    stale = head.weight
    model.float()
    assert head.weight.dtype == torch.float32 and stale.dtype == torch.float64
    assert head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert head.weight.requires_grad and head.weight.is_leaf
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_bias_and_clear_and_a_missing_backward():
    model = build()
    model.lm_head = nn.Linear(16, 37).double()
    head = IsolatedHead(model)
    with pytest.raises(WorkbenchError, match="no gradient yet"):
        head.energy()
    plain = plain_gradients(model)
    isolated_loss(model, head).backward()
    head.clear()
    assert head.weight.grad is None and head.bias.grad is None
    model.zero_grad()
    isolated_loss(model, head).backward()
    head.merge()
    torch.testing.assert_close(model.lm_head.bias.grad, plain["lm_head.bias"])


def test_a_model_without_a_head_is_refused():
    with pytest.raises(WorkbenchError, match="no output embeddings"):
        IsolatedHead(build().model)
    with pytest.raises(WorkbenchError, match="no output embeddings"):
        WeightMonitor(build().model)


# Weight monitor


def step(model, head, optimizer, monitor, update):
    isolated_loss(model, head).backward()
    norm = math.sqrt(head.energy())
    head.merge()
    monitor.measure_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    rows = monitor.observe(step=7, update=update, reuse=2, head_norm=norm)
    optimizer.zero_grad()
    return rows, norm


@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_the_definitions(tied):
    model = build(tied=tied)
    head, monitor = IsolatedHead(model), WeightMonitor(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
    step(model, head, optimizer, monitor, 1)
    before = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
    plain = plain_gradients(model)
    rows, norm = step(model, head, optimizer, monitor, 2)
    now = dict(model.named_parameters(remove_duplicate=False))
    by_module = {row["module"]: row for row in rows}
    assert by_module.keys() == {name.rsplit(".", 1)[0] for name in now}

    def stacked(values, module):
        return torch.cat([v.detach().flatten() for n, v in values.items() if n.rsplit(".", 1)[0] == module])

    for module, row in by_module.items():
        w, b, s = (stacked(values, module) for values in (now, before, start))
        assert row["relative_change"] == pytest.approx(float((w - b).norm() / b.norm()), rel=1e-5)
        assert row["cumulative_change"] == pytest.approx(float((w - s).norm() / s.norm()), rel=1e-5)
        assert row["params"] == len(w)
        assert (row["step"], row["update"], row["reuse"]) == (7, 2, 2)
        if module != "lm_head":
            assert row["grad_norm"] == pytest.approx(float(stacked(plain, module).norm()), rel=1e-5)
    assert by_module["lm_head"]["grad_norm"] == norm
    assert [m for m, row in by_module.items() if row["is_head"]] == ["lm_head"]
    assert {m for m, row in by_module.items() if row["tied"]} == ({"lm_head", "model.embed_tokens"} if tied else set())
    layers = {m: row["layer"] for m, row in by_module.items()}
    assert layers["model.embed_tokens"] == -1
    assert layers["model.layers.0.self_attn.q_proj"] == 0 and layers["model.layers.1.mlp.down_proj"] == 1
    assert layers["model.norm"] == layers["lm_head"] == 2


def test_layers_of_another_architecture():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=3, n_head=2, n_positions=32))
    monitor = WeightMonitor(model)
    rows = {row["module"]: row for row in monitor.observe(1, 1, 1)}
    assert rows["transformer.wpe"]["layer"] == rows["transformer.wte"]["layer"] == -1
    assert rows["transformer.h.2.attn.c_attn"]["layer"] == 2
    assert rows["transformer.ln_f"]["layer"] == rows["lm_head"]["layer"] == 3
    assert rows["lm_head"]["tied"] and rows["lm_head"]["is_head"]
    assert all(row["grad_norm"] is None and row["relative_change"] == 0 for row in rows.values())


def test_frozen_modules_are_left_out_but_the_head_stays():
    model = build()
    model.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    nn.init.zeros_(model.model.layers[1].mlp.up_proj.weight)
    rows = WeightMonitor(model).observe(1, 1, 1, head_norm=0.5)
    assert [(row["module"], row["grad_norm"]) for row in rows] == [
        ("model.layers.1.mlp.up_proj", None),
        ("lm_head", 0.5),
    ]
    assert rows[0]["relative_change"] is None, "no change is relative to weights of norm zero"


def test_every_other_update():
    model = build()
    head, monitor = IsolatedHead(model), WeightMonitor(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model.lm_head.weight.detach().clone()
    assert step(model, head, optimizer, monitor, 1)[0] == []
    (row,) = [r for r in step(model, head, optimizer, monitor, 2)[0] if r["is_head"]]
    moved = float((model.lm_head.weight.detach() - start).norm() / start.norm())
    assert row["relative_change"] == row["cumulative_change"] == pytest.approx(moved, rel=1e-5)
    with pytest.raises(WorkbenchError, match="every must be at least 1"):
        WeightMonitor(model, every=0)


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_monitor_goes_on_as_an_unbroken_one(every):
    def run(updates, monitor, model, head, optimizer):
        return [step(model, head, optimizer, monitor, u)[0] for u in updates]

    def fresh():
        model = build()
        return WeightMonitor(model, every), model, IsolatedHead(model), torch.optim.AdamW(model.parameters(), lr=1e-2)

    whole = run(range(6), *fresh())
    monitor, model, head, optimizer = fresh()
    run(range(3), monitor, model, head, optimizer)
    file = io.BytesIO()
    torch.save([monitor.state_dict(), model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    states = torch.load(file)
    monitor, model, head, optimizer = fresh()
    for part, state in zip((monitor, model, optimizer), states, strict=True):
        part.load_state_dict(state)
    assert run(range(3, 6), monitor, model, head, optimizer) == whole[3:]


def test_a_state_of_another_model_is_refused():
    other = Qwen2ForCausalLM(Qwen2Config(**(SIZES | {"vocab_size": 41})))
    with pytest.raises(WorkbenchError, match="other trainable weights"):
        WeightMonitor(build()).load_state_dict(WeightMonitor(other).state_dict())
