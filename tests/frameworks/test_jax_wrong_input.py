"""Wrong input: the library's one line, as ValueError or TypeError where JAX traces the call; what only numbers show, as
JAX's own error with that line."""

from functools import partial

import anyflash as af
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_calls
from anyflash import _options, tile_machine
from anyflash.jax import attention

X = jnp.zeros((1, 2, 5, 8), jnp.float32)
traced = lambda call, *arguments: jax.jit(call)(*arguments)
WRONG = {
    "8 bits": (TypeError, "query: type float8_e5m2", lambda: attention(X.astype(jnp.float8_e5m2), X, X)),
    "keys of random numbers": (TypeError, "query: type key", lambda: attention(jax.random.key(0), X, X)),
    "no array": (TypeError, "query: type list, expected an array of JAX or NumPy", lambda: attention([1.0], X, X)),
    "words": (TypeError, "value: type <U1", lambda: attention(X, X, np.array(["a"]))),
    "bytes swapped": (TypeError, "key: type >f4", lambda: attention(X, np.ones((1, 2, 5, 8), ">f4"), X)),
    "long double": (
        TypeError,
        "bias: type float128",
        lambda: attention(X, X, X, bias=np.ones((1, 1, 1, 1), np.longdouble)),
    ),
    "records": (TypeError, "sink: type [('a', '<i8')]", lambda: attention(X, X, X, sink=np.zeros(2, [("a", "<i8")]))),
    "a masked array": (
        TypeError,
        "key: type MaskedArray, expected a plain array (a mask goes into the rule)",
        lambda: attention(X, np.ma.masked_array(np.ones(X.shape, np.float32)), X),
    ),
    "masked lengths, after plain ones": (
        TypeError,
        "key_lengths: type MaskedArray, expected a plain array",
        lambda: [attention(X, X, X, key_lengths=kind([3])) for kind in (np.array, np.ma.array)],
    ),
    "tables in an array": (TypeError, "tables: type ArrayImpl, expected", lambda: attention(X, X, X, tables=X)),
    "no query": (TypeError, "query: type NoneType", lambda: attention(None, X, X)),
    "no key": (ValueError, "key: ", lambda: attention(X)),
    "rule": (TypeError, "rule: type int", lambda: attention(X, X, X, rule=3)),
    "tables of no names": (
        TypeError,
        "tables: type list, expected arrays by name",
        lambda: attention(X, X, X, rule="documents(a, a)", tables=[X]),
    ),
    "tables": (ValueError, "tables: given with a Rule", lambda: attention(X, X, X, rule=af.causal(), tables={"a": X})),
    "no table": (ValueError, "tables: no array 'a'", lambda: attention(X, X, X, rule="documents(a, a)")),
    "table of words": (
        TypeError,
        "tables: a: type ",
        lambda: attention(X, X, X, rule="dense(a)", tables={"a": np.array(["a"])}),
    ),
    "table of floats": (
        TypeError,
        "rule: column 1: dense: mask type float32, expected boolean or uint8",
        lambda: attention(X, X, X, rule="dense(a)", tables={"a": X}),
    ),
    "documents under vmap": (
        ValueError,
        "rule documents: ids_q has 3 entries, expected 5 as the queries",
        lambda: jax.vmap(lambda a: attention(X, X, X, rule="documents(a, a)", tables={"a": a}))(jnp.zeros((2, 3), int)),
    ),
    "a traced table": (
        TypeError,
        "rule documents: ids_q traced by JAX",
        lambda: traced(lambda ids: attention(X, X, X, rule=af.documents(ids)), jnp.zeros(5, int)),
    ),
    "a traced array elsewhere": (
        TypeError,
        "query: traced by JAX, expected an array; use anyflash.jax.attention",
        lambda: traced(lambda x: af.attention(x, x, x), X),
    ),
    "large ids": (
        ValueError,
        "tables: t0: numbers beyond int32, expected jax_enable_x64",
        lambda: attention(X, X, X, rule=af.documents(np.arange(5) + 2**33)),
    ),
    "align's type": (TypeError, "align: type int, expected str", lambda: attention(X, X, X, align=3)),
    "layout": (ValueError, "layout: 'sbhd', expected", lambda: attention(X, X, X, layout="sbhd")),
    "return_lse's type": (ValueError, "return_lse: Array", lambda: attention(X, X, X, return_lse=jnp.ones(3))),
    "a traced softcap": (
        TypeError,
        "softcap: type DynamicJaxprTracer, expected a number, known when",
        lambda: traced(lambda cap: attention(X, X, X, softcap=cap), 1.0),
    ),
    "a traced switch": (
        TypeError,
        "deterministic: type DynamicJaxprTracer, expected True or False",
        lambda: traced(lambda switch: attention(X, X, X, deterministic=switch), True),
    ),
    "ids of few bits": (
        TypeError,
        "tables: a type int8, expected",
        lambda: attention(
            *[jnp.zeros((1, 1, 200, 8))] * 3, rule="documents(a, a)", tables={"a": np.zeros(200, np.int8)}
        ),
    ),
    "cumulative lengths of few bits": (
        TypeError,
        "cu_seqlens_q: type int8, expected int32 or int64",
        lambda: attention(
            *[jnp.zeros((200, 1, 8))] * 3,
            layout="thd",
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.zeros(2, np.int8)),
        ),
    ),
    "one cumulative length": (
        ValueError,
        "cu_seqlens_q: ends at 0, expected 5",
        lambda: attention(
            *[jnp.zeros((5, 1, 8))] * 3,
            layout="thd",
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.zeros(1, np.int32)),
        ),
    ),
}


@pytest.fixture(autouse=True)
def without_x64():
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("name", WRONG)
def test_one_line(name):
    kind, start, call = WRONG[name]
    with pytest.raises(kind) as raised:
        call()
    line = str(raised.value)
    assert line.startswith(start) and "\n" not in line and len(line) > 10, line
    assert type(raised.value) is kind


@pytest.mark.parametrize("name", [*wrong_calls.ARRAYS, *wrong_calls.OPTIONS])
def test_what_every_front_end_refuses(name):
    kind, line, _ = wrong_calls.CALLS[name]
    arrays, options = wrong_calls.arguments(name, jnp.asarray)
    for call in (attention, jax.jit(partial(attention, **options))):
        with pytest.raises(kind) as raised:
            call(*arrays, **options if call is attention else {})
        assert str(raised.value).removesuffix(", known when the call is traced") == line and type(raised.value) is kind


def pages():
    return attention(X, *[jnp.zeros((3, 4, 2, 8))] * 2, page_table=jnp.array([[1, 5]]), key_lengths=jnp.array([8]))


@pytest.mark.of_the_cpu  # on a GPU nobody looks
@pytest.mark.parametrize("name", [*wrong_calls.NUMBERS, "pages"])
def test_numbers_that_are_wrong(name):
    line, call = "page_table: ", pages
    if name != "pages":
        line = wrong_calls.NUMBERS[name][1]
        arrays, options = wrong_calls.arguments(name, jnp.asarray)
        call = lambda: attention(*arrays, **options)
    for attempt in (call, jax.jit(call)):
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            jax.block_until_ready(attempt())
        assert line in str(raised.value)
    assert attention(X, X, X).shape == X.shape  # and nothing is amiss afterwards


def test_lengths_of_other_sizes_than_the_queries():
    """Cumulative lengths are checked against their own side where JAX traces the call."""
    q, k = jnp.zeros((1, 1, 4, 8)), jnp.zeros((1, 1, 7, 8))
    tables = {"a": jnp.array([0, 1, 4]), "b": jnp.array([0, 7, 7])}
    for text in ("documents_packed(a, b)", "causal() & documents_packed( cu_seqlens_k = b, cu_seqlens_q=a )"):
        assert attention(q, k, k, rule=text, tables=tables).shape == q.shape
    q, k = jnp.zeros((4, 1, 8)), jnp.zeros((7, 1, 8))
    ends = dict(cu_seqlens_q=tables["a"], cu_seqlens_k=tables["b"])
    assert attention(q, k, k, layout="thd", **ends).shape == q.shape


def test_hidden_keys_may_hold_anything():
    x = np.random.default_rng(0).standard_normal((1, 2, 6, 8)).astype(np.float32)
    poisoned = x.copy()
    poisoned[:, :, 4:] = np.nan
    gradients = lambda k: jax.vjp(lambda q, k: attention(q, k, k, rule=af.prefix(4)), x, k)
    for k in (x, poisoned):
        out, vjp = gradients(jnp.asarray(k))
        dq, dk = vjp(jnp.ones_like(out))
        assert np.isfinite(out).all() and np.isfinite(dq).all() and not dk[:, :, 4:].any()


@pytest.mark.parametrize("shape, keys", [((0, 2, 5, 8), 5), ((1, 0, 5, 8), 5), ((1, 2, 0, 8), 5), ((1, 2, 5, 8), 0)])
def test_empty(shape, keys):
    q, k = jnp.ones(shape), jnp.ones((*shape[:2], keys, 8))
    ids = jnp.zeros(keys, int), jnp.zeros(shape[2], int)
    call = lambda q, k: attention(q, k, k, rule="documents(b, a)", tables={"a": ids[0], "b": ids[1]}, return_lse=True)
    out, lse = call(q, k)
    assert out.shape == shape and lse.shape == shape[:3] and not (keys == 0 and out.any())
    assert keys or (lse == -jnp.inf).all()
    dq, dk = jax.jit(jax.grad(lambda q, k: call(q, k)[0].sum(), (0, 1)))(q, k)
    assert dq.shape == shape and dk.shape == k.shape and not dq.any()


def test_an_array_that_has_been_deleted():
    deleted = X + 1
    deleted.delete()
    with pytest.raises(ValueError, match="^value: deleted or donated, expected an array with data$"):
        af.attention(X, X, deleted)


@pytest.mark.parametrize("name", _options.DEFAULTS)
def test_options_are_known_when_the_call_is_traced(name):
    with pytest.raises(
        TypeError, match=f"^{name}: type DynamicJaxprTracer, expected .*, known when the call is traced"
    ):
        traced(lambda option: attention(X, X, X, **{name: option}), 1)


def test_not_on_the_tile_machine():
    with tile_machine.use(tiles=4):
        with pytest.raises(ValueError, match=r"^anyflash\.jax: inside tile_machine\.use, expected outside it"):
            attention(X, X, X)
    assert attention(X, X, X).shape == X.shape


@pytest.mark.parametrize(
    "name, more", [("softcp", ", did you mean 'softcap'?"), ("is_causal", ", use rule=anyflash.causal()")]
)
def test_a_name_that_is_none(name, more):
    with pytest.raises(TypeError) as raised:
        attention(X, X, X, **{name: 1})
    assert str(raised.value) == f"attention() got an unexpected keyword argument '{name}'{more}"
