"""Wrong arguments of anyflash.tile_machine: one line that names the argument."""

from dataclasses import replace

import anyflash as af
import pytest
from anyflash import tile_machine as tm

SHAPE = (1, 1, 64, 64)
WHOLE = "tiles = 4\nmemory_per_tile = 65536\nclock_hz = 1e9\n"


@pytest.mark.parametrize(
    "call, kind, line",
    [
        (lambda: tm.predict(SHAPE, memory_budget=1.5), TypeError, "memory_budget: type float, expected an integer"),
        (lambda: tm.predict(SHAPE, num_chunks_q=2**70), ValueError, "num_chunks_q: expected an integer of 64 bits"),
        (lambda: tm.predict(SHAPE, dtype=None), TypeError, "dtype: type NoneType, expected str"),
        (lambda: tm.predict(SHAPE, align=3), TypeError, "align: type int, expected str"),
        (lambda: tm.predict(SHAPE, d_v=1.5), TypeError, "d_v: type float, expected an integer"),
        (lambda: tm.predict(SHAPE, trace="x"), TypeError, "trace: type str, expected True or False"),
        (lambda: tm.predict(SHAPE, backward=None), TypeError, "backward: type NoneType, expected True or False"),
        (
            lambda: tm.predict(SHAPE, machine=3),
            TypeError,
            "machine: type int, expected a Machine, a name or a file's path",
        ),
        (lambda: tm.predict(SHAPE, choice=None), TypeError, "choice: type NoneType, expected a Choice"),
        (lambda: tm.predict((1.5, 1, 64, 64)), TypeError, "q_shape: type float, expected an integer"),
        (lambda: tm.predict(3), TypeError, "q_shape: type int, expected integers"),
        (lambda: tm.predict((1, 2)), ValueError, "q_shape: 2 sizes, expected those of an array in the layout"),
        (lambda: tm.predict((1, 64, 64)), ValueError, "query: rank 3, expected 4, 5 or 6 in layout bhsd"),
        (
            lambda: tm.predict((3, 1, 64, 64), layout="qkv", d_v=3),
            ValueError,
            "value: given with layout qkv, expected query to hold all three",
        ),
        (lambda: tm.predict(SHAPE, return_lse="ml"), ValueError, "return_lse: 'ml', expected True, False or 'lm'"),
        (lambda: tm.predict(SHAPE, dlse=3), TypeError, "dlse: type int, expected True or False"),
        (lambda: tm.predict(SHAPE, large_lse=None), TypeError, "large_lse: type NoneType, expected True or False"),
        (lambda: tm.predict(SHAPE, dlse=True), ValueError, "dlse: given to a forward call, expected a backward one"),
        (
            lambda: tm.predict(SHAPE, large_lse=True),
            ValueError,
            "large_lse: given to a forward call, expected a backward one",
        ),
        (
            lambda: tm.predict(SHAPE, return_lse=True, backward=True),
            ValueError,
            "return_lse: given to a backward call, expected a forward one",
        ),
        (lambda: tm.predict(SHAPE, foo=1), TypeError, "predict() got an unexpected keyword argument 'foo'"),
        (
            lambda: tm.candidates(SHAPE, dlsee=True),
            TypeError,
            "candidates() got an unexpected keyword argument 'dlsee', did you mean 'dlse'?",
        ),
        (lambda: tm.candidates(SHAPE, deterministic=2), TypeError, "deterministic: type int, expected True or False"),
        (lambda: tm.Choice(1.5), TypeError, "grid_rows: type float, expected an integer"),
        (lambda: tm.Choice(10**30), ValueError, "grid_rows: expected an integer of 64 bits"),
        (lambda: tm.predict(SHAPE, choice=tm.Choice(-1)), ValueError, "grid_rows: -1, expected 0 or more"),
        (
            lambda: tm.predict(SHAPE, choice=tm.Choice(2**62, 4)),
            ValueError,
            "grid: 4611686018427387904 x 4 tiles, the machine has 1472",
        ),
        (
            lambda: tm.predict(SHAPE, choice=tm.Choice(0, 0, 2**62)),
            ValueError,
            "machine: chunks_in_flight: 4611686018427387904, expected 0 to 65536",
        ),
        (lambda: tm.machine(3), TypeError, "name: type int, expected str"),
        (lambda: tm.read_machine(3), TypeError, "path: type int, expected a path"),
        (lambda: tm.parse_machine(None), TypeError, "text: type NoneType, expected str"),
        (lambda: tm.use(3), TypeError, "machine: type int, expected a Machine, a name or a file's path"),
        (lambda: tm.use(foo=1), TypeError, "use() got an unexpected keyword argument 'foo'"),
        (lambda: tm.use(tile=1), TypeError, "use() got an unexpected keyword argument 'tile', did you mean 'tiles'?"),
        (lambda: tm.use(tiles="many"), TypeError, "tiles: type str, expected an integer"),
        (lambda: tm.use(choice=None), TypeError, "choice: type NoneType, expected a Choice"),
        (lambda: tm.product_cycles("bow", "float16", -1, 2, 3), ValueError, "m: -1, expected 0 or more"),
        (lambda: tm.step_cycles("bow", "float16", 1, 2, -3, 4), ValueError, "d_qk: -3, expected 0 or more"),
        (
            lambda: tm.predict(SHAPE).svg("transfers"),
            ValueError,
            "picture: transfers of a report without trace, expected one with it",
        ),
    ],
)
def test_one_line(call, kind, line):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == line


@pytest.mark.parametrize("name", ["\ud800", "a#b", "a\ntiles = 3", "\x01", "\u00e9"])
def test_names(name):
    for call in (lambda: tm.use(name=name), lambda: replace(tm.machine(), name=name), lambda: tm.Machine(name=name)):
        with pytest.raises(ValueError, match=r"^name: [^\n]*$"):
            call()
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        tm.machine(name)


def test_a_trace_is_bounded():
    machine = tm.Machine(tiles=16384, memory_per_tile=1 << 30)
    choice = tm.Choice(grid_rows=1, grid_columns=1, chunks_in_flight=1)
    call = dict(machine=machine, choice=choice, num_chunks_q=2048, num_chunks_kv=2048)
    assert len(tm.predict((1, 1, 2048, 8), **call).phases) > 1024
    with pytest.raises(ValueError, match=r"^trace: \d+ phases of 16384 tiles, expected at most 1024 phases$"):
        tm.predict((1, 1, 2048, 8), trace=True, **call)


def test_a_trace_without_transfers_can_be_drawn():
    machine = tm.Machine(tiles=1, memory_per_tile=1 << 20)
    assert "Who sends" in tm.predict((1, 1, 64, 8), rule=af.causal(), machine=machine, trace=True).svg("transfers")
