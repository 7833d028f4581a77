"""The group over which processes agree: on the CPU, so that to agree no process waits for its GPU, nor a GPU for it."""

from __future__ import annotations

import functools
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_TAG = (1 << 30) - 1  # of no other message
_MOST_MESSAGES = 8  # that a process sends at once
_sides: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def side(group: Any) -> Any:
    """The group itself where it takes tensors on the CPU, else gloo between the same processes, with its timeout. All
    processes of the group call it for the first time together.

    It is no group of PyTorch's: each process counts those that it is in, and names new groups by the count. One that is
    made in some processes alone would give the next group of all another name there."""
    whole = whole_of(group)
    if "cpu:" in dist.get_backend_config(whole):
        return whole
    made = _sides.get(whole)
    if made is None:
        store = dist.PrefixStore("anyflash", dist.distributed_c10d._get_process_group_store(whole))
        made = lost(lambda: dist.ProcessGroupGloo(store, whole.rank(), whole.size(), _timeout(whole)))
        _sides[whole] = made
    return made


def asked(group: Any, numbers: Sequence[int]) -> Callable[[], list[list[int]]]:
    """Tells all processes these numbers; the function waits for theirs, and gives them in the order of the ranks. To few
    processes a message each is faster than a collective, which goes through threads of gloo's."""
    mine, over = torch.tensor(numbers, dtype=torch.int64, device="cpu"), side(group)
    every = [mine.clone() for _ in range(over.size())]
    others = [rank for rank in range(over.size()) if rank != over.rank()]

    def start() -> list[Any]:
        if len(others) > _MOST_MESSAGES:
            return [over.allgather([every], [mine])]
        received = [over.recv([every[rank]], rank, _TAG) for rank in others]
        return received + [over.send([mine], rank, _TAG) for rank in others]

    works = lost(start)

    def answer() -> list[list[int]]:
        for work in works:
            lost(work.wait)
        return [one.tolist() for one in every]

    return answer


def gathered(group: Any, numbers: Sequence[int]) -> list[list[int]]:
    """All processes' numbers, in the order of their ranks."""
    return asked(group, numbers)()


def told(group: Any, mine: Any) -> list[Any]:
    """All processes' texts, lists and numbers, in the order of their ranks."""
    text = torch.frombuffer(bytearray(json.dumps(mine), "utf-8"), dtype=torch.uint8)
    sizes = [size for (size,) in gathered(group, [len(text)])]
    sent = text.new_zeros(max(sizes))  # a collective takes equal sizes
    sent[: len(text)] = text
    every = [torch.empty_like(sent) for _ in sizes]
    lost(lambda: side(group).allgather([every], [sent]).wait())
    return [json.loads(bytes(one[:size].tolist())) for one, size in zip(every, sizes)]


class GroupLost(RuntimeError):
    """A process is gone or late: the group is of no more use."""


def lost(communicate: Callable[[], _Result]) -> _Result:
    """communicate(), with one line where a process is gone or does not answer within the group's timeout."""
    try:
        return communicate()
    except RuntimeError as error:
        line = str(error).strip().split("\n")[0]
        raise GroupLost(f"anyflash.torch.distributed: another process of the group is gone or late: {line}") from error


def check_device(name: str, x: torch.Tensor, group: Any) -> None:
    try:
        whole_of(group)._get_backend(x.device)
    except RuntimeError:
        config = dist.get_backend_config(group)
        raise ValueError(f"{name}: on {x.device}, expected a device of the group's backend, {config}") from None


def graph_break(function: _Function) -> _Function:
    """torch.compile leaves it out of its graphs. Does not load torch._dynamo, which takes seconds."""
    outside = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*given: Any, **more: Any) -> Any:
        return (outside if "torch._dynamo" in sys.modules else function)(*given, **more)

    return cast(_Function, call)


def whole_of(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _timeout(group: Any) -> Any:
    """That of a group of GPUs; PyTorch's own default where it does not tell."""
    try:
        return group._get_backend(torch.device("cuda")).options._timeout
    except (AttributeError, RuntimeError):
        return default_pg_timeout
