"""Device functions of the portable kernels, each in a kernel of its own (device_functions.cu), against float64: loads
and stores of tiles, products, reductions over a row, masks, the online softmax."""

import ctypes
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PROJECT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("ANYFLASH_DEVICE_FUNCTIONS", PROJECT / "build-gpu/tests/gpu/libdevice_functions.so"))
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
SIDE = 64
of_types = pytest.mark.parametrize("name", TYPES)
several = settings(max_examples=30, deadline=None)


@pytest.fixture(scope="module")
def call():
    assert LIBRARY.exists(), f"{LIBRARY}: scripts/test --gpu builds it; or name it by ANYFLASH_DEVICE_FUNCTIONS"
    torch.cuda.init()
    library = ctypes.CDLL(str(LIBRARY))

    kinds = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_double}

    def run(function, *arguments):
        torch.cuda.synchronize()
        given = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else kinds[type(x)](x) for x in arguments]
        assert getattr(library, function)(*given) == 0

    return run


def randoms(*shape, dtype, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator).to(dtype)


def number_type(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------------------------------------- the tiles


@of_types
@several
@given(data=st.data())
def test_load_any_rows(call, name, data):
    """Rows that do not exist, and channels behind the last one, are zero."""
    dtype, vectors = TYPES[name], data.draw(st.booleans())
    per_vector = 16 // torch.empty((), dtype=dtype).element_size()
    channels = data.draw(st.integers(1, SIDE))
    step = 1 if vectors else data.draw(st.integers(1, 3))
    row = data.draw(st.integers(0, 3)) * per_vector + SIDE * step if vectors else data.draw(st.integers(1, 200))
    exist = torch.tensor(data.draw(st.lists(st.booleans(), min_size=SIDE, max_size=SIDE)), device="cuda")
    memory = randoms(SIDE * row + SIDE * step, dtype=dtype)
    tile = torch.full((SIDE, SIDE), torch.nan, dtype=dtype, device="cuda")
    call(f"load_any_{name}", memory, row, step, vectors, channels, exist, tile)
    expected = torch.zeros_like(tile)
    expected[:, :channels] = memory.as_strided((SIDE, channels), (row, step)) * exist[:, None]
    assert torch.equal(tile, expected)


@of_types
@pytest.mark.parametrize("part", [1, 2, 4])
def test_load_plain_rows(call, name, part):
    dtype = TYPES[name]
    row, channels = SIDE + 16, SIDE // part
    memory = randoms(SIDE, row, dtype=dtype)
    tile = torch.full((SIDE, SIDE), torch.nan, dtype=dtype, device="cuda")
    call(f"load_plain_{name}", memory, row, channels, tile)
    expected = torch.zeros_like(tile)
    expected[:, :channels] = memory[:, :channels]
    assert torch.equal(tile, expected)


@of_types
@several
@given(data=st.data())
def test_store_rows(call, name, data):
    """Nothing is written but the channels of rows that exist."""
    dtype, vectors = TYPES[name], data.draw(st.booleans())
    channels = data.draw(st.integers(1, SIDE))
    step = 1 if vectors else data.draw(st.integers(1, 3))
    row = SIDE * step + (0 if vectors else data.draw(st.integers(0, 9)))
    exist = torch.tensor(data.draw(st.lists(st.booleans(), min_size=SIDE, max_size=SIDE)), device="cuda")
    tile = randoms(SIDE, SIDE, dtype=dtype)
    memory = torch.full((SIDE * row + SIDE * step,), 7, dtype=dtype, device="cuda")
    expected = memory.clone()
    places = expected.as_strided((SIDE, channels), (row, step))
    places[exist] = tile[exist, :channels]
    call(f"store_any_{name}", tile, row, step, vectors, channels, exist, memory)
    assert torch.equal(memory, expected)


@of_types
def test_store_plain_rows(call, name):
    dtype = TYPES[name]
    tile, memory = randoms(SIDE, SIDE, dtype=dtype), torch.full((SIDE, SIDE + 16), 7, dtype=dtype, device="cuda")
    call(f"store_plain_{name}", tile, SIDE + 16, memory)
    assert torch.equal(memory[:, :SIDE], tile) and (memory[:, SIDE:] == 7).all()


# -------------------------------------------------------------------------------------------------------- the products

POLICIES = [*TYPES, "tf32_float32", "plain_bfloat16", "plain_float32", "plain_float64"]


def type_of(policy):
    return TYPES[policy.rpartition("_")[2]]


def assert_near(policy, got, exact, sizes):
    """sizes: sums of the terms' magnitudes. A sum of 64 terms may be off by some roundings of them, or of TF32."""
    epsilon = 2.0**-12 if policy.startswith("tf32") else torch.finfo(got.dtype).eps
    assert ((got.double() - exact).abs() <= 8 * epsilon * sizes + torch.finfo(got.dtype).tiny).all()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_scores(call, name, swapped, magnitude):
    dtype = type_of(name)
    q, k = randoms(SIDE, SIDE, dtype=dtype, seed=1) * magnitude, randoms(SIDE, SIDE, dtype=dtype, seed=2)
    s = torch.full((SIDE, SIDE), torch.nan, dtype=number_type(dtype), device="cuda")
    call(f"scores_{name}", q, k, swapped, s)
    assert_near(name, s, q.double() @ k.double().T, q.double().abs() @ k.double().abs().T)


@pytest.mark.parametrize("name", POLICIES)
def test_swapped_scores_are_the_transposed_to_the_bit(call, name):
    dtype = type_of(name)
    q, k = randoms(SIDE, SIDE, dtype=dtype, seed=3), randoms(SIDE, SIDE, dtype=dtype, seed=4)
    s, t = (torch.full((SIDE, SIDE), torch.nan, dtype=number_type(dtype), device="cuda") for _ in range(2))
    call(f"scores_{name}", q, k, False, s)
    call(f"scores_{name}", k, q, True, t)
    assert torch.equal(s, t.T)


@pytest.mark.parametrize("name", POLICIES)
def test_values(call, name):
    """o += p v, with P rounded to the type of V as the tensor cores take it."""
    dtype = type_of(name)
    p = randoms(SIDE, SIDE, dtype=dtype, seed=5).abs().to(number_type(dtype))
    v = randoms(SIDE, SIDE, dtype=dtype, seed=6)
    before = randoms(SIDE, SIDE, dtype=number_type(dtype), seed=7)
    o = before.clone()
    call(f"values_{name}", p, v, o)
    exact, sizes = before.double() + p.double() @ v.double(), before.double().abs() + p.double() @ v.double().abs()
    assert_near(name, o, exact, sizes)


# --------------------------------------------------------------------------------------------------- rows of the scores


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_reductions_over_four_lanes(call, name):
    x = randoms(32, dtype=TYPES[name])
    x[5], x[9:12] = torch.nan, -torch.inf
    largest, total = torch.empty_like(x), torch.empty_like(x)
    call(f"quad_{name}", x, largest, total)
    quads = x.view(8, 4)
    expected = quads.nan_to_num(-torch.inf, neginf=-torch.inf).amax(1, True).expand(8, 4).reshape(32)
    assert torch.equal(largest, expected)  # a number beside a NaN
    sums = quads.double().sum(1, True).expand(8, 4).reshape(32)
    assert torch.allclose(total.double(), sums, rtol=1e-6, atol=0, equal_nan=True)


@of_types
@several
@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=SIDE, max_size=SIDE))
def test_hidden_pairs(call, name, words):
    s = randoms(SIDE, SIDE, dtype=number_type(TYPES[name]))
    signed = [word - 2**64 if word >> 63 else word for word in words]
    bits = torch.tensor([[word >> bit & 1 for bit in range(SIDE)] for word in words], device="cuda", dtype=torch.bool)
    expected = torch.where(bits, s, -torch.inf)
    call(f"hide_{name}", s, torch.tensor(signed, device="cuda"))
    assert torch.equal(s, expected)


@of_types
@several
@given(
    tiles=st.integers(1, 5),
    magnitude=st.sampled_from([0.1, 3.0, 1000.0]),
    lag=st.sampled_from([0.0, 6.0]),
    rising=st.booleans(),
    seed=st.integers(0, 99),
)
def test_online_softmax(call, name, tiles, magnitude, lag, rising, seed):
    dtype, number = TYPES[name], number_type(TYPES[name])
    scale = 0.3
    s = randoms(tiles, SIDE, SIDE, dtype=number, seed=seed) * magnitude
    if rising:  # every tile raises the maximum
        s += torch.arange(tiles, device="cuda", dtype=number)[:, None, None] * 5 * magnitude
    s[0, 3], s[:, 4] = -torch.inf, -torch.inf  # nothing in the first tile; nothing at all
    s[-1, 5, 6] = torch.nan
    shift, largest, total, o = (torch.empty(SIDE, dtype=number, device="cuda") for _ in range(4))
    p = torch.empty(SIDE, SIDE, dtype=number, device="cuda")
    unit = scale / torch.log(torch.tensor(2.0, dtype=torch.float64)).item() if dtype.itemsize == 2 else scale
    call(f"softmax_{name}", s, tiles, scale, unit, lag / scale, shift, largest, total, o, p)
    rows = s.double().permute(1, 0, 2).reshape(SIDE, -1)
    assert torch.equal(largest.double(), rows.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1))
    seen = torch.ones(SIDE, dtype=torch.bool, device="cuda")
    seen[3], seen[4], seen[5] = tiles > 1, False, False
    assert total[4] == 0 and shift[4] == -torch.inf and total[5].isnan()
    gap = (largest - shift)[seen].double() * scale
    assert (gap >= 0).all() and (gap <= lag + 1e-3 * magnitude).all()
    exact = ((rows - shift.double()[:, None]) * scale).exp()[seen]
    # The exponent's rounding, relative to what it is of; exp's own.
    error = torch.finfo(number).eps * (8 + 4 * scale * magnitude * 10) + (2**-22 if dtype.itemsize == 2 else 0)
    assert torch.allclose(total[seen].double(), exact.sum(1), rtol=error, atol=0)
    assert torch.allclose(o[seen].double(), exact.sum(1), rtol=error, atol=0)
    last = exact[:, -SIDE:]
    assert torch.allclose(p[seen].double(), last, rtol=error, atol=1.03 * torch.finfo(number).tiny)  # which may be 0
