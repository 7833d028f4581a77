"""attention of a sequence that is split over processes: checks, agreement, and the program that calls of a kind share."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _core
from ..._frontend import check_return_lse
from ..._options import DEFAULTS, Scalars, check_names, constants, with_scalars
from ..._rules import documents_packed, full
from .._attention import cast, is_direct
from .._op import NO_SLOPES
from .._rule import given_rule
from ._agree import agree, check_equal, number_of, same
from ._exchange import Ready
from ._heads import attention_by_heads, least_budget
from ._keys import AttentionByKeys, Call
from ._local import Local
from ._pieces import Pieces, contiguous, count_of
from ._schedule import Costs, Layout, Schedule, schedule_of
from ._sharding import Sharding
from ._side import check_device, graph_break, whole_of
from ._speed import speed_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FULL, _SOME = full(), torch.empty(0, device="cpu")
_MOST_KEPT = 256
_MOST_PROGRAMS, _MOST_BYTES = 64, 128 << 20  # of a group
_programs: weakref.WeakKeyDictionary[Any, OrderedDict[Any, _Program]] = weakref.WeakKeyDictionary()  # of a group
_checked: set[Any] = set()  # calls that the library has no objection to
_AXES = {"bhsd": (1, -1), "bshd": (-2, -1), "bhds": (1, 2), "thd": (1, -1), "qkv": (1, -1)}  # heads, channels
_NOT_HERE = ("plan", "out", "page_table", "num_chunks_q", "num_chunks_kv", "dropout_p")


@with_scalars
@graph_break
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    group: Any = None,
    sharding: Sharding | None = None,
    rule: Any = _FULL,
    exchange: str = "auto",
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool | str = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    tables: Mapping[str, Any] | None = None,
    **scalars: Unpack[Scalars],
) -> Any:
    """anyflash.torch.attention of a sequence that is split over the processes of a group, with gradients of q, k, v,
    bias and sink, through out and lse. All processes call it with the same options. The result is that of one process.

    q, k, v : this process' part of the sequence, in any layout. It is split along its outermost dimension.
    group : the process group, the default one if not given: gloo for tensors on the CPU, NCCL on GPUs.
    sharding : made by plan_sharding: which entries the parts are. Without it they are contiguous, in the order of the
        ranks. Their lengths may differ.
    rule : of the whole sequence. So are tables, cu_seqlens_q, cu_seqlens_k and key_lengths. They are complete in each
        process and on the CPU.
    bias : (batch or 1, heads or 1, own queries or 1, all keys or 1). One with one row, and sink and alibi_slopes, are
        the same in each process. Their gradients are the sums of all processes. If each process has one query, one row
        is that of its own query.
    exchange : "keys" sends keys and values to the queries that see them. "heads" gives each process all entries of some
        heads (Ulysses). "auto" takes what moves fewer bytes.
    memory_budget : bounds the workspace of each process' local calls. The buffers of keys come on top.

    Other options are those of anyflash.torch.attention. Pages, plans, `out` and numbers of chunks are refused.

    Returns out of the own queries, as q with v's channels. With return_lse=True also lse, (batch, heads, own queries),
    or (heads, own queries) in layouts without a batch; with "lm" row sums and row maxima of that shape instead.

    All processes run every backward pass, in the same order. torch.compile leaves the call out of its graph.

    Errors have one line. All processes raise ValueError if their shapes, types, rules or options differ, or if their
    backward passes run in different orders. If one process refuses its part (ValueError or TypeError), the others raise
    ValueError. If a process is gone, the others raise RuntimeError within the group's timeout.
    """
    if not is_direct(_SOME):
        raise ValueError("distributed attention: in a trace, transform or dispatch mode, expected a plain call")
    group = sharding.group if group is None and isinstance(sharding, Sharding) else group
    outside = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to processes that are not in it
    if group is not None and not isinstance(group, dist.ProcessGroup) and group != outside:
        raise TypeError(f"group: type {type(group).__name__}, expected a process group")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not in it")
    known = _programs.setdefault(whole_of(group), OrderedDict())
    key = None
    try:
        q, k, v = cast(q, k, v)
        numbers = cu_seqlens_q, cu_seqlens_k, key_lengths
        key = _key((q, k, v, bias, sink, alibi_slopes), numbers, rule, tables, scalars, sharding, exchange, return_lse)
    except Exception:  # the checks have the message
        pass
    program = known.get(key)
    count, all_know = same(group, program.number if program else 0)
    given = group, count, q, k, v, bias, sink, alibi_slopes
    prepared = program.prepared(*given) if program else None  # while they answer
    if not all_know():
        call, error = None, None
        try:
            refused = {name: scalars.pop(name) for name in _NOT_HERE if name in scalars}  # type: ignore[misc]
            call = _Prepared(q, k, v, rule, tables, refused, scalars, sharding, exchange, return_lse)
            call.add_tensors(bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, key_lengths, group)
        except Exception as caught:
            error = caught
        said, own = (call.said() if call and not error else {}), (call.lengths() if call else (0, 0, 0))
        rows = agree(group, said, own, error)
        assert call is not None
        program = _Program(call, group, rank, rows)
        if key is not None and program.schedule.rule is not None:
            known[key] = program
            most = max(_MOST_BYTES, program.bytes)
            while len(known) > _MOST_PROGRAMS or sum(one.bytes for one in known.values()) > most:
                known.popitem(last=False)
        prepared = program.prepared(*given)
    else:
        known.move_to_end(key)
    assert program is not None and prepared is not None
    return program.run(*prepared)


def _key(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], rule: Any, tables: Any, scalars: Any, sharding: Any,
    exchange: Any, return_lse: Any,
) -> Any:  # fmt: skip
    """What two calls share that do the same; None, or an error, of a call that has to be looked at."""
    if not is_direct(*tensors[:5]) or not _core.plain_scalars(scalars):
        return None
    if any(one is not None and one.device.type != "cpu" for one in numbers):
        return None
    rule = given_rule(rule, tables)
    kinds = [
        None if x is None else (type(x), x.shape, x.dtype, x.device, x.layout, x.is_neg(), x.requires_grad)
        for x in tensors
    ]
    lists = [None if one is None else (one.dtype, *one.tolist()) for one in numbers]
    options = [(name, type(one), one) for name, one in scalars.items()]
    split = None if sharding is None else (id(sharding._layout), sharding.rank)
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    key = (*kinds, *lists, *options, split, str(rule), _core.rule_hash(rule), exchange, str(return_lse), threads, grad)
    hash(key)
    return key


class _Program:
    """What each call of a kind does. It holds no tensor of a call."""

    def __init__(self, call: _Prepared, group: Any, rank: int, rows: list[list[int]]) -> None:
        lengths = [(row[1], row[2], row[3]) for row in rows]
        ranks, self.rank = len(rows), rank
        self.number = number_of(rows)  # the same in all processes, and of no other call
        self.kind, self.batched, self.return_lse = call.kind, call.batched, call.return_lse
        self.rule, self.layout = call.whole, call.layout(lengths)
        # The schedule and the local calls have tables of their own, of about the same size each.
        self.bytes = 4 * sum(table.nbytes for table in self.rule._parts[1].values())
        shapes = self.layout.q_shape, self.layout.k_shape
        _core.seen_keys(self.rule, *shapes, call.align, [], 1)  # checks the rule, as all processes do
        self.shares_bias = call.shares_bias(lengths, self.layout)
        costs = call.costs(group, self.layout)
        self.schedule = schedule_of(self.rule, call.align, self.layout, call.rule_hash, call.key_lengths, costs)
        if "dense(" in str(self.rule):
            check_equal(group, "rule: the dense mask sees other keys", str(self.schedule.stages))
        self.by_heads = call.by_heads(self.schedule, self.layout, ranks)
        self.options, self.key_lengths = call.scalars, call.key_lengths
        maxima = call.return_lse == "lm"
        self.local = Local(self.rule, self.layout, self.schedule, rank, call.scalars, call.key_lengths, maxima)
        self.has_gradient = any(call.needs)
        self.needs_lse = self.has_gradient or bool(call.return_lse)
        if call.scalars["memory_budget"] is not None:
            self._check_budget(call, call.scalars["memory_budget"], group)

    def _check_budget(self, call: _Prepared, budget: int, group: Any) -> None:
        """Raises in all processes if it is too small for one."""
        least, error = 0, None
        try:
            q, k, v, bias, sink = map(_plain, (call.q, call.k, call.v, call.bias, call.sink))
            if self.by_heads:
                given = self.rule, self.layout, self.rank, sink, self._options_by_heads(call.slopes)
                least = least_budget(q, k, v, *given, self.has_gradient)
            else:
                least = self.local.least_budget(q, k, v, bias, call.slopes, sink, self.has_gradient)
                if least <= budget:
                    self.local.add_plans(q, k, v, bias, call.slopes, sink)
        except Exception as caught:
            error = caught
        every = [row[1] for row in agree(group, {}, (least, 0, 0), error)]
        if budget < max(every):
            rank = every.index(max(every))
            raise ValueError(f"memory_budget: {budget} bytes, expected at least {every[rank]} as rank {rank} needs")

    def prepared(
        self, group: Any, count: int, q: Tensor, k: Any, v: Any, bias: Any, sink: Any, slopes: Any
    ) -> tuple[Any, ...]:
        """What `run` takes: all that needs no other process."""
        q, k, v = q.unbind(0) if self.kind == "qkv" else (q, k, v)
        q, k, v = (_to_bhsd(self.kind, x) for x in (q, k, v))
        needs = self.has_gradient, self.needs_lse
        call = Call(self.local, self.schedule, group, self.rank, self.shares_bias, slopes, *needs, count)
        return q, k, v, bias, sink, call, None if self.by_heads else call.ready(k, v)

    def run(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, call: Call, first: Ready | None) -> Any:
        if self.by_heads:
            lm, options = self.return_lse == "lm", self._options_by_heads(call.slopes)
            given = self.rule, self.layout, call.group, call.number, sink, options, lm
            out, *rows = attention_by_heads(q, k, v, *given)
        else:
            out, l, m, lse = AttentionByKeys.apply(q, k, v, bias, sink, call, first)
            rows = [l, m] if self.return_lse == "lm" else [lse]
        out = _as_given(self.kind, out)
        if not self.return_lse:
            return out
        return out, *(one if self.batched else one[0] for one in rows)

    def _options_by_heads(self, slopes: Tensor | None) -> dict[str, Any]:
        options = {**self.options, "alibi_slopes": slopes}
        if self.key_lengths is not None:
            options["key_lengths"] = torch.tensor(self.key_lengths, dtype=torch.int64, device="cpu")
        return options


def _to_bhsd(kind: str, x: Tensor) -> Tensor:
    """(batch, heads, sequence..., channels), of a tensor in the call's layout."""
    if kind == "thd":
        return x.transpose(0, 1)[None]
    if kind == "qkv":
        return x[None]
    return x.movedim(-2, 1) if kind == "bshd" else x.movedim(2, -1) if kind == "bhds" else x


def _as_given(kind: str, x: Tensor) -> Tensor:
    """The way back."""
    if kind == "thd":
        return x[0].transpose(0, 1)
    if kind == "qkv":
        return x[0]
    return x.movedim(1, -2) if kind == "bshd" else x.movedim(-1, 2) if kind == "bhds" else x


class _Prepared:
    """One process' call, checked as far as it can be without the others."""

    def __init__(
        self, q: Any, k: Any, v: Any, rule: Any, tables: Any, refused: dict[str, Any], scalars: Any,
        sharding: Any, exchange: str, return_lse: Any,
    ) -> None:  # fmt: skip
        for name, one in refused.items():
            if one is not None:
                instead = "memory_budget instead" if name.startswith("num_chunks") else "none there"
                raise ValueError(f"{name}: given to distributed attention, expected {instead}")
        check_names(scalars, attention, "distributed.attention")
        check_return_lse(return_lse)
        self.scalars = constants(scalars)
        if not self.scalars["threads"]:
            self.scalars["threads"] = torch.get_num_threads()
        self.align, self.kind = self.scalars["align"], self.scalars.pop("layout")
        _core.check_name("layout", self.kind, list(_AXES))
        _core.check_name("exchange", exchange, ["auto", "keys", "heads"])
        if sharding is not None and not isinstance(sharding, Sharding):
            raise TypeError(f"sharding: type {type(sharding).__name__}, expected what plan_sharding returns")
        self.sharding: Sharding | None = sharding
        self.exchange, self.return_lse = exchange, return_lse
        self.rule = given_rule(rule, tables)
        q, k, v = cast(q, k, v)
        if self.kind == "qkv":
            if k is not None or v is not None or q.dim() != 4 or q.shape[0] != 3:
                raise ValueError("query: expected (3, heads, tokens, channels), without key and value")
            q, k, v = q.unbind(0)
        for name, one in (("query", q), ("key", k), ("value", v)):
            if not isinstance(one, Tensor):
                raise TypeError(f"{name}: type {type(one).__name__}, expected a torch.Tensor")
            if one.device != q.device:
                raise ValueError(f"{name}: on {one.device}, expected {q.device} as query")
        if not is_direct(q, k, v):
            raise ValueError("query, key, value: a subclass or on meta, expected plain tensors")
        self.batched = self.kind not in ("thd", "qkv")
        self.q, self.k, self.v = (self._checked(name, one) for name, one in (("query", q), ("key", k), ("value", v)))
        self.bias = self.sink = self.slopes = self.lengths_q = None
        self.key_lengths: list[int] | None = None
        self.whole = self.rule  # with the documents of cu_seqlens

    def _checked(self, name: str, x: Tensor) -> Tensor:
        least = {"thd": 3, "qkv": 3}.get(self.kind, 4)
        if x.dim() < least or x.dim() > (6 if least == 4 else 3):
            raise ValueError(f"{name}: {x.dim()} axes, expected those of layout {self.kind}")
        return _to_bhsd(self.kind, x)

    def add_tensors(
        self, bias: Any, slopes: Any, sink: Any, cu_q: Any, cu_k: Any, key_lengths: Any, group: Any
    ) -> None:
        check_device("query", self.q, group)
        given = {"bias": bias, "alibi_slopes": slopes, "sink": sink}
        given |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "key_lengths": key_lengths}
        for name, one in given.items():
            if one is not None and not isinstance(one, Tensor):
                raise TypeError(f"{name}: type {type(one).__name__}, expected a torch.Tensor")
        if (self.kind == "thd") != (cu_q is not None) or (cu_q is None) != (cu_k is None):
            raise ValueError("cu_seqlens_q, cu_seqlens_k: expected both with layout thd, and none without it")
        for name in ("cu_seqlens_q", "cu_seqlens_k", "key_lengths"):
            if given[name] is not None and given[name].device.type != "cpu":
                raise ValueError(f"{name}: on {given[name].device}, expected cpu in distributed attention")
        if cu_q is not None:
            self.whole = self.rule & documents_packed(cu_q, cu_k)
        if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(NO_SLOPES)
        self.bias, self.sink, self.slopes = bias, sink, slopes
        self.needs = [
            torch.is_grad_enabled() and one is not None and one.requires_grad
            for one in (self.q, self.k, self.v, bias, sink)
        ]
        if bias is not None and bias.dim() != 4:
            raise ValueError(f"bias: {bias.dim()} axes, expected (batch, heads, queries, keys)")
        queries = prod(self.q.shape[2:-1])
        if bias is not None and bias.shape[2] not in (1, queries):
            raise ValueError(f"bias: {bias.shape[2]} queries, expected {queries} as in query, or 1")
        if self.sharding is not None:
            self._check_sharding(self.sharding, dist.get_world_size(group))
        self._check_alone(key_lengths)
        if key_lengths is not None:
            self.key_lengths = [int(one) for one in key_lengths]
        self.rule_hash = _core.rule_hash(self.whole)

    def _check_sharding(self, sharding: Sharding, ranks: int) -> None:
        if sharding.rank is None or sharding.ranks != ranks:
            raise ValueError(f"sharding: of {sharding.ranks} processes, expected one of this group's {ranks}")
        own = count_of(sharding.pieces("query")), count_of(sharding.pieces("key"))
        for name, x, count, shape in (
            ("query", self.q, own[0], sharding.q_shape),
            ("key", self.k, own[1], sharding.k_shape),
        ):
            if tuple(x.shape[2:-1]) != (count, *shape[1:]):
                raise ValueError(
                    f"{name}: sequence {tuple(x.shape[2:-1])}, expected {(count, *shape[1:])} as in sharding"
                )

    def _check_alone(self, key_lengths: Tensor | None) -> None:
        """The library's own checks of the tensors, on a call without the others' keys. It makes each once."""
        tensors = (self.q, self.k, self.v, self.bias, self.slopes, self.sink, key_lengths)
        kinds = [None if x is None else (x.shape, x.dtype, x.device, x.layout, x.is_neg()) for x in tensors]
        key = *kinds, *self.scalars.items()
        if key in _checked:
            return
        options: dict[str, Any] = {
            **self.scalars,
            "rule": _FULL,
            "alibi_slopes": self.slopes,
            "sink": self.sink,
            "key_lengths": None if key_lengths is None else torch.zeros_like(key_lengths),
            "bias": None if self.bias is None else self.bias[:, :, :, :1],
        }
        _core.result_shapes(
            _plain(self.q),
            _plain(self.k),
            _plain(self.v),
            {name: _plain(one) for name, one in options.items() if one is not None},
        )
        if len(_checked) >= _MOST_KEPT:
            _checked.clear()
        _checked.add(key)

    def said(self) -> dict[str, str]:
        """What has to be the same in all processes, as texts."""
        return {
            "call": "a forward pass",
            "query": f"{self.q.dtype}, {_sizes(self.q)}, {self.q.shape[-1]} channels, {self.q.device.type}",
            "key": f"{self.k.dtype}, {_sizes(self.k)}, {self.k.shape[-1]} channels",
            "value": f"{self.v.dtype}, {self.v.shape[-1]} channels",
            "rule": f"{self.whole} with tables of hash {self.rule_hash:x}",
            "sharding": "none" if self.sharding is None else str(self.sharding._layout),
            "bias": "none" if self.bias is None else f"{self.bias.dtype} {(*self.bias.shape[:2], self.bias.shape[3])}",
            "sink": _kind(self.sink),
            "alibi_slopes": _kind(self.slopes),
            "key_lengths": str(self.key_lengths),
            "options": self._options_text(),
            "gradients": str(self.needs),
        }

    def _options_text(self) -> str:
        every = {**self.scalars, "layout": self.kind, "threads": 0}
        given = {name: one for name, one in every.items() if one != DEFAULTS[name]}
        given |= {"exchange": self.exchange, "return_lse": self.return_lse}
        return ", ".join(f"{name}={one}" for name, one in given.items())

    def lengths(self) -> tuple[int, int, int]:
        """Of the outermost dimension, and the rows of the bias."""
        return self.q.shape[2], self.k.shape[2], 0 if self.bias is None else self.bias.shape[2]

    def layout(self, lengths: list[tuple[int, int, int]]) -> Layout:
        if self.sharding is not None:
            return self.sharding._layout
        queries, keys, _ = zip(*lengths)
        return Layout(
            (sum(queries), *self.q.shape[3:-1]),
            (sum(keys), *self.k.shape[3:-1]),
            tuple(contiguous(queries)),
            tuple(contiguous(keys)),
        )

    def shares_bias(self, lengths: list[tuple[int, int, int]], layout: Layout) -> bool:
        """Whether the bias has one row for all queries, the same in all processes. Checks it, and key_lengths."""
        keys = prod(layout.k_shape)
        if self.bias is not None and self.bias.shape[3] not in (1, keys):
            raise ValueError(f"bias: {self.bias.shape[3]} keys, expected all {keys} of the sequence, or 1")
        if self.key_lengths is not None and not all(0 <= length <= keys for length in self.key_lengths):
            raise ValueError(f"key_lengths: {self.key_lengths}, expected 0 to {keys}, the whole sequence")
        inner = prod(layout.q_shape[1:])
        rows, queries = [one[2] for one in lengths], [one[0] * inner for one in lengths]
        if self.bias is None or rows == queries:
            return False
        if any(count != 1 for count in rows):
            raise ValueError(f"bias: rows {rows} in the processes, expected their queries {queries}, or 1 in all")
        return True

    def costs(self, group: Any, layout: Layout) -> Costs | None:
        """None where results have to be the same in each run, whatever the machine's speed."""
        if len(layout.queries) == 1:
            return None
        speed = speed_of(group, self.q)  # on a GPU, in any case: it is the first exchange of all
        if self.scalars["deterministic"]:
            return None
        heads_k, channels = self.k.shape[0] * self.k.shape[1], self.q.shape[-1] + self.v.shape[-1]
        heads_q, size = self.q.shape[0] * self.q.shape[1], self.q.element_size()
        of_pair = heads_q * channels / 2 / speed.work
        key_bytes = heads_k * channels * size
        return Costs(speed.latency, key_bytes / speed.bytes, key_bytes, of_pair, 2 * speed.call)

    def by_heads(self, schedule: Schedule, layout: Layout, ranks: int) -> bool:
        """Whether to exchange heads: possible where each process gets as many, and better where it moves less."""
        heads_q, heads_k = self.q.shape[1], self.k.shape[1]
        why = None
        if heads_q % ranks or heads_k % ranks:
            why = f"{heads_q} heads of queries and {heads_k} of keys, expected multiples of {ranks} processes"
        elif self.bias is not None:
            why = "a bias, expected none"
        elif any(table.ndim > 2 and table.shape[-3] > 1 for table in self.whole._parts[1].values()):
            why = "a rule that differs between heads, expected one for all"
        if self.exchange == "heads" and why:
            raise ValueError(f"exchange: 'heads' with {why}")
        if self.exchange != "auto" or why or ranks == 1:
            return bool(self.exchange == "heads" and why is None)
        channels = self.q.shape[-1] + self.v.shape[-1]
        entries = heads_q * _most(layout.queries, layout.q_shape) + heads_k * _most(layout.keys, layout.k_shape)
        by_heads = entries * channels * (ranks - 1) // ranks
        by_keys = schedule.most_received() * prod(layout.k_shape[1:]) * heads_k * channels
        return bool(by_heads < by_keys)


def _plain(one: Any) -> Any:
    return one.detach() if isinstance(one, Tensor) else one


def _sizes(x: Tensor) -> str:
    return f"{x.shape[0]} batch entries, {x.shape[1]} heads, inner sizes {tuple(x.shape[3:-1])}"


def _kind(x: Tensor | None) -> str:
    return "none" if x is None else f"{x.dtype} {tuple(x.shape)}"


def _most(pieces: tuple[Pieces, ...], shape: tuple[int, ...]) -> int:
    """Entries of the process that has the most."""
    return max(map(count_of, pieces)) * prod(shape[1:])
