import json
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import torch

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
    failures, passed, _ = golden.check(shared)
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


def test_a_case_that_is_wrong_fails_and_a_rule_not_known_is_skipped(tmp_path):
    path = tmp_path / "cases.json"
    wrong = EXAMPLE | {"want": WANT | {"z": [*WANT["z"][:-1], -0.33]}}
    path.write_text(json.dumps({"agent_opsd": [wrong, EXAMPLE | {"want": {"z": [0.0]}}], "other": [{"want": 1}] * 3}))
    run = subprocess.run([sys.executable, "tests/golden.py", path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "agent_opsd[0].z[7]" in run.stdout
    assert run.stdout.splitlines()[-1] == "0 passed, 2 failed, 3 skipped"


@pytest.mark.parametrize("text", ['{"grpo": [{"rewards"', "[]", '{"grpo": {}}', '{"grpo": [{"rewards": [1]}]}'])
def test_a_torn_or_wrong_file_is_one_line(tmp_path, text, capsys):
    path = tmp_path / "torn.json"
    path.write_text(text)
    assert golden.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and str(path) in captured.err


def test_a_case_without_an_input_fails(tmp_path, capsys):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"grpo": [{"rewards": [1, 0], "want": [1, -1]}]}))
    assert golden.main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"
