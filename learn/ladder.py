"""The rungs of learn/: found, called, checked against float64 and timed. Used by learn/climb and by the tests."""

import ctypes
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
# A rung's axis by its name: what it is compared with is the rung before on the same axis.
AXES = {
    "peak|matmul": "matmul",
    "softmax": "softmax",
    "backward": "backward",
    "words|boxes": "masks",
    "attention|flash|blocks|simd|packed|threads|tensor|ldmatrix|copies|cute|wgmma|producer|overlap": "attention",
}
POINTER = ctypes.POINTER(ctypes.c_float)  # or to float16, of which ctypes has none


class Matmul(ctypes.Structure):
    """As in rung.h."""

    _fields_ = [*((name, ctypes.c_int) for name in ("rows", "columns", "depth")), *((x, POINTER) for x in "abc")]


class Softmax(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_int), ("columns", ctypes.c_int), ("x", POINTER), ("y", POINTER)]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("heads", "queries", "keys", "d", "causal", "window", "width")),
        *((name, POINTER) for name in ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")),
    ]


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


class Memory:
    """Where the arrays of a call are. For a CPU, and for the GPU's emulator: where NumPy has them. cuda.py has a GPU's."""

    def pointer(self, array):
        return array.ctypes.data

    def fetch(self):
        """Brings the arrays back after a call."""

    def release(self):
        """Forgets the arrays of the calls so far."""

    def milliseconds(self, function, arguments):
        begin = time.perf_counter()
        function(arguments)
        return 1000 * (time.perf_counter() - begin)


memory = Memory()


def pointer(array):
    return ctypes.cast(memory.pointer(array), POINTER)


def unwritten(shape, type=np.float32):
    """An array that shows what a rung has not written."""
    return np.full(shape, np.nan, type)


@dataclass
class Case:
    """One call of an attention rung: its sizes, its arrays and, on request, the right results."""

    queries: int
    keys: int
    d: int
    heads: int = 2
    causal: bool = False
    window: int = 0
    width: int = 0
    backward: bool = False
    type: type = np.float32

    def __post_init__(self):
        of_queries, of_keys = (self.heads, self.queries, self.d), (self.heads, self.keys, self.d)
        self.q, self.dout, self.k, self.v = (
            self.random(*shape, seed=seed) for seed, shape in enumerate((of_queries, of_queries, of_keys, of_keys), 1)
        )
        self.out, self.lse = unwritten(of_queries, self.type), unwritten(of_queries[:2])
        self.dq, self.dk, self.dv = (unwritten(shape, self.type) for shape in (of_queries, of_keys, of_keys))
        if self.backward:  # it reads what forward wrote
            self.out[:], self.lse[:] = self.forward()

    def random(self, *shape, seed):
        return random(*shape, seed=seed).astype(self.type)

    def sees(self):
        i, j = np.arange(self.queries)[:, None], np.arange(self.keys)[None, :]
        if self.width:
            near = lambda x, y: abs(x - y) < self.window
            return near(i % self.width, j % self.width) & near(i // self.width, j // self.width)
        visible = np.full((self.queries, self.keys), True)
        if self.causal or self.window:
            visible &= j <= i
        return visible & (j > i - self.window) if self.window else visible

    def weights(self):
        """P and lse in float64."""
        s = self.q.astype(np.float64) @ self.k.astype(np.float64).transpose(0, 2, 1) / np.sqrt(self.d)
        visible = self.sees()
        m = np.where(visible, s, -1e300).max(-1, initial=-1e300, keepdims=True)
        p = np.where(visible, np.exp(np.minimum(s - m, 0)), 0)
        l = p.sum(-1, keepdims=True)
        some = np.where(l > 0, l, 1)
        return p / some, np.where(l > 0, m + np.log(some), -np.inf)[..., 0]

    def forward(self):
        p, lse = self.weights()
        return p @ self.v.astype(np.float64), lse

    def gradients(self):
        q, k, v, dout = (x.astype(np.float64) for x in (self.q, self.k, self.v, self.dout))
        p, _ = self.weights()
        dp = dout @ v.transpose(0, 2, 1)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(self.d)
        return ds @ k, ds.transpose(0, 2, 1) @ q, p.transpose(0, 2, 1) @ dout

    def arguments(self):
        arrays = [self.q, self.k, self.v, self.out, self.lse]
        of_backward = [self.dout, self.dq, self.dk, self.dv]
        sizes = (self.heads, self.queries, self.keys, self.d, self.causal, self.window, self.width)
        pointers = [pointer(x) for x in arrays] + [pointer(x) if self.backward else None for x in of_backward]
        return Attention(*sizes, *pointers)

    def wrong(self):
        """What is wrong with the results, or None."""
        written = (self.dq, self.dk, self.dv) if self.backward else (self.out, self.lse)
        names = ("dq", "dk", "dv") if self.backward else ("out", "lse")
        expected = self.gradients() if self.backward else self.forward()
        for name, mine, right in zip(names, written, expected):
            nowhere = np.isinf(right)
            if not np.array_equal(np.where(nowhere, mine, 0), np.where(nowhere, right, 0)):
                return f"{name} is not -infinity exactly where a query sees no key"
            error = np.abs(np.where(nowhere, 0, mine) - np.where(nowhere, 0, right)).max(initial=0)
            if not error <= BOUNDS[mine.dtype.type] * max(1, np.abs(np.where(nowhere, 0, right)).max(initial=0)):
                return f"{name} is off by {error:.1e}"
        return None

    def operations(self):
        """Useful ones: 4 d for each visible pair, 10 d backward."""
        return (10 if self.backward else 4) * self.d * self.heads * int(self.sees().sum())


class Rung:
    def __init__(self, path):
        self.path, self.name = Path(path), Path(path).stem
        self.number, self.title = int(self.name[:2]), self.name[3:].replace("_", " ")
        self.axis = next((axis for names, axis in AXES.items() if re.search(names, self.name)), "library")
        text = self.path.read_text()
        self.changed = re.match(r"// (?:Rung \d+|The last rung): (.*)", text)[1]
        self.type = np.float16 if "AttentionOf<half>" in text else np.float32
        self.on_gpu = self.path.suffix == ".cu"
        self.emulated = self.on_gpu and self.axis != "library" and "cute" not in self.name

    def load(self, modules):
        self.module = ctypes.CDLL(str(modules / f"{self.name}.so"))
        self.function = self.module.rung
        return self

    def __call__(self, arguments):
        self.function(ctypes.byref(arguments))

    def run(self, arguments):
        """One call whose results are wanted. What the emulator reports, or None."""
        self(arguments)
        memory.fetch()
        return emulator_error(self.module) if self.on_gpu else None

    def cases(self):
        """Odd sizes, one key, no key, causal with unequal lengths; of the mask rungs, windows."""
        sizes, boxes = (HALF_SIZES, HALF_BOXES) if self.type is np.float16 else (SIZES, BOXES)
        of_boxes = [Case(w * h, w * h, d, width=w, window=n, type=self.type) for w, h, d, n in boxes]
        if "boxes" in self.name:
            return of_boxes
        backward = self.axis == "backward"
        plain = lambda **options: [
            Case(*size, causal=causal, type=self.type, **options) for size in sizes for causal in (False, True)
        ]
        many_heads = Case(20, 33, 64, heads=9, causal=True, type=self.type, backward=backward)
        cases = [*plain(backward=backward), many_heads]
        if "words" in self.name:
            cases += [Case(*size, window=window, type=self.type) for size in sizes for window in (1, 17, 200)]
        if self.axis == "library":
            cases += plain(backward=True) + of_boxes
        return cases

    def wrong(self):
        """What is wrong with the rung, or None."""
        if self.axis == "matmul":
            return None if "peak" in self.name else self.wrong_matmul()
        if self.axis == "softmax":
            return self.wrong_softmax()
        for case in self.cases():
            if reason := self.run(case.arguments()) or case.wrong():
                return f"{reason}: {case}"
        return None

    def wrong_matmul(self):
        for rows, columns, depth in ((1, 1, 1), (17, 33, 5), (100, 65, 130), (64, 128, 256)):
            a, b, c = random(rows, depth), random(depth, columns), unwritten((rows, columns))
            if reason := self.run(Matmul(rows, columns, depth, pointer(a), pointer(b), pointer(c))):
                return reason
            error = np.abs(c - a.astype(np.float64) @ b.astype(np.float64)).max()
            if not error <= 1e-5 * depth:
                return f"{rows} x {columns} x {depth} is off by {error:.1e}"
        return None

    def wrong_softmax(self):
        for rows, columns in ((1, 1), (3, 5), (7, 64), (5, 1000), *([(2, 20000), (2, 4001)] * self.on_gpu)):
            x, y = random(rows, columns) * 50, unwritten((rows, columns))
            if reason := self.run(Softmax(rows, columns, pointer(x), pointer(y))):
                return reason
            right = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
            right /= right.sum(1, keepdims=True)
            if not np.abs(y - right).max() <= 1e-6:
                return f"{rows} x {columns} is off by {np.abs(y - right).max():.1e}"
        return None

    def seconds(self, arguments, rounds):
        return medians([self], arguments, rounds)[0]


def medians(rungs, arguments, rounds):
    """The median time of each rung's calls with the same arguments. They take turns: what disturbs the machine for a
    while disturbs all. Before that, each is called for a fifth of a second: threads find their cores, caches fill.
    When the calls of the first rung have taken two seconds, no more are timed; those of the others do not count."""
    for rung in rungs:
        begin = time.perf_counter()
        while time.perf_counter() < begin + 0.2:
            memory.milliseconds(rung, arguments)
    times, left = [], 2.0
    while len(times) < rounds and (left > 0 or not times):
        order = (-1) ** len(times)  # who goes first in one round goes last in the next
        times.append([memory.milliseconds(rung, arguments) / 1000 for rung in rungs[::order]][::order])
        left -= times[-1][0]
    return [statistics.median(of_rung) for of_rung in zip(*times)]


def emulator_error(module):
    if not hasattr(module, "emulator_error"):  # compiled for a GPU
        return None
    module.emulator_error.restype = ctypes.c_char_p
    return module.emulator_error().decode() or None


# How far a result may be from float64, relative to the largest where that is above 1. float16 has 11 bits.
BOUNDS = {np.float32: 2e-5, np.float16: 2e-3}
# (queries, keys, d) and (width, height, d, window) of the cases.
SIZES = ((1, 1, 8), (3, 5, 64), (70, 1, 40), (5, 0, 16), (129, 257, 64), (257, 129, 33), (130, 130, 128))
BOXES = ((1, 1, 8, 1), (16, 16, 64, 3), (21, 13, 40, 9), (8, 40, 64, 2))
# float16, for tensor cores.
HALF_SIZES = ((1, 1, 64), (3, 5, 128), (70, 1, 64), (5, 0, 64), (33, 520, 64), (193, 65, 128), (130, 130, 64))
HALF_BOXES = ((1, 1, 64, 1), (16, 16, 64, 3), (21, 13, 128, 9), (8, 24, 64, 2))


def rungs(folder="cpu"):
    return [Rung(path) for path in sorted((FOLDER / folder).glob("[0-9][0-9]_*.c*"))]


def set_threads(count):
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)
