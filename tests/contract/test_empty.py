"""No batch, no heads, no queries, no keys, empty documents: every call is valid."""

import numpy as np
import pytest
from cases import Case, check
from strategies import FLOATS

EMPTY = {
    "batch": dict(batch=0),
    "heads": dict(heads_q=0, heads_kv=0),
    "queries": dict(q_shape=(0,)),
    "keys": dict(k_shape=(0,)),
    "both": dict(q_shape=(0,), k_shape=(0,)),
    "rows": dict(q_shape=(0, 4), k_shape=(3, 4)),
    "columns": dict(q_shape=(3, 0), k_shape=(3, 0)),
    "planes of keys": dict(q_shape=(2, 3, 4), k_shape=(2, 0, 4)),
    "all": dict(batch=0, heads_q=0, heads_kv=0, q_shape=(0,), k_shape=(0,)),
}
LAYOUTS = ("bhsd", "bshd", "bhds")
RULES = [
    ("full",),
    ("causal",),
    ("local", 2),
    ("window", 1, 1),
    ("prefix", 2),
    ("prefix_queries", 2),
    ("sink", 1),
    ("tiles", 2, 3),
    ("neighbourhood", 3, 2),
    ("not", ("causal",)),
]


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", EMPTY)
def test_nothing_there(axis, layout, type):
    case = Case(
        **dict(type=type, batch=2, heads_q=4, heads_kv=2, q_shape=(3,), k_shape=(6,), layout=layout) | EMPTY[axis]
    )
    for align in ("none_front", "none_end", "scale_front", "scale_end"):
        check(case.but(align=align))
    for rule in RULES:
        check(case.but(rule=rule))
    bias = ("float32", (True, True, True, True))
    check(case.but(bias=bias, sink="float32", alibi=("float32", True), softcap=2.0))
    check(case.but(bias=("float32", (False, False, False, False)), sink=type))


@pytest.mark.parametrize("axis", ["queries", "keys", "both"])
def test_tables_over_nothing(axis):
    case = Case(**dict(batch=2, heads_q=2, q_shape=(3,), k_shape=(6,)) | EMPTY[axis])
    n, m = case.queries, case.keys
    for rule in (
        ("documents", np.zeros(n, int), np.zeros(m, int)),
        ("documents", np.zeros((2, n), int), np.zeros((2, m), int)),
        ("documents_packed", [0, 0, n], [0, m, m]),
        ("blocks", np.ones((-(-n // 2), -(-m // 4)), bool), 2, 4),
        ("dense", np.ones((n, m), bool)),
    ):
        check(case.but(rule=rule))


@pytest.mark.parametrize(
    "cu_q, cu_k",
    [((0,), (0,)), ((0, 0), (0, 0)), ((0, 0, 0), (0, 4, 9)), ((0, 4, 9), (0, 0, 0)), ((0, 0, 5, 5), (0, 3, 3, 7))],
)
def test_empty_documents(cu_q, cu_k):
    check(
        Case(heads_q=2, q_shape=(cu_q[-1],), k_shape=(cu_k[-1],), layout="thd", cu_q=cu_q, cu_k=cu_k, rule=("causal",))
    )


@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_documents_come_back_for_more(axis):
    """What a plan says of documents when there is no head, or no batch entry, must not serve the calls that have some."""
    ids = np.arange(97) // 10
    case = Case(batch=2, heads_q=4, heads_kv=2, q_shape=(97,), k_shape=(97,), rule=("documents", ids, ids))
    for one in [EMPTY[axis]] * 3 + [{}] * 3 + [EMPTY[axis]]:
        check(case.but(**one))


def test_packed_nothing():
    for heads, length in ((0, 5), (3, 0), (0, 0)):
        check(Case(heads_q=heads, heads_kv=heads, q_shape=(length,), k_shape=(length,), layout="qkv"))
