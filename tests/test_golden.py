import json
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import torch

from workbench.errors import WorkbenchError

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "golden" / "credit_rules.json"

# The worked example: 5 of 8 succeed, population deviation of the rewards.
EXAMPLE = {
    "evidence": [-0.8, 0.3, 0.5, 1.4, 0.6, 1.2, 0.2, 0.4],
    "prior": 0.625,
    "advantage": 0.774595,
    "gamma": 0.95,
    "lam": 0.5,
    "band": 0.2,
    "eps": 1e-4,
}
WANT = {
    "cumulative": [-0.8, -0.46, 0.063, 1.45985, 1.986857, 3.087515, 3.133139, 3.376482],
    "belief": [0.428206, 0.512704, 0.639645, 0.877684, 0.923979, 0.973360, 0.974518, 0.979911],
    "revision": [-0.196794, 0.084498, 0.126942, 0.238038, 0.046296, 0.049381, 0.001158, 0.005394],
    "z": [-2.078478, 0.345902, 0.711717, 1.669229, 0.016648, 0.043239, -0.372382, -0.335876],
    "weight": [0.8, 1.069180, 1.142343, 1.2, 1.003330, 1.008648, 0.925524, 0.932825],
    "advantage": [0.697136, 0.801389, 0.829724, 0.852055, 0.775885, 0.777944, 0.745751, 0.748578],
}
FAILURE = [-1.420091, -1.246336, -1.199110, -1.161893, -1.288842, -1.285410, -1.339066, -1.334353]
UNDECAYED = [0.697136, 0.794007, 0.825692, 0.852055, 0.780274, 0.778579, 0.747429, 0.748850]


@pytest.fixture(scope="module")
def shared():
    if not SHARED.is_file():
        pytest.skip(f"{SHARED.name} is not beside the checkout")
    return golden.load(SHARED)


def test_shared_cases_pass_in_float64(shared):
    failures, passed = golden.check(shared)
    assert not failures
    assert passed == sum(len(shared[rule]) for rule in golden.RULES) == 44


@pytest.mark.parametrize("rule", sorted(golden.RULES.keys() - {"dgg", "coba"}))  # these two compute in Python floats
def test_shared_cases_pass_in_float32(shared, rule):
    for i, case in enumerate(shared[rule]):
        got = golden.RULES[rule](case, torch.float32)
        assert golden.difference(case["want"], got, f"{rule}[{i}]", tolerance=1e-5) is None


def test_worked_example():
    # Printed to six digits, so the last is uncertain by half a unit.
    assert golden.difference(WANT, golden.agent_opsd(EXAMPLE), tolerance=1.5e-6) is None


def test_worked_example_of_a_failure():
    got = golden.agent_opsd(EXAMPLE | {"advantage": -1.290992})
    assert golden.difference(FAILURE, got["advantage"], tolerance=1.5e-6) is None


def test_worked_example_without_decay():
    got = golden.agent_opsd(EXAMPLE | {"gamma": 1.0})
    assert golden.difference(UNDECAYED, got["advantage"], tolerance=1.5e-6) is None


def run(tmp_path, text):
    path = tmp_path / "cases.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return subprocess.run([sys.executable, "tests/golden.py", path], cwd=ROOT, capture_output=True, text=True)


def test_what_is_wrong_with_a_case_fails_that_case_in_one_line_each(tmp_path):
    good = {"rewards": [1, 0], "groups": [1, 1.0], "std": False, "eps": 0, "ddof": 1, "want": [0.5, -0.5]}
    wrong = EXAMPLE | {"want": WANT | {"z": [*WANT["z"][:-1], -0.33]}}
    cases = [
        good | {"rewards": [10**400, 0]},
        good | {"want": [10**400, 0]},
        {name: value for name, value in good.items() if name != "want"},
        {name: value for name, value in good.items() if name != "std"},
        7,
        good | {"rewards": [[1], [0]]},
        good,
    ]
    rules = {"agent_opsd": [wrong], "grpo": cases, "other\ud800": [good, {}, None]}
    done = run(tmp_path, rules)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == ""
    assert lines[-1] == "1 passed, 10 failed" and len(lines) == 11
    assert lines[0].startswith("FAILED agent_opsd[0].z[7]: want -0.33, got -0.33")
    assert [line.split(":")[0] for line in lines[1:7]] == [f"FAILED grpo[{i}]" for i in range(6)]
    assert "OverflowError" in lines[1] and "OverflowError" in lines[2] and "KeyError: 'std'" in lines[4]
    assert lines[7] == "FAILED other\\ud800[0]: rule other\\ud800 is not known here"


@pytest.mark.parametrize("text", ['{"grpo": [{"rewards"', "[]", "{}", '{"grpo": {}}', "[" * 100_000, "1" * 5_000])
def test_a_torn_or_wrong_file_is_one_line(tmp_path, text, capsys):
    path = tmp_path / "torn.json"
    path.write_text(text)
    assert golden.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and str(path) in captured.err


@pytest.mark.parametrize(
    ("want", "got"),
    [
        ({}, {"budget": [1]}),
        ([], [1.0]),
        ({"budget": []}, {"budget": [1]}),
        ({"value": 1.0}, {"budget": [1]}),
        (True, 1.0),
        ([False], [0.0]),
        (None, 0.0),
        (float("inf"), 3.0),
        (float("inf"), float("-inf")),
        (0.0, float("inf")),
        (1.0, [1.0]),
        (1.0, 1.00001),
    ],
)
def test_values_that_differ(want, got):
    assert golden.difference(want, got, "here").startswith("here")


@pytest.mark.parametrize(
    ("want", "got"),
    [({}, {}), ([], []), (1, 1.0), (float("-inf"), -float("inf")), (None, None), ({"a": 1}, {"a": 1.0000001, "b": 2})],
)
def test_values_that_agree(want, got):
    assert golden.difference(want, got) is None


SHORT = {
    "sdar": {"student": [-1.0, -2.0], "teacher": [-1.0], "mask": [1, 1], "beta": 5.0, "coef": 0.01},
    "surrogate": {"logp": [-1.0, -2.0], "old": [-1.0, -2.0], "advantage": [1.0], "mask": [1, 1]},
    "rlsd": {"student": [-1.0, -2.0], "teacher": [-1.0], "advantage": 1.0, "clip": 0.2, "lam": 0.5},
    "cast": {"turn_advantages": [[1], [0, 1]], "rewards": [1.0], "groups": [0], "alpha": 0.1},
    "gigpo_step": {"returns": [1.0], "anchors": ["hall", "hall"]},
    "grpo": {"rewards": [1.0, 0.0], "groups": [0], "std": True, "eps": 0.0, "ddof": 0},
    "rloo": {"rewards": [1.0], "groups": [0, 0]},
}


@pytest.mark.parametrize("rule", SHORT)
def test_inputs_of_unequal_length_fail_instead_of_broadcasting(rule):
    with pytest.raises(WorkbenchError):
        golden.RULES[rule](SHORT[rule])


def test_one_advantage_is_expected_of_a_sequence():
    case = SHORT["rlsd"] | {"teacher": [-1.0, -1.0], "advantage": [1.0, 2.0]}
    assert golden.check({"rlsd": [case | {"want": []}]})[1] == 0


def test_labels_are_equal_as_values_of_json_are():
    assert golden.labels([1, 1.0, "1", True, None, [0, "a"], [0.0, "a"], 1.5]).tolist() == [0, 0, 1, 2, 3, 4, 4, 5]


def test_an_anchor_is_one_key_whatever_it_is_made_of():
    returns, anchors = [1.0, 3.0, 5.0], ["ab", "ab", "ac"]
    assert golden.gigpo_step({"returns": returns, "anchors": anchors}) == [-1.0, 1.0, 0.0]
    assert golden.gigpo_step({"returns": returns, "anchors": [[0, "x"], [1, "x"], [0.0, "x"]]}) == [-2.0, 0.0, 2.0]


def test_nothing_in_gives_nothing_out():
    assert golden.gigpo_step({"returns": [], "anchors": []}) == []
    assert golden.dgg({"energies": [], "window": 4, "threshold": 1.0}) == {"applied": [], "z": []}
    assert golden.dgg({"energies": [[]], "window": 4, "threshold": 1.0}) == {"applied": [0], "z": [[]]}
