"""attention's gradients by finite differences in float64, for every option."""

import anyflash as af
import numpy as np
import pytest
import tensorflow as tf
from anyflash.tensorflow import attention
from small_rules import small_rules

RULES = small_rules(np.array)
ALIGNMENTS = ["none_front", "none_end", "scale_front", "scale_end"]
ENDS = dict(layout="thd", cu_seqlens_q=[0, 4, 10], cu_seqlens_k=[0, 6, 12])
# Of five queries of four heads, six keys of two, in two batch entries.
CALLS = {f"rule {name}": dict(rule=rule) for name, rule in RULES.items()}
CALLS |= {f"align {align}": dict(rule=af.causal() | af.sink(1), align=align, return_lse=True) for align in ALIGNMENTS}
CALLS |= {
    f"bias {shape}": dict(bias=shape, return_lse=True)
    for shape in [(2, 4, 5, 6), (1, 4, 5, 6), (2, 1, 1, 6), (1, 1, 5, 1), (1, 4, 1, 1)]
}
CALLS |= {
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=0.7),
    "alibi_slopes": dict(alibi_slopes=[0.1, 0.2, 0.3, 0.4]),
    "key_lengths": dict(key_lengths=[4, 6]),
    "switches": dict(deterministic=True, allow_tf32=True),
    "threads": dict(threads=1),
    "text": dict(rule="documents(a, b) & causal()", tables={"a": tf.range(5) // 3, "b": tf.range(6) // 3}),
    "everything": dict(
        rule=af.causal(),
        align="none_end",
        bias=(1, 4, 5, 6),
        sink=(4,),
        softcap=2.0,
        scale=0.4,
        alibi_slopes=np.full((2, 4), 0.1),
        return_lse=True,
    ),
    "layout bshd": dict(layout="bshd"),
    "layout bhds": dict(layout="bhds"),
    "layout thd": dict(**ENDS, sink=(4,), return_lse=True),
}
PLACES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "bhds": (0, 1, 3, 2), "thd": (0, 2, 1, 3)}


@pytest.mark.parametrize("name", CALLS)
def test_by_finite_differences(name):
    rng = np.random.default_rng(0)
    options = dict(CALLS[name])
    layout = options.get("layout", "bhsd")
    shapes = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)
    given = [rng.standard_normal(shape).transpose(PLACES[layout]) for shape in shapes]
    if layout == "thd":
        given = [one.reshape(-1, *one.shape[2:]) for one in given]
    terms = [term for term in ("bias", "sink") if term in options]
    given += [rng.standard_normal(options.pop(term)) for term in terms]

    def call(q, k, v, *others):
        made = tf.nest.flatten(attention(q, k, v, **dict(zip(terms, others)), **options))
        # tanh, since the lse of a query that sees nothing is minus infinity
        return tf.concat([tf.reshape(tf.tanh(one), [-1]) for one in made], 0)

    ours, numeric = tf.test.compute_gradient(tf.function(call), [tf.constant(one) for one in given], delta=1e-6)
    for one, other in zip(ours, numeric, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7)
