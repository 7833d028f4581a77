"""What the tests of equal bits share: a call of many blocks, its biases, and the comparison of two calls' results."""

import numpy as np
from cases import Case, same_bits

SIZED = Case(
    batch=2,
    heads_q=4,
    heads_kv=2,
    q_shape=(600,),
    k_shape=(720,),
    d_qk=40,
    d_v=72,
    rule=("causal",),
    align="none_end",
    bias=("float32", (False, True, False, True)),
    sink="float32",
    softcap=20.0,
    seed=5,
)
BIASES = [None, (True, True, True, True), (False, False, False, True), (False, True, True, False)]


def assert_same_bits(a, b, where=""):
    for (name, x), (_, y) in zip(a.items(), b.items(), strict=True):
        differ = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        assert same_bits(x, y), f"{name}{where}: {np.count_nonzero(differ)} of {x.size} differ"
