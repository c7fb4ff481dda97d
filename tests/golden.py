"""Run a file of golden cases through the public functions: `python tests/golden.py FILE`.

A file is a JSON object, one key a rule, a list of cases each; a case holds the inputs and `want`. Prints one line for
every case that fails and closes with `N passed, N failed`, plus `, N skipped` where rules are not implemented here.
Exit status 1 when a case fails, 2 when the file cannot be read as golden cases.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from workbench import loss
from workbench.budget import coba, v05
from workbench.credit import cast, gigpo, rloo, rlsd
from workbench.credit.agent_opsd import AgentOPSDConfig, reshape_turns
from workbench.credit.grpo import group_advantage
from workbench.distill import sdar
from workbench.errors import WorkbenchError
from workbench.reuse.dgg import DGGConfig, Gate

TOLERANCE = 1e-6


def tensor(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def labels(values: list[Any]) -> torch.Tensor:
    """Numbers in place of labels of any kind, equal where they are equal."""
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(json.dumps(value), len(known)) for value in values])


def agent_opsd(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, list[float]]:
    config = AgentOPSDConfig(**{name: case[name] for name in ("gamma", "lam", "band", "eps")})
    evidence = tensor([case["evidence"]], dtype)
    prior, advantage = (tensor([case[name]], dtype) for name in ("prior", "advantage"))
    turns = reshape_turns(evidence, torch.ones_like(evidence, dtype=torch.bool), prior, advantage, config)
    names = ("cumulative", "belief", "revision", "z", "weight")
    return {name: turns[name][0].tolist() for name in names} | {"advantage": turns["turn_advantage"][0].tolist()}


def sdar_rule(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    config = sdar.SDARConfig(coef=case["coef"], beta=case["beta"])
    student, teacher, mask = tensor(case["student"], dtype), tensor(case["teacher"], dtype), tensor(case["mask"]).bool()
    gradient = sdar.gradient_coefficient(student, teacher, config) / mask.sum().clamp(min=1)
    return {
        "gap": (teacher - student).tolist(),
        "gate": sdar.gate(teacher - student, config).tolist(),
        "loss": loss.masked_mean(sdar.token_loss(student, teacher, config), mask).item(),
        "grad": torch.where(mask, gradient, 0).tolist(),
    }


def dgg(case: dict[str, Any]) -> dict[str, Any]:
    reuse = max(len(energies) for energies in case["energies"])
    gate = Gate(DGGConfig(max_reuse=reuse, window=case["window"], threshold=case["threshold"]))
    applied, scores = [], []
    for energies in case["energies"]:
        decisions = []
        for k, energy in enumerate(energies, 1):
            decisions.append(gate.observe(energy, k))
            if decisions[-1].stop:
                break
        applied.append(sum(d.apply for d in decisions))
        scores.append([d.z for d in decisions])
    return {"applied": applied, "z": scores}


def surrogate(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> float:
    logp, old, advantage = (tensor(case[name], dtype) for name in ("logp", "old", "advantage"))
    return loss.masked_mean(loss.surrogate(logp, old, advantage, 0.2, 0.2, 3.0), tensor(case["mask"]).bool()).item()


def grpo(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[float]:
    groups = labels(case["groups"])
    rewards = tensor(case["rewards"], dtype)
    return group_advantage(rewards, groups, std=case["std"], eps=case["eps"], ddof=case["ddof"]).tolist()


def cast_rule(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    lengths = [len(turns) for turns in case["turn_advantages"]]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    solver = torch.zeros(mask.shape, dtype=dtype)
    solver[mask] = tensor([value for turns in case["turn_advantages"] for value in turns], dtype)
    outcome = cast.outcome_advantage(tensor(case["rewards"], dtype), labels(case["groups"]))
    turns = cast.combine(solver, mask, outcome, cast.CASTConfig(alpha=case["alpha"]))
    advantage = [row[:n].tolist() for row, n in zip(turns["turn_advantage"], lengths, strict=True)]
    return {"outcome": outcome.tolist(), "rms": turns["rms"].item(), "advantage": advantage}


def v05_rule(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, float]:
    rewards = tensor(case["rewards"], dtype)
    fused = v05.fuse(tensor(case["prior"], dtype), rewards.mean(), torch.tensor(len(rewards)))
    return {name: getattr(fused, name).item() for name in ("weight", "baseline", "bias2")}


def coba_rule(case: dict[str, Any]) -> dict[str, Any]:
    density = {name: case[name] for name in ("alpha", "beta", "tau")}
    budget = coba.allocate(case["p"], case["total"], lo=case["lo"], hi=case["hi"], **density)
    return {"budget": budget, "value": coba.total_value(case["p"], budget, **density)}


def rlsd_rule(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[float]:
    gap, advantage = tensor(case["teacher"], dtype) - tensor(case["student"], dtype), tensor([case["advantage"]], dtype)
    return rlsd.mix(advantage, rlsd.token_weights(gap, advantage, case["clip"]), case["lam"]).tolist()


def gigpo_step(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[float]:
    groups, anchors = (labels(list(keys)) for keys in zip(*case["anchors"], strict=True))
    return gigpo.step_advantages(tensor(case["returns"], dtype), anchors, groups).tolist()


def rloo_rule(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[float]:
    return rloo.leave_one_out(tensor(case["rewards"], dtype), labels(case["groups"])).tolist()


RULES = {
    "agent_opsd": agent_opsd,
    "sdar": sdar_rule,
    "dgg": dgg,
    "surrogate": surrogate,
    "grpo": grpo,
    "cast": cast_rule,
    "v05": v05_rule,
    "coba": coba_rule,
    "rlsd": rlsd_rule,
    "gigpo_step": gigpo_step,
    "rloo": rloo_rule,
}


def difference(want: Any, got: Any, where: str = "", tolerance: float = TOLERANCE) -> str | None:
    """The first place where two nested values part by more than the tolerance, or None."""
    if isinstance(want, dict) and isinstance(got, dict):
        missing = want.keys() - got.keys()
        if missing:
            return f"{where}: no {', '.join(sorted(missing))}"
        pairs = [(f"{where}.{key}", want[key], got[key]) for key in want]
    elif isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            return f"{where}: want {len(want)} values, got {len(got)}"
        pairs = [(f"{where}[{i}]", w, g) for i, (w, g) in enumerate(zip(want, got, strict=True))]
    else:
        numbers = isinstance(want, (int, float)) and isinstance(got, (int, float))
        same = abs(want - got) <= tolerance * max(1.0, abs(want)) if numbers else want is None and got is None
        return None if same else f"{where}: want {want}, got {got}"
    return next((found for where, w, g in pairs if (found := difference(w, g, where, tolerance))), None)


def load(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Raises WorkbenchError, in one line, where the file is not an object of lists of cases with `want`."""
    try:
        rules = json.loads(path.read_text())
    except OSError as error:
        raise WorkbenchError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise WorkbenchError(f"{path}: not JSON ({error})") from error
    if not isinstance(rules, dict) or not rules:
        raise WorkbenchError(f"{path}: expected a JSON object with one key a rule")
    for rule, cases in rules.items():
        if not isinstance(cases, list) or not all(isinstance(c, dict) and "want" in c for c in cases):
            raise WorkbenchError(f"{path}: {rule} must be a list of cases, each an object with 'want'")
    return rules


def check(rules: dict[str, list[dict[str, Any]]]) -> tuple[list[str], int, dict[str, int]]:
    """One line for each failed case, the number passed, and how many cases of each unknown rule were left out."""
    failures, passed, skipped = [], 0, {}
    for rule, cases in rules.items():
        if rule not in RULES:
            skipped[rule] = len(cases)
            continue
        for i, case in enumerate(cases):
            try:
                found = difference(case["want"], RULES[rule](case), f"{rule}[{i}]")
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                found = f"{rule}[{i}]: {type(error).__name__}: {error}"
            if found:
                failures.append(found)
            passed += not found
    return failures, passed, skipped


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python tests/golden.py FILE", file=sys.stderr)
        return 2
    try:
        rules = load(Path(arguments[0]))
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 2
    failures, passed, skipped = check(rules)
    for line in failures:
        print("FAILED", line)
    if skipped:
        print("not implemented here: " + ", ".join(f"{rule} ({n})" for rule, n in skipped.items()))
    tail = f", {sum(skipped.values())} skipped" if skipped else ""
    print(f"{passed} passed, {len(failures)} failed{tail}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
