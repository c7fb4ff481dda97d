"""DEAR (arXiv 2606.22830): on-policy distillation on the tokens where a response decides, and on those it decides by.

Decisions are the tokens whose next-token distribution is the most undecided; evidence are the others that lie closest
to a decision in the student's hidden states, the more so where the teacher disagrees. The loss is the mean reverse KL
over both. Known from the abstract and from one write-up; there is no code. Inferred here: what a relevance and a
divergence are scaled by (least and largest among the response's tokens that are no decisions), reverse KL over the
whole vocabulary, that no gradient flows through the choice, that evidence may come after its decision, and that the
hidden state of a token is the one it was predicted from, the last that the output head reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown
from .opsd import OPSDConfig, divergence

WITHIN = ("turn", "row")
REVERSE_KL = OPSDConfig(beta=1.0)
CELLS = 2**22  # numbers held at once, so that a long response needs no square of its length

_SAME = 1e-6  # values that lie within it, as those of equal states do by rounding, have no order


@dataclass(frozen=True)
class DEARConfig:
    coef: float = 1.0  # weight of the loss beside the policy loss; 0 is GRPO
    decisions: float = 0.2  # p: share of a response's tokens that are decisions; 1 is distillation on every token
    evidence: float = 0.2  # q: share of the other tokens that are evidence; 0 keeps the decisions alone
    within: str = "turn"  # what counts as one response: a "turn", or all that was sampled in a "row"
    teacher: str = "frozen"  # weights that score as teacher: the "frozen" first ones, or the "live" student's

    def __post_init__(self):
        if self.within not in WITHIN:
            raise unknown("DEAR within", str(self.within), WITHIN)
        if not 0 <= self.coef < float("inf"):
            raise WorkbenchError(f"DEAR: coef must be finite and at least 0, got {self.coef}")
        if not 0 < self.decisions <= 1:
            raise WorkbenchError(f"DEAR: decisions must lie in (0, 1], got {self.decisions}")
        if not 0 <= self.evidence <= 1:
            raise WorkbenchError(f"DEAR: evidence must lie in [0, 1], got {self.evidence}")
        OPSDConfig(teacher=self.teacher)


@dataclass(frozen=True)
class Selection:
    """Of N sampled tokens: decisions (N,) bool, evidence (N,) bool, never both; relevance (N,): cosine to the closest
    decision of the response, and score (N,) in [0, 2] by which evidence was chosen, both 0 at decisions."""

    decisions: Tensor
    evidence: Tensor
    relevance: Tensor
    score: Tensor

    @property
    def keep(self) -> Tensor:
        return self.decisions | self.evidence


def counts(lengths: Tensor, config: DEARConfig = DEARConfig()) -> tuple[Tensor, Tensor]:
    """Lengths of responses -> how many decisions, ceil(p T), and how much evidence, ceil(q (T - p T)), each has."""
    size = lengths.double()
    # A product such as .07 * 100 lies above its true value by rounding, and would count one token more.
    decisions = (config.decisions * size - 1e-9).ceil().long()
    evidence = (config.evidence * (size - config.decisions * size) - 1e-9).ceil().long()
    return decisions, torch.minimum(evidence, lengths - decisions)


@torch.no_grad()
def select(
    entropy: Tensor, token_divergence: Tensor, hidden: Tensor, response: Tensor, config: DEARConfig = DEARConfig()
) -> Selection:
    """Decisions and evidence among N sampled tokens, response by response.

    entropy, token_divergence: (N,), nats, of the student's distribution and from it to the teacher's; hidden: (N,D),
    the student's states; response: (N,) long, which response each token is of, never falling. Of equal values the
    earlier token is taken. Where a response's relevances are all equal they count as 1, so that divergence decides;
    where its divergences are, they count as 0. Similarities are computed CELLS numbers at a time. Raises WorkbenchError
    on an empty selection, shapes or labels that do not fit, and values that are not finite.
    """
    _check(entropy, token_divergence, hidden, response)
    lengths = torch.unique_consecutive(response, return_counts=True)[1]
    wanted = counts(lengths, config)
    decisions = torch.zeros(len(entropy), dtype=torch.bool, device=entropy.device)
    evidence, relevance = torch.zeros_like(decisions), torch.zeros(len(entropy), device=entropy.device)
    score = torch.zeros_like(relevance)
    for chosen, place, there in _blocks(lengths, hidden.shape[1]):
        many, more = (count[chosen] for count in wanted)
        ranked = entropy[place].masked_fill(~there, -torch.inf).argsort(dim=1, descending=True, stable=True)
        own = torch.zeros_like(there).scatter_(1, ranked, _first(many, there))
        close = _relevance(hidden, place, ranked[:, : int(many.max())], many)
        rest = there & ~own
        worth = _scaled(close, rest, 1.0) * (1 + _scaled(token_divergence[place].float(), rest, 0.0))
        best = worth.masked_fill(~rest, -torch.inf).argsort(dim=1, descending=True, stable=True)
        picked = torch.zeros_like(there).scatter_(1, best, _first(more, there))
        flat = place[there]
        decisions[flat], evidence[flat] = own[there], picked[there]
        relevance[flat], score[flat] = (torch.where(rest, value, 0)[there] for value in (close, worth))
    if not bool(torch.isfinite(relevance).all()):
        raise WorkbenchError("DEAR: a hidden state is not finite")
    return Selection(decisions, evidence, relevance, score)


def loss(student_logits: Tensor, teacher_logits: Tensor, keep: Tensor) -> Tensor:
    """Mean reverse KL, nats, over the kept of N tokens: logits (N,V) of both, keep (N,) bool. Only student_logits carry
    gradient. With every token kept it is the loss of plain distillation. Raises WorkbenchError where none is kept,
    shapes differ (a teacher with another vocabulary), or logits are not finite."""
    same_vocabulary(student_logits.shape[-1], teacher_logits.shape[-1])
    if keep.shape != student_logits.shape[:1] or keep.dtype != torch.bool:
        raise WorkbenchError(f"DEAR: keep must be bool ({len(student_logits)},), got {keep.dtype} {tuple(keep.shape)}")
    if not bool(keep.any()):
        raise WorkbenchError("DEAR: no token is kept, so there is nothing to distil")
    return divergence(student_logits[keep], teacher_logits[keep], REVERSE_KL).mean()


def gradient_mass(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """(N,) how hard plain distillation would pull at each token: the length of its reverse KL's gradient in the logits.

    The gradient is p (log p - log q - KL), p and q being the distributions of student and teacher. That the paper
    measures mass so is inferred. Raises WorkbenchError as `loss`.
    """
    same_vocabulary(student_logits.shape[-1], teacher_logits.shape[-1])
    student, teacher = (logits.detach().float().log_softmax(1) for logits in (student_logits, teacher_logits))
    gap = student - teacher
    p = student.exp()
    return (p * (gap - (p * gap).sum(1, keepdim=True))).norm(dim=1)


def coverage(mass: Tensor, chosen: Tensor) -> float | None:
    """The share of the gradient's mass (N,) that the chosen of N tokens carry, the paper's diagnostic (39 % on
    decisions, 76 % with evidence); None where there is no mass at all, as with a teacher who agrees everywhere."""
    total = mass.double().sum()
    return float(mass.double()[chosen].sum() / total) if total > 0 else None


def same_vocabulary(student: int, teacher: int) -> None:
    """Raise WorkbenchError where student and teacher do not score the same number of tokens."""
    if student != teacher:
        raise WorkbenchError(
            f"DEAR: the student scores {student} tokens and the teacher {teacher}; a teacher with another tokenizer "
            "cannot be compared token by token"
        )


def _check(entropy: Tensor, token_divergence: Tensor, hidden: Tensor, response: Tensor) -> None:
    n = entropy.shape
    if len(n) != 1 or token_divergence.shape != n or response.shape != n or hidden.dim() != 2 or len(hidden) != n[0]:
        raise WorkbenchError(
            f"DEAR: entropy {tuple(n)}, divergence {tuple(token_divergence.shape)} and response "
            f"{tuple(response.shape)} must be (N,), hidden {tuple(hidden.shape)} (N,D)"
        )
    if not n[0]:
        raise WorkbenchError("DEAR: no sampled token to choose from; the mask is empty")
    for name, values in (("entropy", entropy), ("divergence", token_divergence)):
        if not bool(torch.isfinite(values).all()):
            raise WorkbenchError(f"DEAR: {name} of token {int((~torch.isfinite(values)).nonzero()[0])} is not finite")
    if bool((response[1:] < response[:-1]).any()):
        raise WorkbenchError("DEAR: response must not fall: the tokens of one response come one after another")


def _first(count: Tensor, like: Tensor) -> Tensor:
    """(S,L) bool: the first count (S,) of every row."""
    return torch.arange(like.shape[1], device=like.device) < count[:, None]


def _blocks(lengths: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Responses of like length together: which they are (S,), where their tokens stand (S,L) and which exist (S,L)."""
    starts = lengths.cumsum(0) - lengths
    order = lengths.argsort(stable=True)
    sizes = lengths[order].tolist()
    first = 0
    while first < len(sizes):
        last, room = first + 1, CELLS // width
        while last < len(sizes) and sizes[last] <= min(1.25 * sizes[first], room // (last - first + 1)):
            last += 1
        chosen = order[first:last]
        column = torch.arange(sizes[last - 1], device=lengths.device)
        there = column < lengths[chosen][:, None]
        yield chosen, torch.where(there, starts[chosen][:, None] + column, 0), there
        first = last


def _relevance(hidden: Tensor, place: Tensor, ranked: Tensor, many: Tensor) -> Tensor:
    """(S,L) largest cosine of each token's state to a decision's, a bounded number of tokens at a time."""
    least = torch.finfo(torch.float32).tiny
    anchors = hidden[place.gather(1, ranked)].float()
    anchors = anchors / anchors.norm(dim=2, keepdim=True).clamp(min=least)
    absent = ~_first(many, ranked)[:, None]
    step = max(1, CELLS // (len(place) * max(ranked.shape[1], hidden.shape[1])))
    parts = []
    for begin in range(0, place.shape[1], step):
        states = hidden[place[:, begin : begin + step]].float()
        similar = (states @ anchors.transpose(1, 2)).masked_fill_(absent, -torch.inf).amax(2)
        parts.append(similar / states.norm(dim=2).clamp(min=least))
    return torch.cat(parts, 1)


def _scaled(values: Tensor, of: Tensor, without_spread: float) -> Tensor:
    """Values (S,L) from the least of a row to its largest as 0 to 1; where they do not differ, `without_spread`."""
    low = values.masked_fill(~of, torch.inf).amin(1, keepdim=True)
    span = values.masked_fill(~of, -torch.inf).amax(1, keepdim=True) - low
    return torch.where(span > _SAME, (values - low) / span.clamp(min=_SAME), without_spread)
