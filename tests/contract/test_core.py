"""A fixed selection of calls that reaches every kernel: all types, the edges of vectors and blocks, every option. It is
small enough to be run again under each instruction set (test_instruction_sets.py)."""

import os

import anyflash as af
import numpy as np
import pytest
from cases import Case, check, same_bits
from reference import TYPES
from strategies import FLOATS

ALL = (True, True, True, True)
CALLS = {
    "one pair": dict(q_shape=(1,), k_shape=(1,), d_qk=1, d_v=1),
    "decoding": dict(
        q_shape=(1,), k_shape=(333,), heads_q=8, heads_kv=2, d_qk=128, d_v=128, rule=("causal",), align="none_end"
    ),
    "decoding in parts": dict(
        batch=2,
        heads_q=6,
        heads_kv=2,
        q_shape=(2,),
        k_shape=(2500,),
        key_lengths=(1200, 2500),
        d_qk=40,
        d_v=72,
        rule=("or", ("sink", 4), ("local", 2100, 0, True)),
        align="none_end",
        poison=True,
        softcap=10.0,
        bias=("float32", (True, True, False, True)),
        alibi=("float32", False),
        sink="float32",
    ),
    "decoding from pages": dict(
        batch=2,
        heads_q=8,
        heads_kv=2,
        q_shape=(1,),
        k_shape=(1600,),
        page_size=16,
        key_lengths=(70, 1600),
        d_qk=64,
        d_v=64,
    ),
    "d64 causal": dict(q_shape=(300,), k_shape=(300,), d_qk=64, d_v=64, rule=("causal",)),
    "d128 full": dict(q_shape=(200,), k_shape=(260,), d_qk=128, d_v=128),
    "d256, d_v 512": dict(q_shape=(65,), k_shape=(129,), d_qk=256, d_v=512),
    "odd": dict(batch=2, heads_q=3, q_shape=(67,), k_shape=(131,), d_qk=37, d_v=19, wild=True),
    "narrow": dict(q_shape=(140,), k_shape=(75,), d_qk=3, d_v=5, wild=True, layout="bhds"),
    "grouped": dict(batch=2, heads_q=6, heads_kv=2, q_shape=(80,), k_shape=(90,), d_qk=33, d_v=65, layout="bshd"),
    "local with stride": dict(q_shape=(400,), k_shape=(400,), d_qk=32, d_v=32, rule=("local", 20, 2, True)),
    "pixels": dict(
        q_shape=(21, 19), k_shape=(21, 19), d_qk=16, d_v=24, rule=("neighbourhood", 5, 2, False), layout="bhds"
    ),
    "voxels": dict(q_shape=(5, 6, 7), k_shape=(4, 9, 3), d_qk=16, d_v=8, rule=("local", 3, 0, True), align="scale_end"),
    "documents": dict(
        q_shape=(150,),
        k_shape=(150,),
        d_qk=48,
        d_v=48,
        rule=("and", ("causal",), ("documents_packed", [0, 40, 40, 150], [0, 30, 60, 150])),
    ),
    "ragged": dict(
        q_shape=(120,),
        k_shape=(140,),
        layout="thd",
        cu_q=(0, 50, 50, 120),
        cu_k=(0, 60, 70, 140),
        d_qk=40,
        d_v=40,
        rule=("causal",),
    ),
    "packed": dict(
        heads_q=3, heads_kv=3, q_shape=(97,), k_shape=(97,), d_qk=32, d_v=32, layout="qkv", rule=("causal",)
    ),
    "paged": dict(
        batch=2,
        heads_q=4,
        heads_kv=2,
        q_shape=(5,),
        k_shape=(160,),
        page_size=16,
        key_lengths=(33, 160),
        d_qk=64,
        d_v=64,
    ),
    "tree": dict(
        q_shape=(200,),
        k_shape=(180,),
        d_qk=24,
        d_v=24,
        poison=True,
        rule=("or", ("sink", 3), ("and", ("local", 30), ("not", ("prefix", 9)))),
    ),
    "everything": dict(
        batch=2,
        heads_q=4,
        heads_kv=2,
        q_shape=(100,),
        k_shape=(110,),
        d_qk=20,
        d_v=36,
        softcap=3.0,
        scale=0.3,
        bias=("float32", ALL),
        alibi=("float32", False),
        sink="float32",
        rule=("causal",),
        align="none_end",
    ),
    "bias of keys": dict(
        batch=2,
        heads_q=2,
        q_shape=(150,),
        k_shape=(150,),
        d_qk=32,
        d_v=32,
        bias=("float32", (False, False, False, True)),
    ),
    "bias of queries": dict(
        batch=2,
        heads_q=2,
        q_shape=(150,),
        k_shape=(150,),
        d_qk=32,
        d_v=32,
        bias=("float32", (True, False, True, False)),
    ),
    "bias of heads": dict(
        heads_q=6,
        heads_kv=6,
        q_shape=(200,),
        k_shape=(300,),
        d_qk=59,
        d_v=47,
        dlse=True,
        bias=("float64", (False, True, False, False)),
    ),  # a sum of 60,000 numbers
    "sharp": dict(q_shape=(129,), k_shape=(129,), d_qk=64, d_v=16, magnitude=3.0, rule=("causal",)),
    "one key each": dict(q_shape=(200,), k_shape=(200,), d_qk=128, d_v=16, rule=("local", 1), magnitude=3.0),
    "large scores": dict(q_shape=(40,), k_shape=(1,), d_qk=80, d_v=16, scale=0.3, magnitude=1e4),
    "large scores, few queries": dict(
        q_shape=(8,),
        k_shape=(1,),
        d_qk=80,
        d_v=16,
        scale=0.3,
        magnitude=1e4,
        bias=("float32", (True, True, True, True)),
    ),
    "key lengths": dict(batch=3, q_shape=(70,), k_shape=(200,), key_lengths=(0, 65, 200), d_qk=64, d_v=64, poison=True),
}


def test_the_instruction_set_is_the_one_asked_for():
    asked = os.environ.get("ANYFLASH_ISA")
    assert af._core.instruction_set() in af._core.instruction_sets()
    assert asked is None or af._core.instruction_set() == asked


def core_case(name, type):
    """Of these draws, no textbook in float64 is so lucky that many more must decide, in longdouble."""
    return Case(type=type, seed=2 + sum(map(ord, name)), **CALLS[name])


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("name", CALLS)
def test_call(name, type):
    check(core_case(name, type))


@pytest.mark.parametrize("type", FLOATS)
def test_every_head_size(type):
    """d_qk 1 to 256 and d_v 1 to 512, each at least once over the four types."""
    start = FLOATS.index(type)
    for d_qk in range(1 + start, 257, 4):
        d_v = 2 * d_qk - (d_qk + start) % 2
        queries = 9 if d_qk % 3 else 18  # few queries go a way of their own
        check(
            Case(
                type=type,
                q_shape=(queries,),
                k_shape=(17,),
                d_qk=d_qk,
                d_v=d_v,
                rule=("causal",),
                align="none_end",
                seed=d_qk,
            )
        )


def test_numbers_of_any_float_type_as_bias():
    for type in FLOATS:
        for bias in FLOATS:
            check(Case(type=type, q_shape=(40,), k_shape=(70,), bias=(bias, ALL), d_qk=16, d_v=16))


@pytest.mark.parametrize("type", FLOATS)
def test_decoding_where_key_heads_begin_at_odd_places(type):
    """Keys and values of decoding are used where they lie: bshd with a channel of padding, forwards and backwards."""
    rng = np.random.default_rng(0)
    numbers = lambda *shape: rng.standard_normal(shape).astype(TYPES[type])
    q, memory = numbers(1, 4, 1, 64), numbers(2, 1, 200, 2, 65)
    for pairs in (memory[..., :64], memory[..., 1:], memory[:, :, ::-1, :, :64]):
        k, v = (array.swapaxes(1, 2) for array in pairs)
        packed = af.attention(q, np.ascontiguousarray(k), np.ascontiguousarray(v))
        assert same_bits(af.attention(q, k, v), packed)
