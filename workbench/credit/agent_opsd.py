"""AgentOPSD (arXiv 2608.05987): turn credit from a belief that a privileged self-teacher's log-probs move.

Equation numbers are the paper's, as quoted by public write-ups; the full text was not read, the released code was
(github ZethWang/AgentOPSD, verl/trainer/ppo/opsd_utils.py). Where we depart from that code:

* the prior is the group's success rate; the code averages raw rewards, so a 0/10 scale clamps it to .0001 or .9999;
* a turn that several rows repeat counts once; the code counts padding copies again;
* gamma = .95 and eps = 1e-4 (paper) are the defaults; the scripts run gamma = 1, and eps = 1e-6 in z;
* beliefs are not clamped after the sigmoid, and revisions are computed without cancellation;
* token granularity standardises as turn granularity does; the code has `sqrt(var + eps) + eps` there.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown
from ..records import Batch, Credit
from .gap import teacher_gap
from .grpo import GRPOConfig, turn_advantages

COLUMNS = ("evidence", "belief_before", "belief", "revision", "z", "weight", "turn_advantage", "pivotal")

_BLOCK = 1 << 18  # cells that token granularity lays out at a time: few enough for a processor's cache

_CHOICES = {
    "granularity": ("turn", "token"),
    "evidence": ("sum", "mean", "centred"),
    "signal": ("revision", "evidence"),
    "prior": ("group", "half"),
    "prior_per": ("trajectory", "turn"),
}


@dataclass(frozen=True)
class AgentOPSDConfig:
    lam: float = 0.5  # share of the advantage that is reshaped; 0 is GRPO. Only lam * band is identifiable
    band: float = 0.2  # b: weights lie in [1 - b, 1 + b]
    gamma: float = 0.95  # decay of earlier evidence per turn; the released scripts leave it at 1
    eps: float = 1e-4  # clips the prior to [eps, 1 - eps] and is added to the deviation in z
    # Rows of the paper's ablation table, each this one change to the full method: "per-token accumulation" is
    # granularity="token", "raw e_k" is signal="evidence", "|dB| only (no outcome sign)" is signed=False, and
    # "no group-rate prior" is prior="half".
    granularity: str = "turn"  # "turn"; "token": the recursion runs over the tokens inside each turn and restarts
    # Of a turn's token gaps: "sum" (paper), "mean", or "centred": sums less their episode's mean; in token granularity,
    # gaps less their turn's mean. What is alone, an episode's one turn or a turn's one token, has no drift and stays.
    evidence: str = "sum"
    signal: str = "revision"  # what is standardised: "revision" dB, or "evidence" e_k itself
    signed: bool = True  # align with the outcome's sign; False: the signal's magnitude alone
    prior: str = "group"  # B_0: "group" success rate, or "half": .5
    prior_per: str = "trajectory"  # success rate over "trajectory", or over "turn" rows, where long ones weigh more
    decay_prior: bool = False  # let gamma decay the prior's log-odds too
    ddof: int = 0  # deviation in z: 0 population (paper), 1 sample
    grpo: GRPOConfig = field(default_factory=GRPOConfig)  # the advantage that is reshaped

    def __post_init__(self):
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown(f"AgentOPSD {name}", str(getattr(self, name)), known)
        for name, low, high in (("lam", 0, 1), ("band", 0, 1), ("gamma", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise WorkbenchError(f"AgentOPSD: {name} must lie in [{low}, {high}], got {getattr(self, name)}")
        if not 0 < self.eps < 0.5:
            raise WorkbenchError(f"AgentOPSD: eps must lie in (0, .5), got {self.eps}")
        if self.ddof not in (0, 1):
            raise WorkbenchError(f"AgentOPSD: ddof must be 0 or 1, got {self.ddof}")
        if self.granularity == "token" and self.evidence == "mean":
            raise WorkbenchError("AgentOPSD: evidence='mean' has no meaning with granularity='token'")


def _revision(logits: Tensor, before: Tensor) -> Tensor:
    """sigmoid(logits) - sigmoid(before), exact where both are saturated and the plain difference has no digits left."""
    step = logits - before
    high, low = torch.maximum(logits, before), torch.minimum(logits, before)
    return step.sign() * torch.sigmoid(high) * torch.sigmoid(-low) * -torch.expm1(-step.abs())


def standardise(values: Tensor, mask: Tensor, eps: float, ddof: int = 0) -> Tensor:
    """(E,K) z-scores of each row over its own masked entries, `(x - mean) / (std + eps)`; 0 off the mask."""
    values = torch.where(mask, values, 0)
    count = mask.sum(1, keepdim=True).clamp(min=1).to(values.dtype)
    centred = torch.where(mask, values - values.sum(1, keepdim=True) / count, 0)
    variance = centred.square().sum(1, keepdim=True) / (count - ddof).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def reshape_turns(
    evidence: Tensor, turn_mask: Tensor, prior: Tensor, advantage: Tensor, config: AgentOPSDConfig = AgentOPSDConfig()
) -> dict[str, Tensor]:
    """Evidence (E,K) of turns, nats, prior (E,) and advantage (E,) or (E,K) -> tensors (E,K) by name, 0 off the mask.

    cumulative c_k, belief_before B_{k-1}, belief B_k (eq. 8), revision B_k - B_{k-1} (eq. 9), z of the outcome-aligned
    revision over the episode's own turns, weight (eq. 10-12) and turn_advantage A [(1 - lam) + lam w_k]. Raises
    WorkbenchError on shapes that do not fit, a value that is not finite, or a row whose existing turns are not first.
    """
    E, K = evidence.shape
    if turn_mask.shape != (E, K) or prior.shape != (E,) or advantage.shape not in ((E,), (E, K)):
        raise WorkbenchError(
            f"reshape_turns: evidence {(E, K)} needs a mask of that shape, a prior ({E},) and an advantage ({E},) or "
            f"{(E, K)}; got {tuple(turn_mask.shape)}, {tuple(prior.shape)}, {tuple(advantage.shape)}"
        )
    if bool((turn_mask[:, 1:] & ~turn_mask[:, :-1]).any()):
        raise WorkbenchError(
            "reshape_turns: turn_mask has a hole before an existing turn; turns must be first in a row"
        )
    if not bool(torch.isfinite(evidence[turn_mask]).all()):
        raise WorkbenchError("AgentOPSD: the evidence of a turn is not finite; check teacher and student log-probs")
    if not bool(((prior >= 0) & (prior <= 1)).all()):
        raise WorkbenchError("AgentOPSD: a prior is a success rate in [0, 1]; binarise rewards first")
    advantage = advantage[:, None].expand(E, K) if advantage.dim() == 1 else advantage
    advantage = torch.where(turn_mask, advantage, 0)
    if not bool(torch.isfinite(advantage).all()):
        raise WorkbenchError("AgentOPSD: an advantage is not finite")

    evidence = torch.where(turn_mask, evidence, 0)
    base = torch.logit(prior.to(evidence.dtype).clamp(config.eps, 1 - config.eps))
    support, bases = [evidence.new_zeros(E)], [base]
    for k in range(K):
        support.append(config.gamma * support[-1] + evidence[:, k])
        bases.append(config.gamma * bases[-1] if config.decay_prior else base)
    cumulative = torch.stack(support, 1)
    logits = torch.stack(bases, 1) + cumulative
    belief, revision = torch.sigmoid(logits), _revision(logits[:, 1:], logits[:, :-1])

    signal = {"revision": revision, "evidence": evidence}[config.signal]
    # Aligning after standardising equals eq. 10 where the advantage has one sign in a trajectory, as z(-q) = -z(q), and
    # is what the released code does where its turns differ.
    if config.signed:
        z = advantage.sign().to(evidence.dtype) * standardise(signal, turn_mask, config.eps, config.ddof)
    else:
        z = standardise(signal.abs(), turn_mask, config.eps, config.ddof)
    weight = (1 + config.band * z).clamp(1 - config.band, 1 + config.band)
    out = {
        "cumulative": cumulative[:, 1:],
        "belief_before": belief[:, :-1],
        "belief": belief[:, 1:],
        "revision": revision,
        "z": z,
        "weight": weight,
        "turn_advantage": advantage * ((1 - config.lam) + config.lam * weight.to(advantage.dtype)),
    }
    return {name: torch.where(turn_mask, value, 0) for name, value in out.items()}


def prior(batch: Batch, config: AgentOPSDConfig = AgentOPSDConfig()) -> Tensor:
    """(E,) B_0 of every episode before clipping: its group's success rate, over 0/1 outcomes whatever the rewards."""
    if config.prior == "half":
        return batch.old_logprobs.new_full(batch.outcome.shape, 0.5)
    share = batch.turn_counts if config.prior_per == "turn" else torch.ones_like(batch.turn_counts)
    share = share.to(batch.old_logprobs.dtype)
    labels, index = torch.unique(batch.group_index, return_inverse=True)
    zeros = share.new_zeros(len(labels))
    won = zeros.index_add(0, index, share * batch.outcome.to(share.dtype))
    return (won / zeros.index_add(0, index, share))[index]


def credit(batch: Batch, config: AgentOPSDConfig = AgentOPSDConfig(), evidence_mask: Tensor | None = None) -> Credit:
    """Reshaped advantages (B,T) and the turn table of COLUMNS.

    evidence_mask (B,T) bool: tokens whose gap counts as evidence (default all sampled tokens, reasoning included, as in
    the paper); all tokens of a turn get its advantage either way. In token granularity the turn table holds the belief
    at the turn's last token and token means of weight and turn_advantage, and no z or pivotal.
    Raises WorkbenchError without teacher log-probs, on a gap that is not finite, or a mask that does not fit.
    """
    gap = teacher_gap(batch, "AgentOPSD")
    if evidence_mask is not None:
        if evidence_mask.shape != gap.shape or evidence_mask.dtype != torch.bool:
            raise WorkbenchError(
                f"AgentOPSD: evidence_mask must be bool {tuple(gap.shape)}, got {evidence_mask.dtype} "
                f"{tuple(evidence_mask.shape)}"
            )
        gap = torch.where(evidence_mask, gap, 0)
    advantage = turn_advantages(batch, config.grpo)
    start = prior(batch, config)
    if config.granularity == "token":
        return _token_credit(batch, gap, start, advantage, config)

    evidence = batch.turn_sum(gap)
    if config.evidence == "mean":
        tokens = batch.turn_tokens if evidence_mask is None else batch.turn_sum(evidence_mask.long())
        evidence = evidence / tokens.clamp(min=1)
    if config.evidence == "centred":
        turns = batch.turn_counts[:, None]
        evidence = torch.where(turns > 1, evidence - evidence.sum(1, keepdim=True) / turns, evidence)
        evidence = torch.where(batch.turn_mask, evidence, 0)
    table = reshape_turns(evidence, batch.turn_mask, start, advantage, config)
    table |= {"evidence": evidence, "pivotal": table["z"].abs() > 1}
    reused = gap if gap.dtype == advantage.dtype and gap.is_contiguous() else None
    return Credit(batch.to_tokens(table["turn_advantage"], out=reused), {name: table[name] for name in COLUMNS})


def _token_credit(batch: Batch, gap: Tensor, start: Tensor, advantage: Tensor, config: AgentOPSDConfig) -> Credit:
    """The same recursion with tokens for turns: each turn is laid out as a row of its own tokens, some rows at a time.

    A row that repeats a turn has the same tokens, hence the same credit; the turn table shows the row that counts.
    """
    places, owner, sizes = batch.tokens_by_turn()
    prior_of_turn = start[:, None].expand(batch.turn_mask.shape).reshape(-1)
    gap, advantage, done = gap.reshape(-1), advantage.reshape(-1), 0
    tokens = advantage.new_zeros(gap.shape)
    blocks: list[tuple[Tensor, ...]] = []
    rows = max(1, _BLOCK // int(sizes.max()))
    for turns, length in zip(owner.split(rows), sizes[:, None].split(rows), strict=True):
        here = places[done : done + int(length.sum())]
        done += len(here)
        exists = torch.arange(int(length.max()), device=gap.device) < length
        evidence = gap.new_zeros(exists.shape).masked_scatter(exists, gap[here])
        if config.evidence == "centred":
            evidence = torch.where(exists & (length > 1), evidence - evidence.sum(1, keepdim=True) / length, evidence)
        table = reshape_turns(evidence, exists, prior_of_turn[turns], advantage[turns], config)
        tokens[here] = table["turn_advantage"][exists]
        blocks.append(
            (
                evidence.sum(1),
                table["belief_before"][:, 0],
                table["belief"].gather(1, length - 1)[:, 0],
                table["revision"].sum(1),
                table["weight"].sum(1) / length[:, 0],
                table["turn_advantage"].sum(1) / length[:, 0],
            )
        )
    counts = torch.ones_like(owner, dtype=torch.bool)
    counts[1:] = owner[1:] != owner[:-1]
    names = ("evidence", "belief_before", "belief", "revision", "weight", "turn_advantage")
    columns = (torch.cat(values)[counts] for values in zip(*blocks, strict=True))
    turns_table = {
        name: values.new_zeros(batch.turn_mask.numel()).index_copy(0, owner[counts], values).view(batch.turn_mask.shape)
        for name, values in zip(names, columns, strict=True)
    }
    return Credit(tokens.view(batch.response_mask.shape), turns_table)


def saturation(turns: dict[str, Tensor], turn_mask: Tensor) -> dict[str, float | None]:
    """Shares of the existing turns: belief_saturated (B outside [.01, .99]), revision_tiny (|dB| < 1e-3),
    pivotal_share (|z| > 1; None where the turn table has no z).

    The expected gap is minus a KL divergence: beliefs drift down, may die at the first turn, and z then compares noise.
    """
    belief, revision = turns["belief"][turn_mask], turns["revision"][turn_mask]
    flags = [(belief < 0.01) | (belief > 0.99), revision.abs() < 1e-3]
    flags += [turns["z"][turn_mask].abs() > 1] if "z" in turns else []
    shares = torch.stack(flags).to(belief.dtype).mean(1).tolist()
    return dict(zip(("belief_saturated", "revision_tiny", "pivotal_share"), shares + [None], strict=False))
