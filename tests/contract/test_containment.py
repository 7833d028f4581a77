"""NaN and infinity: a hidden one changes nothing, a visible one shows in exactly what depends on it; queries without
keys."""

import anyflash as af
import numpy as np
import pytest
from bits import assert_same_bits
from cases import Case, Laid, check, rounds_otherwise, same_bits
from cases import run_for_bits as run
from hypothesis import given
from hypothesis import strategies as st
from memory import restride
from profiles import examples
from reference import Exact, attention
from strategies import ATOMS, FLOATS, calls

WIDE = [type for type in ("float32", "float64") if type in FLOATS]
BAD = {"NaN": np.nan, "inf": np.inf, "-inf": -np.inf}


def unseen_keys(case):
    """(b, heads_kv, m): keys that no query of any head of the group sees."""
    group = case.heads_q // case.heads_kv if case.heads_kv else 1
    return ~case.pattern[0].any(2).reshape(case.batch, case.heads_kv, group, case.keys).any(2)


def assert_nothing_shows(case, got):
    """Of hidden numbers."""
    clean = run(case)
    if not rounds_otherwise(case):
        return assert_same_bits(got, clean)
    for (name, x), (_, y) in zip(got.items(), clean.items(), strict=True):
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), err_msg=name)
    check(case.but(poison=True))


@pytest.mark.parametrize("atom", ATOMS)
@pytest.mark.parametrize("bad", BAD)
def test_hidden_keys_may_hold_anything(atom, bad):
    @examples(8)
    @given(calls(atom=atom))
    def property(case):
        case = case.but(poison=False)
        unseen = unseen_keys(case)
        tensors = {name: value.copy() for name, value in case.tensors.items()}
        tensors["k"][unseen] = tensors["v"][unseen] = BAD[bad]
        got = run(case, tensors)
        assert_nothing_shows(case, got)
        assert not got.dk[unseen].any() and not got.dv[unseen].any()

    property()


@examples(30)
@given(calls(), st.sampled_from(list(BAD)))
def test_hidden_keys_in_any_tree(case, bad):
    case = case.but(poison=False)
    unseen = unseen_keys(case)
    tensors = {name: value.copy() for name, value in case.tensors.items()}
    tensors["k"][unseen] = tensors["v"][unseen] = BAD[bad]
    assert_nothing_shows(case, run(case, tensors))


def small(case):
    """A case that the reference's pair by pair sums can follow."""
    return case.batch * case.heads_q * case.queries * case.keys * max(case.d_qk, case.d_v) <= 3_000_000


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse", "bias", "sink", "alibi_slopes"])
@pytest.mark.parametrize("bad", BAD)
def test_it_shows_where_it_should(name, bad):
    """The places that must be non-finite come from the reference's own arithmetic, in which hidden pairs have no terms.
    For NaN also: a row (of a query or a key) in no result of which it shows keeps its bits, and what is left of the
    others its value."""
    extra = {
        "bias": dict(bias=("float32", (True, True, True, True))),
        "sink": dict(sink="float32"),
        "alibi_slopes": dict(alibi=("float32", True)),
        "dlse": dict(dlse=True),
    }.get(name, {})

    @examples(25)
    @given(calls(types=WIDE).filter(small), st.integers(0, 2**30))
    def property(case, place):
        case = case.but(poison=False, magnitude=1.0, **extra)
        tensors = {key: value.copy() for key, value in case.tensors.items()}
        if tensors[name].size == 0:
            return
        tensors[name].flat[place % tensors[name].size] = BAD[bad]
        got, clean = run(case, tensors), run(case)
        truth = attention(case.call(tensors), Exact(np.float64))
        for key, value in got.items():
            broken = np.isnan if bad == "NaN" else lambda a: ~np.isfinite(a)
            assert_same_places(key, broken(value), broken(getattr(truth, key)))
        if bad == "NaN":
            assert_rest_is_the_same(got, clean)

    property()


def assert_rest_is_the_same(got, clean):
    nan = {key: np.isnan(value) for key, value in got.items()}
    queries = ~(nan["out"].any(-1) | nan["lse"] | nan["dq"].any(-1))
    keys = ~(nan["dk"].any(-1) | nan["dv"].any(-1))
    for key, value in got.items():
        before, rest = getattr(clean, key), ~nan[key]
        tolerance = 1e3 * np.finfo(value.dtype).eps * np.abs(np.where(np.isfinite(before), before, 0)).max(initial=1)
        np.testing.assert_allclose(value[rest], before[rest], rtol=0, atol=tolerance, err_msg=key)
        untouched = {"dk": keys, "dv": keys, "dbias": None, "dsink": None}.get(key, queries)
        if untouched is not None:
            assert same_bits(value[untouched], before[untouched]), f"{key}: a row that does not depend on it changed"


def assert_same_places(name, got, expected):
    wrong = np.argwhere(got != expected)
    assert not len(wrong), f"{name}: {len(wrong)} places, first {wrong[0]}, expected {expected[tuple(wrong[0])]}"


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize(
    "kind, sink",
    [
        (kind, sink)
        for kind in ("rule", "key length", "bias", "no key")
        for sink in (None, "float32")
        if (kind, sink) != ("bias", "float32")
    ],
)
def test_queries_without_keys(type, sink, kind):
    """out 0, lse -inf, m -inf, l 0, and nothing of them in any gradient, even if they themselves hold NaN."""
    case = Case(
        type=type, batch=2, heads_q=2, heads_kv=1, q_shape=(150,), k_shape=(90,), d_qk=24, d_v=40, sink=sink, seed=4
    )
    dead = np.zeros((2, 2, 150), bool)
    if kind == "rule":
        case = case.but(rule=("causal",), align="none_end")
        dead[:, :, :60] = True
    elif kind == "key length":
        case = case.but(key_lengths=(0, 90))
        dead[0] = True
    elif kind == "bias":
        case = case.but(bias=("float32", (True, True, True, True)))
        dead[1, 0, 7:80] = True
        case.tensors["bias"][dead] = -np.inf
    else:
        case = case.but(k_shape=(0,))
        dead[...] = True
    clean = run(case)
    for name, expected in (("out", 0), ("lse", -np.inf), ("m", -np.inf), ("l", 0), ("dq", 0)):
        assert (getattr(clean, name)[dead] == expected).all(), name
        assert (getattr(clean, name)[~dead] != expected).any() or dead.all(), name
    for _, value in clean.items():
        assert not np.isnan(value).any()
    if clean.dbias is not None:
        assert not clean.dbias[dead].any()

    tensors = {name: value.copy() for name, value in case.tensors.items()}
    if kind != "bias":  # there a score of NaN would not be -inf any more
        tensors["q"][dead] = np.nan
    tensors["dout"][dead] = tensors["dlse"][dead] = np.nan
    assert_same_bits(run(case, tensors), clean)


@pytest.mark.parametrize("type", FLOATS)
def test_out_is_written_whole_and_nothing_else(type):
    """A given out with gaps: every element of it is written, and no byte between them."""
    case = Case(
        type=type, batch=2, heads_q=3, q_shape=(70,), k_shape=(50,), d_qk=19, d_v=33, rule=("causal",), align="none_end"
    )
    laid = Laid(case)
    expected = af.attention(laid.q, laid.k, laid.v, **laid.options)
    rng = np.random.default_rng(0)
    for _ in range(20):
        out, flat = restride(np.full(expected.shape, np.nan, expected.dtype), rng, writable_base=True)
        before = flat.copy()
        returned = af.attention(laid.q, laid.k, laid.v, out=out, **laid.options)
        assert returned is out and same_bits(out, expected)
        out[...] = np.nan
        assert flat.tobytes() == before.tobytes()
