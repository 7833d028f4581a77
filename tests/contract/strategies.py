"""Hypothesis strategies for cases: shapes of every sort, rules as trees, options in all combinations, kept to a size
that a textbook can follow."""

from __future__ import annotations

import numpy as np
from cases import Case
from devices import DEVICE
from hypothesis import strategies as st

ALIGNMENTS = ("none_front", "none_end", "scale_front", "scale_end")
FLOATS = ("float16", "float32") if DEVICE == "tiles" else ("float16", "bfloat16", "float32", "float64")
ATOMS = (
    "full",
    "causal",
    "local",
    "window",
    "prefix",
    "prefix_queries",
    "sink",
    "documents",
    "documents_packed",
    "tiles",
    "neighbourhood",
    "blocks",
    "dense",
)

# Around the edges of vectors, cells of 64 and blocks of 128 and 256, and anything else.
lengths = st.one_of(
    st.integers(0, 3),
    st.integers(1, 40),
    st.sampled_from([15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257]),
    st.integers(1, 300),
)
long_lengths = st.integers(900, 1400)


def channels(most):
    edges = (1, 2, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256, 257, 511, 512)
    return st.one_of(st.sampled_from([c for c in edges if c <= most]), st.integers(1, 64), st.integers(1, most))


def fit(shape, most):
    """Shrinks a shape until it has at most `most` entries."""
    shape = list(shape)
    while np.prod(shape) > most:
        i = int(np.argmax(shape))
        shape[i] = max(1, shape[i] * 2 // 3)
    return tuple(shape)


def per_dimension(draw, values, dims):
    """One number for all dimensions or one for each."""
    return draw(values) if draw(st.booleans()) else tuple(draw(values) for _ in range(dims))


class Shapes:
    """What a rule may need to know about the call it is drawn for."""

    def __init__(self, batch, heads, q_shape, k_shape, documents=True):
        self.batch, self.heads, self.q_shape, self.k_shape = batch, heads, q_shape, k_shape
        self.n, self.m, self.dims = int(np.prod(q_shape)), int(np.prod(k_shape)), len(q_shape)
        self.documents = documents  # may a documents atom still appear?


def _cumulative(draw, length, count):
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1)))
    return np.array([0, *cuts, length], np.int64)


def _documents(draw, shapes):
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    count = draw(st.integers(1, 6))
    by_batch = draw(st.booleans())
    ids = []
    for length in (shapes.n, shapes.m):
        table = rng.integers(-2, count - 2, (shapes.batch, length) if by_batch else (length,))
        ids.append(np.sort(table, -1) if draw(st.booleans()) else table)
    return ("documents", *ids)


def _table(draw, shapes, rows, columns):
    """A table (rows, columns) of booleans or of bytes, with leading axes of size 1 or full; some share of it is set."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    lead = draw(st.sampled_from([(), (1, 1), (shapes.batch, 1), (1, shapes.heads), (shapes.batch, shapes.heads)]))
    table = rng.random((*lead, rows, columns)) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return table * rng.integers(1, 256, table.shape, np.uint8) if draw(st.booleans()) else table


def draw_atom(draw, name, shapes):
    small, dims = st.integers(1, 9), shapes.dims
    if name == "local":
        window = draw(st.one_of(small, st.integers(1, 200)))
        return ("local", window, draw(st.sampled_from([0, 0, 0, 1, 2, 3, 7])), draw(st.booleans()))
    if name == "window":
        bound = st.one_of(st.integers(-1, 9), st.integers(0, 150))
        return ("window", per_dimension(draw, bound, dims), per_dimension(draw, bound, dims))
    if name in ("prefix", "prefix_queries", "sink"):
        return (name, draw(st.one_of(st.integers(0, 8), st.integers(0, max(shapes.n, shapes.m) + 3))))
    if name == "documents":
        return _documents(draw, shapes)
    if name == "documents_packed":
        count = draw(st.integers(1, 6))
        return ("documents_packed", _cumulative(draw, shapes.n, count), _cumulative(draw, shapes.m, count))
    if name == "tiles":
        return ("tiles", per_dimension(draw, small, dims), per_dimension(draw, st.sampled_from([1, 3, 5, 11]), dims))
    if name == "neighbourhood":
        kernel = per_dimension(draw, st.one_of(small, st.integers(1, 80)), dims)
        dilation = per_dimension(draw, st.integers(1, 4), dims)
        return ("neighbourhood", kernel, dilation, per_dimension(draw, st.booleans(), dims))
    if name == "blocks":
        size = st.sampled_from([1, 3, 16, 64, 100, 128])
        block_q, block_k = draw(size), draw(size)
        return ("blocks", _table(draw, shapes, -(-shapes.n // block_q), -(-shapes.m // block_k)), block_q, block_k)
    if name == "dense":
        return ("dense", _table(draw, shapes, shapes.n, shapes.m))
    return (name,)


def draw_rule(draw, shapes, depth):
    if depth > 0 and draw(st.integers(0, 2)):
        operation = draw(st.sampled_from(["and", "or", "not"]))
        parts = 1 if operation == "not" else 2
        return (operation, *(draw_rule(draw, shapes, depth - 1) for _ in range(parts)))
    name = draw(st.sampled_from([a for a in ATOMS if shapes.documents or not a.startswith("documents")]))
    if name.startswith("documents"):
        shapes.documents = False
    return draw_atom(draw, name, shapes)


def _options(draw, type):
    bias_types = st.sampled_from([type, type, "float32"] if type != "float64" else ["float64", "float32"])
    statistic = "float64" if type == "float64" else "float32"
    chosen = {}
    if draw(st.booleans()):
        chosen["bias"] = (draw(bias_types), tuple(draw(st.booleans()) for _ in range(4)))
    if draw(st.integers(0, 3)) == 0:
        chosen["alibi"] = (draw(st.sampled_from([statistic, "float32"])), draw(st.booleans()))
    if draw(st.integers(0, 3)) == 0:
        chosen["sink"] = draw(st.sampled_from([type, statistic]))
    if draw(st.integers(0, 3)) == 0:
        chosen["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.integers(0, 3)) == 0:
        chosen["scale"] = draw(st.sampled_from([1.0, 0.37, -0.2, 0.0, 0.01]))
    return chosen


def _common(draw):
    return dict(
        magnitude=draw(st.sampled_from([1.0, 1.0, 0.1, 3.0])),
        dlse=draw(st.booleans()),
        wild=draw(st.booleans()),
        poison=draw(st.booleans()),
        threads=draw(st.sampled_from([0, 1, 2, 3])),
        index_type=draw(st.sampled_from(["int32", "int64"])),
        seed=draw(st.integers(0, 2**32)),
    )


def _sequences(draw, dims, rows, long):
    """Query and key shapes. `rows`: batch * heads * channels; the textbook has at most about 40 million products to
    sum."""
    most = 40_000_000 // max(1, rows)
    if long:
        return (draw(long_lengths),), (draw(st.one_of(long_lengths, lengths)),)
    if dims == 1:
        q_shape, k_shape = (draw(lengths),), (draw(lengths),)
    else:
        side = st.one_of(st.integers(1, 24 if dims == 2 else 9), st.sampled_from([0, 1, 8, 16]))
        q_shape = tuple(draw(side) for _ in range(dims))
        k_shape = q_shape if draw(st.booleans()) else tuple(draw(side) for _ in range(dims))
    if draw(st.integers(0, 2)) == 0:
        k_shape = q_shape
    side = int(most**0.5)
    return fit(q_shape, side), fit(k_shape, side)


@st.composite
def calls(draw, types=FLOATS, atom=None, long=False):
    """A case in one of the layouts with free batch: bhsd, bshd, bhds. `atom`: the rule is this atom alone."""
    type = draw(st.sampled_from(types))
    dims = 1 if long else draw(st.sampled_from([1, 1, 2, 3]))
    batch = 1 if long else draw(st.sampled_from([1, 1, 2, 3, 0]))
    heads_kv = draw(st.sampled_from([1, 1, 2, 3, 0] if not long else [1]))
    heads_q = heads_kv * draw(st.sampled_from([1, 1, 2, 4] if not long else [1, 2]))
    d_qk, d_v = draw(channels(32 if long else 256)), draw(channels(32 if long else 512))
    q_shape, k_shape = _sequences(draw, dims, batch * heads_q * (d_qk + d_v), long)
    key_lengths = None
    if dims == 1 and draw(st.integers(0, 3)) == 0:
        key_lengths = tuple(draw(st.integers(0, k_shape[0])) for _ in range(batch))
    shapes = Shapes(batch, heads_q, q_shape, k_shape)
    rule = draw_atom(draw, atom, shapes) if atom else draw_rule(draw, shapes, draw(st.integers(0, 3)))
    return Case(
        type=type,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        q_shape=q_shape,
        k_shape=k_shape,
        d_qk=d_qk,
        d_v=d_v,
        rule=rule,
        align=draw(st.sampled_from(ALIGNMENTS)),
        layout=draw(st.sampled_from(["bhsd", "bshd", "bhds"])),
        key_lengths=key_lengths,
        **_options(draw, type),
        **_common(draw),
    )


@st.composite
def packed_cases(draw, types=FLOATS):
    """Layout qkv: (3, heads, length, channels)."""
    type, heads = draw(st.sampled_from(types)), draw(st.sampled_from([1, 2, 5, 0]))
    length, d = draw(lengths), draw(channels(256))
    shapes = Shapes(1, heads, (length,), (length,))
    return Case(
        type=type,
        heads_q=heads,
        heads_kv=heads,
        q_shape=(length,),
        k_shape=(length,),
        d_qk=d,
        d_v=d,
        layout="qkv",
        rule=draw_rule(draw, shapes, 2),
        align=draw(st.sampled_from(ALIGNMENTS)),
        **_options(draw, type),
        **(_common(draw) | {"poison": False}),
    )


@st.composite
def ragged_cases(draw, types=FLOATS):
    """Layout thd: documents end to end."""
    type = draw(st.sampled_from(types))
    heads_kv = draw(st.sampled_from([1, 2]))
    heads_q = heads_kv * draw(st.sampled_from([1, 3]))
    count = draw(st.integers(1, 7))
    sizes = st.one_of(st.integers(0, 5), st.integers(0, 150))
    cu_q, cu_k = (tuple(np.cumsum([0, *(draw(sizes) for _ in range(count))]).tolist()) for _ in "qk")
    if draw(st.booleans()):
        cu_k = cu_q
    shapes = Shapes(1, heads_q, (cu_q[-1],), (cu_k[-1],), documents=False)
    return Case(
        type=type,
        heads_q=heads_q,
        heads_kv=heads_kv,
        q_shape=(cu_q[-1],),
        k_shape=(cu_k[-1],),
        d_qk=draw(channels(256)),
        d_v=draw(channels(512)),
        layout="thd",
        cu_q=cu_q,
        cu_k=cu_k,
        rule=draw_rule(draw, shapes, 2),
        align=draw(st.sampled_from(ALIGNMENTS)),
        **_options(draw, type),
        **_common(draw),
    )


@st.composite
def paged_cases(draw, types=FLOATS):
    """Key and value caches in pages, forward only."""
    type, batch = draw(st.sampled_from(types)), draw(st.sampled_from([1, 2, 3]))
    heads_kv = draw(st.sampled_from([1, 2]))
    heads_q = heads_kv * draw(st.sampled_from([1, 3]))
    page_size = draw(st.sampled_from([1, 3, 16, 64, 100]))
    keys = page_size * draw(st.integers(1, max(1, min(9, 400 // page_size))))
    queries = draw(st.one_of(st.integers(1, 4), lengths))
    key_lengths = tuple(draw(st.one_of(st.integers(0, keys), st.just(keys))) for _ in range(batch))
    shapes = Shapes(batch, heads_q, (queries,), (keys,))
    return Case(
        type=type,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        q_shape=(queries,),
        k_shape=(keys,),
        d_qk=draw(channels(256)),
        d_v=draw(channels(512)),
        layout=draw(st.sampled_from(["bhsd", "bshd", "bhds"])),
        key_lengths=key_lengths,
        page_size=page_size,
        rule=draw_rule(draw, shapes, 2),
        align=draw(st.sampled_from(ALIGNMENTS)),
        **_options(draw, type),
        **_common(draw),
    )
