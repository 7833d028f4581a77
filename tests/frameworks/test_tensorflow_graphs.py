"""The ops in what TensorFlow makes of them: functions with unknown dimensions, saved models, Keras, loops, threads; and
what they refuse."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anyflash as af
import keras
import numpy as np
import pytest
import tensorflow as tf
from anyflash import _options
from anyflash.tensorflow import attention, causal_1d, full_1d, full_2d, local_2d
from cases import same_bits
from snippets import snippets

rng = np.random.default_rng(0)


def normal(*shape, dtype=tf.float32):
    return tf.constant(rng.standard_normal(shape), dtype)


IMAGES = [normal(2, 3, 8, 6, 7), normal(2, 3, 8, 5, 9), normal(2, 3, 4, 5, 9)]


def near(q, k, v):
    return local_2d(q, k, v, 2, 0, False, "scale_front", True)


def gradients(q, k, v):
    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        out, l, m = near(q, k, v)
        loss = sum(tf.reduce_sum(tf.sin(tf.cast(x, tf.float64))) for x in (out, l, m))
    return out, l, m, *tape.gradient(loss, [q, k, v])


def assert_same(ours, theirs):
    """The same results to the bit; gradients pass through operations that TensorFlow changes in graphs."""
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if i < 3:
            assert same_bits(one.numpy(), other.numpy())
        epsilon = {2: 1e-2, 4: 1e-5, 8: 1e-12}[one.dtype.size]
        np.testing.assert_allclose(*(x.numpy().astype(float) for x in (one, other)), rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("known", ["all", "channels", "rank", "nothing"])
def test_unknown_dimensions(known, dtype):
    given = [tf.cast(x, dtype) for x in IMAGES]
    shape_of = {
        "all": lambda x: x.shape,
        "channels": lambda x: [None, 3, x.shape[2], None, None],
        "rank": lambda x: [None] * 5,
        "nothing": lambda x: None,
    }[known]
    function = tf.function(gradients, input_signature=[tf.TensorSpec(shape_of(x), dtype) for x in given])
    assert_same(function(*given), gradients(*given))
    if known in ("rank", "nothing"):
        smaller = [x[:1, :, :, :3, :2] for x in given]
        assert_same(function(*smaller), gradients(*smaller))


SHAPES = [
    ([2, 3, 8, 6, 7], [2, 3, 4, 5, 9], [2, 3, 4, 6, 7], [2, 3, 6, 7]),
    ([None, 3, 8, 6, None], [None, None, 4, None, 9], [None, 3, 4, 6, None], [None, 3, 6, None]),
    ([None, None, None], [None, None, None], [None] * 3, [None] * 2),
    ([None, None, 8, 6, 7], None, None, [None, None, 6, 7]),
    (None, [2, 4, 5, 9], None, None),
]


@pytest.mark.parametrize("q, v, out, rows", SHAPES)
def test_shapes_are_inferred(q, v, out, rows):
    specs = [tf.TensorSpec(q), tf.TensorSpec(None), tf.TensorSpec(v)]
    made = tf.function(lambda *x: full_2d(*x, returning_l_m=True)).get_concrete_function(*specs).structured_outputs
    for one, shape in zip(made, (out, rows, rows)):
        assert str(one.shape) == str(tf.TensorShape(shape))


@pytest.mark.parametrize(
    "layout, q, v, out, lse",
    [
        ("bhsd", [None, 4, 9, 8], [None, 2, 7, 5], [None, 4, 9, 5], [None, 4, 9]),
        ("bshd", [2, 6, 7, 4, 8], [2, 7, 7, 2, 5], [2, 6, 7, 4, 5], [2, 4, 42]),
        ("bhds", [2, 4, 8, 6, None], [2, 2, 5, 7, 7], [2, 4, 5, 6, None], [2, 4, None]),
        ("thd", [None, 4, 8], [None, 2, 5], [None, 4, 5], [4, None]),
        ("bhsd", None, [2, 2, 7, 5], None, None),
    ],
)
def test_shapes_of_attention_are_inferred(layout, q, v, out, lse):
    lengths = dict(cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 3]) if layout == "thd" else {}
    function = tf.function(lambda q, k, v: attention(q, k, v, layout=layout, return_lse=True, **lengths))
    made = function.get_concrete_function(tf.TensorSpec(q), tf.TensorSpec(v), tf.TensorSpec(v)).structured_outputs
    assert [str(x.shape) for x in made] == [str(tf.TensorShape(shape)) for shape in (out, lse)]


def test_saved_model(tmp_path):
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 3, None, None, None])] * 3)
        def forward(self, q, k, v):
            return near(q, k, v)

        @tf.function(input_signature=[tf.TensorSpec(None)] * 3)
        def gradients(self, q, k, v):
            return gradients(q, k, v)

        @tf.function(input_signature=[tf.TensorSpec([None, 2, None, 8]), tf.TensorSpec([None], tf.int32)])
        def documents(self, q, ids):
            return attention(q, q, q, rule="documents(ids, ids) & causal()", tables={"ids": ids}, scale=0.3)

    model = Model()
    text, ids = normal(1, 2, 9, 8), tf.constant([0, 0, 0, 1, 1, 1, 1, 2, 2])
    expected = [*model.forward(*IMAGES), *model.gradients(*IMAGES), model.documents(text, ids)]
    tf.saved_model.save(model, str(tmp_path / "model"))
    np.savez(tmp_path / "data.npz", *IMAGES, text, ids)
    program = """
import sys
from pathlib import Path
import numpy as np, tensorflow as tf
import anyflash.tensorflow
folder = Path(sys.argv[1])
*images, text, ids = map(tf.constant, np.load(folder / "data.npz").values())
model = tf.saved_model.load(str(folder / "model"))
made = [*model.forward(*images), *model.gradients(*images), model.documents(text, ids)]
np.savez(folder / "made.npz", *made)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = [tf.constant(x) for x in np.load(tmp_path / "made.npz").values()]
    assert_same(made[:3], expected[:3])
    assert_same(made[3:9], expected[3:9])
    assert_same(made[9:], expected[9:])


def test_generated_functions_take_defaults():
    """What a graph holds where a text is short: full attention."""
    library = sys.modules["anyflash.tensorflow._ops"]._library
    q, k, v = normal(3, 5), normal(3, 6), normal(2, 6)
    out, (lse,) = library.anyflash_attention1d(query=q, key=k, value=v, call="dimensions=1", rows=1)
    assert same_bits(out.numpy(), full_1d(q, k, v).numpy()) and lse.shape == (5,)
    out, rows = library.anyflash_attention1d(query=q, key=k, value=v, call="dimensions=1", rows=0)
    assert same_bits(out.numpy(), full_1d(q, k, v).numpy()) and rows == []


def test_keras_trains_and_is_saved(tmp_path):
    import keras

    @keras.saving.register_keras_serializable("tests")
    class Neighbours(keras.layers.Layer):
        supports_jit = False  # XLA has no such ops

        def build(self, shape):
            self.project = self.add_weight(shape=(3, shape[1], 8), name="project")

        def call(self, x):
            q, k, v = tf.unstack(tf.einsum("pcd,bcyx->pbdyx", tf.cast(self.project, x.dtype), x))
            return local_2d(q, k, v, 2, 0, False, "none_front")

    keras.utils.set_random_seed(0)
    x = rng.standard_normal((64, 2, 6, 6)).astype("float32")
    y = (x[:, 0, 2:4, 2:4].mean((1, 2)) > 0).astype("int32")
    for policy in ("float32", "mixed_bfloat16"):
        keras.config.set_dtype_policy(policy)
        model = keras.Sequential([keras.Input((2, 6, 6)), Neighbours(), keras.layers.Flatten(), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses = model.fit(x, y, epochs=12, batch_size=16, verbose=0).history["loss"]
        assert losses[-1] < 0.5 * losses[0], (policy, losses)
        model.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
        assert same_bits(again.predict(x, verbose=0), model.predict(x, verbose=0))
    keras.config.set_dtype_policy("float32")


def test_loops_and_maps():
    q, k, v = normal(4, 3, 5), normal(4, 3, 6), normal(4, 2, 6)
    expected = full_1d(q, k, v).numpy()
    each = tf.function(lambda *x: tf.map_fn(lambda one: full_1d(*one), x, fn_output_signature=tf.float32))
    np.testing.assert_allclose(each(q, k, v), expected, atol=1e-6)
    np.testing.assert_allclose(tf.vectorized_map(lambda one: full_1d(*one), (q, k, v)), expected, atol=1e-6)

    @tf.function
    def repeated(q):
        with tf.GradientTape() as tape:
            tape.watch(q)
            x = q
            for _ in tf.range(3):
                x = full_1d(x, x, x)
            loss = tf.reduce_sum(x**2)
        return tape.gradient(loss, q)

    with tf.GradientTape() as tape:
        tape.watch(q)
        x = full_1d(full_1d(q, q, q), *[full_1d(q, q, q)] * 2)
        loss = tf.reduce_sum(full_1d(x, x, x) ** 2)
    np.testing.assert_allclose(repeated(q), tape.gradient(loss, q), rtol=1e-4, atol=1e-4)


def test_other_kinds_of_input():
    q, k, v = normal(3, 5), normal(3, 6), normal(2, 6)
    expected = full_1d(q, k, v).numpy()
    for kind in (np.asarray, tf.Variable, lambda x: x.numpy().tolist()):
        assert same_bits(full_1d(kind(q), kind(k), kind(v)).numpy(), expected)
    with tf.GradientTape() as tape:  # a gradient in slices
        tape.watch(v)
        row = tf.gather(full_1d(q, k, v), [0])
    assert tape.gradient(row, v).numpy()[1].tolist() == [0] * 6
    numbers = [tf.Variable(x) for x in (q, k, v)]
    with tf.GradientTape() as tape:
        out = full_1d(*numbers)
    assert all(x is not None for x in tape.gradient(out, numbers))


def test_eager_tensors_through_anyflash_itself():
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        q, k, v = (tf.cast(normal(1, 2, n, 8), dtype) for n in (5, 6, 6))
        out, lse = af.attention(q, k, v, rule=af.causal(), return_lse=True)
        assert isinstance(out, tf.Tensor) and out.dtype == dtype
        assert same_bits(out.numpy(), attention(q, k, v, rule=af.causal()).numpy())
        made = af.attention_backward(out, q, k, v, out, lse, rule=af.causal())
        assert isinstance(made.dq, tf.Tensor) and made.dq.dtype == dtype
    for variable in (tf.Variable(X), keras.Variable(X)):
        assert same_bits(af.attention(variable, variable, X).numpy(), attention(X, X, X).numpy())
    with pytest.raises(TypeError, match="query: traced by TensorFlow, expected an array; use anyflash.tensorflow"):
        tf.function(lambda x: af.attention(x, x, x))(X)
    variable = tf.Variable(X)
    with pytest.raises(TypeError, match="query: traced by TensorFlow, expected an array; use anyflash.tensorflow"):
        tf.function(lambda: af.attention(variable, X, X))()
    with pytest.raises(TypeError, match="^key: type SparseTensor, expected an array$"):
        af.attention(X, tf.sparse.from_dense(X), X)


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


@pytest.mark.parametrize("graph", [False, True])
def test_threads(graph):
    call = tf.function(gradients) if graph else gradients
    expected = [x.numpy() for x in call(*IMAGES)]
    with ThreadPoolExecutor(6) as pool:
        for made in pool.map(lambda _: call(*IMAGES), range(60)):
            assert all(same_bits(one.numpy(), other) for one, other in zip(made, expected, strict=True))


def test_the_same_bits_in_every_thread_count():
    q = normal(2, 3, 100, 16)
    made = [attention(q, q, q, rule="causal()", threads=n).numpy() for n in (1, 2, 5)]
    assert same_bits(made[0], made[1]) and same_bits(made[0], made[2])


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_no_second_derivative(graph, statistics):
    q, k, v = (tf.cast(x, tf.float64) for x in IMAGES)
    attend = tf.function(full_2d) if graph else full_2d
    with pytest.raises(NotImplementedError, match="^anyflash.tensorflow: a second derivative, or one forwards, "):
        with tf.GradientTape() as outer:
            outer.watch(q)
            with tf.GradientTape() as tape:
                tape.watch(q)
                made = attend(q, k, v, returning_l_m=statistics)
                loss = tf.add_n([tf.reduce_sum(tf.sin(one)) for one in tf.nest.flatten(made)])
            dq = tape.gradient(loss, q)
        outer.gradient(dq, q)


def test_xla_refuses_by_name():
    function = tf.function(full_2d, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="AnyflashAttention2D"):
        function(*IMAGES)


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
    "rank of a number": ("query: rank 0, expected 4", lambda: attention(tf.constant(1.0), X, X)),
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
    "integers in a bias": (
        "bias: type int32, expected float16, bfloat16, float32 or float64",
        lambda: attention(X, X, X, bias=tf.zeros((1, 1, 1, 8), tf.int32)),
    ),
    "slopes' type": (
        "alibi_slopes: type int32, expected float32 or float64",
        lambda: attention(X, X, X, alibi_slopes=tf.zeros(3, tf.int32)),
    ),
    "lengths' type": (
        "key_lengths: type float32, expected int32 or int64",
        lambda: attention(X, X, X, key_lengths=[3.0, 2.0]),
    ),
    "a table's type": (
        "tables: ids: type int8, expected bool, uint8, int32 or int64",
        lambda: attention(X, X, X, rule="documents(ids, ids)", tables={"ids": tf.zeros(8, tf.int8)}),
    ),
    "window beyond 64 bits": (
        "window_size: expected an integer of 64 bits",
        lambda: local_2d(X, X, X, **ONE | {"window_size": 2**63}),
    ),
    "scale too large": ("scale: expected a number that float64 holds", lambda: attention(X, X, X, scale=10**400)),
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
    "rule's text": ("rule: ", lambda: attention(X, X, X, rule="casual()")),
    "a table that the text does not name": (
        "tables: 'idz', which the rule's text does not name, did you mean 'ids'?",
        lambda: attention(X, X, X, rule="dense(ids)", tables={"ids": tf.ones((8, 8), tf.bool), "idz": [0] * 8}),
    ),
    "a table beside a text without any": (
        "tables: 'a', which the rule's text does not name",
        lambda: attention(X, X, X, rule="causal()", tables={"a": [0] * 8}),
    ),
    "no table": ("tables: no tensor 'ids'", lambda: attention(X, X, X, rule="documents(ids, ids)")),
    "tables": ("tables: given with a Rule", lambda: attention(X, X, X, rule=af.causal(), tables={"a": X})),
    "layout": ("layout: 'qkv', expected bhsd, bshd, thd or bhds", lambda: attention(X, X, X, layout="qkv")),
    "return_lse": ("return_lse: 'l', expected True, False or 'lm'", lambda: attention(X, X, X, return_lse="l")),
    "bias": ("bias: ", lambda: attention(X, X, X, bias=tf.ones((5, 5)))),
    "sink": ("sink: ", lambda: attention(X, X, X, sink=tf.ones(7))),
    "softcap": ("softcap: nan, expected", lambda: attention(X, X, X, softcap=float("nan"))),
    "lengths": ("key_lengths: ", lambda: attention(X, X, X, key_lengths=[9, 9])),
    "threads": ("threads: -1, expected", lambda: attention(X, X, X, threads=-1)),
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


@pytest.mark.parametrize(
    "name",
    [
        "channels",
        "batch",
        "rank",
        "rank of a number",
        "rank of NumPy's number",
        "types differ",
        "integers in a bias",
        "sync mode",
        "window",
        "bias",
        "softcap",
    ],
)
def test_the_same_line_in_a_graph(name):
    start, call = WRONG[name]
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tf.function(call)()
    before = r"(\{\{function_node .*\}\} | +InvalidArgumentError: )?"  # of an op; of what is checked as Python runs
    assert any(re.match(before + re.escape(start), x) for x in str(raised.value).splitlines())


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


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("change", [lambda call: call, tf.function])
def test_tf32_changes_nothing_on_the_cpu(change):
    def call(q, k, v, **switch):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out, lse = attention(q, k, v, return_lse=True, **switch)
        return out, lse, *tape.gradient([out, lse], [q, k, v])

    given = [normal(2, 4, 9, 8) for _ in range(3)]
    for got, expected in zip(change(call)(*given, allow_tf32=True), change(call)(*given), strict=True):
        assert same_bits(got.numpy(), expected.numpy())


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


@pytest.mark.parametrize("block", snippets("python tensorflow"))
def test_the_documents_example_runs(block, tmp_path):
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_everything_public_is_documented():
    import inspect

    module = sys.modules["anyflash.tensorflow"]
    assert len(inspect.getdoc(module)) > 100
    for name in module.__all__:
        assert len(inspect.getdoc(getattr(module, name))) > 60, name


def test_no_copies():
    """Peak memory of a call, forward and backward: its results, and far less than a copy of its inputs."""
    program = """
import re
from pathlib import Path
import tensorflow as tf
from anyflash.tensorflow import local_1d

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def peak(call):
    Path("/proc/self/clear_refs").write_text("5")
    before = megabytes("VmRSS")
    result = call()
    return megabytes("VmHWM") - before, result

def attend(q, k, v):
    return local_1d(q, k, v, 16, 0, False, "none_front")

def gradient(q, k, v, dout):
    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        out = attend(q, k, v)
    return tape.gradient(out, [q, k, v], dout)

small = [tf.ones((2, 8, 64, 64))] * 3
gradient(*small, small[0])
shape = (2, 8, 64, 8192)
q, k, v, dout = [tf.random.normal(shape) for _ in range(4)]
mebibytes = 4 * 2 * 8 * 64 * 8192 / 2**20
forward, out = peak(lambda: attend(q, k, v))
del out
both, made = peak(lambda: gradient(q, k, v, dout))
print(forward / mebibytes, both / mebibytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward, both = map(float, done.stdout.split())
    assert forward < 1.5 and both < 4.7, done.stdout  # out; out and three gradients
