"""A case: one call as plain numbers. It makes its tensors from a seed, lays them out as the library is to see them,
runs the library, and brings everything back to the canonical form of reference.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import anyflash as af
import numpy as np
from bar import compare, together
from devices import DEVICE, from_device, to_device
from memory import restride
from reference import TYPES, Call, Result, Textbook, attention, exact_for, statistic_type
from reference_rules import visible


@dataclass(frozen=True)
class Case:
    type: str = "float32"
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    q_shape: tuple = (5,)
    k_shape: tuple = (5,)
    d_qk: int = 8
    d_v: int = 8
    rule: tuple = ("full",)
    align: str = "none_front"
    layout: str = "bhsd"
    scale: float | None = None
    softcap: float = 0.0
    bias: tuple | None = None  # (type, four booleans: has the axis its full size?)
    alibi: tuple | None = None  # (type, by batch too?)
    sink: str | None = None  # its type
    key_lengths: tuple | None = None
    cu_q: tuple | None = None  # thd: cumulative lengths
    cu_k: tuple | None = None
    page_size: int = 0
    index_type: str = "int32"
    dlse: bool = True
    magnitude: float = 1.0
    wild: bool = False  # strides of all kinds
    poison: bool = False  # keys that nobody sees hold NaN
    threads: int = 0
    late: bool = False  # lengths, page tables and the tables of rules lie where the tensors do
    seed: int = 0

    def __post_init__(self):
        assert self.heads_kv == self.heads_q or self.heads_q % self.heads_kv == 0
        if self.layout == "thd":
            assert self.batch == 1 and self.cu_q and self.cu_k
        if self.layout == "qkv":  # (3, heads, length, channels)
            assert self.batch == 1 and self.heads_q == self.heads_kv
            assert self.q_shape == self.k_shape and self.d_qk == self.d_v

    @property
    def queries(self):
        return int(np.prod(self.q_shape))

    @property
    def keys(self):
        return int(np.prod(self.k_shape))

    @property
    def whole_rule(self):
        """With what the layout implies."""
        if self.layout != "thd":
            return self.rule
        return ("and", self.rule, ("documents_packed", np.array(self.cu_q), np.array(self.cu_k)))

    def but(self, **changes):
        return replace(self, **changes)

    @cached_property
    def pattern(self):
        return visible(
            self.whole_rule, self.q_shape, self.k_shape, self.align, self.batch, self.heads_q, self.key_lengths
        )

    @cached_property
    def tensors(self):
        """Canonical tensors by name, in their own types."""
        rng = np.random.default_rng(self.seed)

        def normal(*shape, type=self.type, by=self.magnitude):
            return (rng.standard_normal(shape) * by).astype(TYPES[type])

        b, h, n, m = self.batch, self.heads_q, self.queries, self.keys
        made = {
            "q": normal(b, h, n, self.d_qk),
            "k": normal(b, self.heads_kv, m, self.d_qk),
            "v": normal(b, self.heads_kv, m, self.d_v),
            "dout": normal(b, h, n, self.d_v, by=1.0),
        }
        if self.dlse:
            made["dlse"] = normal(b, h, n, type=statistic_type(self.type), by=1.0)
        if self.bias:
            type, axes = self.bias
            made["bias"] = normal(*(s if full else 1 for s, full in zip((b, h, n, m), axes)), type=type)
        if self.alibi:
            type, by_batch = self.alibi
            made["alibi_slopes"] = np.abs(normal(*((b, h) if by_batch else (h,)), type=type, by=0.3))
        if self.sink:
            made["sink"] = normal(h, type=self.sink)
        if self.poison:
            group = h // self.heads_kv if self.heads_kv else 1
            unseen = ~self.pattern[0].any(2).reshape(b, self.heads_kv, group, m).any(2)
            made["k"][unseen] = np.nan
            made["v"][unseen] = np.nan
        return made

    def call(self, tensors=None, backward=True):
        t = self.tensors if tensors is None else tensors
        mask, distance = self.pattern
        penalty = None
        if "alibi_slopes" in t:
            slopes = t["alibi_slopes"].astype(np.float64)
            with np.errstate(invalid="ignore"):  # an infinite slope at distance 0
                penalty = np.broadcast_to(slopes, (self.batch, self.heads_q))[..., None, None] * distance[:, None]
        scale = float(1 / np.sqrt(np.longdouble(self.d_qk))) if self.scale is None else self.scale
        return Call(
            t["q"],
            t["k"],
            t["v"],
            mask,
            scale,
            self.softcap,
            t.get("bias"),
            penalty,
            t.get("sink"),
            t["dout"] if backward else None,
            t.get("dlse"),
        )


def library_rule(rule, index_type="int32", place=lambda table: table):
    """The library's rule of a tuple, its tables brought to where they are to be."""
    name, *arguments = rule
    if name == "and":
        return library_rule(arguments[0], index_type, place) & library_rule(arguments[1], index_type, place)
    if name == "or":
        return library_rule(arguments[0], index_type, place) | library_rule(arguments[1], index_type, place)
    if name == "not":
        return ~library_rule(arguments[0], index_type, place)
    if name in ("documents", "documents_packed"):
        arguments = [np.asarray(a).astype(index_type) for a in arguments]
    return getattr(af, name)(*(place(a) if isinstance(a, np.ndarray) else a for a in arguments))


class Laid:
    """A case's tensors as the library sees them."""

    place = staticmethod(to_device)

    def __init__(self, case, tensors=None):
        self.case = case
        given = case.tensors if tensors is None else tensors
        rng = np.random.default_rng(case.seed + 1)
        self.rng = rng
        shape = (lambda a: restride(a, rng)) if case.wild else np.ascontiguousarray
        lay = lambda a: self.place(shape(a))
        self.lay, self.shape = lay, shape
        self.place_table = self.place if case.late else lambda a: a
        if case.layout == "qkv":
            packed = np.stack([given[name][0] for name in "qkv"])
            self.q, self.k, self.v = lay(packed), None, None
        else:
            self.q = lay(self.to_layout(given["q"], case.q_shape))
            self.k = lay(self.to_layout(given["k"], case.k_shape))
            self.v = lay(self.to_layout(given["v"], case.k_shape))
        self.dout = shape(self.to_layout(given["dout"], case.q_shape))
        self.dlse = lay(self.statistic_to_layout(given["dlse"])) if "dlse" in given else None
        self.options = self._options(given, lay)
        if case.page_size:
            self._lay_pages(given, lay, rng)

    def _options(self, given, lay):
        case = self.case
        options = dict(
            rule=library_rule(case.rule, case.index_type, self.place_table),
            align=case.align,
            layout=case.layout,
            scale=case.scale,
            softcap=case.softcap,
            threads=case.threads,
        )
        for name in ("bias", "alibi_slopes", "sink"):
            if name in given:
                options[name] = lay(given[name])
        for name, value in (
            ("cu_seqlens_q", case.cu_q),
            ("cu_seqlens_k", case.cu_k),
            ("key_lengths", case.key_lengths),
        ):
            if value is not None:
                options[name] = self.place_table(self.shape(np.array(value, case.index_type)))
        return options

    def _lay_pages(self, given, lay, rng):
        """Scatters keys and values over pages in random order; unused pages, and rows beyond a length, hold NaN."""
        case = self.case
        count = case.keys // case.page_size
        table = rng.permutation(case.batch * count + 2)[: case.batch * count].reshape(case.batch, count)

        def scatter(a):
            b, h, m, d = a.shape
            pool = np.full((b * count + 2, case.page_size, h, d), np.nan, a.dtype)
            for entry in range(b):
                rows = np.array(a[entry].swapaxes(0, 1))
                if case.key_lengths is not None:
                    rows[case.key_lengths[entry] :] = np.nan
                pool[table[entry]] = rows.reshape(count, case.page_size, h, d)
            return lay(pool)

        self.k, self.v = scatter(given["k"]), scatter(given["v"])
        self.options["page_table"] = self.place_table(self.shape(table.astype(np.int32)))

    def to_layout(self, a, shape):
        """Canonical (b, h, s, d) as the layout has it."""
        layout = self.case.layout
        b, h, _, d = a.shape
        a = a.reshape((b, h, *shape, d))
        if layout == "bshd":
            return np.moveaxis(a, 1, -2)
        if layout == "bhds":
            return np.moveaxis(a, -1, 2)
        if layout == "thd":
            return a[0].swapaxes(0, 1)
        return a[0] if layout == "qkv" else a

    def from_layout(self, a):
        layout = self.case.layout
        if layout == "bshd":
            a = np.moveaxis(a, -2, 1)
        elif layout == "bhds":
            a = np.moveaxis(a, 2, -1)
        elif layout == "thd":
            a = a.swapaxes(0, 1)[None]
        elif layout == "qkv":
            a = a[None]
        return a.reshape(a.shape[:2] + (int(np.prod(a.shape[2:-1])), a.shape[-1]))

    def statistic_to_layout(self, a):
        return a[0] if self.case.layout in ("thd", "qkv") else a

    def statistic_from_layout(self, a):
        return a[None] if self.case.layout in ("thd", "qkv") else a

    def forward(self, **changes):
        """Raw (out, lse, l, m) of the library; out and lse of one call, l and m of another, which must give the same
        out."""
        options = self.options | changes
        out, lse = map(from_device, af.attention(self.q, self.k, self.v, return_lse=True, **options))
        again, l, m = map(from_device, af.attention(self.q, self.k, self.v, return_lse="lm", **options))
        assert same_bits(out, again)
        return out, lse, l, m

    def backward(self, out, lse, **changes):
        options = self.options | changes
        lay = self.lay
        gradients = af.attention_backward(
            lay(self.dout), self.q, self.k, self.v, lay(out), lay(lse), dlse=self.dlse, **options
        )
        return type(gradients)(*map(from_device, gradients))

    def run(self, backward=True, **changes):
        """Everything the library computes, in canonical form."""
        out, lse, l, m = self.forward(**changes)
        got = Result(self.from_layout(out), *(self.statistic_from_layout(a) for a in (lse, l, m)))
        if not backward or self.case.page_size:
            return got
        gradients = self.backward(out, lse, **changes)
        if self.case.layout == "qkv":
            assert gradients.dk is None and gradients.dv is None
            got.dq, got.dk, got.dv = (a[None] for a in gradients.dq)
        else:
            got.dq, got.dk, got.dv = (self.from_layout(a) for a in gradients[:3])
        got.dbias, got.dsink = gradients.dbias, gradients.dsink
        assert (got.dbias is None) == (self.case.bias is None)
        assert (got.dsink is None) == (self.case.sink is None)
        return got


def run(case, tensors=None, backward=True, **changes):
    return Laid(case, tensors).run(backward, **changes)


def run_for_bits(case, tensors=None, backward=True, **changes):
    """The same, if bits are to be compared: some gradients are repeatable on GPUs only if asked to be."""
    return run(case, tensors, backward, **{"deterministic": True, **changes})


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def rounds_otherwise(case):
    """On Hopper GPUs some 16-bit calls, and query blocks of others in which a number is not finite, are the portable
    kernels', which round otherwise."""
    return DEVICE == "cuda" and case.type in ("float16", "bfloat16")


def result_type(case, name):
    """The element type of a result; where it is wider than what it is computed in, the latter."""
    if name in ("lse", "l", "m"):
        return statistic_type(case.type)
    given = {"dbias": case.bias and case.bias[0], "dsink": case.sink}.get(name, case.type)
    return statistic_type(case.type) if given == "float64" else given


def textbook(case, call, fused):
    """The textbook's results, bias and sink gradients in the types of what they belong to."""
    result = attention(call, Textbook(case.type, fused))
    for name, type in (("dbias", case.bias and case.bias[0]), ("dsink", case.sink)):
        value = getattr(result, name)
        if value is not None:
            setattr(result, name, value.astype(TYPES[type]))
    return result


@np.errstate(all="ignore")
def sizes_of_dsink(call, truth):
    """What the terms of dsink add up to without their signs: it goes by exp of the logit, and by the rows that have the
    fewest keys beside it."""
    terms = np.abs(call.dout.astype(truth.out.dtype) * truth.out).sum(-1)
    if call.dlse is not None:
        terms += np.abs(call.dlse)
    share = np.exp(call.sink.astype(truth.lse.dtype)[:, None] - truth.lse)
    sizes = np.where(truth.lse == -np.inf, 0, share * terms).sum((0, 2))
    return np.where(np.isfinite(sizes) & (sizes > 0), sizes, 1)


def measure(case, tensors=None, backward=True, fused=(False,), relative=False, **changes):
    """Runs a case: the errors of every result by its name. relative: those of dsink to its sizes."""
    backward = backward and not case.page_size
    got = run(case, tensors, backward, **changes)
    call = case.call(tensors, backward)
    truth = attention(call, exact_for(case.type))
    textbooks = [textbook(case, call, f) for f in fused]
    measured = {}
    for name, value in got.items():
        stored = {"dbias": case.bias and case.bias[0], "dsink": case.sink}.get(name, result_type(case, name))
        assert value.dtype == TYPES[stored], f"{name}: {value.dtype}"
        parts = [getattr(t, name) for t in textbooks]
        sizes = sizes_of_dsink(call, truth) if relative and name == "dsink" else None
        rough = DEVICE == "cuda" and case.type == "bfloat16" and name in ("lse", "l", "m")
        measured[name] = compare(
            name, value, getattr(truth, name), parts, result_type(case, name), sizes, 0.35 if rough else 0.1
        )
    return measured


def more_draws(case):
    """8 to 32; a large case, which takes long (in longdouble, for float64, most of all), has many numbers in each."""
    terms = case.batch * case.heads_q * np.prod(case.q_shape) * np.prod(case.k_shape) * (case.d_qk + case.d_v)
    return int(np.clip((2.5e8 if case.type != "float64" else 5e7) / max(terms, 1), 8, 32))


def misses(measured):
    return {name: f"{name}: {miss}" for name, one in measured.items() if (miss := one.miss())}


def check(case, tensors=None, backward=True, **changes):
    """Runs a case and holds every result against the bar.

    Where the textbook is lucky, its doubled error says little. So a miss is decided over more draws of the same call,
    this one among them, and over both kinds of textbook; a miss of those, too, over four times as many.
    """
    missed = misses(measure(case, tensors, backward, **changes))
    if not missed:
        return
    assert tensors is None, missed
    count = more_draws(case)
    draws = []
    for wanted in (count, 4 * count):
        seeds = range(case.seed + len(draws), case.seed + wanted)
        draws += [measure(case.but(seed=seed), None, backward, (False, True), True, **changes) for seed in seeds]
        missed = misses({name: together([draw[name] for draw in draws]) for name in missed})
        if not missed:
            return
    raise AssertionError(f"over {len(draws)} draws: " + "; ".join(missed.values()))
