from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from ._core import Plan, Rule

class _Array(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_A = TypeVar("_A", bound=_Array)
_Align = Literal["none_front", "none_end", "scale_front", "scale_end"]
_Layout = Literal["bhsd", "bshd", "bhds", "qkv", "thd"]

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
    align: _Align = "none_front",
    layout: _Layout = "bhsd",
    scale: float | None = None,
    bias: _Array | None = None,
    softcap: float = 0.0,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    allow_tf32: bool = False,
    plan: Plan | None = None,
    out: _A | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    threads: int = 0,
) -> _A: ...
@overload
def attention(
    q: _A,
    k: _A | None = None,
    v: _A | None = None,
    *,
    rule: Rule = ...,
    align: _Align = "none_front",
    layout: _Layout = "bhsd",
    scale: float | None = None,
    bias: _Array | None = None,
    softcap: float = 0.0,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    allow_tf32: bool = False,
    plan: Plan | None = None,
    out: _A | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    threads: int = 0,
) -> tuple[_A, _A]: ...
@overload
def attention(
    q: _A,
    k: _A | None = None,
    v: _A | None = None,
    *,
    rule: Rule = ...,
    align: _Align = "none_front",
    layout: _Layout = "bhsd",
    scale: float | None = None,
    bias: _Array | None = None,
    softcap: float = 0.0,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    return_lse: Literal["lm"],
    deterministic: bool = False,
    allow_tf32: bool = False,
    plan: Plan | None = None,
    out: _A | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    threads: int = 0,
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
    align: _Align = "none_front",
    layout: _Layout = "bhsd",
    scale: float | None = None,
    bias: _Array | None = None,
    softcap: float = 0.0,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    deterministic: bool = False,
    allow_tf32: bool = False,
    plan: Plan | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    threads: int = 0,
) -> Gradients: ...
def plan(
    q: _Array,
    k: _Array | None = None,
    v: _Array | None = None,
    *,
    rule: Rule = ...,
    align: _Align = "none_front",
    layout: _Layout = "bhsd",
    scale: float | None = None,
    bias: _Array | None = None,
    softcap: float = 0.0,
    alibi_slopes: _Array | None = None,
    sink: _Array | None = None,
    deterministic: bool = False,
    allow_tf32: bool = False,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    key_lengths: _Array | None = None,
    page_table: _Array | None = None,
    threads: int = 0,
) -> Plan: ...
