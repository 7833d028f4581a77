"""Wrong calls of attention that all front ends in Python answer alike, as data. Each front end's test of wrong input runs
them, with arrays of its own, and keeps a table only of what it alone can be given.

The right call has queries (2, 4, 6, 8), keys and values (2, 2, 5, 8). A row names what is given in their place or beside
them: NumPy arrays, of which the front end makes its own, rules as text with their tables, and plain values.
"""

import numpy as np


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


RIGHT = {"query": zeros(2, 4, 6, 8), "key": zeros(2, 2, 5, 8), "value": zeros(2, 2, 5, 8)}
FLOATS = "expected float16, bfloat16, float32 or float64"
INDICES = "expected int32 or int64"
ALIGN = "expected none_front, none_end, scale_front or scale_end"
PAGES = dict(key=zeros(3, 4, 2, 8), value=zeros(3, 4, 2, 8))


def packed(q, k):
    """Cumulative lengths for layout thd, of 6 queries and 5 keys."""
    return dict(
        query=zeros(6, 4, 8), key=zeros(5, 2, 8), value=zeros(5, 2, 8), layout="thd", cu_seqlens_q=q, cu_seqlens_k=k
    )


ARRAYS = {  # the class of the error, its line, what is given
    "head sizes": (ValueError, "key: head size 7, expected 8 as in query", dict(key=zeros(2, 2, 5, 7))),
    "batches": (ValueError, "key: batch 1, expected 2 as in query", dict(key=zeros(1, 2, 5, 8))),
    "heads do not divide": (
        ValueError,
        "key: heads 3, expected a divisor of the 4 of query",
        dict(key=zeros(2, 3, 5, 8), value=zeros(2, 3, 5, 8)),
    ),
    "heads of the values": (ValueError, "value: heads 1, expected 2 as in key", dict(value=zeros(2, 1, 5, 8))),
    "lengths": (ValueError, "value: keys 4, expected 5 as in key", dict(value=zeros(2, 2, 4, 8))),
    "no axes": (ValueError, "query: rank 0, expected 4, 5 or 6 in layout bhsd", dict(query=zeros())),
    "two axes": (ValueError, "query: rank 2, expected 4, 5 or 6 in layout bhsd", dict(query=zeros(6, 8))),
    "three axes": (ValueError, "query: rank 3, expected 4, 5 or 6 in layout bhsd", dict(query=zeros(4, 6, 8))),
    "too many axes": (ValueError, "query: rank 9, expected at most 8", dict(query=zeros(*(1,) * 9))),
    "other ranks": (ValueError, "key: rank 5, expected 4 as in query", dict(key=zeros(2, 2, 5, 8, 1))),
    "rank of the values": (ValueError, "value: rank 3, expected 4 as in query", dict(value=zeros(2, 5, 8))),
    "no channels": (
        ValueError,
        "query: head size 0, expected 1 to 256",
        dict(query=zeros(2, 4, 6, 0), key=zeros(2, 2, 5, 0)),
    ),
    "too many channels": (
        ValueError,
        "query: head size 257, expected 1 to 256",
        dict(query=zeros(2, 4, 6, 257), key=zeros(2, 2, 5, 257)),
    ),
    "too many channels of values": (
        ValueError,
        "value: head size 513, expected 1 to 512",
        dict(value=zeros(2, 2, 5, 513)),
    ),
    "types that differ": (
        TypeError,
        "key: type float16, expected float32 as in query",
        dict(key=zeros(2, 2, 5, 8, dtype=np.float16)),
    ),
    "integers": (TypeError, f"query: type int32, {FLOATS}", dict(query=zeros(2, 4, 6, 8, dtype=np.int32))),
    "complex numbers": (
        TypeError,
        f"query: type complex64, {FLOATS}",
        dict(query=zeros(2, 4, 6, 8, dtype=np.complex64)),
    ),
}

OPTIONS = {
    "alignment": (ValueError, f"align: 'end', {ALIGN}", dict(align="end")),
    "alignment of two lines": (ValueError, f"align: 'a\\x0ab', {ALIGN}", dict(align="a\nb")),
    "scale not a number": (ValueError, "scale: nan, expected a finite float32", dict(scale=float("nan"))),
    "scale too large": (ValueError, "scale: expected a number that float64 holds", dict(scale=10**400)),
    "scale in text": (TypeError, "scale: type str, expected a number", dict(scale="1")),
    "softcap": (ValueError, "softcap: -1, expected 0 (none) or a positive float32", dict(softcap=-1.0)),
    "softcap not a number": (
        ValueError,
        "softcap: nan, expected 0 (none) or a positive float32",
        dict(softcap=float("nan")),
    ),
    "softcap none": (TypeError, "softcap: type NoneType, expected a number", dict(softcap=None)),
    "threads": (ValueError, "threads: -1, expected 0 (all) to 65536", dict(threads=-1)),
    "threads beyond 32 bits": (ValueError, "threads: 2147483648, expected 0 (all) to 65536", dict(threads=2**31)),
    "threads too large": (ValueError, "threads: expected an integer of 64 bits", dict(threads=2**70)),
    "threads in part": (TypeError, "threads: type float, expected an integer", dict(threads=1.5)),
    "threads none": (TypeError, "threads: type NoneType, expected an integer", dict(threads=None)),
    "queries' chunks": (
        ValueError,
        "num_chunks_q: 4, expected a divisor of 6 queries: 1, 2, 3, 6",
        dict(num_chunks_q=4),
    ),
    "no chunks of queries": (
        ValueError,
        "num_chunks_q: 0, expected a divisor of 6 queries: 1, 2, 3, 6",
        dict(num_chunks_q=0),
    ),
    "keys' chunks": (ValueError, "num_chunks_kv: -5, expected a divisor of 5 keys: 1, 5", dict(num_chunks_kv=-5)),
    "chunks in part": (TypeError, "num_chunks_kv: type float, expected an integer", dict(num_chunks_kv=1.0)),
    "chunks too many": (ValueError, "num_chunks_q: expected an integer of 64 bits", dict(num_chunks_q=2**70)),
    "negative budget": (ValueError, "memory_budget: -1, expected a number of bytes", dict(memory_budget=-1)),
    "budget in text": (TypeError, "memory_budget: type str, expected an integer", dict(memory_budget="64MiB")),
    "return_lse": (ValueError, "return_lse: 'both', expected True, False or 'lm'", dict(return_lse="both")),
    "return_lse a number": (ValueError, "return_lse: 2, expected True, False or 'lm'", dict(return_lse=2)),
    "deterministic none": (TypeError, "deterministic: type NoneType, expected True or False", dict(deterministic=None)),
    "deterministic two": (TypeError, "deterministic: type int, expected True or False", dict(deterministic=2)),
    "allow_tf32": (TypeError, "allow_tf32: type str, expected True or False", dict(allow_tf32="tf32")),
    "bias' heads": (
        ValueError,
        "bias: shape (2, 3, 6, 5), expected (2, 4, 6, 5), or 1 in place of a size",
        dict(bias=zeros(2, 3, 6, 5)),
    ),
    "bias' rank": (ValueError, "bias: rank 2, expected 4", dict(bias=zeros(6, 5))),
    "bias' type": (TypeError, f"bias: type int32, {FLOATS}", dict(bias=zeros(1, 1, 6, 5, dtype=np.int32))),
    "sink's heads": (ValueError, "sink: shape (3), expected (4)", dict(sink=zeros(3))),
    "slopes' heads": (ValueError, "alibi_slopes: shape (2, 3), expected (2, 4)", dict(alibi_slopes=zeros(2, 3))),
    "slopes' type": (
        TypeError,
        "alibi_slopes: type int32, expected float32 or float64",
        dict(alibi_slopes=ints(1, 2, 3, 4)),
    ),
    "key_lengths' type": (TypeError, f"key_lengths: type float32, {INDICES}", dict(key_lengths=zeros(2))),
    "key_lengths' size": (ValueError, "key_lengths: shape (1), expected (2)", dict(key_lengths=ints(5))),
    "cumulative lengths without thd": (
        ValueError,
        "cu_seqlens_q: given with layout bhsd, expected only with thd",
        dict(cu_seqlens_q=ints(0, 6), cu_seqlens_k=ints(0, 5)),
    ),
    "pages without lengths": (
        ValueError,
        "key_lengths: not given, expected the lengths that go with page_table",
        dict(page_table=ints(0, 1, 2, 3).reshape(2, 2), **PAGES),
    ),
    "documents of another length": (
        ValueError,
        "rule documents: ids_q has 2 entries, expected 6 as the queries",
        dict(rule="documents(a, a)", tables={"a": ints(0, 1)}),
    ),
    "blocks of another size": (
        ValueError,
        "rule blocks: bitmap has 2 rows, expected 3 for the queries",
        dict(rule="blocks(m, 2, 3)", tables={"m": zeros(2, 2, dtype=bool)}),
    ),
    "dense of another size": (
        ValueError,
        "rule dense: mask has 6 columns, expected 5 (or 1) as the keys",
        dict(rule="dense(m)", tables={"m": zeros(6, 6, dtype=bool)}),
    ),
    "two dimensions for one": (
        ValueError,
        "rule window: 2 numbers, expected 1 as the sequence's dimensions",
        dict(rule="window([1, 1], 0)"),
    ),
    "a rule's text": (ValueError, "rule: column 11: expected a rule, found the end", dict(rule="causal() &")),
    "a rule's number": (ValueError, "rule: column 1: local: window 0, expected at least 1", dict(rule="local(0)")),
    "a table that the text does not name": (
        ValueError,
        "tables: 'idz', which the rule's text does not name, did you mean 'ids'?",
        dict(rule="documents(ids, ids)", tables={"ids": ints(*[0] * 6), "idz": ints(*[0] * 6)}),
    ),
    "a table beside a text without any": (
        ValueError,
        "tables: 'causal', which the rule's text does not name",
        dict(rule="causal()", tables={"causal": ints(0)}),
    ),
}

NUMBERS = {  # what only the arrays' numbers show
    "key_lengths too long": (
        ValueError,
        "key_lengths: 6 for batch entry 1, expected 0 to 5",
        dict(key_lengths=ints(5, 6)),
    ),
    "key_lengths negative": (
        ValueError,
        "key_lengths: -1 for batch entry 0, expected 0 to 5",
        dict(key_lengths=ints(-1, 5)),
    ),
    "documents end elsewhere": (
        ValueError,
        "cu_seqlens_k: ends at 4, expected 5 as the keys",
        dict(rule="documents_packed(a, b)", tables={"a": ints(0, 6), "b": ints(0, 4)}),
    ),
    "cumulative lengths that end elsewhere": (
        ValueError,
        "cu_seqlens_q: ends at 5, expected 6 as the queries",
        packed(ints(0, 5), ints(0, 5)),
    ),
    "cumulative lengths that fall": (
        ValueError,
        "cu_seqlens_q: falls from 3 to 2 at entry 2, expected no fall",
        packed(ints(0, 3, 2, 6), ints(0, 1, 2, 5)),
    ),
}

CALLS = ARRAYS | OPTIONS | NUMBERS


def arguments(name, make):
    """(query, key, value) and options of a call, whose arrays make(array) makes of NumPy's."""
    of = lambda value: make(value) if isinstance(value, np.ndarray) else value
    given = {key: of(value) for key, value in (RIGHT | CALLS[name][2]).items()}
    if "tables" in given:
        given["tables"] = {key: of(value) for key, value in given["tables"].items()}
    return tuple(given.pop(key) for key in RIGHT), given
