"""What is particular to a GPU in PyTorch's front ends: streams, graphs, memory, and lengths that nobody waits for.
Collected only where ANYFLASH_TEST_DEVICE is cuda; without a GPU they fail."""

from types import SimpleNamespace

import anyflash as af
import pytest
import torch
from anyflash.compat import flash_attn
from anyflash.torch import _attention, _sdpa, attention, flash_attention_qkv_packed, scaled_dot_product_attention, sdpa
from torch.utils.flop_counter import FlopCounterMode

BOUNDS = {torch.bfloat16: 3e-2, torch.float32: 2e-5}


def randoms(*shapes, dtype, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def on_gpu(numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype, device="cuda")


def with_gradients(call, *tensors):
    """The result of a call and the gradients of its tensors."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = call(*tensors)
    return [out.detach(), *torch.autograd.grad(out.float().sin().sum(), tensors)]


def plain(dtype):
    q, k, v = randoms(*[(2, 4, 200, 64)] * 3, dtype=dtype)
    return dict(q=q, k=k, v=v), lambda t: with_gradients(lambda *x: attention(*x, rule=af.causal()), t.q, t.k, t.v), {}


def with_key_lengths(dtype):
    q, k, v = randoms((3, 4, 70, 64), (3, 2, 300, 64), (3, 2, 300, 64), dtype=dtype)
    call = lambda t: with_gradients(lambda *x: attention(*x, key_lengths=t.lengths), t.q, t.k, t.v)
    return dict(q=q, k=k, v=v, lengths=on_gpu([300, 0, 77])), call, dict(lengths=[1, 299, 64])


def with_a_mask(dtype):
    q, k, v = randoms(*[(2, 4, 150, 64)] * 3, dtype=dtype)
    mask = torch.rand(2, 1, 150, 150, device="cuda") < 0.5
    call = lambda *x, mask: scaled_dot_product_attention(*x, attn_mask=mask)
    return (
        dict(q=q, k=k, v=v, mask=mask),
        lambda t: with_gradients(lambda *x: call(*x, mask=t.mask), t.q, t.k, t.v),
        dict(mask=mask.logical_not().tolist()),
    )


def with_a_dense_rule(dtype):
    given, _, changes = with_a_mask(dtype)
    return given, lambda t: with_gradients(lambda *x: attention(*x, rule=af.dense(t.mask)), t.q, t.k, t.v), changes


def packed(dtype):
    (qkv,) = randoms((3, 2, 96, 32), dtype=dtype)
    return dict(q=qkv), lambda t: with_gradients(lambda x: flash_attention_qkv_packed(x, 2, 3), t.q), {}


def varlen(dtype, **options):
    q, k, v = randoms((300, 4, 64), (340, 2, 64), (340, 2, 64), dtype=dtype)
    given = dict(q=q, k=k, v=v, ends_q=on_gpu([0, 3, 3, 200, 300]), ends_k=on_gpu([0, 120, 121, 340, 340]))
    new = dict(ends_q=[0, 100, 160, 160, 300], ends_k=[0, 100, 160, 160, 340])
    call = lambda t, *x: flash_attn.flash_attn_varlen_func(*x, t.ends_q, t.ends_k, 200, 240, causal=True, **options)
    return given, lambda t: with_gradients(lambda *x: call(t, *x), t.q, t.k, t.v), new


def varlen_with_slopes(dtype):
    return varlen(dtype, alibi_slopes=torch.rand(4, 4, device="cuda"))


def varlen_with_pages(dtype):
    q, k, v = randoms((40, 4, 64), (30, 16, 2, 64), (30, 16, 2, 64), dtype=dtype)
    table = torch.randperm(30, device="cuda").int().reshape(3, 10)
    given = dict(q=q, k=k, v=v, table=table, ends_q=on_gpu([0, 1, 20, 40]), ends_k=on_gpu([0, 100, 119, 270]))
    return (
        given,
        lambda t: flash_attn.flash_attn_varlen_func(
            t.q, t.k, t.v, t.ends_q, t.ends_k, 20, 160, causal=True, block_table=t.table, return_attn_probs=True
        )[:2],
        dict(ends_q=[0, 20, 40, 40], ends_k=[0, 20, 180, 180]),
    )


def kvcache(dtype, **options):
    """New keys, rotated, behind lengths that differ."""
    q, k, v, k_cache, v_cache = randoms(
        (2, 3, 4, 64), (2, 3, 2, 64), (2, 3, 2, 64), (2, 200, 2, 64), (2, 200, 2, 64), dtype=dtype
    )
    angles = torch.rand(200, 16, device="cuda")
    given = dict(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, lengths=on_gpu([150, 0]))

    def call(t):
        out = flash_attn.flash_attn_with_kvcache(
            t.q,
            t.k_cache,
            t.v_cache,
            t.k,
            t.v,
            angles.cos(),
            angles.sin(),
            causal=True,
            return_softmax_lse=True,
            **dict(cache_seqlens=t.lengths) | options,
        )
        return *out, t.k_cache, t.v_cache

    return given, call, dict(lengths=[7, 197])


def kvcache_of_one_length(dtype):
    given, call, _ = kvcache(dtype, cache_seqlens=50)
    return given, call, {}


def kvcache_in_pages(dtype):
    given, call, new = kvcache(dtype, block_table=torch.randperm(26, device="cuda").int().reshape(2, 13))
    for name in ("k_cache", "v_cache"):
        (given[name],) = randoms((26, 16, 2, 64), dtype=dtype)
    return given, call, new


def kvcache_with_places(dtype):
    return kvcache(dtype, cache_batch_idx=on_gpu([1, 0]), cache_leftpad=on_gpu([5, 0]))


CASES = [
    plain,
    with_key_lengths,
    with_a_mask,
    with_a_dense_rule,
    packed,
    varlen,
    varlen_with_slopes,
    varlen_with_pages,
    kvcache,
    kvcache_of_one_length,
    kvcache_in_pages,
    kvcache_with_places,
]


def close(got, expected, dtype):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.fixture
def no_waiting():
    """PyTorch raises where it would wait for the GPU."""

    class Forbidden:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return Forbidden()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_nobody_waits(case, dtype, no_waiting):
    given, call, _ = case(dtype)
    given = SimpleNamespace(**given)
    expected = [x.clone() for x in call(given)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    with no_waiting:
        got = call(given)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    close(got, expected, dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_replayed_in_a_graph(case, dtype):
    """With other numbers, other lengths and masks; what is written in place is written anew."""
    given, call, changes = case(dtype)
    given = SimpleNamespace(**given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch asks for: gradients remember the stream of their first use
        call(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(given)
    given.q.neg_()
    for name, numbers in changes.items():
        tensor = getattr(given, name)
        tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype))
    before = {name: x.clone() for name, x in vars(given).items() if name.endswith("_cache")}
    graph.replay()
    got = [x.clone() for x in results]
    for name, x in before.items():
        getattr(given, name).copy_(x)
    close(got, call(given), dtype)


def test_gradients_on_a_stream_of_their_own():
    """Inputs that are written late, on a stream that only the call's own stream waits for."""
    q, k, v, dout = randoms(*[(2, 4, 1000, 64)] * 4, dtype=torch.bfloat16)
    expected = with_gradients(lambda *x: attention(*x), q, k, v)
    late = [torch.zeros_like(x).requires_grad_() for x in (q, k, v)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for x, of in zip(late, (q, k, v)):
                x.copy_(of)
        out = attention(*late)
        loss = out.float().sin().sum()
    got = torch.autograd.grad(loss, late)  # PyTorch runs it on the forward pass' stream, and makes this one wait
    close(got, expected[1:], torch.bfloat16)
    side.synchronize()
    close([out.detach()], expected[:1], torch.bfloat16)


def test_compiled_with_graphs_of_pytorch_s_own():
    q, k, v = randoms(*[(1, 2, 100, 64)] * 3, dtype=torch.float32)
    call = lambda q, k, v: attention(q * 2, k, v, rule=af.causal()).relu()
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for step in range(4):
        close([compiled(q + step, k, v)], [call(q + step, k, v)], torch.float32)


@pytest.mark.parametrize("way", ["compiled", "exported", "exported, strict"])
def test_the_override_is_asked_first_in_a_graph(way):
    """Whether a GPU is covered is found by a call on it, be it that tensors are not true ones just then."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    qkv = tuple(randoms(*[(1, 2, 20, 8)] * 3, dtype=torch.float32))
    torch._dynamo.reset()
    _sdpa._asked.cache_clear()
    with sdpa():
        if way == "compiled":
            graphs = []
            backend = lambda graph, inputs: graphs.append(graph) or graph
            made = torch.compile(Model(), fullgraph=True, backend=backend)
            close([made(*qkv)], [Model()(*qkv)], torch.float32)
        else:
            exported = torch.export.export(Model(), qkv, strict=way.endswith("strict"))
            made, graphs = exported.module(), [exported.graph_module]
            close([made(*qkv)], [Model()(*qkv)], torch.float32)
    assert "anyflash.attention" in graphs[0].code and _sdpa._asked(torch.device("cuda", 0), False) == ""


def test_no_copies():
    """Peak memory of calls on views of one packed tensor: their results. What they work in beside that is in the
    library's own pool, and told by a plan."""

    def peak(call):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        return result

    peaks = []
    qkv = torch.randn(2, 4096, 3, 8, 64, device="cuda", dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    one = 2 * 8 * 4096 * 64 * 2  # bytes of q, of out, of each gradient
    rows = 2 * 8 * 4096 * 4
    out = peak(lambda: attention(q, k, v, rule=af.local(16)))
    with pytest.MonkeyPatch.context() as patch:
        gradients = _attention._gradients
        patch.setattr(_attention, "_gradients", lambda *given: peak(lambda: gradients(*given)))
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    forward, backward = peaks
    assert one + rows <= forward <= one + rows + 4096 and 3 * one <= backward <= 3 * one + 4096
    plan = af.plan(*(x.detach() for x in (q, k, v)), rule=af.local(16))
    assert plan.forward_workspace < one / 4 and plan.backward_workspace < 3 * one  # sums of dq in float32


WRONG = {
    "key: on cpu, expected cuda:0": lambda q: attention(q, q.cpu(), q),
    "bias: on cpu, expected cuda:0": lambda q: attention(q, q, q, bias=torch.zeros(1, 1, 1, 5)),
    "key: on cuda:0, expected cpu": lambda q: attention(q.cpu(), q, q),
    "rule": lambda q: attention(
        q, q, q, rule="documents(a, b)", tables={"a": on_gpu([0] * 5), "b": torch.zeros(5, dtype=torch.int32)}
    ),  # in two places
    "cache_seqlens: 7, expected 0 to 5": lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, cache_seqlens=7),
    "cache_seqlens: 2 new keys go up to 6": lambda q: flash_attn.flash_attn_with_kvcache(
        q, q.clone(), q.clone(), q[:, :2], q[:, :2], cache_seqlens=torch.tensor([4])
    ),  # on the CPU it is looked at
    "block_table: 2 sequences, expected 1": lambda q: flash_attn.flash_attn_varlen_func(
        q[0], q, q, on_gpu([0, 5]), on_gpu([0, 5]), 5, 5, block_table=on_gpu([[0], [0]])
    ),
}


@pytest.mark.parametrize("start", WRONG)
def test_wrong_input(start):
    with pytest.raises(ValueError) as raised:
        WRONG[start](torch.zeros(1, 5, 5, 8, device="cuda"))
    assert str(raised.value).startswith(start) and "\n" not in str(raised.value)


def test_whatever_lengths_hold_does_no_harm():
    for bad in ([-5, 10**6], [2**31 - 1, -(2**31)], [200, 199]):
        for case in (kvcache, kvcache_in_pages):
            given, call, _ = case(torch.float32)
            given["lengths"] = on_gpu(bad)
            call(SimpleNamespace(**given))
    given, call, _ = kvcache(torch.float32, block_table=on_gpu([[99, -1] * 7, [2**31 - 1, -(2**31)] * 7]))
    given["k_cache"], given["v_cache"] = randoms(*[(26, 16, 2, 64)] * 2, dtype=torch.float32)
    call(SimpleNamespace(**given))
    for bad in ([0, 40, 3, 40], [9, 4, 2, 1], [-7, 10**9, -3, 50], [0, 0, 0, 0]):
        for case in (varlen, varlen_with_pages):
            given, call, _ = case(torch.float32)
            given["ends_q"] = given["ends_k"] = on_gpu(bad)
            call(SimpleNamespace(**given))
    given, call, _ = varlen(torch.float32, alibi_slopes=torch.rand(4, 4, device="cuda"))
    given["ends_q"] = given["ends_k"] = on_gpu([-7, 10**9, -3, 50, 20])
    call(SimpleNamespace(**given))
    torch.cuda.synchronize()
    assert attention(*randoms(*[(1, 1, 5, 8)] * 3, dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("case", [varlen, varlen_with_slopes, varlen_with_pages, kvcache])
def test_lengths_on_the_cpu_give_the_same(case):
    given, call, _ = case(torch.float32)
    others = {name: x.cpu() if x.dtype == torch.int32 else x.clone() for name, x in given.items()}
    close(call(SimpleNamespace(**given)), call(SimpleNamespace(**others)), torch.float32)


@pytest.mark.parametrize("name", ["slopes", "pages"])
def test_sequences_of_very_different_lengths(name):
    """As rows of a batch they would be nine times as many queries; they go one by one."""
    ends = on_gpu([0, 1, 2, 3, 4, 5, 6, 7, 8, 308])
    (q,) = randoms((308, 4, 32), dtype=torch.float32)
    k, v = randoms(*[(20, 16, 2, 32) if name == "pages" else (308, 2, 32)] * 2, dtype=torch.float32)
    options = dict(alibi_slopes=torch.rand(9, 4, device="cuda")) if name == "slopes" else {}
    if name == "pages":
        options["block_table"] = torch.arange(9 * 20, device="cuda").int().reshape(9, 20) % 20
    got, expected = (
        flash_attn.flash_attn_varlen_func(q, k, v, at, at, 300, 300, causal=True, return_attn_probs=True, **options)[:2]
        for at in (ends, ends.cpu())
    )
    close(got, expected, torch.float32)


def test_no_sequence_sees_another_s_nan():
    """Neither in the results nor in the gradients, though rows of a batch hold copies of what lies around."""
    (x,) = randoms((12, 2, 16), dtype=torch.float32)
    x[3:7] = torch.nan
    ends = on_gpu([0, 3, 7, 12])
    made = with_gradients(
        lambda *x: flash_attn.flash_attn_varlen_func(
            *x, ends, ends, 6, 6, alibi_slopes=torch.rand(3, 2, device="cuda")
        ),
        x,
        x,
        x,
    )
    for one in made:
        assert one[3:7].isnan().all() and one[:3].isfinite().all() and one[7:].isfinite().all()


@pytest.mark.parametrize("slopes, most", [(False, 6), (True, 6), (True, 30)])  # 30: sequences go one by one
def test_tokens_behind_the_last_sequence(slopes, most):
    """They are in none: 0, as are their gradients, and those of others do not hear theirs."""
    (x,) = randoms((12, 2, 16), dtype=torch.float32)
    ends, lse = on_gpu([0, 3, 7]), []
    slopes = torch.rand(2, 2, device="cuda") if slopes else None

    def call(*x):
        out, statistic, _ = flash_attn.flash_attn_varlen_func(
            *x, ends, ends, most, most, alibi_slopes=slopes, return_attn_probs=True
        )
        lse.append(statistic.detach())
        return out

    whole, part = (with_gradients(call, y, y, y) for y in (x, x[:7].clone()))
    for one, other in zip(whole, part):
        assert len(one) == 12 and not one[7:].any()
        torch.testing.assert_close(one[:7], other)
    assert (lse[0][:, 7:] == -torch.inf).all()
    torch.testing.assert_close(lse[0][:, :7], lse[1])


@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("wrong", [[0, 7, 3], [2, 5, 12], [0, 7, 20]])
def test_lengths_are_checked_where_sequences_go_one_by_one(side, wrong):
    (x,) = randoms((12, 2, 16), dtype=torch.float32)
    lengths = {name: on_gpu(wrong if name == side else [0, 7, 12]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    with pytest.raises(ValueError, match=f"^{side}: "):
        flash_attn.flash_attn_varlen_func(
            x, x, x, **lengths, max_seqlen_q=30, max_seqlen_k=30, alibi_slopes=torch.ones(2, 2, device="cuda")
        )


def test_rows_of_queries_and_long_keys():
    """As rows of a batch, keys would be ten times as many; they go one by one."""
    q, k = randoms((10, 2, 16), (1009, 2, 16), dtype=torch.float32)
    ends_q, ends_k = on_gpu(range(11)), on_gpu([*range(10), 1009])
    call = lambda ends_q, ends_k: flash_attn.flash_attn_varlen_func(
        q, k, k, ends_q, ends_k, 1, 1000, alibi_slopes=torch.ones(10, 2, device="cuda")
    )
    call(ends_q, ends_k)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = call(ends_q, ends_k)
    assert torch.cuda.max_memory_allocated() - before < 4 * k.nbytes
    close([got], [call(ends_q.cpu(), ends_k.cpu())], torch.float32)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_longest_sequence_below_0(name):
    (x,) = randoms((12, 2, 16), dtype=torch.float32)
    ends = on_gpu([0, 12])
    with pytest.raises(ValueError, match=f"^{name}: -1, expected 0 or more$"):
        flash_attn.flash_attn_varlen_func(
            x,
            x,
            x,
            ends,
            ends,
            **dict(max_seqlen_q=12, max_seqlen_k=12) | {name: -1},
            alibi_slopes=torch.ones(1, 2, device="cuda"),
        )


@pytest.mark.parametrize("length, dtype", [(2**32 + 3, torch.int64), (2**31, torch.int64), (2**31 - 1, torch.int32)])
def test_lengths_that_would_wrap_around(length, dtype):
    caches = randoms(*[(1, 16, 2, 32)] * 2, dtype=torch.float32)
    q, new = randoms((1, 1, 2, 32), (1, 1, 2, 32), dtype=torch.float32)
    lengths = on_gpu([length], dtype)
    close(
        [flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)],
        [flash_attn.flash_attn_with_kvcache(q, *caches)],
        torch.float32,
    )
    got = flash_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lengths)
    assert all(torch.equal(cache[0, 15], new[0, 0]) for cache in caches)  # a cache's last place
    close([got], [flash_attn.flash_attn_with_kvcache(q, *caches)], torch.float32)


def test_padding_on_the_left_under_a_mode():
    given, call, _ = kvcache_with_places(torch.float32)
    expected = call(SimpleNamespace(**{name: x.clone() for name, x in given.items()}))
    with FlopCounterMode(display=False):
        close(call(SimpleNamespace(**given)), expected, torch.float32)


def test_a_bias_of_another_framework():
    """Its stream makes it behind a long sleep; and uses its memory again at once."""
    import cupy

    q, k, v = randoms(*[(1, 2, 64, 32)] * 3, dtype=torch.float32)
    (bias,) = randoms((1, 2, 64, 64), dtype=torch.float32)
    expected, source = attention(q, k, v, bias=bias), cupy.from_dlpack(bias)
    late = cupy.zeros_like(source)
    late[...] = 0  # so that CuPy has compiled it
    late[...] = source
    late[...] = 0
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(200_000_000)
        late[...] = source
        got = attention(q, k, v, bias=late)
        late[...] = cupy.nan
    close([got], [expected], torch.float32)


def test_the_override_s_first_call_in_a_transform():
    (x,) = randoms((1, 2, 8, 16), dtype=torch.float32)
    _sdpa._asked.cache_clear()
    with sdpa():
        torch.func.grad(lambda q: torch.nn.functional.scaled_dot_product_attention(q, x, x).sum())(x)
    assert _sdpa._asked(torch.device("cuda", 0), True) == ""


def test_tf32():
    """Heard where it is allowed, in graphs and transforms too: what the library gives then, to the bit."""
    q, k, v = randoms(*[(2, 2, 200, 64)] * 3, dtype=torch.float32)
    call = lambda *x: attention(*x, allow_tf32=True)
    expected, exact = (af.attention(q, k, v, allow_tf32=allow) for allow in (True, False))
    heard = not torch.equal(expected, exact)  # what has to be is said by tests/gpu/test_tf32.py
    assert torch.equal(attention(q, k, v), exact) and torch.equal(call(q, k, v), expected)
    assert torch.equal(torch.compile(call, fullgraph=True)(q, k, v), expected)
    mapped = torch.func.vmap(call)(*(x[:, None] for x in (q, k, v)))
    assert torch.equal(mapped[:, 0], expected)
    _, lse = af.attention(q, k, v, return_lse=True, allow_tf32=True)
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = q
    _, dk, dv = torch.autograd.grad(call(*tensors), tensors, dout)
    for allow in (True, False):  # dq is summed in no order
        made = af.attention_backward(dout, q, k, v, expected, lse, allow_tf32=allow)
        assert (torch.equal(made.dk, dk), torch.equal(made.dv, dv)) == 2 * (allow or not heard,)
