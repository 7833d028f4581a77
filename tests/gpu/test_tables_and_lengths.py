"""Lengths, page tables and the tables of rules in the GPU's memory: the same results as from the CPU's, nobody waits for
them, they may change between replays of a graph, and whatever they hold does no harm."""

import anyflash as af
import numpy as np
import pytest
import torch


def randoms(*shapes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def on_gpu(numbers, dtype=torch.int32):
    return torch.as_tensor(numbers, dtype=dtype).to("cuda")


def both_ways(call, **tables):
    """A call's results with tables on the CPU and on the GPU."""
    return call(**tables), call(**{name: on_gpu(table, table.dtype) for name, table in tables.items()})


def same(one, other):
    """The same bits; of 16-bit types, for which masks known on the CPU have kernels of their own, what rounds alike."""

    def alike(a, b):
        if a.dtype != torch.bfloat16 and one[0].dtype != torch.bfloat16:
            return torch.equal(a, b)
        return torch.equal(a.isinf(), b.isinf()) and torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2)

    return all(alike(a, b) for a, b in zip(one, other) if a is not None)


RULES = {
    "full": af.full(),
    "causal": af.causal(),
    "window": af.window(70, 3),
    "sink": af.causal() & af.local(50) | af.sink(4),
}


BARS = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}  # some of these calls take other kernels


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("queries", [1, 3, 200])
def test_key_lengths(queries, name, wide, dtype):
    q, k, v = randoms((4, 4, queries, 40), (4, 2, 500, 40), (4, 2, 500, 40), dtype=dtype)
    lengths = torch.tensor([500, 0, 1, 333], dtype=wide)

    def call(key_lengths):
        return af.attention(q, k, v, rule=RULES[name], align="none_end", key_lengths=key_lengths, return_lse=True)

    one, other = both_ways(call, key_lengths=lengths)
    for a, b in zip(one, other):
        assert torch.allclose(a.double(), b.double(), rtol=BARS[dtype], atol=BARS[dtype])  # infinities: where they are


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize("queries", [1, 5, 100])
def test_page_tables(queries, page_size):
    pages = -(-300 // page_size)
    q, k, v = randoms((2, 6, queries, 64), (2 * pages, page_size, 2, 64), (2 * pages, page_size, 2, 72))
    order = np.random.default_rng(1).permutation(2 * pages).astype(np.int32).reshape(2, pages)

    def call(page_table, key_lengths):
        return [
            af.attention(q, k, v, page_table=page_table, key_lengths=key_lengths, rule=af.causal(), align="none_end")
        ]

    one, other = both_ways(call, page_table=torch.tensor(order), key_lengths=torch.tensor([300, 17], dtype=torch.int32))
    assert torch.allclose(one[0].float(), other[0].float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("queries", [1, 100])
def test_a_pool_without_pages(queries):
    """No query sees a key then, whatever table and length say. On the CPU, where they are read, they are wrong."""
    q, none = randoms((1, 2, queries, 64), (0, 16, 1, 64))
    tables = dict(page_table=torch.zeros(1, 1, dtype=torch.int32), key_lengths=torch.ones(1, dtype=torch.int32))
    given, out = {name: on_gpu(table) for name, table in tables.items()}, torch.full_like(q, 7)
    _, lse = af.attention(q, none, none, out=out, return_lse=True, **given)
    assert not out.any() and (lse == -torch.inf).all()
    with pytest.raises(ValueError, match="^page_table: ") as error:
        af.attention(q, none, none, **tables)
    assert "\n" not in str(error.value)
    (pages,) = randoms((1, 16, 1, 64))
    assert torch.equal(af.attention(q, pages, pages, **given), pages[0, 0].expand_as(q))  # of the only key


def test_an_empty_batch_spoils_no_later_call():
    """It has lengths on the GPU; the calls behind it, of the same sizes, have none."""
    none = torch.empty(0, 4, 256, 64, device="cuda", dtype=torch.float16)
    every = dict(rule=af.causal(), key_lengths=on_gpu([]))
    out, lse = af.attention(none, none, none, return_lse=True, **every)
    assert out.shape == none.shape and lse.shape == (0, 4, 256)
    assert all(x.shape == none.shape for x in af.attention_backward(none, none, none, none, out, lse, **every)[:3])
    q, k, v, dout = randoms(*[(2, 4, 256, 64)] * 4, dtype=torch.float16)
    out, lse = af.attention(q, k, v, rule=af.causal(), return_lse=True)
    made = [out, *af.attention_backward(dout, q, k, v, out, lse, rule=af.causal())[:3]]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    for got, x in zip(made, [expected, *torch.autograd.grad(expected, wide, dout.double())]):
        assert (got.double() - x).abs().max() < 1e-2 * x.abs().max()


CUTS = {"even": ([0, 100, 200, 300], [0, 100, 200, 300]), "ragged": ([0, 3, 3, 200, 300], [0, 120, 121, 400, 400])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", [af.full(), af.causal(), af.local(20)], ids=str)
@pytest.mark.parametrize("align", ["none_front", "none_end"])
@pytest.mark.parametrize("name", CUTS)
def test_cumulative_lengths(name, align, rule, dtype):
    cut_q, cut_k = (torch.tensor(cut, dtype=torch.int32) for cut in CUTS[name])
    q, k, v, dout = randoms((300, 4, 64), (int(cut_k[-1]), 2, 64), (int(cut_k[-1]), 2, 64), (300, 4, 64), dtype=dtype)

    def call(cu_seqlens_q, cu_seqlens_k):
        options = dict(layout="thd", rule=rule, align=align, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        out, lse = af.attention(q, k, v, return_lse=True, **options)
        return [out, lse, *af.attention_backward(dout, q, k, v, out, lse, deterministic=True, **options)[:3]]

    assert same(*both_ways(call, cu_seqlens_q=cut_q, cu_seqlens_k=cut_k))


LONG = {"full": af.full(), "causal": af.causal(), "window": af.local(200), "few": ~af.local(3000, log2_stride=3)}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", LONG)
def test_long_sequences_in_any_order(name, d):
    """Not deterministic, so by Hopper's kernels there; of the last rule more tiles hide pairs than they have room for."""
    cut = torch.tensor([0, 1500, 1501, 1501, 4200], dtype=torch.int32)
    q, k, v, dout = randoms((4200, 4, d), (4200, 2, d), (4200, 2, d), (4200, 4, d))

    def call(cu_seqlens_q, cu_seqlens_k):
        options = dict(layout="thd", rule=LONG[name], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        out, lse = af.attention(q, k, v, return_lse=True, **options)
        return [out, lse, *af.attention_backward(dout, q, k, v, out, lse, **options)[:3]]

    assert same(*both_ways(call, cu_seqlens_q=cut, cu_seqlens_k=cut))


@pytest.mark.parametrize("name", LONG)
def test_key_lengths_in_any_order(name):
    q, k, v, dout = randoms((3, 4, 700, 64), (3, 2, 900, 64), (3, 2, 900, 64), (3, 4, 700, 64))
    for i, n in enumerate((900, 0, 333)):
        k[i, :, n:], v[i, :, n:] = torch.nan, torch.nan

    def call(key_lengths):
        options = dict(rule=LONG[name], align="none_end", key_lengths=key_lengths)
        out, lse = af.attention(q, k, v, return_lse=True, **options)
        return [out, lse, *af.attention_backward(dout, q, k, v, out, lse, **options)[:3]]

    assert same(*both_ways(call, key_lengths=torch.tensor([900, 0, 333], dtype=torch.int32)))


@pytest.mark.parametrize("options", [{}, dict(softcap=5.0), dict(deterministic=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [af.full(), af.causal(), af.local(20)], ids=str)
def test_gradient_of_a_bias(rule, dtype, options):
    """Of many blocks: each tile of the bias is looked for among its block's runs."""
    q, k, v, dout = randoms((2, 4, 600, 64), (2, 2, 700, 64), (2, 2, 700, 64), (2, 4, 600, 64), dtype=dtype)
    (bias,) = randoms((1, 4, 600, 700), dtype=dtype, seed=1)

    def call(key_lengths):
        every = dict(rule=rule, bias=bias, key_lengths=key_lengths, **options)
        out, lse = af.attention(q, k, v, return_lse=True, **every)
        return af.attention_backward(dout, q, k, v, out, lse, **every).dbias.double()

    one, other = both_ways(call, key_lengths=torch.tensor([700, 333], dtype=torch.int32))
    assert (one - other).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-4) * one.norm()


@pytest.mark.parametrize("shape", [(10, 10), (3, 10, 10), (2, 3, 10, 10)])
@pytest.mark.parametrize("kind", ["blocks", "dense"])
def test_tables_of_rules(kind, shape):
    n, sizes = 640, shape if kind == "blocks" else (*shape[:-2], 640, 640)
    if kind == "dense" and len(shape) == 3:
        sizes = (1, *sizes)
    table = torch.tensor(np.random.default_rng(2).integers(0, 2, sizes).astype(bool))
    q, k, v, dout = randoms(*[(2, 3, n, 64)] * 4)

    def call(table):
        rule = (af.blocks(table, 64, 64) if kind == "blocks" else af.dense(table)) & af.causal()
        out, lse = af.attention(q, k, v, rule=rule, return_lse=True)
        return [out, lse, *af.attention_backward(dout, q, k, v, out, lse, rule=rule, deterministic=True)[:3]]

    assert same(*both_ways(call, table=table))


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("queries", [3, 64, 700])
@pytest.mark.parametrize("name", RULES)
def test_an_entry_alone_has_the_bits_that_it_has_in_a_batch(name, queries, place):
    q, k, v, dout = randoms((3, 4, queries, 64), *[(3, 4, 700, 64)] * 2, (3, 4, queries, 64))
    lengths = torch.tensor([700, 333, 64], dtype=torch.int32, device=place)

    def call(entries):
        x, y, z, w = (tensor[entries].contiguous() for tensor in (q, k, v, dout))
        every = dict(rule=RULES[name], align="none_end", key_lengths=lengths[entries], deterministic=True)
        out, lse = af.attention(x, y, z, return_lse=True, **every)
        return [out, lse, *af.attention_backward(w, x, y, z, out, lse, **every)[:3]]

    together = call(slice(None))
    for entry in range(3):
        for name_of, x, y in zip("out lse dq dk dv".split(), call(slice(entry, entry + 1)), together):
            assert torch.equal(x[0], y[entry]), f"{name_of} of entry {entry}"


def test_more_runs_than_are_kept():
    """Bitmaps of eight heads that hide every other key block: room is for half of their runs, so hidden blocks are
    visited too."""
    n = 131_072
    table = torch.zeros(8, n // 64, n // 64, dtype=torch.bool, device="cuda")
    table[:, :, ::2] = True
    q, k, v = randoms((1, 8, n, 64), (1, 2, n, 64), (1, 2, n, 64))
    seen = torch.arange(n, device="cuda") // 64 % 2 == 0
    out, expected = af.attention(q, k, v, rule=af.blocks(table, 64, 64)), af.attention(q, k[:, :, seen], v[:, :, seen])
    assert torch.allclose(out.float(), expected.float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("queries", [1, 200])
def test_lengths_change_between_replays(queries):
    q, k, v = randoms((3, 4, queries, 64), (3, 4, 700, 64), (3, 4, 700, 64))
    lengths = on_gpu([700, 5, 300])
    out = torch.empty_like(q)
    call = lambda: af.attention(q, k, v, key_lengths=lengths, out=out, align="none_end", rule=af.causal())
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for new in ([0, 700, 64], [699, 1, 65]):
        lengths.copy_(on_gpu(new))
        graph.replay()
        replayed = out.clone()
        call()
        assert torch.equal(replayed, out)


def test_nobody_waits():
    q, k, v = randoms((2, 4, 1, 64), (2, 2, 900, 64), (2, 2, 900, 64))
    lengths = on_gpu([900, 77])
    call = lambda: af.attention(q, k, v, key_lengths=lengths)
    expected = call()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    got = call()
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    assert torch.equal(got, expected)


def test_whatever_they_hold_does_no_harm():
    q, k, v = randoms((2, 4, 3, 64), (2, 4, 300, 64), (2, 4, 300, 64))
    for bad in ([-5, 10**9], [2**31 - 1, -(2**31)]):
        clamped = [min(max(x, 0), 300) for x in bad]
        got = af.attention(q, k, v, key_lengths=on_gpu(bad))
        assert torch.equal(got, af.attention(q, k, v, key_lengths=on_gpu(clamped)))
    pages = on_gpu([[0, 99, -1], [2**31 - 1, 1, 2]])
    af.attention(
        q, k.reshape(6, 100, 4, 64), v.reshape(6, 100, 4, 64), page_table=pages, key_lengths=on_gpu([300, 300])
    )
    t = q.reshape(24, 1, 64)
    for bad in ([0, 24, 3, 24], [9, 4, 2, 1], [-7, 10**9, -3, 50], [0, 0, 0, 0]):
        out, lse = af.attention(
            t, t, t, layout="thd", rule=af.causal(), cu_seqlens_q=on_gpu(bad), cu_seqlens_k=on_gpu(bad), return_lse=True
        )
        af.attention_backward(
            out, t, t, t, out, lse, layout="thd", rule=af.causal(), cu_seqlens_q=on_gpu(bad), cu_seqlens_k=on_gpu(bad)
        )
    torch.cuda.synchronize()
    assert torch.isfinite(af.attention(q, k, v)).all()


def test_a_plan_is_for_lengths_in_one_place():
    q, k, v = randoms((2, 4, 1, 64), (2, 2, 900, 64), (2, 2, 900, 64))
    plan = af.plan(q, k, v, key_lengths=on_gpu([900, 77]))
    expected = af.attention(q, k, v, key_lengths=on_gpu([3, 77]))
    assert torch.equal(af.attention(q, k, v, plan=plan, key_lengths=on_gpu([3, 77])), expected)
    with pytest.raises(ValueError, match="^plan: made for lengths or tables on a GPU, the call has none there$"):
        af.attention(q, k, v, plan=plan, key_lengths=np.array([3, 77]))


WRONG = {
    "lengths for the cpu": (lambda q: dict(key_lengths=on_gpu([1, 1])), True, "key_lengths: on cuda:0, expected cpu"),
    "two places": (
        lambda q: dict(key_lengths=on_gpu([3, 3]), page_table=np.zeros((2, 3), np.int32)),
        False,
        "page_table: on cpu, expected cuda:0 as key_lengths",
    ),
    "a table elsewhere": (
        lambda q: dict(key_lengths=on_gpu([3, 3]), rule=af.dense(np.ones((3, 3), bool))),
        False,
        "rule: a table on the cpu, expected cuda:0 as key_lengths",
    ),
    "a mask for the cpu": (
        lambda q: dict(rule=af.dense(torch.ones(3, 3, dtype=torch.bool, device="cuda"))),
        True,
        "a table of the rule: on cuda:0, expected cpu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_places(name):
    make, on_cpu, line = WRONG[name]
    (q,) = randoms((2, 1, 3, 64))
    if "page_table" in make(q):
        k = q.reshape(2, 3, 1, 64)
    else:
        k = q
    q, k = (x.cpu() if on_cpu else x for x in (q, k))
    with pytest.raises(ValueError) as error:
        af.attention(q, k, k, **make(q))
    assert str(error.value) == line


def test_ids_of_both_sides_are_in_one_place():
    with pytest.raises(ValueError, match="^rule documents: ids_k on cpu, expected cuda:0 as ids_q$"):
        af.documents(on_gpu([0, 0]), np.zeros(2, np.int32))


def test_rules_with_tables_on_a_gpu_are_not_explained():
    rule = af.dense(torch.ones(3, 3, dtype=torch.bool, device="cuda"))
    for ask in (lambda: af.explain(rule, (3,)), lambda: __import__("pickle").dumps(rule)):
        with pytest.raises(ValueError, match="on cuda:0, expected cpu"):
            ask()
