"""What bench/compare --device cuda measures: anyflash beside PyTorch's own kernels on one NVIDIA GPU. The rows of masks
are in gpu_masks.py.

16k tokens over the batch, 2048 channels over the heads; of float32 and float64 4 x 16 heads of 4096 tokens. TFLOP/s are
those of useful operations: 4 d for each visible pair forward, 10 d backward. Times are those of the GPU's events, each
call beside its peer's in turns; that both give the same is looked at first.
"""

import functools
import itertools
import json
import statistics
import subprocess

import anyflash as af
import gpu_peers
import measure
import torch
from gpu_peers import by_backend
from torch.nn.attention import SDPBackend

# What anyflash is held to beside the fastest peer of a type (gpu_peers.py), forward and backward.
LEAST = {"bfloat16": (1, 1), "float16": (1, 1), "float32": (2, 2), "float64": (2.5, 1.3)}
PRODUCT = 8192  # rows and columns of the matrices whose product dense rows are compared with
OPERATIONS = {"forward": 4, "backward": 10}  # for each visible pair and channel
# How far two results of a type may differ, relative to the largest number: TF32 may be in PyTorch's float32.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 3e-3, torch.float64: 1e-9}
TF32_TOLERANCE = 1e-2  # operands have float16's 11 bits


def name():
    cudnn = torch.backends.cudnn.version() or 0  # 91002: 9.10.2
    return (
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, "
        f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}{gpu_peers.versions()}"
    )


def seconds(call, idle=False, count=1):
    """Of `call`, which makes so many calls. The GPU is still busy when they are asked for, as in a model, so what the
    host does meanwhile is not in it; idle: the GPU waits for the host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if not idle:
        torch.cuda._sleep(1_000_000 * count)  # cycles: about half a millisecond for each
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(calls, rounds, idle=False):
    """For each call its seconds, one a round; after two rounds in which plans are made and memory is taken."""
    for call in calls * 2:
        call()
    torch.cuda.synchronize()
    times = [[seconds(call, idle) for call in calls] for _ in range(rounds)]
    return [list(of_call) for of_call in zip(*times)]


def random(*shape, type_="bfloat16"):
    return torch.randn(*shape, device="cuda", dtype=getattr(torch, type_))


def check(what, ours, theirs, tolerance=None):
    """Ends the run if a call's results, a tensor or dq, dk, dv and others, are not a peer's, within the type's
    tolerance if none is given."""
    ours, theirs = ([x] if isinstance(x, torch.Tensor) else x for x in (ours, theirs))
    for tensor, mine, its in zip(("out",) if len(ours) == 1 else ("dq", "dk", "dv"), ours, theirs):
        its = its.reshape(mine.shape).double()
        difference = ((mine - its).abs().max() / its.abs().max()).item()
        allowed = tolerance or TOLERANCES[mine.dtype]
        if not difference <= allowed:
            raise SystemExit(
                f"bench/compare: {what}, {tensor}: differs from the peer's by {difference:.1e} of its "
                f"largest, expected at most {allowed:.0e}"
            )


def add_rates(
    table, what, direction, calls, work, arguments, *, same=True, tolerance=None, idle=False, rounds=None, **columns
):
    """A row of useful TFLOP/s. work: visible pairs times channels; same: both calls have the same results, within
    `tolerance` as check() takes it."""
    if same:
        check(f"{direction} {what}, {columns}", *(call() for call in calls), tolerance)
    mine, theirs = interleaved(calls, rounds or arguments.rounds, idle)
    table.rates(
        f"{direction}{', ' * bool(what)}{what}", mine, theirs, OPERATIONS[direction] * work / 1e12, "TFLOP/s", **columns
    )


def our_call(direction, q, k, v, dout, **options):
    if direction == "forward":
        out = torch.empty_like(q)
        return lambda: af.attention(q, k, v, out=out, **options)
    out, lse = af.attention(q, k, v, return_lse=True, **options)
    return lambda: af.attention_backward(dout, q, k, v, out, lse, **options)


def peer_call(direction, q, k, v, dout, function):
    """function(q, k, v): a peer's forward pass. Backward is the gradients alone."""
    if direction == "forward":
        return lambda: function(q, k, v)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    result = function(*inputs)
    return lambda: torch.autograd.grad(result, inputs, dout, retain_graph=True)


def shapes(type_):
    """(batch, heads, sequence, d)"""
    if type_ in ("float32", "float64"):
        return [(4, 16, 4096, 64), (4, 16, 4096, 128)]
    return [(16384 // s, 2048 // d, s, d) for d in (64, 128, 256) for s in (512, 2048, 8192, 16384)]


# (what, shape of q, shape of k and v), (batch, sequence, heads, d)
ODD = (
    ("32 / 8 heads", (1, 8192, 32, 128), (1, 8192, 8, 128)),
    ("4001 tokens", (4, 4001, 16, 128), (4, 4001, 16, 128)),
    ("1024 queries", (4, 1024, 16, 128), (4, 16384, 16, 128)),
)


def product_rate(table, type_, rounds):
    """TFLOP/s of PyTorch's product of two large matrices, the most that attention can reach; a row of its own."""
    a, b = (random(PRODUCT, PRODUCT, type_=type_) for _ in range(2))
    (times,) = interleaved([lambda: a @ b], rounds)
    rate = 2 * PRODUCT**3 / 1e12 / statistics.median(times)
    size = " x ".join([str(PRODUCT)] * 3)
    table.add(f"torch.mm, {size}", rate, "TFLOP/s", type=type_, d=0, spread=measure.spread(times))
    return rate


def peer_calls(direction, tensors, functions):
    """{name: call} of those peers that take these tensors. functions: {name: function of q, k, v}."""
    found, (q, *_) = {}, tensors
    for peer, function in functions.items():
        try:
            call = peer_call(direction, *tensors, function)
            call()
            found[peer] = call
        except Exception as error:  # of any package, which may not have this head size
            print(f"bench/compare: no {peer}, {direction}, {q.dtype}, d {q.shape[-1]}: {error!r:.100}")
    return found


def beside_all(table, what, direction, ours, theirs, work, arguments, **columns):
    """As add_rates, beside every one of {name: call}, all in turns. The fastest is the row's peer, `peers` has the
    figures of all."""
    if not theirs:
        return
    for peer, call in theirs.items():
        check(f"{direction} {what}, {columns}, {peer}", ours(), call())
    mine, *others = interleaved(
        [ours, *theirs.values()], min(arguments.rounds, columns.pop("rounds", arguments.rounds))
    )
    times, amount = dict(zip(theirs, others)), OPERATIONS[direction] * work / 1e12
    best = min(times, key=lambda peer: statistics.median(times[peer]))
    table.rates(
        f"{direction}{', ' * bool(what)}{what}",
        mine,
        times[best],
        amount,
        "TFLOP/s",
        peer=best,
        peers={peer: amount / statistics.median(of_peer) for peer, of_peer in times.items()},
        **columns,
    )


def dense(table, arguments):
    """Full and causal calls, (batch, sequence, heads, d) in memory, beside every peer that can be imported."""
    for type_, limits in LEAST.items():
        if type_ not in arguments.types:
            continue
        product = product_rate(table, type_, arguments.rounds)
        for (b, h, s, d), causal in ((shape, causal) for shape in shapes(type_) for causal in (False, True)):
            tensors = [random(b, s, h, d, type_=type_).transpose(1, 2) for _ in range(4)]
            columns = dict(type=type_, d=d, causal=causal, sequence=s, product=product)
            beside_dense_peers(table, "", tensors, limits, arguments, columns)
        if type_ == "bfloat16":
            for (what, shape, kv_shape), causal in itertools.product(ODD, (False, True)):
                q, k, v, dout = (random(*x).transpose(1, 2) for x in (shape, kv_shape, kv_shape, shape))
                columns = dict(type=type_, d=shape[3], causal=causal, sequence=kv_shape[1], product=product)
                if not (causal and shape[1] != kv_shape[1]):
                    beside_dense_peers(table, what, (q, k, v, dout), limits, arguments, columns)


def beside_dense_peers(table, what, tensors, limits, arguments, columns):
    (b, h, s, d), causal = tensors[0].shape, columns["causal"]
    for direction, least in zip(OPERATIONS, limits):
        ours = our_call(direction, *tensors, rule=af.causal() if causal else af.full())
        theirs = peer_calls(direction, tensors, gpu_peers.functions(columns["type"], direction, causal))
        work = b * h * s * columns["sequence"] * d / (2 if causal else 1)
        beside_all(table, what, direction, ours, theirs, work, arguments, least=least, **columns)


def tf32(table, arguments):
    """float32 where TF32 is allowed, beside FlexAttention with TF32, compiled for each mask; no row where PyTorch finds
    no kernel that fits the GPU."""
    if "float32" not in arguments.types:
        return
    import gpu_masks

    torch.set_float32_matmul_precision("high")
    for b, h, s, d in shapes("float32"):
        tensors = [random(b, h, s, d, type_="float32") for _ in range(4)]
        for causal in (False, True):
            theirs = gpu_masks.peers(lambda b, h, i, j: i >= j if causal else i >= 0, s)["FlexAttention"]
            for direction in OPERATIONS:
                try:
                    peers = peer_call(direction, *tensors, theirs)
                    peers()
                except Exception as error:  # of PyTorch's compiler, which has many
                    print(f"bench/compare: FlexAttention, TF32, {direction}, d {d}: {error!r:.100}")
                    continue
                ours = our_call(direction, *tensors, rule=af.causal() if causal else af.full(), allow_tf32=True)
                work = b * h * s * s * d / (2 if causal else 1)
                add_rates(
                    table,
                    "TF32 allowed",
                    direction,
                    [ours, peers],
                    work,
                    arguments,
                    tolerance=TF32_TOLERANCE,
                    type="float32",
                    d=d,
                    causal=causal,
                    sequence=s,
                    peer="torch Flex, TF32",
                )
    torch.set_float32_matmul_precision("highest")


# (batch, query heads, key heads, keys, d), bfloat16
DECODE = (
    (1, 32, 8, 131072, 128),
    (16, 32, 8, 8192, 128),
    (64, 32, 8, 4096, 128),
    (16, 32, 1, 8192, 128),
    (16, 16, 16, 8192, 64),
    (64, 8, 1, 4096, 256),
    (1, 64, 8, 16384, 128),
    (256, 32, 8, 1024, 128),
    (8, 32, 8, 1000, 128),
    (4, 32, 8, 2048, 128),
    (1, 32, 8, 4096, 128),
)
PAGES = (16, 64)  # keys
SMALL = 64e6  # bytes of K and V: below it nearly a third more than the peer's speed is wanted


def decode_seconds(call, kv):
    """A call's time, of as many in a row as there are copies of K and V, so that none is in a cache."""
    return seconds(lambda: [call(*one) for one in kv], count=len(kv)) / len(kv)


def in_turns(calls, kvs, rounds):
    times = [[decode_seconds(call, kv) for call, kv in zip(calls, kvs)] for _ in range(rounds + 2)]
    return [list(of_call) for of_call in zip(*times[2:])]


def beside_readers(table, what, ours, functions, q, kv, read, arguments, **columns):
    """A row of GB/s of K and V. Each of {name: function of q, k, v} is beside ours in turns; the best one is the row's."""
    timed = {}
    for peer, function in functions.items():
        theirs = functools.partial(function, q)
        try:
            result = theirs(*kv[0])
        except Exception as error:  # of a package or a compiler, which may not have this mask
            print(f"bench/compare: no {peer}, {what}: {error!r:.100}")
            continue
        check(f"{what}, {peer}", ours(*kv[0]), result)
        timed[peer] = in_turns([ours, theirs], [kv, kv], arguments.rounds)
    if not timed:
        return
    peer = min(timed, key=lambda name: statistics.median(timed[name][1]))
    table.rates(what, *timed[peer], read / 1e9, "GB/s", peer=peer, **columns)


def decode(table, arguments):
    """One query, K and V read; each peer beside ours in turns, the better one is the row's."""
    if "bfloat16" not in arguments.types:
        return
    for b, h, h_kv, n, d in DECODE:
        read = 2 * b * h_kv * n * d * 2
        q = random(b, h, 1, d)
        kv = [(random(b, h_kv, n, d), random(b, h_kv, n, d)) for _ in range(max(2, 2**29 // read))]
        ours = functools.partial(af.attention, q, out=torch.empty_like(q))
        what = f"decode, batch {b}, {h} / {h_kv} heads, K and V read"
        columns = dict(type="bfloat16", d=d, sequence=n, least=1.3 if read < SMALL else 1.0)
        beside_readers(table, what, ours, gpu_peers.decode_functions(), q, kv, read, arguments, **columns)
    for (b, h, h_kv, n, d), page in ((shape, page) for shape in DECODE for page in PAGES):
        read = 2 * b * h_kv * n * d * 2
        q, lengths = random(b, h, 1, d), torch.full((b,), n, device="cuda", dtype=torch.int32)
        copies, count = max(2, 2**29 // read), b * -(-n // page)
        plain = [(random(b, h_kv, n, d), random(b, h_kv, n, d)) for _ in range(copies)]
        pages = [
            (
                random(count, page, h_kv, d),
                random(count, page, h_kv, d),
                torch.randperm(count, device="cuda", dtype=torch.int32).view(b, -1),
            )
            for _ in range(copies)
        ]
        ours = functools.partial(af.attention, q, out=torch.empty_like(q))
        paged = lambda k, v, table: ours(k, v, page_table=table, key_lengths=lengths)
        in_a_row = [x[pages[0][2]].flatten(1, 2)[:, :n].movedim(2, 1) for x in pages[0][:2]]
        check(f"decode, pages of {page}, {b, h, h_kv, n, d}", paged(*pages[0]).clone(), ours(*in_a_row))
        table.rates(
            f"decode, pages of {page}, batch {b}, {h} / {h_kv} heads, K and V read",
            *in_turns([paged, ours], [pages, plain], arguments.rounds),
            read / 1e9,
            "GB/s",
            type="bfloat16",
            d=d,
            sequence=n,
            peer="without pages",
            least=0.97,
        )


# Of a sequence: what a draft model proposes, or the end of a prompt.
QUERIES = (4, 16, 64)


def tree(queries, keys):
    """(queries, keys): what the nodes of a binary tree of tokens see: all keys before the tree, themselves, and the
    nodes above them."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    seen[:, : keys - queries] = True
    for node in range(queries):
        above = node
        while above >= 0:
            seen[node, keys - queries + above] = True
            above = (above - 1) // 2
    return seen


FEW = (32, 8, 8192, 128)  # query heads, key heads, keys, d


def few_call(b, queries, seen):
    """A function of K and V, which have FEW's sizes; seen: a tree, or None for queries in order. Also q."""
    h, h_kv, n, d = FEW
    q, kv = random(b, h, queries, d), [random(b, h_kv, n, d)] * 2
    options = dict(rule=af.causal() if seen is None else af.dense(seen.numpy()), align="none_end")
    plan = af.plan(q, *kv, **options)
    return q, functools.partial(af.attention, q, out=torch.empty_like(q), plan=plan, **options)


def few(table, arguments):
    """A few queries of each sequence at the end of its keys, in order or as a tree (speculative decoding)."""
    if "bfloat16" not in arguments.types:
        return
    h, h_kv, n, d = FEW
    for b, queries, causal in itertools.product((1, 8), QUERIES, (True, False)):
        read, seen = 2 * b * h_kv * n * d * 2, None if causal else tree(queries, n)
        q, ours = few_call(b, queries, seen)
        kv = [(random(b, h_kv, n, d), random(b, h_kv, n, d)) for _ in range(max(2, 2**29 // read))]
        what = f"{queries} queries, {'causal' if causal else 'a tree'}, batch {b}, {h} / {h_kv} heads, K and V read"
        functions = gpu_peers.few_query_functions(None if causal else seen.cuda(), queries, n)
        columns = dict(type="bfloat16", d=d, causal=causal, sequence=n, least=1.0)
        beside_readers(table, what, ours, functions, q, kv, read, arguments, **columns)


PACKED = 16, 128  # heads, channels
LENGTHS = (1024, 4096, 2048, 3072, 1536, 2560, 3584, 1792, 4096, 2304, 3200, 3456)  # of packed documents


def packed_case():
    """q, k, v and dout, and the documents' ends."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return [random(int(ends[-1]), *PACKED) for _ in range(4)], ends


def packed_call(direction, tensors, ends, causal):
    rule = af.causal() if causal else af.full()
    return our_call(direction, *tensors, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, rule=rule)


def packed(table, arguments):
    """32k tokens in documents of 1k to 4k, 16 heads; beside peers for packed sequences, whose lengths are on the GPU:
    ours are on the CPU, then on the GPU too."""
    (h, d), (tensors, cu) = PACKED, packed_case()
    on_gpu = cu.cuda()
    for causal in (False, True):
        work = h * d * sum(n * n for n in LENGTHS) / (2 if causal else 1)
        columns = dict(type="bfloat16", d=d, causal=causal, sequence=int(cu[-1]), least=1)
        for direction in OPERATIONS:
            functions = gpu_peers.packed_functions(direction, on_gpu, max(LENGTHS), causal)
            theirs = peer_calls(direction, tensors, functions)
            for where, ends in (("", cu.numpy()), (", lengths on the GPU", on_gpu)):
                ours = packed_call(direction, tensors, ends, causal)
                what = f"documents of 1k to 4k, packed{where}"
                beside_all(table, what, direction, ours, theirs, work, arguments, **columns)


def bias(table, arguments):
    """A bias, whose gradient is made too, and a mask of any pairs: 1 x 16 heads of 4096 tokens, all pairs counted.
    cuDNN, the peer, makes no gradient of a bias."""
    h, n, d = 16, 4096, 128
    tensors = [random(1, h, n, d) for _ in range(4)]
    columns = dict(type="bfloat16", d=d, sequence=n, peer="torch cuDNN", least=0.9)
    for what, heads in (("a bias of each head", h), ("a bias of all heads", 1)):
        values = random(1, heads, n, n)
        theirs = by_backend(SDPBackend.CUDNN_ATTENTION, attn_mask=values)
        for direction in OPERATIONS:
            calls = [our_call(direction, *tensors, bias=values), peer_call(direction, *tensors, theirs)]
            add_rates(table, what, direction, calls, h * n * n * d, arguments, **columns)
    mask = torch.rand(n, n) < 0.5
    rule = af.dense(mask.numpy())
    plan = af.plan(*tensors[:3], rule=rule)
    theirs = by_backend(SDPBackend.CUDNN_ATTENTION, attn_mask=mask.cuda()[None, None])
    for direction in OPERATIONS:
        calls = [our_call(direction, *tensors, rule=rule, plan=plan), peer_call(direction, *tensors, theirs)]
        add_rates(table, "a mask of half the pairs", direction, calls, h * n * n * d, arguments, **columns)


def calls(table, arguments):
    """What the host does for a call on tiny input, while the GPU has enough to do: from C++ and from Python."""
    columns = dict(type="float32", d=16, causal=True, sequence=8)
    done = subprocess.run([arguments.gpu_calls], capture_output=True, text=True, check=True)
    for what, times in json.loads(done.stdout).items():
        name = "launch of an empty kernel" if what == "launch" else f"tiny {what} from C++"
        table.add(
            f"{name}, host side",
            statistics.median(times) * 1e6,
            "us",
            spread=measure.spread(times),
            most=8 if what == "forward" else None,
            **columns,
        )
    q = random(1, 1, 8, 16, type_="float32")
    out, rule, loops = torch.empty_like(q), af.causal(), 200

    def many():
        for _ in range(loops):
            af.attention(q, q, q, rule=rule, out=out)

    times = []
    for _ in range(9):
        times.append(measure.once(many) / loops)
        torch.cuda.synchronize()
    table.add(
        "tiny forward from Python, host side",
        statistics.median(times[2:]) * 1e6,
        "us",
        spread=measure.spread(times[2:]),
        **columns,
    )


def long(table, arguments):
    """A million tokens, one head; the memory that a call takes beside its tensors."""
    n, d = 2**20, 128
    tensors = [random(1, 1, n, d) for _ in range(4)]
    plan = af.plan(*tensors[:3], rule=af.causal())
    columns = dict(type="bfloat16", d=d, causal=True, sequence=n)
    for direction in OPERATIONS:
        ours = our_call(direction, *tensors, rule=af.causal())
        theirs = peer_calls(direction, tensors, gpu_peers.functions("bfloat16", direction, True))
        what, work = "a million tokens", n * n * d / 2
        beside_all(table, what, direction, ours, theirs, work, arguments, rounds=3, least=1, **columns)
        table.add(
            f"{direction}, a million tokens, memory beside tensors",
            getattr(plan, f"{direction}_workspace") / 1e6,
            "MB",
            **columns,
        )


def masks(table, arguments):
    import gpu_masks

    gpu_masks.masks(table, arguments)


# In the order of the table.
PARTS = {
    "calls": calls,
    "torch": dense,
    "tf32": tf32,
    "decode": decode,
    "few": few,
    "masks": masks,
    "packed": packed,
    "bias": bias,
    "long": long,
}
