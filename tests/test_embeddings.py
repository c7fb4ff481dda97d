import pytest
import torch
from tiny_models import tiny_model

from workbench import shipped
from workbench.budget import v0
from workbench.embeddings import embed
from workbench.errors import WorkbenchError
from workbench.policy import Policy, load_tokenizer

TEXTS = ["you are in the kitchen", "take the apple", "look around the room and open the door to the north", "go"]


@pytest.fixture(scope="module")
def policy():
    tokenizer = load_tokenizer(shipped.data("models", "twc-small"))
    return Policy(tiny_model(tokenizer), tokenizer)


def test_a_text_is_the_mean_of_its_own_hidden_states_whatever_is_beside_it(policy):
    got = embed(policy, TEXTS)
    assert got.shape == (4, 32) and got.dtype == torch.float32 and not got.requires_grad
    for text, row in zip(TEXTS, got, strict=True):
        ids = torch.tensor([policy.tokenizer.encode(text, add_special_tokens=False)])
        torch.testing.assert_close(row, policy.hidden(ids)[0].detach().mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(embed(policy, TEXTS, micro_tokens=1), got, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(embed(policy, TEXTS[::-1]), got.flip(0), atol=1e-5, rtol=1e-4)
    long = embed(policy, [TEXTS[2], TEXTS[2] + " and take the apple"], max_tokens=4)
    torch.testing.assert_close(long[0], long[1])
    assert not torch.allclose(long[0], got[2], atol=1e-3)


def test_they_tell_questions_apart(policy):
    rooms = [f"you are in the {room}, {n} steps from home" for n in range(12) for room in ("kitchen", "garden")]
    outcomes = torch.tensor([1.0, 0.0] * 12)
    vectors = embed(policy, rooms)
    for head in v0.HEADS:
        values = v0.predict(vectors[:16], outcomes[:16], vectors[16:], v0.V0Config(head, neighbours=4))
        assert v0.auc_within(values, outcomes[16:], torch.zeros(8)) > 0.9


def test_what_has_no_tokens_is_refused(policy):
    with pytest.raises(WorkbenchError, match="text 1 has no tokens"):
        embed(policy, ["go", ""])
    for texts, most in (([], 8), (["go"], 0)):
        with pytest.raises(WorkbenchError, match="at least one text and one token"):
            embed(policy, texts, most)
