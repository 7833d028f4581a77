"""One case to time: its inputs, anyflash's calls on them, and, in a subclass, a peer's beside them."""

import itertools
import math

import anyflash as af
import measure
import numpy as np

# What results may differ by, relative to the largest: a few units in the last place of the type, as both sides round.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DIRECTIONS = ("forward", "backward")
TRIALS = 3  # of each of a peer's paths, of which the fastest is taken
# A path is not tried again if its first call took so many times another's, and so many seconds.
FAR_SLOWER, LONG = 3, 0.3


class Case:
    """queries, keys: sizes of the sequence, of one to three dimensions; keys as queries if not given. copies: how many
    of k and v there are; forward calls take them in turn, as the layers of a model do."""

    def __init__(
        self,
        *,
        type="float32",
        batch=1,
        heads=4,
        kv_heads=None,
        queries=(2048,),
        keys=None,
        d=64,
        d_v=None,
        rule=None,
        causal=False,
        threads=1,
        copies=1,
    ):
        self.type, self.d, self.d_v, self.causal, self.threads = type, d, d_v or d, causal, threads
        self.rule = rule if rule is not None else af.causal() if causal else af.full()
        self.queries, self.keys = queries, keys or queries
        self.heads, self.kv_heads = batch * heads, batch * (kv_heads or heads)
        of_queries, of_keys = (batch, heads, *self.queries), (batch, kv_heads or heads, *self.keys)
        q, k, v, dout = (
            self.random(seed, shape)
            for seed, shape in enumerate(
                ((*of_queries, d), (*of_keys, d), (*of_keys, self.d_v), (*of_queries, self.d_v))
            )
        )
        self.q, self.dout = self.array(q), self.array(dout)
        self.kv = [(self.array(k), self.array(v)) for _ in range(copies)]

    def random(self, seed, shape):
        return np.random.default_rng(seed).standard_normal(shape, np.float64 if self.type == "float64" else np.float32)

    def array(self, numbers):
        """A new array of the case's type."""
        return numbers.astype(self.type)

    def numbers(self, array):
        """Of a result, in float64."""
        return np.asarray(array, np.float64)

    def explained(self, what):
        return af.explain(self.rule, self.queries, self.keys, d_qk=self.d, d_v=self.d_v, backward=what == "backward")

    def flops(self, what):
        explained = self.explained(what)
        return self.heads * (explained.forward_flops if what == "forward" else explained.backward_flops)

    def kv_bytes(self):
        return self.kv_heads * math.prod(self.keys) * (self.d + self.d_v) * BYTES[self.type]

    def bytes(self, what):
        """Of what a call must read and write: q, k, v, out, lse; backward dout and the gradients too."""
        queries = self.heads * math.prod(self.queries)
        tensors = queries * (self.d + self.d_v) * BYTES[self.type] + self.kv_bytes()
        return tensors * (1 if what == "forward" else 2) + queries * (8 if self.type == "float64" else 4)

    def columns(self, what):
        """What a row of bench/compare says about the case."""
        return dict(
            type=self.type,
            d=self.d,
            causal=self.causal,
            sequence=math.prod(self.keys),
            threads=self.threads,
            intensity=self.flops(what) / self.bytes(what),
        )

    def in_turn(self, first):
        return itertools.cycle(self.kv[first:] + self.kv[:first])

    def call(self, what, *, reuse=False):
        """anyflash's call, without arguments. reuse: forward writes where the last call wrote: no new pages."""
        options = dict(rule=self.rule, threads=self.threads)
        turn = self.in_turn(0)
        if what == "forward":
            out = af.attention(self.q, *self.kv[0], **options) if reuse else None
            return lambda: af.attention(self.q, *next(turn), out=out, **options)
        k, v = self.kv[0]
        out, lse = af.attention(self.q, k, v, return_lse=True, **options)
        return lambda: af.attention_backward(self.dout, self.q, k, v, out, lse, **options)

    def peer_calls(self, what):
        """{name of a peer's path: its call}; forward calls return out, backward calls dq, dk and dv."""
        raise NotImplementedError

    def beside(self, what, paths=None):
        """(anyflash's call, the peer's fastest, its name). Results are compared first; the peer's paths (those named,
        or all) are then timed a few times in turns: one time alone may be one that something else disturbed, unless it
        is long and far from the other's. The first call is not timed: threads start in it."""
        ours = self.call(what)
        theirs = {name: call for name, call in self.peer_calls(what).items() if paths is None or name in paths}
        expected = ours()
        for name, call in theirs.items():
            self.compare(what, expected, call(), name)
        if len(theirs) > 1:
            second = {name: measure.once(call) for name, call in theirs.items()}
            most = max(LONG, FAR_SLOWER * min(second.values()))
            theirs = {name: call for name, call in theirs.items() if second[name] < most}
        seconds = dict(zip(theirs, measure.interleaved(theirs.values(), TRIALS))) if len(theirs) > 1 else {}
        name = min(theirs, key=lambda name: min(seconds.get(name, (0,))))
        return ours, theirs[name], name

    def compare(self, what, ours, theirs, name):
        pairs = {"out": (ours, theirs)} if what == "forward" else dict(zip(("dq", "dk", "dv"), zip(ours, theirs)))
        for tensor, (mine, its) in pairs.items():
            mine, its = self.numbers(mine), self.numbers(its)
            for whose, numbers in (("anyflash's", mine), (f"{name}'s", its)):
                if not np.isfinite(numbers).all():
                    raise SystemExit(
                        f"bench/compare: {tensor} of {self.type} {tuple(self.q.shape)}, causal "
                        f"{self.causal}: {whose} is not finite"
                    )
            difference = np.abs(mine - its).max() / np.abs(its).max()
            if not difference <= TOLERANCE[self.type]:
                raise SystemExit(
                    f"bench/compare: {tensor} of {self.type} {tuple(self.q.shape)}, causal {self.causal}: "
                    f"differs from {name} by {difference:.1e} of its largest, expected at most "
                    f"{TOLERANCE[self.type]:.0e}"
                )
