"""One process' own work: attention of its queries to some keys, and the join of partial results."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _core
from ..._arrays import settle
from .._attention import _forward, _gradients
from .._op import others_of, stream_of
from ._exchange import as_given, new_keys
from ._parts import Part, own_parts, stage_parts
from ._pieces import before, count_of
from ._schedule import Layout, Schedule
from ._shares import Rows, Shares, Sums

_Results = tuple[Tensor, Tensor, Tensor]  # out, row_sum, row_max
# The sink of each part, of a call with a sink: too small to weigh anything. It tells rows whose visible logits are all
# -inf (row_max is this) from rows that see no key (row_max is -inf). A sink that is lower still is left out of them.
_FAINT = -1e38


def _shows(sink: Tensor) -> Tensor:
    return ~(sink.detach() <= _FAINT / 2)  # a NaN does


class LocalCall(NamedTuple):
    """One call of a process on keys at hand."""

    part: Part
    options: dict[str, Any]  # that each repetition has; a plan is added by the first


class Local:
    """The calls of one process. `options`: those of anyflash.torch.attention but the rule, the lengths and tensors."""

    def __init__(
        self,
        rule: Any,
        layout: Layout,
        schedule: Schedule,
        rank: int,
        options: dict[str, Any],
        lengths: list[int] | None,
        maxima: bool,
    ) -> None:
        self.layout, self.options, self.lengths, self.maxima = layout, options, lengths, maxima
        self.rule = rule if schedule.rule is None else schedule.rule
        # The library keeps plans of rules without tables itself.
        self.keeps_plans = schedule.rule is not None and (bool(self.rule._parts[1]) or lengths is not None)
        self.schedule, self.rank = schedule, rank
        self.inner_q, self.inner_k = prod(layout.q_shape[1:]), prod(layout.k_shape[1:])
        self._calls: dict[int, list[LocalCall]] = {}

    def calls(self, number: int) -> list[LocalCall]:
        """Those on the keys of a stage, or on the own keys if the number is -1."""
        made = self._calls.get(number)
        if made is None:
            made = self._calls[number] = [LocalCall(part, self._options(part)) for part in self._parts(number)]
        return made

    def least_budget(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, slopes: Any, sink: Any, backward: bool
    ) -> int:  # fmt: skip
        """The smallest memory_budget with which all calls of this process work. A plan is of both passes."""
        backward, least = backward or self.keeps_plans, 0
        for _, cut, options in self._every_call(q, k, v, bias, slopes, sink):
            least = max(least, _core.torch_least_budget(*cut, {**options, "memory_budget": None}, backward))
        return least

    def add_plans(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, slopes: Any, sink: Any) -> None:
        """Those of all calls, where plans are kept: `forward` makes no more."""
        for call, cut, options in self._every_call(q, k, v, bias, slopes, sink) if self.keeps_plans else ():
            self._add_plan(call, cut, options)

    def _every_call(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, slopes: Any, sink: Any
    ) -> Iterator[tuple[LocalCall, tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
        """What `forward` gives to the library, but for the numbers of keys and values."""
        for number in range(-1, len(self.schedule.stages)):
            if number >= 0:
                count = count_of(self.schedule.stages[number].keys(self.rank))
                k, v = as_given(new_keys(k, count)), as_given(new_keys(v, count))
            for call in self.calls(number):
                cut = _cut(call.part, q, k, v)
                yield call, cut, self._given(call, cut, self.bias_of(call.part, bias), slopes, sink)[0]

    def forward(
        self, call: LocalCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """out, row_sum and row_max of a call. row_max is any number near the maximum where nobody asks for maxima.
        Joined.finish adds the sink."""
        cut = _cut(call.part, q, k, v)
        options, others = self._given(call, cut, self.bias_of(call.part, bias), slopes, sink)
        self._add_plan(call, cut, options)
        if self.maxima:
            made: tuple[Tensor, Tensor, Tensor] = _forward(options, others, *cut, None, "lm")
            return made
        made = _core.torch_part(*cut, options)
        if others:
            settle(q, *others)
        return made

    def backward(
        self, number: int, i: int, wanted: int, rows: Rows, saved: tuple[Any, ...], k: Tensor, v: Tensor,
        slopes: Tensor | None, shares: Shares | None,
    ) -> Any:  # fmt: skip
        """The gradients of q, k, v and bias of call i of a stage. rows: all. saved: q, bias, and the joined out. shares:
        given if there are large rows."""
        call = self.calls(number)[i]
        q, bias, out = saved
        start, count = call.part.rows
        flat = start * self.inner_q, count * self.inner_q
        cut = _cut(call.part, q, k, v)
        options, _ = self._given(call, cut, None, slopes, None)
        self._add_plan(call, cut, options)
        rows = rows.narrow((start, count), flat)
        if shares is not None:
            rows = shares.of_call(i + sum(len(self.calls(before)) for before in range(-1, number)), rows, flat)
        bias, out = self.bias_of(call.part, bias), out.narrow(2, start, count)
        return _gradients(wanted, options, rows.dout, rows.dlse, *cut, bias, None, out, rows.lse)

    def bias_of(self, part: Part, bias: Tensor | None) -> Tensor | None:
        """The bias of a part's queries and keys."""
        if bias is None:
            return None
        if bias.shape[2] > 1:
            bias = bias.narrow(2, part.rows[0] * self.inner_q, part.rows[1] * self.inner_q)
        if bias.shape[3] == 1:
            return bias
        columns = [bias.narrow(3, first * self.inner_k, count * self.inner_k) for first, count in part.keys]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 3)

    def add_bias_gradient(self, part: Part, gradient: Tensor, total: Tensor) -> None:
        if total.shape[2] > 1:
            total = total.narrow(2, part.rows[0] * self.inner_q, part.rows[1] * self.inner_q)
        if total.shape[3] == 1:
            total += gradient
            return
        at = 0
        for first, count in part.keys:
            entries = count * self.inner_k
            total.narrow(3, first * self.inner_k, entries).add_(gradient.narrow(3, at, entries))
            at += entries

    def _parts(self, number: int) -> tuple[Part, ...]:
        kept = self.schedule.parts.get((self.rank, number))
        if kept is None:
            queries = self.layout.queries[self.rank]
            if number < 0:
                kept = own_parts(self.layout, queries, self.layout.keys[self.rank])
            else:
                keys = self.schedule.stages[number].keys(self.rank)
                kept = stage_parts(self.rule, self.options["align"], self.layout, queries, keys, self.lengths)
            self.schedule.parts[self.rank, number] = kept
        made: tuple[Part, ...] = kept
        return made

    def _options(self, part: Part) -> dict[str, Any]:
        options, lengths = dict(self.options), None
        if self.lengths is not None:
            own = [before(part.keys, length) for length in self.lengths]
            options["key_lengths"] = torch.tensor(own, dtype=torch.int64)
            lengths = torch.tensor(self.lengths, dtype=torch.int64)
        shapes = self.layout.q_shape, self.layout.k_shape
        options["rule"] = _core.rule_part(self.rule, *shapes, part.queries, part.keys, lengths)
        return options

    def _given(
        self, call: LocalCall, tensors: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, slopes: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:  # fmt: skip
        """The options with what is this time's own, and what comes from other frameworks."""
        options, others = dict(call.options), ()
        if bias is not None:
            options["bias"] = bias
        if slopes is not None:
            options["alibi_slopes"] = slopes
        if sink is not None:
            options["sink"] = torch.where(_shows(sink), _FAINT, -torch.inf).float()
        if tensors[0].is_cuda:
            others = others_of(tensors[0], options)
            options["stream"] = stream_of(tensors[0], others)
        return options, others

    def _add_plan(self, call: LocalCall, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> None:
        if self.keeps_plans and "plan" not in options:
            q, k, v = (x.detach() for x in tensors)
            options["plan"] = call.options["plan"] = _core.plan(q, k, v, options)


def _cut(part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.narrow(2, *part.rows), k.narrow(2, *part.columns), v.narrow(2, *part.columns)


class Joined:
    """The softmax over all keys from those over parts of them. Sums are float32, or float64 for float64: with the pair
    (row_max, row_sum) of each part they are exact, where a large log-sum-exp would have lost its digits. Results of two
    parts are rounded to the queries' type once, and kept in it until then."""

    def __init__(self, q: Tensor, d_v: int, inner: int, keeps_parts: bool) -> None:
        self.q, self.d_v, self.inner, self.keeps_parts = q, d_v, inner, keeps_parts
        self.kind = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.parts: list[Sums] = []  # of each, if they are kept; the first one's own are changed in place
        self.first: _Results | None = None  # of all queries
        self.second: list[tuple[tuple[int, int], _Results]] = []  # of other queries each
        self.sums: _Results | None = None

    def add(self, rows: tuple[int, int], out: Tensor, row_sum: Tensor, row_max: Tensor) -> None:
        if self.keeps_parts:
            self.parts.append(Sums(row_sum.clone(), row_max.clone()) if not self.parts else Sums(row_sum, row_max))
        made = out, row_sum, row_max
        if self.first is None and self.sums is None and rows == (0, self.q.shape[2]):
            self.first = made
        elif self.first is not None and apart(rows, [one for one, _ in self.second]):
            self.second.append((rows, made))
        else:
            self._join(self._sums(), rows, made)

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """out, row_sum and row_max. The sink is one more logit in each row that sees a key."""
        if self.first is not None and sink is None:
            for rows, made in self.second:
                self._join(self.first, rows, made)
            return self.first
        out, sums, maxima = self._sums()
        if sink is not None:
            logit = sink.detach().to(self.kind)[:, None]
            logit = torch.where(sums == 0, -torch.inf, logit)  # of rows that see no key
            faint = (maxima <= _FAINT / 2) & _shows(sink)[:, None] | (maxima == -torch.inf)
            maxima = torch.where(faint, -torch.inf, maxima)
            greater = torch.maximum(logit, maxima)
            own = torch.where(faint, 0.0, (maxima - greater).exp() * sums)
            total = own + torch.where(logit == -torch.inf, 0.0, (logit - greater).exp())
            out *= torch.where(total == 0, 1.0, own / total).reshape(*out.shape[:-1], 1)
            sums, maxima = total, greater
        return out.to(self.q.dtype), sums, maxima

    def _sums(self) -> _Results:
        if self.sums is None:
            rows = *self.q.shape[:2], self.q.shape[2] * self.inner
            if self.first is not None:
                out, sums, maxima = self.first
                self.sums = out.to(self.kind), sums, maxima  # changed in place: nobody else has them
            else:
                zeros = self.q.new_zeros((*self.q.shape[:-1], self.d_v), dtype=self.kind)
                self.sums = (
                    zeros,
                    self.q.new_zeros(rows, dtype=self.kind),
                    self.q.new_full(rows, -torch.inf, dtype=self.kind),
                )
            for one, made in self.second:
                self._join(self.sums, one, made)
            self.first, self.second = None, []
        return self.sums

    def _join(self, to: _Results, rows: tuple[int, int], made: _Results) -> None:
        """Adds a part's results in place."""
        flat = rows[0] * self.inner, rows[1] * self.inner
        into = to[0].narrow(2, *rows), to[1].narrow(2, *flat), to[2].narrow(2, *flat)
        _core.torch_join(*into, *made, stream_of(self.q), torch.get_num_threads())


def apart(rows: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    """Whether rows (first, count) share none with others."""
    return all(sum(rows) <= first or first + count <= rows[0] for first, count in others)
