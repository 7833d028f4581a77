"""Backward passes of rows with a large log-sum-exp, which has lost digits that gradients need.

A local kernel finds what lse lost from the sum of P over its keys, which is 1 but for that. So it must be given lse of
these keys alone: P is then that of a softmax over them. P of all keys is the same, times the share that these keys have
of the row's weight. All gradients are linear in the gradients of out and lse, so the share can be multiplied to those.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """What a backward pass needs of rows. dout is (batch, heads, sequence..., channels), the others have one axis for
    the sequence and no channels."""

    dout: Tensor
    dlse: Tensor | None
    lse: Tensor

    def narrow(self, span: tuple[int, int], flat: tuple[int, int]) -> Rows:
        """span: of the outermost dimension; flat: of the sequence."""
        dlse = None if self.dlse is None else self.dlse.narrow(2, *flat)
        return Rows(self.dout.narrow(2, *span), dlse, self.lse.narrow(2, *flat))


class Sums(NamedTuple):
    """Of the softmax of rows."""

    row_sum: Tensor
    row_max: Tensor

    def narrow(self, first: int, count: int) -> Sums:
        return Sums(self.row_sum.narrow(2, first, count), self.row_max.narrow(2, first, count))


class LargeRows:
    """Whether a call has rows whose lse has lost digits. On a GPU that is known when its forward pass is done there."""

    def __init__(self, lse: Tensor, kind: torch.dtype) -> None:
        self.limit = limit_of(kind)
        self.event = None
        sizes = lse.nan_to_num(0.0, 0.0, 0.0)
        self.largest = torch.linalg.vector_norm(sizes, torch.inf) if lse.numel() else lse.new_zeros(())
        if lse.is_cuda:
            on_gpu, self.event = self.largest, torch.cuda.Event()
            self.largest = torch.empty((), dtype=lse.dtype, pin_memory=True)
            self.largest.copy_(on_gpu, non_blocking=True)
            self.event.record(torch.cuda.current_stream(lse.device))

    def known(self) -> bool:
        return self.event is None or bool(self.event.query())

    def any(self) -> bool:
        """Waits until it is known."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.largest >= self.limit)


class Shares(NamedTuple):
    """What a call keeps for the rows with a large lse of its backward pass."""

    large: LargeRows | None  # None: lse of the local calls is that of the call
    whole: Sums
    parts: list[Sums]  # of each local call, in the forward pass' order; none if there can be no such rows

    def of_call(self, i: int, rows: Rows, flat: tuple[int, int]) -> Rows:
        """What local call i is given. flat: which rows of the whole these are."""
        return of_part(rows, self.whole.narrow(*flat), self.parts[i]) if self.parts else rows


def is_known_late(lse: Tensor) -> bool:
    """Whether the process goes on before its forward pass is done."""
    return bool(lse.is_cuda)


def limit_of(kind: torch.dtype) -> float:
    """From this |lse| on what it lost is more than the type's own rounding."""
    return 1024.0 if kind.itemsize == 2 else 32.0


def of_part(rows: Rows, whole: Sums, part: Sums) -> Rows:
    """For a call on a part of the keys: in rows with a large lse that of these keys alone, and their share of the
    gradients. Where all these keys are hidden or have a logit of -inf, lse stays: with lse -inf the row would count as one
    without keys, and 0 times an infinity of K would not show."""
    dout, dlse, lse = rows
    size = lse.abs()
    is_large = (size >= limit_of(dout.dtype)) & (size < torch.inf)
    share = (part.row_max - whole.row_max).exp() * (part.row_sum / whole.row_sum)
    share = torch.where(is_large, share, 1.0)
    weighed = torch.mul(dout, share.reshape(*dout.shape[:-1], 1), out=torch.empty_like(dout))
    lse = torch.where(is_large & (part.row_sum != 0), part.row_max + part.row_sum.log(), lse)
    return Rows(weighed, None if dlse is None else dlse * share, lse)
