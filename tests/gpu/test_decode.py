"""Few queries: all heads of a key head at once, the keys in parts."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyflash as af
import pytest
import torch
from asleep import nobody_waits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from make_kernel_table import launched

TYPES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def randoms(b, heads, kv_heads, queries, keys, d, d_v=None, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = (b, heads, queries, d), (b, kv_heads, keys, d), (b, kv_heads, keys, d_v or d)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def reference(q, k, v, causal=True):
    """In float64, causal and bottom-right aligned. (out, lse)"""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], device="cuda", dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def close(got, expected, dtype):
    """By the size of all numbers: those of thousands of keys are small."""
    return (got.double() - expected.double()).norm() <= min(TYPES[dtype], 1e-2) * expected.double().norm()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("d, d_v", [(64, 64), (128, 128), (256, 256), (40, 72), (65, 33), (8, 512)])
@pytest.mark.parametrize(
    "heads, kv_heads, queries", [(2, 2, 1), (8, 2, 1), (6, 2, 3), (32, 1, 1), (64, 1, 1), (5, 1, 11)]
)
@pytest.mark.parametrize("keys", [70, 5000])
def test_values(keys, heads, kv_heads, queries, d, d_v, dtype):
    q, k, v = randoms(2, heads, kv_heads, queries, keys, d, d_v, dtype)
    out, lse = af.attention(q, k, v, rule=af.causal(), align="none_end", return_lse=True)
    expected, expected_lse = reference(q, k, v)
    assert (out - expected).abs().max() < TYPES[dtype]
    assert (lse - expected_lse).abs().max() < TYPES[dtype]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_option(dtype):
    q, k, v = randoms(2, 8, 2, 2, 3000, 64, dtype=dtype)
    bias, sink, slopes = torch.randn(2, 8, 1, 3000), torch.randn(8), torch.rand(8) / 100
    options = dict(rule=af.causal() & af.window(2000, 0) | af.sink(3), align="none_end", softcap=3.0, return_lse="lm")
    lengths = torch.tensor([3000, 1234], dtype=torch.int32)
    extras = dict(bias=bias, sink=sink, alibi_slopes=slopes)
    got = af.attention(q, k, v, key_lengths=lengths, **options, **{name: x.cuda() for name, x in extras.items()})
    wide = [x.double().cpu() for x in (q, k, v)]
    expected = af.attention(*wide, key_lengths=lengths, **options, **{name: x.double() for name, x in extras.items()})
    for a, b in zip(got, expected):
        assert torch.allclose(a.double().cpu(), b, rtol=TYPES[dtype], atol=TYPES[dtype])


def test_same_bits_in_every_run_and_batch():
    q, k, v = randoms(3, 8, 2, 1, 9000, 128)
    for deterministic in (False, True):
        once = af.attention(q, k, v, deterministic=deterministic)
        for _ in range(3):
            assert torch.equal(af.attention(q, k, v, deterministic=deterministic), once)
    assert torch.equal(af.attention(q[1:2], k[1:2], v[1:2], deterministic=True), once[1:2])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_other_entries_masks_change_no_bit(dtype):
    """A dense mask of each batch entry; the first shows half of the keys, those in front."""
    q, k, v = randoms(3, 1, 1, 1, 2176, 128, dtype=dtype)
    mask = torch.zeros(3, 1, 1, 2176, dtype=torch.bool)
    mask[0, ..., :1088], mask[1, ..., ::2], mask[2, ..., 100:] = True, True, True

    def call(of):
        return af.attention(q[of], k[of], v[of], rule=af.dense(mask[of]), return_lse=True, deterministic=True)

    out, lse = call(slice(0, 3))
    expected, expected_lse = reference(q[:1], k[:1, :, :1088], v[:1, :, :1088])
    assert close(out[:1], expected, dtype) and close(lse[:1], expected_lse, dtype)
    for b in range(3):
        alone, alone_lse = call(slice(b, b + 1))
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_keys_that_come_one_by_one(dtype):
    """Each step has a plan of its own, more than are kept. Nobody waits for what is queued."""
    q, k, v = randoms(2, 8, 2, 1, 1300, 64, dtype=dtype)

    def steps(first):
        return [
            af.attention(q, k[:, :, :n], v[:, :, :n], rule=af.causal(), align="none_end", return_lse=True)
            for n in range(first, first + 71)
        ]

    for n, (out, lse) in enumerate(nobody_waits(lambda: steps(1000), lambda: steps(1200)), 1000):
        expected, expected_lse = reference(q, k[:, :, :n], v[:, :, :n])
        assert close(out, expected, dtype) and close(lse, expected_lse, dtype)


@pytest.mark.parametrize("batch, keys", [(1, 70000), (2, 20000), (20, 9000), (200, 3000)])
@pytest.mark.parametrize("lengths", [False, True])
def test_parts_by_the_machine(batch, keys, lengths):
    """One query of each head, in as many parts as suit the batch."""
    q, k, v = randoms(batch, 8, 1, 1, keys, 128)
    of_each = torch.arange(keys, keys - batch, -1, dtype=torch.int32, device="cuda") if lengths else None
    got = af.attention(q, k, v, key_lengths=of_each)
    for b in {0, batch - 1}:
        n = keys - b if lengths else keys
        p = torch.softmax(q[b].double() @ k[b, :, :n].double().mT / 128**0.5, -1)
        assert torch.allclose(got[b].double(), p @ v[b, :, :n].double(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_hidden_keys_do_not_show(bad, dtype):
    q, k, v = randoms(1, 8, 2, 3, 4000, 64, dtype=dtype)
    expected = af.attention(q, k, v, rule=af.causal(), align="none_end")
    k, v = (torch.cat([x, torch.full_like(x[:, :, :5], bad)], 2) for x in (k, v))
    lengths = torch.tensor([4000])
    got = af.attention(q, k, v, rule=af.causal(), align="none_end", key_lengths=lengths)
    assert close(got, expected, dtype)
    v[:, :, 3998] = bad  # hidden from the first of the queries alone
    got = af.attention(q, k, v, rule=af.causal(), align="none_end", key_lengths=lengths)
    assert torch.isfinite(got[:, :, 0]).all() and not torch.isfinite(got[:, :, 1:]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_near_the_end_of_their_type(dtype):
    q, k, v = randoms(1, 4, 1, 1, 3000, 64, dtype=dtype)
    q.zero_()
    v.fill_(torch.finfo(dtype).max * 0.9)
    out = af.attention(q, k, v)
    assert torch.allclose(out, v[:, :, :1].expand_as(out), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [6, 12, 30])
def test_some_rows_overflow(heads, dtype):
    """Sums of P V that are divided last do so where many keys share a row, and do not where one key has all."""
    q, k, v = randoms(2, heads, 1, 1, 3000, 64, dtype=dtype)
    q[:, ::2] = 0
    q[:, 1::2] *= 1000
    v.fill_(torch.finfo(dtype).max * 0.9)
    out = af.attention(q, k, v)
    assert torch.allclose(out, v[:, :, :1].expand_as(out), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(af.attention(q[1:], k[1:], v[1:]), out[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads", [6, 12, 30, 60])
def test_rows_keep_their_bits_beside_such_as_overflow(heads, d, dtype):
    """Even rows see the first half of the keys alone, whose values overflow in sums, odd rows the second half."""
    q, k, v = randoms(2, heads, 1, 1, 3000, d, dtype=dtype)
    k[:, :, :1500, 0], k[:, :, 1500:, 0], v[:, :, :1500, 3] = 30, 0, torch.finfo(dtype).max * 0.9
    q[..., 0] = -5 * d**0.5
    expected, expected_lse = af.attention(q, k, v, return_lse=True)
    assert (expected - reference(q, k[:, :, 1500:], v[:, :, 1500:])[0]).abs().max() < TYPES[dtype]
    q[:, ::2, :, 0] *= -1
    out, lse = af.attention(q, k, v, return_lse=True)
    assert torch.equal(out[:, 1::2], expected[:, 1::2]) and torch.equal(lse[:, 1::2], expected_lse[:, 1::2])
    assert torch.allclose(out[:, ::2, :, 3], v[:, :, 0, 3].expand(2, heads)[:, ::2, None], rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads, kv_heads, queries", [(12, 1, 1), (6, 2, 6), (12, 2, 7), (24, 2, 5), (4, 1, 16)])
def test_several_queries_that_see_all(heads, kv_heads, queries, d, dtype):
    """Rows are the queries of all heads of a key head; lengths in device memory, NaN behind them, and pages."""
    keys, lengths = 1500, torch.tensor([1500, 1, 777], dtype=torch.int32)
    q, k, v = randoms(3, heads, kv_heads, queries, keys, d, dtype=dtype)
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = torch.nan, torch.nan
    got, lse = af.attention(q, k, v, key_lengths=lengths.cuda(), return_lse=True)
    for i, n in enumerate(lengths):
        expected, expected_lse = reference(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], causal=False)
        assert (got[i] - expected[0]).abs().max() < TYPES[dtype]
        assert (lse[i] - expected_lse[0]).abs().max() < TYPES[dtype]
    for page in (16, 32, 64):
        order = torch.randperm(3 * -(-keys // page), device="cuda")
        paged = af.attention(
            q,
            in_pages(k, page, order),
            in_pages(v, page, order),
            key_lengths=lengths.cuda(),
            page_table=order.reshape(3, -1).int(),
        )
        assert torch.equal(paged, got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d, d_v", [(64, 24), (72, 128), (128, 64), (200, 256), (256, 304)])
@pytest.mark.parametrize("heads", [1, 7, 12, 27, 48])
def test_any_number_of_rows(heads, d, d_v, dtype):
    """Of plain calls, in one part and in several, in pages, and with keys that a window hides."""
    q, k, v = randoms(2, heads, 1, 1, 6000, d, d_v, dtype)
    for keys in (1, 100, 6000):
        out, lse = af.attention(q, k[:, :, :keys], v[:, :, :keys], return_lse=True)
        expected, expected_lse = reference(q, k[:, :, :keys], v[:, :, :keys])
        assert (out - expected).abs().max() < TYPES[dtype] and (lse - expected_lse).abs().max() < TYPES[dtype]
    order = torch.randperm(2 * 375, device="cuda")
    lengths = torch.full((2,), 6000, dtype=torch.int32, device="cuda")
    paged = af.attention(
        q, in_pages(k, 16, order), in_pages(v, 16, order), key_lengths=lengths, page_table=order.reshape(2, -1).int()
    )
    assert (paged - expected).abs().max() < TYPES[dtype]
    near, far = k.clone(), v.clone()
    near[:, :, :899], far[:, :, :899] = torch.nan, torch.inf
    out = af.attention(q, near, far, rule=af.window(5100, 0), align="none_end")
    assert (out - reference(q, k[:, :, 899:], v[:, :, 899:])[0]).abs().max() < TYPES[dtype]


def seen_by(rule, queries, keys):
    """(the rule, what each query sees); queries are at the end of the keys."""
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    generator = torch.Generator().manual_seed(queries)
    if rule == "causal":
        return af.causal(), j <= i
    if rule == "window":
        return af.window(700, 0) | af.sink(5), ((j <= i) & (i - j <= 700)) | (j < 5)
    if rule == "tree":  # each node sees its parent, chosen at random among the nodes before, and what that one sees
        seen = (j < keys - queries).repeat(queries, 1)
        for node in range(queries):
            if node > 0:
                seen[node] |= seen[int(torch.randint(node, (1,), generator=generator))]
            seen[node, keys - queries + node] = True
    else:  # any pairs, but for a query that sees nothing, and whole blocks that nobody sees
        seen = torch.rand(queries, keys, generator=generator) < 0.3
        seen[queries // 2], seen[:, 64:192] = False, False
    return af.dense(seen), seen


def masked_reference(q, k, v, seen):
    """In float64; rows that see nothing are 0. (out, lse)"""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen.to(q.device), -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d, d_v", [(64, 64), (128, 128), (256, 256), (72, 128)])
@pytest.mark.parametrize(
    "heads, kv_heads, queries",
    [(2, 2, 2), (8, 2, 4), (32, 8, 16), (6, 2, 21), (8, 8, 64), (8, 2, 64), (32, 8, 64), (5, 1, 37)],
)
@pytest.mark.parametrize("rule", ["causal", "window", "tree", "any"])
def test_few_queries_under_a_mask(rule, heads, kv_heads, queries, d, d_v, dtype):
    """The queries of all heads of a key head in one task or several, the keys in one part and in many."""
    for b, keys in ((2, 90), (1, 5000)):
        q, k, v = randoms(b, heads, kv_heads, queries, keys, d, d_v, dtype)
        rule_given, seen = seen_by(rule, queries, keys)
        options = dict(rule=rule_given, align="none_end", return_lse=True)
        expected, expected_lse = masked_reference(q, k, v, seen)
        for deterministic in (False, True):
            out, lse = af.attention(q, k, v, deterministic=deterministic, **options)
            assert (out - expected).abs().max() < TYPES[dtype]
            assert torch.equal(lse.isinf(), expected_lse.isinf())
            assert (lse - expected_lse).nan_to_num(0).abs().max() < TYPES[dtype]
            again, again_lse = af.attention(q, k, v, deterministic=deterministic, **options)
            assert torch.equal(again, out) and torch.equal(again_lse, lse)
        alone, alone_lse = af.attention(q[:1], k[:1], v[:1], deterministic=True, **options)
        assert torch.equal(alone, out[:1]) and torch.equal(alone_lse, lse[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads, kv_heads, queries", [(4, 2, 5), (32, 8, 16), (4, 1, 64)])
def test_bad_keys_of_few_queries(heads, kv_heads, queries, d, dtype):
    """A NaN of a key and an infinity of another show in those rows alone that see them; other rows keep their bits."""
    keys, sink = 3000, torch.randn(heads, device="cuda")
    q, k, v = randoms(2, heads, kv_heads, queries, keys, d, dtype=dtype)
    rule, seen = seen_by("tree", queries, keys)
    seen[1:, 700] = False  # in another block than the tree
    options = dict(rule=af.dense(seen), align="none_end", sink=sink, return_lse="lm")
    expected = af.attention(q, k, v, **options)
    k[:, :, keys - 1], v[:, :, keys - 1], v[:, :, 700] = torch.nan, torch.inf, torch.nan
    got = af.attention(q, k, v, **options)
    touched = seen[:, keys - 1] | seen[:, 700]
    assert touched.any() and not touched.all()
    for a, b in zip(got, expected):
        assert torch.equal(a[:, :, ~touched], b[:, :, ~touched])
    assert not torch.isfinite(got[0][:, :, touched]).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, queries", [(8, 2, 4), (32, 8, 16), (8, 2, 64)])
def test_few_queries_of_many_lengths(heads, kv_heads, queries, dtype):
    """Causal at the end of each sequence; lengths in either memory, NaN behind them, and pages."""
    keys, lengths = 1500, torch.tensor([1500, 64, 777, 0], dtype=torch.int32)
    q, k, v = randoms(4, heads, kv_heads, queries, keys, 128, dtype=dtype)
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = torch.nan, torch.nan
    options = dict(rule=af.causal(), align="none_end", return_lse=True)
    got, lse = af.attention(q, k, v, key_lengths=lengths.cuda(), **options)
    assert not got[3].any() and (lse[3] == -torch.inf).all()
    for i, n in enumerate(lengths[:3]):
        expected, expected_lse = reference(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n])
        assert (got[i] - expected[0]).abs().max() < TYPES[dtype]
        assert (lse[i] - expected_lse[0]).abs().max() < TYPES[dtype]
    on_host, host_lse = af.attention(q, k, v, key_lengths=lengths, **options)
    assert torch.allclose(on_host, got, rtol=0, atol=TYPES[dtype])
    assert torch.allclose(host_lse, lse, rtol=0, atol=TYPES[dtype])
    for page in (16, 32, 64, 128):
        order = torch.randperm(4 * -(-keys // page), device="cuda")
        paged = af.attention(
            q,
            in_pages(k, page, order),
            in_pages(v, page, order),
            key_lengths=lengths.cuda(),
            page_table=order.reshape(4, -1).int(),
            **options,
        )
        assert torch.allclose(paged[0], got, rtol=0, atol=TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("d_v", [64, 40])
def test_parts_of_many_rows(d_v, dtype):
    """Of 1, 2, 3 or 9 entries, 8, 4, 2 or 1 warps join a row; the same bits."""
    q, k, v = randoms(9, 6, 6, 40, 9000, 64, d_v, dtype)
    options = dict(rule=af.causal(), align="none_end", return_lse=True, deterministic=True)
    out, lse = af.attention(q, k, v, **options)
    expected, expected_lse = reference(q[8:], k[8:], v[8:])
    assert close(out[8:], expected, dtype) and close(lse[8:], expected_lse, dtype)
    for first in (8, 7, 6):
        some, some_lse = af.attention(q[first:], k[first:], v[first:], **options)
        assert torch.equal(some, out[first:]) and torch.equal(some_lse, lse[first:])


@pytest.mark.parametrize("heads", [4, 32])
def test_calls_on_many_streams_join_their_own_parts(heads):
    q, k, v = randoms(4, heads, 1, 1, 20000, 128)
    expected = af.attention(q, k, v)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(af.attention(q, k, v))
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected) for x in got)


def in_pages(x, page, order):
    """(batch, heads, keys, d) as (pages, page, heads, d), page i of all at order[i]."""
    b, heads, keys, d = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, -keys % page), value=torch.nan).transpose(1, 2)
    pages = torch.empty_like(x.reshape(-1, page, heads, d))
    pages[order] = x.reshape(-1, page, heads, d)
    return pages


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads, keys, d", [(4, 150, 64), (4, 130, 128), (4, 100, 256), (40, 130, 128), (2, 3000, 128)])
def test_tasks_that_follow_one_another(heads, keys, d, dtype):
    """More of them than run at once. Some batch entries hold NaN behind their keys, so a pass with care stands between
    two others; some are empty. Lengths in either memory, with pages and without: the same bits."""
    b, kv_heads = 160, 2
    q, k, v = randoms(b, heads, kv_heads, 1, keys, d, dtype=dtype)
    lengths = torch.arange(b, dtype=torch.int32) * 37 % (keys + 1)
    for i in range(0, b, 3):
        k[i, :, lengths[i] :], v[i, :, lengths[i] :] = torch.nan, torch.nan
    got, lse = af.attention(q, k, v, key_lengths=lengths, return_lse=True)
    for i in range(0, b, 7):
        n = int(lengths[i])
        expected, expected_lse = reference(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], causal=False)
        assert (got[i] - expected[0]).abs().max() < TYPES[dtype]
        assert torch.equal(lse[i].isinf(), expected_lse[0].isinf())
        assert not n or (lse[i] - expected_lse[0]).abs().max() < TYPES[dtype]
    assert torch.equal(af.attention(q, k, v, key_lengths=lengths.cuda()), got)
    for page in (16, 64, 24):
        order = torch.randperm(b * -(-keys // page), device="cuda")
        pages = dict(page_table=order.reshape(b, -1).int(), key_lengths=lengths.cuda())
        paged = af.attention(q, in_pages(k, page, order), in_pages(v, page, order), **pages)
        assert torch.allclose(paged, got, rtol=0, atol=TYPES[dtype]) and (page == 24 or torch.equal(paged, got))
    one = af.attention(q[3:4], k[3:4], v[3:4], key_lengths=lengths[3:4])
    assert torch.equal(one, got[3:4])


@pytest.mark.parametrize("heads", [2, 16, 40])
def test_lengths_far_below_the_room(heads):
    """Most parts have no key; what lies there does not count."""
    q, k, v = randoms(4, heads, 2, 1, 9000, 128)
    lengths = torch.tensor([0, 1, 3000, 9000])
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = torch.nan, torch.nan
    got, lse = af.attention(q, k, v, key_lengths=lengths.cuda(), return_lse=True)
    assert not got[0].any() and (lse[0] == -torch.inf).all()
    for i, n in enumerate(lengths[1:], 1):
        expected, expected_lse = reference(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], causal=False)
        assert (got[i] - expected[0]).abs().max() < 3e-2 and (lse[i] - expected_lse[0]).abs().max() < 3e-2


def test_one_query_sees_all_keys_of_its_length():
    """A causal rule, aligned at the end, with lengths on the device: no mask has to be asked."""
    q, k, v = randoms(3, 8, 2, 1, 700, 64)
    lengths = torch.tensor([0, 333, 700])
    for rule, align in ((af.causal(), "none_end"), (af.full(), "none_front")):
        got = af.attention(q, k, v, rule=rule, align=align, key_lengths=lengths.cuda())
        assert torch.equal(got, af.attention(q, k, v, rule=rule, align=align, key_lengths=lengths))
    first = af.attention(q, k, v, rule=af.causal(), align="none_front", key_lengths=lengths.cuda())  # sees one key
    assert torch.equal(first[1:], v[1:, :, :1].repeat_interleave(4, 1))


def test_rows_that_see_nothing():
    q, k, v = randoms(2, 4, 2, 2, 300, 64)
    sink = torch.zeros(4, device="cuda")
    out, lse = af.attention(q, k, v, rule=~af.full(), sink=sink, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    out, lse = af.attention(q, k, v, key_lengths=torch.tensor([0, 300]), return_lse=True)
    assert not out[0].any() and (lse[0] == -torch.inf).all() and torch.isfinite(lse[1]).all()


def test_many_threads_and_streams():
    """Each thread on a stream of its own, calls of both kinds in turns; nobody's memory is anybody else's."""
    cases = [randoms(2, 8, 2, queries, 3000, 64, seed=seed) for seed, queries in enumerate([1, 100, 1, 200])]
    expected = [af.attention(*case) for case in cases]
    torch.cuda.synchronize()

    def work(number):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(30):
                i = (number + turn) % len(cases)
                assert torch.equal(af.attention(*cases[i]), expected[i])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_a_call_is_replayed_in_a_graph():
    q, k, v = randoms(2, 8, 2, 1, 9000, 128)
    out = torch.empty_like(q)
    af.attention(q, k, v, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        af.attention(q, k, v, out=out)
    q.neg_()
    graph.replay()
    replayed = out.clone()
    assert torch.equal(replayed, af.attention(q, k, v))


def pages_of(size):
    table = torch.arange(4096 // size, dtype=torch.int32, device="cuda").view(1, -1)
    return dict(page_table=table, key_lengths=torch.tensor([4000], dtype=torch.int32, device="cuda"))


def to_pages(x, size):
    return x[0].transpose(0, 1).reshape(-1, size, x.shape[1], x.shape[3])


def odd_rows(x):
    """The same numbers in rows that do not begin on 16 bytes."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the kernels of Hopper")
@pytest.mark.parametrize("queries", [33, 64])  # of two heads: more than 64 rows, but one block of queries
@pytest.mark.parametrize(
    "d, options, page, odd, bulk",
    [
        (64, {}, None, "", True),
        (128, dict(rule=af.window(500, 0), align="none_end"), None, "", True),
        (256, {}, None, "", True),
        (128, {}, 16, "", True),
        (100, {}, None, "", False),
        (128, {}, 8, "", False),
        (128, {}, None, "q", False),
        (128, {}, None, "k", False),
        (128, {}, None, "v", False),
        (128, dict(scale=0.0), None, "", False),
        (128, dict(scale=-0.1), None, "", False),
        (128, dict(softcap=20.0), None, "", False),
        (128, dict(deterministic=True), None, "", False),
    ],
)
def test_more_rows_are_only_for_hoppers_decode(queries, d, options, page, odd, bulk):
    q, k, v = randoms(1, 2, 1, queries, 4096, d)
    wide = [x[..., :4000, :].double().cpu() if page and x is not q else x.double().cpu() for x in (q, k, v)]
    if page:
        k, v, options = to_pages(k, page), to_pages(v, page), options | pages_of(page)
    q, k, v = (odd_rows(x) if name in odd else x for name, x in (("q", q), ("k", k), ("v", v)))
    names = launched(lambda: af.attention(q, k, v, **options))
    assert any("bulk_decode_kernel" in name for name in names) == bulk, names
    assert bulk or any("group_kernel" in name or "forward_kernel" in name for name in names), names
    plain = {name: x for name, x in options.items() if name not in ("page_table", "key_lengths", "deterministic")}
    assert close(af.attention(q, k, v, **options).cpu(), af.attention(*wide, **plain), torch.bfloat16)
