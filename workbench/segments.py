"""Reductions over runs: stretches of equal labels inside the rows of a (B,T) table, laid end to end.

A turn's tokens lie next to each other, so turns are summed by segment lengths, not by one index a token: a run costs a
few numbers, and nothing is added in an order that a device chooses, which float sums by index leave open on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, eq=False)
class Runs:
    """R runs that cover a (B,T) table in row-major order; no run crosses a row.

    lengths (R,) int32: cells of each run, long in a table of 2^31 cells or more; rows (R,) long: its row; columns (R,)
    long: its first column; labels (R,) long: the value that all its cells share.
    """

    shape: tuple[int, int]
    lengths: Tensor
    rows: Tensor
    columns: Tensor
    labels: Tensor


def runs_of(labels: Tensor) -> Runs:
    """The longest runs of equal integers in the rows of (B,T), both at least 1."""
    flat, width = labels.reshape(-1), labels.shape[1]
    begins = torch.empty(flat.shape, dtype=torch.bool, device=flat.device)
    torch.ne(flat[1:], flat[:-1], out=begins[1:])
    begins[::width] = True
    starts = begins.nonzero()[:, 0]
    lengths = torch.diff(starts, append=starts.new_tensor([flat.numel()]))
    lengths = lengths.int() if flat.numel() < 2**31 else lengths
    rows = starts.div(width, rounding_mode="floor")
    return Runs(tuple(labels.shape), lengths, rows, starts - rows * width, flat.index_select(0, starts).long())


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """(S,) sums of consecutive segments of the one-dimensional values; an empty segment's is 0.

    lengths (S,) int32 or long must be at least 0 and add up to the number of values; that is not checked. Integers are
    summed exactly. Differentiable; the same bits at every call on one device.
    """
    if values.is_floating_point():
        return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    ends = lengths.cumsum(0)
    before = torch.nn.functional.pad(values.cumsum(0), (1, 0))
    return (before[ends] - before[ends - lengths]).to(values.dtype)


def spread(values: Tensor, runs: Runs, out: Tensor | None = None) -> Tensor:
    """Give every cell of the table its run's value, bit for bit: (R,) -> (B,T).

    out: a contiguous (B,T) tensor of the dtype of values whose memory the result takes over, to save an allocation.
    """
    if values.requires_grad:
        size = runs.shape[0] * runs.shape[1]
        return torch.repeat_interleave(values, runs.lengths, output_size=size).view(runs.shape)
    # What changes from run to run, summed along the row. Differences of bit patterns, taken as integers that wrap
    # around, add up exactly, where those of floats would not; an index a cell would take more memory than the result.
    bits = values.view(_BITS[values.element_size()])
    first = runs.columns == 0
    change = torch.where(first, bits, bits - bits.roll(1))
    cells = (
        torch.zeros(runs.shape, dtype=bits.dtype, device=bits.device) if out is None else out.view(bits.dtype).zero_()
    )
    cells.view(-1)[runs.rows * runs.shape[1] + runs.columns] = change
    return cells.cumsum_(1).view(values.dtype)
