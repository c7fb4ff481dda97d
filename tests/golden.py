"""Run a file of golden cases through the public functions: `python tests/golden.py FILE`.

A file is a JSON object, one key a rule, a list of cases each; a case holds the inputs and `want`. Prints one line for
every case that fails, whatever fails in it, and closes with `N passed, N failed`. A rule that is not known here fails
in all its cases. Exit status 1 when a case fails, 2 when the file cannot be read as golden cases.
"""

import json
import math
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


def columns(case: dict[str, Any], *names: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs that hold one number each of the same things."""
    found = [tensor(case[name], dtype) for name in names]
    if found[0].dim() != 1 or any(values.shape != found[0].shape for values in found):
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in zip(names, found, strict=True))
        raise WorkbenchError(f"expected lists of one length, got {shapes}")
    return found


def plain(label: Any) -> Any:
    """The label with its whole numbers as integers, so that 1 and 1.0 are one label."""
    if isinstance(label, list):
        return [plain(part) for part in label]
    return int(label) if isinstance(label, float) and label.is_integer() else label


def labels(values: list[Any]) -> torch.Tensor:
    """Numbers in place of labels of any kind, equal where they are equal."""
    known: dict[str, int] = {}
    numbers = [known.setdefault(json.dumps(plain(value), sort_keys=True), len(known)) for value in values]
    return torch.tensor(numbers, dtype=torch.long)


def agent_opsd(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, list[float]]:
    config = AgentOPSDConfig(**{name: case[name] for name in ("gamma", "lam", "band", "eps")})
    evidence = tensor([case["evidence"]], dtype)
    prior, advantage = (tensor([case[name]], dtype) for name in ("prior", "advantage"))
    turns = reshape_turns(evidence, torch.ones_like(evidence, dtype=torch.bool), prior, advantage, config)
    names = ("cumulative", "belief", "revision", "z", "weight")
    return {name: turns[name][0].tolist() for name in names} | {"advantage": turns["turn_advantage"][0].tolist()}


def sdar_rule(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    config = sdar.SDARConfig(coef=case["coef"], beta=case["beta"])
    student, teacher, mask = columns(case, "student", "teacher", "mask", dtype=dtype)
    mask = mask.bool()
    gradient = sdar.gradient_coefficient(student, teacher, config) / mask.sum().clamp(min=1)
    return {
        "gap": (teacher - student).tolist(),
        "gate": sdar.gate(teacher - student, config).tolist(),
        "loss": loss.masked_mean(sdar.token_loss(student, teacher, config), mask).item(),
        "grad": torch.where(mask, gradient, 0).tolist(),
    }


def dgg(case: dict[str, Any]) -> dict[str, Any]:
    reuse = max([1, *(len(energies) for energies in case["energies"])])
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
    logp, old, advantage, mask = columns(case, "logp", "old", "advantage", "mask", dtype=dtype)
    return loss.masked_mean(loss.surrogate(logp, old, advantage, 0.2, 0.2, 3.0), mask.bool()).item()


def grpo(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[float]:
    groups = labels(case["groups"])
    rewards = tensor(case["rewards"], dtype)
    return group_advantage(rewards, groups, std=case["std"], eps=case["eps"], ddof=case["ddof"]).tolist()


def cast_rule(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    lengths = [len(turns) for turns in case["turn_advantages"]]
    if len(lengths) != len(case["rewards"]):
        raise WorkbenchError(f"{len(lengths)} trajectories but {len(case['rewards'])} rewards; one each expected")
    mask = torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]
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
    teacher, student = columns(case, "teacher", "student", dtype=dtype)
    gap = teacher - student
    advantage = torch.full_like(gap, case["advantage"])
    return rlsd.mix(advantage, rlsd.reweighting(gap, advantage, case["clip"]), case["lam"]).tolist()


def gigpo_step(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[float]:
    anchors = labels(case["anchors"])  # of task and observation as one key
    returns = tensor(case["returns"], dtype)
    return gigpo.step_advantages(returns, anchors, torch.zeros_like(anchors), mode="mean_norm").tolist()


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


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def difference(want: Any, got: Any, where: str = "", tolerance: float = TOLERANCE) -> str | None:
    """The first place where two nested values part by more than the tolerance, or None."""
    if isinstance(want, dict) and isinstance(got, dict):
        missing = want.keys() - got.keys()
        if missing:
            return f"{where}: no {', '.join(sorted(missing))}"
        if got and not want:
            return f"{where}: want nothing, got {', '.join(got)}"
        pairs = [(f"{where}.{key}", want[key], got[key]) for key in want]
    elif isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            return f"{where}: want {len(want)} values, got {len(got)}"
        pairs = [(f"{where}[{i}]", w, g) for i, (w, g) in enumerate(zip(want, got, strict=True))]
    else:
        if is_number(want) and is_number(got):
            close = math.isfinite(want) and abs(want - got) <= tolerance * max(1.0, abs(want))
            same = want == got or close
        else:
            same = want is None and got is None
        return None if same else f"{where}: want {want}, got {got}"
    return next((found for where, w, g in pairs if (found := difference(w, g, where, tolerance))), None)


def load(path: Path) -> dict[str, list[Any]]:
    """Raises WorkbenchError, in one line, where the file is not an object of lists."""
    try:
        rules = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkbenchError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WorkbenchError(f"{path}: not JSON ({error})") from error
    if not isinstance(rules, dict) or not rules:
        raise WorkbenchError(f"{path}: expected a JSON object with one key a rule")
    for rule, cases in rules.items():
        if not isinstance(cases, list):
            raise WorkbenchError(f"{path}: {rule} must be a list of cases")
    return rules


def fault(rule: str, case: Any, where: str) -> str | None:
    """What is wrong with the case or with our answer to it, or None."""
    if rule not in RULES:
        return f"{where}: rule {rule} is not known here"
    if not isinstance(case, dict) or "want" not in case:
        return f"{where}: a case is an object with its inputs and 'want'"
    try:
        return difference(case["want"], RULES[rule](case), where)
    except Exception as error:
        return f"{where}: {type(error).__name__}: {error}"


def check(rules: dict[str, list[Any]]) -> tuple[list[str], int]:
    """One line for each failed case, and the number passed."""
    found = [fault(rule, case, f"{rule}[{i}]") for rule, cases in rules.items() for i, case in enumerate(cases)]
    failures = [" ".join(text.split()) for text in found if text is not None]
    return failures, len(found) - len(failures)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python tests/golden.py FILE", file=sys.stderr)
        return 2
    try:
        rules = load(Path(arguments[0]))
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 2
    failures, passed = check(rules)
    for line in failures:
        print("FAILED", line.encode(errors="backslashreplace").decode())
    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
