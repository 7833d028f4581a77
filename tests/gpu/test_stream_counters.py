"""Calls hand counters on to the next call on their stream (Hopper's forward kernel of 16-bit types): results are the same
bits, whatever the calls before met, and no other thread, stream or graph comes between."""

import threading

import anyflash as af
import pytest
import torch

SHAPES = [  # (heads, queries, keys, d)
    (24, 1500, 1500, 128),  # more tasks than thread blocks
    (24, 1500, 1500, 64),
    (4, 700, 700, 128),
    (4, 700, 700, 64),
    (4, 256, 6000, 128),  # keys in parts
]
NAN_FROM_END = 40


class Call:
    """A causal call; `bad`: with a NaN that the last rows of the last head see."""

    def __init__(self, heads, queries, keys, d, dtype=torch.bfloat16, bad=False):
        generator = torch.Generator("cuda").manual_seed(d + keys)
        shapes = (1, heads, queries, d), (1, heads, keys, d), (1, heads, keys, d)
        self.q, self.k, self.v = (torch.randn(x, device="cuda", dtype=dtype, generator=generator) for x in shapes)
        if bad:
            self.v[0, -1, -NAN_FROM_END, 3] = torch.nan
        self.expected = self.make()
        wrong = torch.zeros_like(self.expected, dtype=torch.bool)
        wrong[0, -1, -NAN_FROM_END:, 3] = bad
        assert torch.equal(~self.expected.isfinite(), wrong)
        hidden = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(keys - queries + 1)
        scores = self.q.double() @ self.k.double().mT * d**-0.5
        wanted = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.v.double().nan_to_num()
        error = (self.expected - wanted).masked_fill(wrong, 0).norm(dim=-1)
        assert (error < 2e-2 * wanted.norm(dim=-1)).all()

    def make(self, out=None):
        return af.attention(self.q, self.k, self.v, rule=af.causal(), align="none_end", out=out)

    def check(self, out):
        torch.testing.assert_close(out, self.expected, rtol=0, atol=0, equal_nan=True)


class TooManyTiles(Call):
    """Masks are found on the GPU, and have more partial tiles than there is room for: the portable kernel makes all."""

    def __init__(self):
        generator = torch.Generator("cuda").manual_seed(0)
        randoms = (torch.randn(4200, h, 64, device="cuda", generator=generator).bfloat16() for h in (4, 2, 2))
        self.q, self.k, self.v = randoms
        self.cut = torch.tensor([0, 1500, 1501, 1501, 4200], dtype=torch.int32, device="cuda")
        self.expected = self.make()

    def make(self, out=None):
        options = dict(cu_seqlens_q=self.cut, cu_seqlens_k=self.cut, rule=~af.local(3000, log2_stride=3))
        return af.attention(self.q, self.k, self.v, layout="thd", out=out, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_calls_one_after_the_other(shape, dtype):
    calls = [Call(*shape, dtype), Call(*shape, dtype, bad=True), Call(8, 100, 9000, 128, dtype), TooManyTiles()]
    assert torch.equal(calls[0].expected[0, :-1], calls[1].expected[0, :-1]), "other heads keep their bits"
    order = [0, 1, 3, 0, 2, 1, 1, 3, 1, 0, 2, 0, 0, 1] * 3
    for at, out in [(i, calls[i].make()) for i in order]:
        calls[at].check(out)


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_on_one_stream(shape):
    calls = [Call(*shape, bad=True), Call(*shape, bad=True), Call(*shape), TooManyTiles()]
    torch.cuda.synchronize()
    stream, failed = torch.cuda.Stream(), []

    def work(call):
        try:
            with torch.cuda.stream(stream):
                outs = [call.make() for _ in range(30)]
            stream.synchronize()
            for out in outs:
                call.check(out)
        except BaseException as error:  # the test raises it
            failed.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_beside_calls_on_its_stream(shape):
    """The graph is replayed on another stream meanwhile."""
    calls = [Call(*shape, bad=bad) for bad in (False, True)]
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    captured = [(call, torch.empty_like(call.q)) for call in calls * 4]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call, out in captured:
            call.make(out)
    for _ in range(5):
        with torch.cuda.stream(other):
            for _, out in captured:
                out.fill_(7)
            graph.replay()
        with torch.cuda.stream(stream):
            live = [(call, call.make()) for call in calls * 8]
        torch.cuda.synchronize()
        for call, out in live + captured:
            call.check(out)


def test_calls_on_some_streams_at_once():
    call = Call(24, 1500, 1500, 64, bad=True)
    torch.cuda.synchronize()
    outs = []
    for stream in [torch.cuda.Stream() for _ in range(16)] * 2:
        with torch.cuda.stream(stream):
            outs += [call.make(), call.make()]
    torch.cuda.synchronize()
    for out in outs:
        call.check(out)
