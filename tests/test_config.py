"""Loose mappings into typed configuration."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from workbench.config import canonical_json, coerce, digest, from_mapping
from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class Config:
    method: Literal["grpo", "agent_opsd"] = "grpo"
    steps: int = 60
    lr: float = 3e-4
    shuffle: bool = True
    model: str | None = None
    seeds: list[int] = field(default_factory=list)
    options: dict = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.999)


def one_line(excinfo) -> str:
    text = str(excinfo.value)
    assert "\n" not in text
    return text


def test_defaults_and_given_values():
    assert from_mapping(Config, {}) == Config()
    given = {"steps": 2, "method": "agent_opsd", "model": "m"}
    assert from_mapping(Config, given) == Config("agent_opsd", 2, model="m")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("lr", 1, 1.0),
        ("lr", "1e-5", 1e-5),
        ("lr", "-0.5", -0.5),
        ("steps", "12", 12),
        ("shuffle", "false", False),
        ("shuffle", "True", True),
        ("model", "none", None),
        ("model", None, None),
        ("model", "5", "5"),
        ("seeds", "[1, 2]", [1, 2]),
        ("seeds", (1, 2), [1, 2]),
        ("options", '{"lam": 0.25}', {"lam": 0.25}),
        ("options", "{'lam': 0.25}", {"lam": 0.25}),
        ("betas", [0.9, 1], (0.9, 1.0)),
    ],
)
def test_habits_of_papermill_and_of_the_command_line(name, given, expected):
    value = getattr(from_mapping(Config, {name: given}), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("steps", "many", "steps must be int, got 'many' (str)"),
        ("steps", 1.5, "steps must be int, got 1.5 (float)"),
        ("steps", True, "steps must be int, got True (bool)"),
        ("lr", False, "lr must be float, got False (bool)"),
        ("lr", "nan", "lr must be float"),
        ("shuffle", 1, "shuffle must be bool, got 1 (int)"),
        ("shuffle", "yes", "shuffle must be bool"),
        ("model", 3, "model must be str | None, got 3 (int)"),
        ("seeds", [1, "x"], "seeds must be list[int], got [1, 'x'] (list)"),
        ("seeds", "1", "seeds must be list[int]"),
        ("betas", [1.0], "betas must be tuple[float, float]"),
        ("options", [], "options must be dict"),
        ("method", "grop", "'grop'; did you mean 'grpo'? known: agent_opsd, grpo"),
        ("method", 3, "method must be one of 'grpo', 'agent_opsd', got 3"),
    ],
)
def test_ill_typed_values_are_refused_in_one_line(name, given, said):
    with pytest.raises(WorkbenchError) as error:
        from_mapping(Config, {name: given}, "train.ipynb")
    assert said in one_line(error) and "train.ipynb" in one_line(error)


def test_a_misspelt_name_brings_the_nearest_and_all():
    with pytest.raises(WorkbenchError) as error:
        from_mapping(Config, {"step": 3}, "train.ipynb")
    text = one_line(error)
    assert "'step'" in text and "did you mean 'steps'" in text and "train.ipynb" in text
    assert all(name in text for name in Config.__dataclass_fields__)


def test_a_missing_required_field_is_named():
    @dataclass(frozen=True)
    class Needs:
        path: str

    with pytest.raises(WorkbenchError, match="path .str. is missing"):
        from_mapping(Needs, {})


def test_unions_prefer_the_exact_type():
    assert coerce("5", int | str, "x") == "5"
    assert coerce("5", int | None, "x") == 5
    assert coerce("none", Literal["none"] | None, "x") == "none"
    assert coerce(1, float | None, "x") == 1.0
    assert coerce([1, "a"], Any, "x") == [1, "a"]


def test_digest_depends_on_names_and_values_alone():
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": (1, 2), "a": 1})
    assert len({digest({"a": 1}), digest({"a": 2}), digest({"b": 1}), digest({"a": 1.0})}) == 4
    # written down once: a run's name must not change between releases
    assert digest({"lr": 1e-4, "method": "grpo", "steps": 3}) == "931b9fb9"
    spelt = {"steps": 1, "method": "grpo", "lr": 3e-4, "shuffle": True, "model": None, "seeds": [], "options": {}}
    assert canonical_json(Config(steps=1)) == canonical_json(spelt | {"betas": [0.9, 0.999]})
    with pytest.raises(WorkbenchError, match="JSON"):
        digest({"a": object()})
