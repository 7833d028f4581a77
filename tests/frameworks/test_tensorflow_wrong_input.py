"""Wrong input: the library's one line, as TensorFlow's InvalidArgumentError or as TypeError, eagerly and in graphs."""

import re

import anyflash as af
import keras
import numpy as np
import pytest
import tensorflow as tf
import wrong_calls
from anyflash import _options, tile_machine
from anyflash.tensorflow import attention, causal_1d, full_1d, full_2d, local_2d
from cases import same_bits

X = tf.ones((2, 3, 8, 5))
ONE = dict(window_size=1, log2_stride_size=0, is_causal=False, sync_mode="none_front")
WRONG = {
    "channels": ("key: head size 4, expected 8 as in query", lambda: full_1d(X, X[..., :4, :], X)),
    "batch": ("key: batch (1, 3), expected (2, 3) as in query", lambda: full_1d(X, X[:1], X)),
    "batch of another order": (
        "value: batch (3, 2), expected (2, 3) as in query",
        lambda: full_1d(X, X, tf.reshape(X, (3, 2, 8, 5))),
    ),
    "keys and values": ("value: ", lambda: full_1d(X, X, X[..., :4])),
    "rank": ("query: rank 1, expected at least 2", lambda: full_1d(X[0, 0, 0], X, X)),
    "rank of NumPy's number": ("query: rank 0, expected 4", lambda: attention(np.float32(1), X, X)),
    "ranks differ": ("key: rank 3, expected 4 as in query", lambda: full_1d(X, X[0], X)),
    "rank in two dimensions": ("query: rank 2, expected at least 3", lambda: full_2d(X[0, 0], X, X)),
    "too many channels": ("query: head size 300, expected 1 to 256", lambda: full_1d(*[tf.ones((300, 2))] * 3)),
    "no channels": ("query: head size 0, expected 1 to 256", lambda: full_1d(*[tf.ones((0, 2))] * 3)),
    "types differ": ("key: type float64, expected float32 as in query", lambda: full_1d(X, tf.cast(X, tf.float64), X)),
    "integers": (
        "query: type int32, expected float16, bfloat16, float32 or float64",
        lambda: full_1d(*[tf.cast(X, tf.int32)] * 3),
    ),
    "a table's type": (
        "tables: ids: type int8, expected bool, uint8, int32 or int64",
        lambda: attention(X, X, X, rule="documents(ids, ids)", tables={"ids": tf.zeros(8, tf.int8)}),
    ),
    "window beyond 64 bits": (
        "window_size: expected an integer of 64 bits",
        lambda: local_2d(X, X, X, **ONE | {"window_size": 2**63}),
    ),
    "sync mode": (
        "sync_mode: 'middle', expected none_front, none_end, scale_front or scale_end",
        lambda: causal_1d(X, X, X, "middle"),
    ),
    "window": (
        "rule: column 1: local: window 0, expected at least 1",
        lambda: local_2d(X, X, X, **ONE | {"window_size": 0}),
    ),
    "stride": (
        "rule: column 1: local: log2_stride 31, expected",
        lambda: local_2d(X, X, X, **ONE | {"log2_stride_size": 31}),
    ),
    "no table": ("tables: no tensor 'ids'", lambda: attention(X, X, X, rule="documents(ids, ids)")),
    "tables": ("tables: given with a Rule", lambda: attention(X, X, X, rule=af.causal(), tables={"a": X})),
    "layout": ("layout: 'qkv', expected bhsd, bshd, thd or bhds", lambda: attention(X, X, X, layout="qkv")),
    "more in the sync mode": (
        "sync_mode: 'none_front; rule=causal()', expected none_front, none_end",
        lambda: full_1d(X, X, X, "none_front; rule=causal()"),
    ),
    "more in the alignment": ("align: ", lambda: attention(X, X, X, align="none_front; scale=3")),
    "more in a table's name": (
        "tables: name 'a; scale=3', expected a word",
        lambda: attention(X, X, X, rule="documents(ids, ids)", tables={"ids": [0] * 5, "a; scale=3": [0] * 5}),
    ),
    "more in the rule": ("rule: ", lambda: attention(X, X, X, rule="full(); scale=3")),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_line(name):
    start, call = WRONG[name]
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        call()
    line = str(raised.value)
    assert line.startswith(start) and "\n" not in line and "[Op:" not in line and len(line) > 10, line


def test_one_line_of_a_gradient():
    pages = tf.ones((3, 4, 3, 5))
    with tf.GradientTape() as tape:
        tape.watch(pages)
        out = attention(X[..., :1, :], pages, pages, page_table=[[0], [1]], key_lengths=[4, 2])
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tape.gradient(out, pages)
    assert str(raised.value) == "page_table: given to backward, expected keys and values without pages"


def is_in_a_graph(start, error):
    before = r"(\{\{function_node .*\}\} | +InvalidArgumentError: | +TypeError: )?"  # of an op; of what Python checks
    return any(re.match(before + re.escape(start), x) for x in str(error).splitlines())


@pytest.mark.parametrize(
    "name", ["channels", "batch", "rank", "rank of NumPy's number", "types differ", "sync mode", "window"]
)
def test_the_same_line_in_a_graph(name):
    start, call = WRONG[name]
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tf.function(call)()
    assert is_in_a_graph(start, raised.value)


@pytest.mark.parametrize("name", wrong_calls.CALLS)
def test_what_every_front_end_refuses(name):
    """As TensorFlow's own class of errors, but for options of another type."""
    _, line, _ = wrong_calls.CALLS[name]
    arrays, options = wrong_calls.arguments(name, tf.constant)
    kind = (
        TypeError
        if re.search("expected (a number|an integer|True or False)$", line)
        else tf.errors.InvalidArgumentError
    )
    with pytest.raises(kind) as raised:
        attention(*arrays, **options)
    assert str(raised.value) == line
    with pytest.raises(kind) as raised:
        tf.function(lambda: attention(*arrays, **options))()
    assert is_in_a_graph(line, raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": "1; scale=3"},
        {"threads": 1.5},
        {"scale": "x"},
        {"scale": "3"},
        {"softcap": None},
        {"deterministic": "no"},
        {"rule": 3},
        {"deterministic": None},
        {"allow_tf32": None},
        {"tables": [1], "rule": "full()"},
        {"align": None},
        {"layout": ["bhsd"]},
        {"tables": [("ids", [0] * 5)], "rule": "documents(ids, ids)"},
        {"tables": np.zeros(5)},
    ],
)
def test_options_of_another_type(options):
    with pytest.raises(TypeError, match=f"^{next(iter(options))}: type "):
        attention(X, X, X, **options)


@pytest.mark.parametrize("value", [None, 2, 1.0, [], "no", tf.constant(True)])
def test_what_is_neither_true_nor_false(value):
    """An is_causal that came out as None is no mask without causality."""
    for name, call in (
        ("is_causal", lambda: local_2d(X, X, X, **ONE | {"is_causal": value})),
        ("returning_l_m", lambda: full_1d(X, X, X, returning_l_m=value)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: type .*, expected True or False"):
            call()
    assert len(full_1d(X, X, X, returning_l_m=np.True_)) == 3


def test_no_derivative_forwards():
    with pytest.raises(NotImplementedError, match="or one forwards"), tf.autodiff.ForwardAccumulator(X, X):
        full_1d(X, X, X)


def test_sync_modes_and_tables_of_another_type():
    with pytest.raises(TypeError, match="^sync_mode: type int, expected a word$"):
        causal_1d(X, X, X, 1)
    with pytest.raises(TypeError, match="^tables: ids: type NoneType, expected a tensor$"):
        attention(X, X, X, rule="documents(ids, ids)", tables={"ids": None})


class Broken:
    def __array__(self, *args, **kwargs):
        raise RuntimeError("no\nnumbers")


def test_operands_of_other_types():
    """NumPy's real numbers become the query's type, as in TensorFlow's own ops."""
    ones = np.ones(X.shape)
    assert same_bits(full_1d(X, ones, X).numpy(), full_1d(X, tf.ones_like(X), X).numpy())
    refused = dict(complex128=ones * 1j, object=np.full(X.shape, None), str32=ones.astype("U1"))
    variables = ("float64", tf.Variable(ones)), ("float64", keras.Variable(ones, dtype="float64"))
    for kind, given in (*refused.items(), *variables):
        for call in (attention, full_1d):
            line = f"^key: type {kind}, expected float32 as in query$"
            with pytest.raises(tf.errors.InvalidArgumentError, match=line):
                call(X, given, X)
    for name, given in (("query", (Broken(), X, X)), ("value", (X, X, Broken()))):
        with pytest.raises(TypeError, match=f"^{name}: type Broken, expected a tensor$"):
            full_1d(*given)


NO_TENSORS = [None, tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[1.0, 2.0]]), [[1.0], [2.0, 3.0]]]
MASKED = np.ma.masked_array(np.ones(X.shape, np.float32), np.ones(X.shape))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("value", [*NO_TENSORS, MASKED], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_named(value, graph):
    def check(name, call):
        with pytest.raises(TypeError) as raised:
            (tf.function(call) if graph else call)()
        line = next(x for x in str(raised.value).splitlines() if f"{name}: type " in x)
        assert line.strip().removeprefix("TypeError: ").startswith(f"{name}: type {type(value).__name__}, expected a ")
        assert graph or line == str(raised.value)

    for place, name in enumerate(("query", "key", "value")):
        for function in (full_1d, attention):
            check(name, lambda: function(*(value if i == place else X for i in range(3))))
    for name in () if value is None else ("bias", "sink", "key_lengths"):
        check(name, lambda: attention(X, X, X, **{name: value}))
    check("tables: ids", lambda: attention(X, X, X, rule="documents(ids, ids)", tables={"ids": value}))


def test_variables_of_tensorflow_1():
    """They have a type of their own, float32_ref."""
    expected = [call(X, X, X).numpy() for call in (full_1d, attention)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        start = tf.compat.v1.constant_initializer(X.numpy())
        of_1 = tf.compat.v1.get_variable("of_1", X.shape, initializer=start, use_resource=False)
        given = tf.compat.v1.placeholder(tf.float32, X.shape)
        made = [call(*which) for call in (full_1d, attention) for which in ((of_1, given, of_1), (given, of_1, given))]
        session.run(of_1.initializer)
        for i, out in enumerate(session.run(made, {given: X.numpy()})):
            assert same_bits(out, expected[i // 2])


@pytest.mark.parametrize("name", _options.DEFAULTS)
def test_options_are_no_tensors_of_a_graph(name):
    @tf.function
    def call(option):
        return attention(X, X, X, **{name: option})

    with pytest.raises(TypeError) as raised:
        call(tf.constant(1))
    assert f"{name}: type SymbolicTensor, expected " in str(raised.value)


@pytest.mark.parametrize("call", [full_1d, attention])
def test_numpy_beside_tensors_of_another_type(call):
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        call(np.zeros(X.shape), X, X)
    assert str(raised.value) == "key: type float32, expected float64 as in query"


@pytest.mark.parametrize("change", [{"window_size": 2.5}, {"log2_stride_size": "0"}, {"window_size": None}])
def test_windows_are_whole_numbers(change):
    with pytest.raises(TypeError):
        local_2d(X, X, X, **ONE | change)


@pytest.mark.parametrize(
    "kind, given",
    [
        ("string", tf.constant(["a"])),
        ("string", tf.Variable(["a"])),
        ("resource", tf.Variable(1.0).handle),
        ("variant", tf.raw_ops.TensorListReserve(element_shape=[1], num_elements=2, element_dtype=tf.float32)),
    ],
    ids=str,
)
def test_tensors_that_hold_no_numbers(kind, given):
    """TensorFlow's own export ends the process."""
    with pytest.raises(TypeError, match=f"^query: type {kind}, expected numbers$"):
        af.attention(given, X, X)
    with pytest.raises(TypeError, match=f"^rule documents: ids_q type {kind}, expected numbers$"):
        af.documents(given)


def test_not_on_the_tile_machine():
    with tile_machine.use(tiles=4):
        with pytest.raises(ValueError, match=r"^anyflash\.tensorflow: inside tile_machine\.use, expected outside it"):
            attention(X, X, X)
        with pytest.raises(ValueError, match=r"^anyflash\.tensorflow: inside tile_machine\.use"):
            full_1d(X, X, X, "none_front")
    assert attention(X, X, X).shape == X.shape


@pytest.mark.parametrize(
    "name, more", [("softcp", ", did you mean 'softcap'?"), ("is_causal", ", use rule=anyflash.causal()")]
)
def test_a_name_that_is_none(name, more):
    with pytest.raises(TypeError) as raised:
        attention(X, X, X, **{name: 1})
    assert str(raised.value) == f"attention() got an unexpected keyword argument '{name}'{more}"
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'num_chunk_q', did you mean 'num_chunks_q'\?$"):
        full_1d(X, X, X, num_chunk_q=1)
