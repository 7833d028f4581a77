"""full_1d to local_2d against the contract's reference, over types, alignments, batch ranks and odd sizes; their
gradients, through O, l and m, by finite differences and beside TensorFlow's own."""

import anyflash as af
import cases
import numpy as np
import pytest
import tensorflow as tf
from anyflash.tensorflow import causal_1d, causal_2d, full_1d, full_2d, local_1d, local_2d
from cases import Case, Laid, same_bits
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from reference_rules import visible
from strategies import ALIGNMENTS, FLOATS, channels

FUNCTIONS = {
    (1, "full"): full_1d,
    (1, "causal"): causal_1d,
    (1, "local"): local_1d,
    (2, "full"): full_2d,
    (2, "causal"): causal_2d,
    (2, "local"): local_2d,
}


def call(rule, dimensions, q, k, v, align, returning_l_m):
    return FUNCTIONS[dimensions, rule[0]](q, k, v, *rule[1:], align, returning_l_m)


class FunctionLaid(Laid):
    """A case's tensors as these functions take them, batch and heads in 0 to 4 axes."""

    place = staticmethod(tf.constant)

    def to_layout(self, a, shape):
        a = super().to_layout(a, shape)
        b, h = a.shape[:2]
        batches = [(b, h), (b * h,), (b, 1, h), (b, h, 1, 1)] + ([()] if b * h == 1 else [])
        return a.reshape(batches[self.case.seed % len(batches)] + a.shape[2:])

    def forward(self, **changes):
        case = self.case
        tensors = [self.q, self.k, self.v]
        with tf.GradientTape() as self.tape:
            self.tape.watch(tensors)
            out, l, m = call(case.rule, len(case.q_shape), *tensors, case.align, True)
            lse = m + tf.math.log(l)
            self.results = [out] if case.dlse is False else [out, lse]
        alone = call(case.rule, len(case.q_shape), *tensors, case.align, False)
        assert same_bits(out.numpy(), alone.numpy())
        rank = len(case.q_shape)
        assert l.shape == m.shape == out.shape[: -rank - 1] + out.shape[-rank:]
        rows = [x.numpy().reshape(case.batch, case.heads_q, case.queries) for x in (lse, l, m)]
        return out.numpy().reshape(case.batch, case.heads_q, case.d_v, *case.q_shape), *rows

    def backward(self, out, lse, **changes):
        case = self.case
        tensors = [self.q, self.k, self.v]
        given = [tf.constant(self.dout)]
        if case.dlse:
            given.append(tf.reshape(self.dlse, self.results[1].shape))
        made = self.tape.gradient(self.results, tensors, given)
        shapes = [(case.d_qk, *case.q_shape), (case.d_qk, *case.k_shape), (case.d_v, *case.k_shape)]
        made = (x.numpy().reshape(case.batch, case.heads_q, *shape) for x, shape in zip(made, shapes))
        return af.Gradients(*made, None, None)


@st.composite
def function_cases(draw):
    dimensions = draw(st.sampled_from([1, 2]))
    side = st.one_of(st.integers(0, 3), st.integers(1, 150 if dimensions == 1 else 14))
    q_shape, k_shape = (tuple(draw(side) for _ in range(dimensions)) for _ in "qk")
    local = ("local", draw(st.integers(1, 20)), draw(st.sampled_from([0, 0, 1, 2, 5])), draw(st.booleans()))
    heads = draw(st.sampled_from([1, 1, 2, 3]))
    return Case(
        type=draw(st.sampled_from(FLOATS)),
        batch=draw(st.sampled_from([1, 1, 2, 0])),
        heads_q=heads,
        heads_kv=heads,
        q_shape=q_shape,
        k_shape=k_shape,
        d_qk=draw(channels(80)),
        d_v=draw(channels(80)),
        rule=draw(st.sampled_from([("full",), ("causal",), local])),
        align=draw(st.sampled_from(ALIGNMENTS)),
        layout="bhds",
        dlse=draw(st.booleans()),
        poison=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


@examples(100)
@given(function_cases())
def test_any_call(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "Laid", FunctionLaid)
        cases.check(case)


RULES = [("full",), ("causal",), ("local", 2, 0, False), ("local", 2, 1, False), ("local", 3, 1, True)]


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_every_function_alignment_and_type(dimensions, rule, align, type, monkeypatch):
    """Every batch rank in turn; keys fewer and more than queries."""
    monkeypatch.setattr(cases, "Laid", FunctionLaid)
    shapes = [((13,), (37,)), ((41,), (12,))] if dimensions == 1 else [((5, 7), (11, 3)), ((9, 8), (4, 4))]
    for seed, (q_shape, k_shape) in enumerate(shapes * 2):
        cases.check(
            Case(
                type=type,
                batch=2,
                heads_q=3,
                heads_kv=3,
                q_shape=q_shape,
                k_shape=k_shape,
                d_qk=9,
                d_v=5,
                rule=rule,
                align=align,
                layout="bhds",
                seed=seed,
            )
        )


def tensors(dimensions, batch=(2,), dtype=tf.float64, queries=(3, 4), keys=(4, 2)):
    rng = np.random.default_rng(0)
    sizes = [(3, *queries), (3, *keys), (2, *keys)] if dimensions == 2 else [(3, 5), (3, 6), (2, 6)]
    return [tf.constant(rng.standard_normal((*batch, *size)), dtype) for size in sizes]


def textbook(rule, dimensions, q, k, v, align):
    """The formula in TensorFlow's own operations."""
    shape, d = q.shape[-dimensions:], q.shape[-dimensions - 1]
    mask = visible(rule, tuple(shape), tuple(k.shape[-dimensions:]), align, 1, 1, None)[0][0, 0]
    flat = [tf.reshape(x, (*x.shape[:-dimensions], -1)) for x in (q, k, v)]
    scores = tf.where(mask, tf.matmul(flat[0], flat[1], transpose_a=True) / d**0.5, -np.inf)
    m = tf.reduce_max(scores, -1)
    seen = mask.any(-1)
    weights = tf.exp(scores - tf.where(seen, m, 0)[..., None])
    l = tf.reduce_sum(weights, -1)
    out = tf.matmul(flat[2], weights / tf.where(seen, l, 1)[..., None], transpose_b=True)
    rows = (*q.shape[: -dimensions - 1], *shape)
    return tf.reshape(out, (*q.shape[: -dimensions - 1], v.shape[-dimensions - 1], *shape)), *(
        tf.reshape(x, rows) for x in (l, m)
    )


def all_numbers(results):
    """One tensor, without the infinities of queries that see nothing."""
    out, l, m = results
    return tf.concat([tf.reshape(x, [-1]) for x in (out, l, tf.where(tf.math.is_inf(m), tf.zeros_like(m), m))], 0)


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_gradients_by_finite_differences(dimensions, rule, align):
    """Of O, l and m, each number of them."""
    given = tensors(dimensions)
    ours, numeric = tf.test.compute_gradient(
        lambda *x: all_numbers(call(rule, dimensions, *x, align, True)), given, delta=1e-6
    )
    for one, other in zip(ours, numeric):
        np.testing.assert_allclose(one, other, atol=1e-7)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_gradients_beside_tensorflow_s(dimensions, rule, graph):
    given = tensors(dimensions)
    weights = np.random.default_rng(1).standard_normal(1000)

    def gradients(attend):
        with tf.GradientTape() as tape:
            tape.watch(given)
            numbers = all_numbers(attend())
            loss = tf.reduce_sum(tf.sin(numbers) * weights[: len(numbers)])
        return tape.gradient(loss, given)

    ours = (tf.function(gradients) if graph else gradients)(lambda: call(rule, dimensions, *given, "none_end", True))
    for one, other in zip(ours, gradients(lambda: textbook(rule, dimensions, *given, "none_end"))):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_function_s_gradients_under_a_tape_that_lasts():
    """TensorFlow differentiates what stands in the function twice then, as it traces it, where variables are in it."""
    given = [tf.Variable(one) for one in tensors(1)]
    made = []
    for attend in (tf.function(call), lambda rule, *others: textbook(rule, *others[:-1])):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(tf.sin(all_numbers(attend(("causal",), 1, *given, "none_front", True))))
        made.append([tape.gradient(loss, one) for one in given])
    for one, other in zip(*made):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("key", (1.0, 0.0))
def test_equal_scores_share_the_gradient_of_their_maximum(key):
    """As in tf.reduce_max."""
    q, _, v = tensors(1)
    k = tf.zeros_like(v[:, :1]) + tf.fill((3, 1), tf.constant(key, tf.float64))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(k)
        ours, theirs = full_1d(q, k, v, "none_front", True)[2], textbook(("full",), 1, q, k, v, "none_front")[2]
    np.testing.assert_allclose(tape.gradient(ours, k), tape.gradient(theirs, k), atol=1e-14)


SIZES = [(tf.float32, x) for x in (1e-30, 1e-12, 1e-6, 1e-3, 1, 1e4, 1e24)]
SIZES += [(tf.float64, x) for x in (1e-200, 1e-16, 1e-3, 1, 1e4, 1e200)]
SIZES += [(tf.float16, x) for x in (1e-6, 1e-3, 1, 1e4)] + [(tf.bfloat16, x) for x in (1e-30, 1e-6, 1, 1e4)]


@pytest.mark.parametrize("share", [0.5, 0.1, 0.9])
@pytest.mark.parametrize("type, size", SIZES)
def test_gradients_of_the_maximum_of_scores_of_any_size(type, size, share):
    """Some scores twice, some queries with 0 alone; a hidden key that is huge or none."""
    rng = np.random.default_rng(3)
    # Of few bits, so that scores are exact in every type and those that look equal are.
    q, k = (rng.integers(-4, 5, shape) / 4 for shape in ((2, 4, 9), (2, 4, 8)))
    k[..., 5], q[0, :, 3], k[1, :, 0] = k[..., 1], 0, 0
    powers = [2.0 ** np.round(np.log2(size) * part) for part in (share, 1 - share)]
    q, k = q * powers[0], k * powers[1]
    scores = np.einsum("bcq,bck->bqk", q, k)
    weights = rng.integers(1, 4, (2, 9)) * np.where(np.arange(9) % 4 == 1, 0, 1)
    top = scores == scores.max(-1, keepdims=True)
    share_of = top / top.sum(-1, keepdims=True) * weights[..., None] / 2  # 2: the root of the channels
    expected = np.einsum("bqk,bck->bcq", share_of, k), np.einsum("bqk,bcq->bck", share_of, q)
    hidden = np.full((2, 4, 2), [np.nan, float(type.max)])
    for tail in (hidden[..., :0], hidden):
        given = [tf.constant(x, type) for x in (q, np.concatenate([k, tail], -1))]
        with tf.GradientTape() as tape:
            tape.watch(given)
            q_all, k_all = given
            first = local_1d(q_all[..., :1], k_all, k_all, 8, 0, False, "none_front", True)[2]  # it sees 8 keys
            rest = full_1d(q_all[..., 1:], k_all[..., :8], k_all[..., :8], returning_l_m=True)[2]
            m = tf.concat([first, rest], -1)
            loss = tf.reduce_sum(tf.cast(weights, m.dtype) * m)
        for one, other in zip(tape.gradient(loss, given), expected):
            one = one.numpy().astype(np.float64)[..., : other.shape[-1]]
            bar = {tf.float64: 1e-14, tf.float32: 1e-6, tf.float16: 4e-3, tf.bfloat16: 3e-2}[type]
            np.testing.assert_allclose(one, other, atol=bar * np.abs(other).max(), rtol=0)


@pytest.mark.parametrize(
    "type, size", [(tf.float32, -100), (tf.float32, -113), (tf.float64, -997), (tf.bfloat16, -100)], ids=str
)
def test_the_gradient_of_the_maximum_where_all_keys_are_small(type, size):
    """Each query's own key has the greatest score, though hardly greater than any other."""
    k = np.eye(6) * 2.0**size
    q = np.eye(6)[::-1] + 0.5
    with tf.GradientTape() as tape:
        given = tf.constant(q, type), tf.constant(k, type)
        tape.watch(given)
        loss = tf.reduce_sum(full_1d(*given, tf.ones((2, 6), type), returning_l_m=True)[2])
    expected = np.eye(6)[::-1] * 2.0**size, q[:, ::-1]
    for one, other in zip(tape.gradient(loss, given), expected):
        np.testing.assert_allclose(tf.cast(one, tf.float64), other / 6**0.5, rtol=4e-3, atol=0)


def test_two_halves_of_the_keys_merge():
    """l and m are what it takes to join parts, gradients included."""
    q, k, v = tensors(1)

    def merged(attend):
        (o1, l1, m1), (o2, l2, m2) = attend(k[..., :2], v[..., :2]), attend(k[..., 2:], v[..., 2:])
        m = tf.maximum(m1, m2)
        a, b = (tf.expand_dims(l * tf.exp(x - m), -2) for l, x in ((l1, m1), (l2, m2)))
        return (o1 * a + o2 * b) / (a + b)

    def gradients(attend):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out = attend()
        return out, *tape.gradient(out, [q, k, v])

    joined = gradients(lambda: merged(lambda k, v: full_1d(q, k, v, returning_l_m=True)))
    for one, other in zip(joined, gradients(lambda: full_1d(q, k, v))):
        np.testing.assert_allclose(one, other, atol=1e-13)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("function, sequence", [(causal_1d, (5,)), (causal_2d, (2, 3))])
@pytest.mark.parametrize("batch", [(1, 2, 1, 3, 1, 1, 2), (2, 1, 1, 1, 3, 1, 1, 1, 1, 2)])
def test_many_batch_axes(batch, function, sequence, graph):
    """As one that is as long; their number unknown in a graph."""
    rng = np.random.default_rng(0)
    given = [tf.constant(rng.standard_normal((*batch, d, *sequence))) for d in (3, 3, 4)]

    def run(q, k, v):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out, l, m = function(q, k, v, "none_end", True)
            loss = tf.reduce_sum(out**2) + tf.reduce_sum(l**3) + tf.reduce_sum(tf.sin(m))
        return out, l, m, *tape.gradient(loss, [q, k, v])

    expected = run(*(tf.reshape(x, (-1, *x.shape[len(batch) :])) for x in given))
    many = tf.function(run, input_signature=[tf.TensorSpec(None, tf.float64)] * 3) if graph else run
    for one, other in zip(many(*given), expected):
        assert one.shape == (*batch, *other.shape[1:])
        np.testing.assert_allclose(tf.reshape(one, other.shape), other, atol=1e-14)
    with pytest.raises(tf.errors.InvalidArgumentError, match="key: batch .*as in query"):
        many(given[0], tf.transpose(given[1], (1, 0, *range(2, len(given[1].shape)))), given[2])


BLIND = ("causal",), "none_end", 2  # the keys stand at 3 and 4 beside five queries
HIDDEN = ("local", 1, 0, False), "none_front", 8  # three keys behind the last query


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rule, align, keys", [BLIND, HIDDEN])
def test_queries_that_see_nothing_and_hidden_keys(rule, align, keys, graph):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, d, n)) for d, n in ((3, 5), (3, keys), (2, keys)))
    k[..., 5:], v[..., 5:] = np.nan, np.inf

    def run(q, k, v):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out, l, m = call(rule, 1, q, k, v, align, True)
            loss = tf.reduce_sum(out**2) + tf.reduce_sum(l**2) + tf.reduce_sum(m + tf.math.log(l))
        return out, l, m, *tape.gradient(loss, [q, k, v])

    out, l, m, *grads = (tf.function(run) if graph else run)(*map(tf.constant, (q, k, v)))
    blind = l.numpy() == 0
    assert blind.any() == (keys == 2) and not blind.all()
    assert (m.numpy()[blind] == -np.inf).all() and (np.moveaxis(out.numpy(), 1, -1)[blind] == 0).all()
    assert np.isfinite(out).all() and all(np.isfinite(x).all() for x in grads)
    assert not np.moveaxis(grads[0].numpy(), 1, -1)[blind].any()
    assert not grads[1].numpy()[..., 5:].any() and not grads[2].numpy()[..., 5:].any()


@pytest.mark.parametrize("function", [full_1d, causal_1d])
@pytest.mark.parametrize(
    "batch, queries, keys", [((0,), 5, 6), ((2, 0, 3), 5, 6), ((2,), 0, 6), ((), 5, 0), ((2,), 0, 0)]
)
def test_empty(function, batch, queries, keys):
    q, k, v = tf.ones((*batch, 3, queries)), tf.ones((*batch, 3, keys)), tf.ones((*batch, 4, keys))
    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        out, l, m = function(q, k, v, "none_front", True)
    assert out.shape == (*batch, 4, queries) and l.shape == m.shape == (*batch, queries)
    assert not out.numpy().any() and (keys > 0 or (not l.numpy().any() and np.isneginf(m).all()))
    for x, dx in zip((q, k, v), tape.gradient([out, l], [q, k, v])):
        assert dx.shape == x.shape and not dx.numpy()[..., :0].any()
