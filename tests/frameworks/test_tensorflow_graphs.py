"""The ops in what TensorFlow makes of them: functions with unknown dimensions, saved models, Keras, loops, threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anyflash as af
import keras
import numpy as np
import pytest
import tensorflow as tf
from anyflash.tensorflow import attention, full_1d, full_2d, local_2d
from cases import same_bits
from snippets import snippets

rng = np.random.default_rng(0)


def normal(*shape, dtype=tf.float32):
    return tf.constant(rng.standard_normal(shape), dtype)


X = tf.ones((2, 3, 8, 5))
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
