"""The parts of bench/compare: each gives its rows, a peer's results are compared before it is timed, and of its paths
the faster counts. PyTorch's place is taken by the textbook formula in NumPy, on small shapes."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "bench"))

import compare
import page
import parts_own
import timed_case
from table import Table

PATHS = ("textbook 1.0", "textbook 1.0 math")


class Textbook(timed_case.Case):
    """The peer's paths are the same formula twice. error: of its results, relative."""

    error = 0.0

    def probabilities(self, q, k):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(self.d)
        if self.causal:
            s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def forward(self, q, k, v):
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
        return self.probabilities(q, k) @ v * (1 + self.error)

    def backward(self, q, k, v):
        p, dout = self.probabilities(q, k), self.dout
        dp = dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(self.d)
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout * (1 + self.error)

    def peer_calls(self, what):
        call = getattr(self, what)
        return dict.fromkeys(PATHS, lambda: call(self.q, *self.kv[0]))


@pytest.fixture
def parts_torch(monkeypatch):
    """The module, with the textbook as its peer, and small shapes."""
    peers = SimpleNamespace(
        NAME="textbook 1.0", Case=Textbook, PRODUCT=10, product=lambda threads, type="float32": lambda: time.sleep(1e-6)
    )
    monkeypatch.setitem(sys.modules, "peers", peers)
    monkeypatch.delitem(sys.modules, "parts_torch", raising=False)
    module = importlib.import_module("parts_torch")
    for name, small in dict(
        SEQUENCE=96, SHORT=(2, 3, (16, 40)), DECODE_KEYS=(128,), FAR=1 << 20, SIZES=((40, 40), (24, 8))
    ).items():
        monkeypatch.setattr(module, name, small)
    return module


def arguments(**more):
    return SimpleNamespace(
        **dict(
            rounds=1,
            types=("float32", "float64"),
            threads=[1],
            json=None,
            kernels=Path("none"),
            heads=None,
            sequence=None,
        )
        | more
    )


def rows_of(part, given):
    table = Table("cpu")
    part(table, given)
    assert all(row["figure"] > 0 for row in table.rows)
    return table.rows


def test_rows_beside_torch(parts_torch, monkeypatch):
    monkeypatch.setattr(parts_torch.measure, "has_amx", lambda: False)
    rows = rows_of(parts_torch.torch, arguments())
    assert [(row["type"], row["d"], row["causal"], row["what"]) for row in rows] == [
        (type_, d, causal, what)
        for type_ in ("float32", "float64")
        for d in (64, 128)
        for causal in (False, True)
        for what in ("forward", "backward")
    ]
    assert [row["least_ratio"] for row in rows] == [1.15, 1.2, 1.4, 1.45, 1.1, 1.2, 1.35, 1.45] + [1.5] * 8
    assert all(row["unit"] == "GFLOP/s" and row["peer"] in PATHS for row in rows)
    assert all(row["ratio"] == pytest.approx(row["figure"] / row["peer_figure"]) for row in rows)  # of one round


def test_rows_of_a_shape_that_options_choose(parts_torch):
    """A record knows it; by default there is nothing to know."""
    rows = rows_of(parts_torch.torch, arguments(types=("float32",), heads=3, sequence=40))
    assert {(row["shape"], row["sequence"]) for row in rows} == {("1x3x40", 40)} and len(rows) == 8
    rows += rows_of(parts_torch.torch, arguments(types=("float32",), heads=3))
    assert rows[-1]["shape"] == "1x3x96" and rows[-1]["intensity"] > 0
    assert not any("shape" in row for row in rows_of(parts_torch.torch, arguments(types=("float32",))))


@pytest.mark.parametrize("pairs_by, beside", [("instruction", 3e3), ("tiles", None), ("nothing", 2e3)])
def test_rows_of_the_peer_s_own_product(parts_torch, monkeypatch, pairs_by, beside):
    """Beside the peak of its type, where that is measured; they have no limit."""
    peaks = {"peak/float32": [1e3, 2e3], "peak/float64": [1e3, 5e2]} | ({"peak/pairs": [3e3]} if beside == 3e3 else {})
    monkeypatch.setattr(parts_torch.measure, "machine_speeds", lambda *asked: (peaks, pairs_by))
    rows = rows_of(parts_torch.products, arguments(types=compare.TYPES, rounds=3))
    assert [(row["type"], row["peer_figure"]) for row in rows] == list(zip(compare.TYPES, (2e3, 1e3, beside, 2e3)))
    assert {(row["what"], row["threads"], row["least_ratio"]) for row in rows} == {("torch.mm, 10 x 10 x 10", 1, None)}
    assert all(row["ratio"] == (row["peer_figure"] and row["figure"] / row["peer_figure"]) for row in rows)


def test_the_peer_s_own_product_needs_the_program(parts_torch, monkeypatch):
    """It is left out without it, and where options choose the shape."""
    monkeypatch.setattr(parts_torch, "products", lambda table, given: table.add("product", 1.0, "GFLOP/s"))
    last = lambda **more: rows_of(parts_torch.torch, arguments(types=("float32",), **more))[-1]["what"]
    assert last() == "backward" and last(kernels=Path(sys.executable)) == "product"
    assert last(kernels=Path(sys.executable), heads=2) == "backward"


def test_goals_on_a_processor_with_amx(parts_torch, monkeypatch):
    monkeypatch.setattr(parts_torch.measure, "has_amx", lambda: True)
    rows = rows_of(parts_torch.torch, arguments(types=("float32", "float64")))
    assert [row["least_ratio"] for row in rows] == [1.2] * 8 + [1.5] * 8
    goals = {
        what: {parts_torch.goal("bfloat16", what, d, causal, True) for d in (64, 128) for causal in (False, True)}
        for what in timed_case.DIRECTIONS
    }
    assert goals == {"forward": {1.2}, "backward": {2.5}}
    assert parts_torch.goal("float16", "backward", 64, False, True) == 25


@pytest.mark.parametrize(
    "flags, found", [("avx512_bf16 amx_bf16 amx_tile", True), ("fpu amx_bf16", True), ("avx512_bf16 amx_tile", False)]
)
def test_a_processor_with_amx_is_known(monkeypatch, flags, found):
    monkeypatch.setattr(timed_case.measure.Path, "read_text", lambda self: f"flags\t\t: {flags}\nbugs\t: none\n")
    assert timed_case.measure.has_amx() is found


@pytest.mark.parametrize(
    "limits, held",
    [
        (dict(), True),
        (dict(ratio=1.1, least=1.1), True),
        (dict(ratio=1.09, least=1.1), False),
        (dict(most=3.0), True),
        (dict(most=2.9), False),
        (dict(ratio=2, least=1, most=2.9), False),
        (dict(ratio=0.9, least=1, most=3.0), False),
    ],
)
def test_a_limit_is_held_or_missed(limits, held):
    table = Table("cpu")
    table.add("forward", 3.0, "s", **limits)
    assert table.rows[0]["held"] is held


def test_ratios_are_above_1_where_anyflash_is_faster():
    """Medians of the rounds' own ratios: 4, 1 and 2."""
    table = Table("cpu")
    table.rates("forward", (1, 4, 2), (4, 4, 4), 8, "GFLOP/s")
    table.times("forward", (1, 4, 2), (4, 4, 4), "ms", 1e3)
    assert [
        (row["figure"], row["peer_figure"], row["ratio"], row["spread"], row["peer_spread"]) for row in table.rows
    ] == [(4, 2, 2, 1.5, 0), (2000, 4000, 2, 1.5, 0)]


@pytest.mark.parametrize(
    "seconds, paths, fastest",
    [((1, 2), None, "textbook 1.0"), ((2, 1), None, "textbook 1.0 math"), ((2, 1), ["textbook 1.0"], "textbook 1.0")],
)
def test_the_faster_path_is_the_peer(monkeypatch, seconds, paths, fastest):
    """Each is compared; where there are two, one round says whether one is far slower, one more is not timed."""
    called = []
    calls = [lambda i=i: called.append(i) for i in range(2)]
    monkeypatch.setattr(Textbook, "peer_calls", lambda self, what: dict(zip(PATHS, calls)))
    monkeypatch.setattr(Textbook, "compare", lambda *rest: None)
    monkeypatch.setattr(timed_case.measure, "once", lambda call: (call(), seconds[calls.index(call)])[1])
    ours, theirs, name = Textbook(queries=(32,)).beside("forward", paths)
    assert name == fastest and theirs is calls[fastest.endswith("math")]
    assert called == ([0, 1] * (3 + timed_case.TRIALS) if paths is None else [0]) and ours().shape == (1, 4, 32, 64)


def test_a_path_that_was_disturbed_once_is_still_the_peer(monkeypatch):
    """Other work on the machine may fall into any one time."""
    for disturbed in range(timed_case.TRIALS):
        times = iter([1, 1] + [9 if i == 2 * disturbed else 1 + i % 2 for i in range(2 * timed_case.TRIALS)])
        calls = dict.fromkeys(PATHS, lambda: None)
        monkeypatch.setattr(Textbook, "peer_calls", lambda self, what: calls)
        monkeypatch.setattr(Textbook, "compare", lambda *rest: None)
        monkeypatch.setattr(timed_case.measure, "once", lambda call: next(times))
        assert Textbook(queries=(32,)).beside("forward")[2] == PATHS[0]


@pytest.mark.parametrize("seconds, calls", [((0.1, 0.5), 2), ((0.1, 0.25), 6), ((0.2, 0.5), 6)])
def test_a_long_path_that_is_far_slower_is_not_tried_again(monkeypatch, seconds, calls):
    """By its second call; a short one, or one not far from the other, may have been disturbed."""
    called = []
    monkeypatch.setattr(
        Textbook, "peer_calls", lambda self, what: {path: lambda i=i: called.append(i) for i, path in enumerate(PATHS)}
    )
    monkeypatch.setattr(Textbook, "compare", lambda *rest: None)
    # Before and after the second call of each path, then before and after each other.
    clock = iter([0, seconds[0], 0, seconds[1]] + [0, 1, 0, 2] * timed_case.TRIALS)
    monkeypatch.setattr(timed_case.measure.time, "perf_counter", lambda: next(clock))
    assert Textbook(queries=(32,)).beside("forward")[2] == PATHS[0]
    assert called.count(1) == calls


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_results_that_differ_end_the_run(monkeypatch, what):
    monkeypatch.setattr(Textbook, "error", 1e-3)
    with pytest.raises(SystemExit) as caught:
        Textbook(queries=(32,)).beside(what)
    tensor = "out" if what == "forward" else "dv"
    assert str(caught.value) == (
        f"bench/compare: {tensor} of float32 (1, 4, 32, 64), causal False: differs from "
        "textbook 1.0 by 1.0e-03 of its largest, expected at most 2e-05"
    )


def test_goals_of_16_bit_types(parts_torch):
    goals = {
        (type_, what, causal): parts_torch.goal(type_, what, 64, causal)
        for type_ in ("bfloat16", "float16")
        for what in timed_case.DIRECTIONS
        for causal in (False, True)
    }
    assert set(goals.values()) == {1.1, 1.35, 3, 25}
    assert all(goals[type_, "forward", causal] == (1.35 if causal else 1.1) for type_, _, causal in goals)
    assert goals["bfloat16", "backward", True] == 3 and goals["float16", "backward", False] == 25


def test_rows_of_short_sequences(parts_torch):
    rows = rows_of(parts_torch.short, arguments())
    assert {row["least_ratio"] for row in rows} == {1.3} and len(rows) == 8
    assert {(row["sequence"], row["causal"]) for row in rows} == {(s, c) for s in (16, 40) for c in (False, True)}
    assert rows[0]["what"] == "forward, batch 2 x 3 heads"


def test_rows_of_other_head_sizes(parts_torch):
    rows = rows_of(parts_torch.sizes, arguments())
    assert {(row["what"], row["d"]) for row in rows} == {
        ("forward", 40),
        ("backward", 40),
        ("forward, d_v 8", 24),
        ("backward, d_v 8", 24),
    }
    assert {row["least_ratio"] for row in rows} == {1.1}


def test_rows_of_decoding(parts_torch, monkeypatch):
    monkeypatch.setattr(parts_torch.measure, "read_bandwidth", lambda program, threads: [1e9, 3e9, 2e9])
    rows = rows_of(parts_torch.decode, arguments(types=("float64", "float32"), kernels="none"))
    assert [(row["type"], row["d"], row["sequence"], row["least_ratio"]) for row in rows] == [
        ("float32", d, 128, least) for d in (64, 128) for least in (3.5, 0.75)
    ]
    read = rows[1]
    assert read["figure"] == rows[0]["figure"] and read["peer_figure"] == 2e9 and not read["held"]
    assert read["ratio"] == pytest.approx(read["figure"] / 2e9)
    # 4 d operations for each key of 32 heads; K and V of 8 heads, and next to nothing else.
    assert read["intensity"] == pytest.approx(4 * 32 / (2 * 8 * 4), rel=0.1)


@pytest.mark.parametrize("type_", ["float32", "float64", "float16"])
def test_operations_and_bytes_of_a_call(type_):
    """Bytes are those of the arrays that a call reads and writes; lse is float64 for float64, or else float32."""
    case = timed_case.Case(type=type_, batch=2, heads=6, kv_heads=3, queries=(40,), keys=(56,), d=24, d_v=8)
    out, dout = case.call("forward")(), case.dout
    lse = timed_case.af.attention(case.q, *case.kv[0], return_lse=True)[1]
    inputs = case.q.nbytes + sum(x.nbytes for x in case.kv[0])
    gradients = sum(x.nbytes for x in case.call("backward")()[:3])  # dq, dk, dv
    pairs = 2 * 6 * 40 * 56
    moved = {
        "forward": inputs + out.nbytes + lse.nbytes,
        "backward": inputs + out.nbytes + lse.nbytes + dout.nbytes + gradients,
    }
    operations = {"forward": 2 * (24 + 8) * pairs, "backward": (6 * 24 + 4 * 8) * pairs}
    for what in timed_case.DIRECTIONS:
        assert case.bytes(what) == moved[what] and case.flops(what) == operations[what]
        assert case.columns(what)["intensity"] == operations[what] / moved[what]


def test_copies_of_keys_and_values_are_taken_in_turn():
    case = timed_case.Case(queries=(1,), keys=(32,), copies=3)
    case.kv[1][1][:] = 1
    call = case.call("forward")
    assert [bool(np.allclose(call(), 1)) for _ in range(4)] == [False, True, False, False]


def test_rows_after_an_operation_of_torch(parts_torch):
    rows = rows_of(parts_torch.beside, arguments())
    assert [(row["sequence"], row["what"].split(",")[0]) for row in rows] == [
        (512, "forward"),
        (512, "backward"),
        (96, "forward"),
        (96, "backward"),
    ]
    assert {row["peer"] for row in rows} == {"by itself"} and {row["least_ratio"] for row in rows} == {1 / 1.05}


def test_rows_of_masks():
    """A rule's ratio is (time of full / time of the rule) * (its visible share)."""
    rows = rows_of(parts_own.masks, arguments())
    assert [row["what"] for row in rows] == [
        f"{what} {text}, time a visible pair"
        for text in (
            "causal() 2048",
            "local(256, causal=true) 2048",
            "documents of 200 2048",
            "local(8) 64x64",
            "local(16) 64x64",
        )
        for what in ("forward", "backward")
    ]
    assert {row["least_ratio"] for row in rows} == {0.8} and {row["unit"] for row in rows} == {"ns"}
    assert all(row["ratio"] == pytest.approx(row["peer_figure"] / row["figure"]) for row in rows)


def test_visible_pairs_are_those_of_the_rule():
    case = timed_case.Case(queries=(450,), rule=parts_own.af.documents(np.arange(450) // 200))
    assert case.explained("forward").visible_pairs == 200 * 200 * 2 + 50 * 50


@pytest.mark.parametrize("processors, count", [(1, 0), (2, 8)])
def test_rows_of_two_threads(monkeypatch, capsys, processors, count):
    monkeypatch.setattr(parts_own.os, "cpu_count", lambda: processors)
    rows = rows_of(parts_own.scaling, arguments())
    assert len(rows) == count and all(row["threads"] == 2 and row["least_ratio"] == 1.95 for row in rows)
    assert ("left out" in capsys.readouterr().out) == (count == 0)


def test_every_part_has_a_function_and_a_title():
    assert {*compare.PARTS, *compare.GPU_PARTS, "build"} == set(page.TITLES)
    gpu = (PROJECT / "bench" / "gpu.py").read_text()
    for part in compare.GPU_PARTS:
        function = re.search(rf'^PARTS = {{.*?"{part}": (\w+)', gpu, re.M | re.S)[1]
        assert f"\ndef {function}(table, arguments):" in gpu
    assert page.GPU_ORDER == compare.GPU_PARTS
    for part, module in compare.PARTS.items():
        assert f"\ndef {part}(table, arguments):" in (PROJECT / "bench" / f"{module}.py").read_text()


def test_rows_are_written_after_each_part(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_own, "masks", lambda table, given: table.add("one", 1.0, "s"))
    monkeypatch.setattr(parts_own, "long", lambda table, given: pytest.fail("stopped"))
    given = arguments(parts=["masks", "long"], json=tmp_path / "rows.json")
    with pytest.raises(pytest.fail.Exception):
        compare.measure_parts(Table("cpu"), given, {part: compare.function_of(part) for part in given.parts})
    assert [(row["part"], row["what"]) for row in json.loads(given.json.read_text())] == [("masks", "one")]


def test_packed_sequences_on_a_gpu_have_their_lengths_in_either_memory(monkeypatch):
    """With nothing behind PyTorch's names."""
    torch = MagicMock()
    for name in ("torch", "torch.nn", "torch.nn.attention", "torch.nn.attention.varlen"):
        monkeypatch.setitem(sys.modules, name, torch)
    spec = importlib.util.spec_from_file_location("gpu", PROJECT / "bench" / "gpu.py")
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    rows, lengths = [], []
    monkeypatch.setattr(
        gpu,
        "beside_all",
        lambda table, what, direction, *_, **columns: rows.append(
            (f"{direction}, {what}", columns["causal"], columns["least"])
        ),
    )
    monkeypatch.setattr(
        gpu, "our_call", lambda *_, cu_seqlens_q, cu_seqlens_k, **given: lengths.append((cu_seqlens_q, cu_seqlens_k))
    )
    gpu.packed(None, None)
    on_cpu, on_gpu = (f"documents of 1k to 4k, packed{where}" for where in ("", ", lengths on the GPU"))
    assert rows == [
        (f"{direction}, {what}", causal, 1)
        for causal in (False, True)
        for direction in ("forward", "backward")
        for what in (on_cpu, on_gpu)
    ]
    cu = torch.tensor().cumsum().to()
    assert lengths == [(cu.numpy(), cu.numpy()), (cu.cuda(), cu.cuda())] * 4
