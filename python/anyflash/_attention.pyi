from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from typing_extensions import Unpack

from ._core import Plan, Rule
from ._options import Scalars

class _Array(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_A = TypeVar("_A", bound=_Array)

class Gradients(NamedTuple):
    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None

@overload
def attention(
    q: _A,
    k: _A | None = None,
    v: _A | None = None,
    *,
    rule: Rule = ...,
    bias: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    return_lse: Literal[False] = False,
    plan: Plan | None = None,
    out: _A | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    **scalars: Unpack[Scalars],
) -> _A: ...
@overload
def attention(
    q: _A,
    k: _A | None = None,
    v: _A | None = None,
    *,
    rule: Rule = ...,
    bias: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    return_lse: Literal[True],
    plan: Plan | None = None,
    out: _A | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    **scalars: Unpack[Scalars],
) -> tuple[_A, _A]: ...
@overload
def attention(
    q: _A,
    k: _A | None = None,
    v: _A | None = None,
    *,
    rule: Rule = ...,
    bias: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    return_lse: Literal["lm"],
    plan: Plan | None = None,
    out: _A | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    **scalars: Unpack[Scalars],
) -> tuple[_A, _A, _A]: ...
def attention_backward(
    dout: _Array,
    q: _Array,
    k: _Array | None,
    v: _Array | None,
    out: _Array,
    lse: _Array,
    *,
    dlse: _Array | None = None,
    rule: Rule = ...,
    bias: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    plan: Plan | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    **scalars: Unpack[Scalars],
) -> Gradients: ...
def plan(
    q: _Array,
    k: _Array | None = None,
    v: _Array | None = None,
    *,
    rule: Rule = ...,
    bias: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    **scalars: Unpack[Scalars],
) -> Plan: ...
