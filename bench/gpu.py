"""The rows of bench/compare --device cuda: anyflash beside PyTorch's own kernels on one NVIDIA GPU, forward, backward
and decoding. 16k tokens over the
batch, 2048 channels over the heads; of float32 and float64 4 x 16 heads of 4096 tokens. Times are those of the GPU's
events."""

import statistics

import measure
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import anyflash as af

# The peer of each type, and what anyflash is held to beside it, forward and backward.
PEERS = {"bfloat16": ("torch flash", SDPBackend.FLASH_ATTENTION, (1.1, 1.1)),
         "float16": ("torch flash", SDPBackend.FLASH_ATTENTION, (1.1, 1.1)),
         "float32": ("torch mem-eff", SDPBackend.EFFICIENT_ATTENTION, (2, 2)),
         "float64": ("torch math", SDPBackend.MATH, (2.5, 1.3))}  # fmt: skip


def name():
    return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"


def shapes(type_):
    """(batch, heads, sequence, d)"""
    if type_ in ("float32", "float64"):
        return [(4, 16, 4096, 64), (4, 16, 4096, 128)]
    sequences = (512, 2048, 8192, 16384) if type_ == "bfloat16" else (8192,)
    return [(16384 // s, 2048 // d, s, d) for d in (64, 128, 256) for s in sequences]


def seconds(call):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(calls, rounds):
    for call in calls * 2:  # plans are made, memory is taken
        call()
    torch.cuda.synchronize()
    times = [[seconds(call) for call in calls] for _ in range(rounds)]
    return [list(of_call) for of_call in zip(*times)]


def forward_calls(q, k, v, causal, backend):
    out, rule = torch.empty_like(q), af.causal() if causal else af.full()

    def ours():
        af.attention(q, k, v, rule=rule, out=out)

    def theirs():
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return [ours, theirs]


def backward_calls(q, k, v, causal, backend):
    rule = af.causal() if causal else af.full()
    out, lse = af.attention(q, k, v, rule=rule, return_lse=True)
    dout, inputs = torch.randn_like(out), [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        result = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)

    def ours():
        af.attention_backward(dout, q, k, v, out, lse, rule=rule)

    def theirs():
        torch.autograd.grad(result, inputs, dout, retain_graph=True)

    return [ours, theirs]


# (batch, query heads, key heads, keys, d), bfloat16
DECODE = ((1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128), (64, 32, 8, 4096, 128), (16, 32, 1, 8192, 128),
          (16, 16, 16, 8192, 64), (64, 8, 1, 4096, 256), (1, 64, 8, 16384, 128), (256, 32, 8, 1024, 128),
          (8, 32, 8, 1000, 128))  # fmt: skip
DECODE_PEERS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}


DECODE_PAGES = (64, 16)


def in_pages(x, page, order):
    """(batch, heads, keys, d) as (pages, page, heads, d): page i of the batch at order[i]."""
    b, heads, keys, d = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, -keys % page)).transpose(1, 2).reshape(-1, page, heads, d)
    pages = torch.empty_like(x)
    pages[order] = x
    return pages


def decode_seconds(call, kv):
    """A call's time, of as many in a row as there are copies of K and V, so that none is in a cache."""
    return seconds(lambda: [call(k, v) for k, v in kv]) / len(kv)


def decode_turns(mine, its, rounds):
    """Times of two (call, copies of K and V) in turns, after two of each to warm up."""
    pairs = [(decode_seconds(*mine), decode_seconds(*its)) for _ in range(rounds + 2)]
    return [list(times) for times in zip(*pairs[2:])]


def decode(table, arguments):
    """One query, K and V read; each peer beside ours in turns, the better one is the row's. Then ours in pages, with
    the page table and the lengths on the GPU, beside ours without."""
    if "bfloat16" not in arguments.types:
        return
    for b, h, h_kv, n, d in DECODE:
        read = 2 * b * h_kv * n * d * 2
        copies = max(2, 2**29 // read)
        q = torch.randn(b, h, 1, d, device="cuda", dtype=torch.bfloat16)
        kv = [tuple(torch.randn(b, h_kv, n, d, device="cuda", dtype=q.dtype) for _ in "kv") for _ in range(copies)]
        out = torch.empty_like(q)
        columns = dict(type="bfloat16", d=d, sequence=n)

        def ours(k, v, **tables):
            af.attention(q, k, v, out=out, **tables)

        best = None
        for peer, backend in DECODE_PEERS.items():

            def theirs(k, v):
                with sdpa_kernel(backend):
                    torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=h != h_kv)

            mine, others = decode_turns((ours, kv), (theirs, kv), arguments.rounds)
            if best is None or statistics.median(others) < statistics.median(best[2]):
                best = peer, mine, others
        peer, mine, others = best
        heads = f"batch {b}, {h} / {h_kv} heads, K and V read"
        table.rates(f"decode, {heads}", mine, others, read / 1e9, "GB/s", peer=peer, least=1.0, **columns)
        for page in DECODE_PAGES:
            order = torch.randperm(b * -(-n // page), device="cuda")
            tables = dict(page_table=order.reshape(b, -1).int(),
                          key_lengths=torch.full((b,), n, device="cuda", dtype=torch.int32))  # fmt: skip
            paged = [tuple(in_pages(x, page, order) for x in pair) for pair in kv]
            mine, others = decode_turns((lambda k, v: ours(k, v, **tables), paged), (ours, kv), arguments.rounds)
            table.rates(f"decode in pages of {page}, {heads}", mine, others, read / 1e9, "GB/s", peer="no pages",
                        least=0.95, **columns)  # fmt: skip


def beside_torch(table, arguments):
    for type_, (peer, backend, limits) in PEERS.items():
        if type_ not in arguments.types:
            continue
        for (b, h, s, d), causal in ((shape, causal) for shape in shapes(type_) for causal in (False, True)):
            q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=getattr(torch, type_)) for _ in range(3))
            directions = [("forward", forward_calls, 4), ("backward", backward_calls, 10)]
            for (direction, calls, operations), least in zip(directions, limits):
                mine, others = interleaved(calls(q, k, v, causal, backend), arguments.rounds)
                work = operations * b * h * s * s * d * (0.5 if causal else 1) / 1e12
                table.add(direction, work / statistics.median(mine), "TFLOP/s", type=type_, d=d, causal=causal,
                          sequence=s, spread=measure.spread(mine), peer=peer,
                          peer_figure=work / statistics.median(others), peer_spread=measure.spread(others),
                          ratio=measure.median_ratio(mine, others), least=least if s > 512 else None)  # fmt: skip
