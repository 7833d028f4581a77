"""Python's calls on the tile machine: where they run, and what they report."""

import threading

import anyflash as af
import numpy as np
import pytest
from anyflash import tile_machine

SMALL = dict(tiles=4, memory_per_tile=1 << 18)


def arrays(type=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, 60, 8)).astype(type) for _ in range(3)]


def test_calls_within_the_context_alone():
    q, k, v = arrays()
    double = [x.astype(np.float64) for x in (q, k, v)]
    expected = af.attention(q, k, v)
    with tile_machine.use(**SMALL) as used:
        got, lse = af.attention(q, k, v, return_lse=True)
        first = used.report
        assert first.machine == used.machine and first.machine.tiles == 4 and not first.backward
        assert af.attention_backward(got, q, k, v, got, lse).dq.shape == q.shape
        assert used.report.backward
        with tile_machine.use("bow", choice=tile_machine.Choice(grid_rows=2)) as other:
            af.attention(q, k, v, num_chunks_q=4)
            assert other.report.machine.name == "bow" and other.report.num_chunks_q == 4
            assert other.report.grid_rows == 2 and used.report.backward
        with pytest.raises(ValueError, match="query: float64 on the tile machine, expected float16 or float32"):
            af.attention(*double)
        af.attention(q, k, v)
        assert used.report.machine.tiles == 4
    np.testing.assert_allclose(got, expected, atol=1e-5)
    af.attention(*double)


def test_lengths_and_tables_stay_on_the_cpu():
    q, k, v = arrays()
    options = dict(rule=af.blocks(np.eye(4, dtype=bool), 16, 16), key_lengths=np.array([50]))
    expected = af.attention(q, k, v, **options)
    with tile_machine.use(**SMALL):
        np.testing.assert_allclose(af.attention(q, k, v, **options), expected, atol=1e-5)
        plan = af.plan(q, k, v, **options)
        np.testing.assert_allclose(af.attention(q, k, v, plan=plan, **options), expected, atol=1e-5)


def test_a_plan_of_one_device_is_refused_on_the_other():
    q, k, v = arrays()
    of_cpu = af.plan(q, k, v)
    with tile_machine.use(**SMALL):
        of_tiles = af.plan(q, k, v)
        with pytest.raises(ValueError, match="^plan: made for cpu, the call has tiles:0$"):
            af.attention(q, k, v, plan=of_cpu)
    with pytest.raises(ValueError, match="^plan: made for tiles:0, the call has cpu$"):
        af.attention(q, k, v, plan=of_tiles)


def test_other_threads_run_on_the_cpu():
    double = arrays(np.float64)
    results = []
    with tile_machine.use(**SMALL):
        thread = threading.Thread(target=lambda: results.append(af.attention(*double)))
        thread.start()
        thread.join()
    assert results[0].dtype == np.float64


NO_CALL = "^tile report: no call on the tile machine yet$"


def test_a_report_is_that_of_the_last_call_in_its_context():
    q, k, v = arrays()
    with tile_machine.use(**SMALL) as used:
        with pytest.raises(ValueError, match=NO_CALL):
            print(used.report)
        af.attention(q, k, v)
        with tile_machine.use("bow") as inner, pytest.raises(ValueError, match=NO_CALL):
            print(inner.report)
        assert used.report.machine.tiles == 4
        af.attention(q, k[:, :, :0], v[:, :, :0])
        with pytest.raises(ValueError, match=NO_CALL):
            print(used.report)
        af.attention(q, k, v)
    assert used.report.machine.tiles == 4
    with used, pytest.raises(ValueError, match=NO_CALL):
        print(used.report)


def test_threads_have_their_own_machines():
    q, k, v = arrays()
    both, results, errors = threading.Barrier(2), {}, []

    def work(tiles):
        with tile_machine.use(tiles=tiles) as used:
            both.wait(60)
            for _ in range(5):
                af.attention(q, k, v)
                tile_machine.predict((1, 2, 60, 8), machine="bow")
            both.wait(60)
            results[tiles] = used.report.machine.tiles
            if tiles == 3:
                thread = threading.Thread(
                    target=lambda: errors.append(pytest.raises(RuntimeError, getattr, used, "report"))
                )
                thread.start()
                thread.join()

    threads = [threading.Thread(target=work, args=(tiles,)) for tiles in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {3: 3, 5: 5}
    assert "open in another thread" in str(errors[0].value)


def test_contexts_end_in_order_and_once():
    double = arrays(np.float64)
    outer, inner = tile_machine.use(tiles=3), tile_machine.use(tiles=5)
    outer.__enter__()
    with pytest.raises(RuntimeError, match="entered already"):
        outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="ended before a context inside it, which ended with it"):
        outer.__exit__()
    af.attention(*double)  # on the CPU
    for one in (inner, outer):
        with pytest.raises(RuntimeError, match="not entered in this thread, or ended already"):
            one.__exit__()


def test_too_little_memory_writes_nothing():
    q, k, v = arrays()
    out = np.full_like(q, 7)
    with tile_machine.use(tiles=2, memory_per_tile=4000):
        with pytest.raises(MemoryError, match=r"tile \d, phase '[^']+': \d+ bytes live, expected at most 4000"):
            af.attention(q, k, v, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "members, line",
    [
        (dict(tiles=0), "machine: tiles: 0, expected 1 to 65536"),
        (dict(clock_hz=float("nan")), "machine: clock_hz: nan, expected a number"),
    ],
)
def test_absurd_machines(members, line):
    with pytest.raises(ValueError) as error:
        tile_machine.use(**members)
    assert str(error.value) == line
