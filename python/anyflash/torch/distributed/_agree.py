"""Whether all processes of a group do the same. Each tells the others one number before an exchange; a process that was
about to raise still takes part, so that no other waits for it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ._side import asked, gathered, lost, told, whole_of

# What has to be equal, each with a text that a message can show.
FIELDS = (
    "call",
    "query",
    "key",
    "value",
    "rule",
    "sharding",
    "bias",
    "sink",
    "alibi_slopes",
    "key_lengths",
    "options",
    "gradients",
)


_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of a group's questions so far


def same(group: Any, number: int) -> tuple[int, Callable[[], bool]]:
    """Asks whether all processes say this number, and not 0. Returns the number of this question, the same in all
    processes, and a function that waits for the answer."""
    count, answer = _question(group, number)
    return count, lambda: all(one == [number] for one in answer()) and number != 0


def _question(group: Any, number: int) -> tuple[int, Callable[[], list[list[int]]]]:
    answer, whole = asked(group, [number]), whole_of(group)
    _counts[whole] = count = _counts.get(whole, 0) + 1
    return count, answer


def step(group: Any, text: str, error: Exception | None = None) -> tuple[int, Callable[[], None]]:
    """Asks whether all processes do what the text says. The function waits for the answer, and raises if they do not."""
    count, all_do = same(group, 0 if error else number_of(text))

    def check() -> None:
        if not all_do():
            agree(group, {"call": text}, (0, 0, 0), error)

    return count, check


def any_says(group: Any, text: str, mine: bool, error: Exception | None = None) -> bool:
    """Whether a process says yes at this point of its call. If one has an error or is at another point, all raise: the
    one with the error raises it, the others RuntimeError."""
    no, yes = number_of(f"{text}: no"), number_of(f"{text}: yes")
    said = [number for (number,) in _question(group, 0 if error else yes if mine else no)[1]()]
    if not all(number in (no, yes) for number in said):
        try:
            agree(group, {"call": text}, (0, 0, 0), error)
        except ValueError as refused:
            if error is not None:
                raise
            raise RuntimeError(f"anyflash.torch.distributed: {refused}") from refused
    return yes in said


def agree(group: Any, said: Mapping[str, str], own: tuple[int, int, int], error: Exception | None) -> list[list[int]]:
    """What all processes say, in their order: whether they have an error, the numbers `own`, and digests. Raises in every
    process if one has an error, or says another text under one of FIELDS."""
    texts = [said.get(name, "") for name in FIELDS]
    rows = gathered(group, [int(error is not None), *own, *map(_digest, texts)])
    if any(row[0] for row in rows) or any(row[4:] != rows[0][4:] for row in rows):
        _refuse(group, error, texts)
    return rows


def number_of(what: Any) -> int:
    """A number, not 0, for a text or for what `agree` returned."""
    return _digest(str(what)) or 1


def _refuse(group: Any, error: Exception | None, texts: list[str]) -> None:
    """Raises what is wrong, in every process."""
    every = told(group, (None if error is None else str(error), texts))
    if error is not None:
        raise error
    for rank, (refused, _) in enumerate(every):
        if refused is not None:
            raise ValueError(f"rank {rank} refused its part of the call: {refused}")
    for i, name in enumerate(FIELDS):
        for rank, (_, texts) in enumerate(every):
            if texts[i] != every[0][1][i]:
                raise ValueError(f"{name}: {texts[i]} in rank {rank}, expected {every[0][1][i]} as in rank 0")
    raise ValueError("the processes' calls differ, expected the same call in all of them")


def check_equal(group: Any, what: str, text: str) -> None:
    """Raises ValueError in every process if their texts differ."""
    digests = gathered(group, [_digest(text)])
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(f"{what} in rank {rank}, expected those of rank 0")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of all processes' tensors, in the order of their ranks: the same bits in each run."""
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    lost(lambda: dist.all_gather(every, x.contiguous(), group=group))
    total = every[0]
    for one in every[1:]:
        total = total + one
    return total
