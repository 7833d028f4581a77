"""A process that has used anyflash forks: its children compute, and do not wait for threads that they do not have."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import anyflash as af
import numpy as np
import pytest
from python_helpers import numbers, textbook

PATIENCE = 60  # seconds


def attend(seed):
    q, k, v = (numbers(seed + i, 1, 4, 512, 32) for i in range(3))
    out, lse = af.attention(q, k, v, return_lse=True, threads=4)
    return out, lse, af.attention_backward(q, q, k, v, out, lse, threads=4).dk


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_workers_compute_what_their_parent_does():
    expected = [attend(seed) for seed in range(3)]
    q, k, v = (numbers(i, 1, 4, 512, 32) for i in range(3))
    np.testing.assert_allclose(expected[0][0], textbook(q, k, v)[0], atol=2e-6)
    pool = multiprocessing.get_context("fork").Pool(2)
    try:
        results = pool.map_async(attend, range(3)).get(timeout=PATIENCE)
    finally:
        pool.terminate()
    for result, wanted in zip(results, expected, strict=True):
        for array, same in zip(result, wanted, strict=True):
            np.testing.assert_array_equal(array, same)
    np.testing.assert_array_equal(attend(0)[0], expected[0][0])


OLD_RUN_TIME = """
import ctypes, os, signal, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import numpy as np
import anyflash as af

q = np.ones((1, 4, 512, 32), np.float32)
attend = lambda: af.attention(q, q, q, threads=4)
attend()
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))
    attend()
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def test_a_run_time_that_cannot_let_its_threads_go(tmp_path):
    """PyTorch up to 2.6 brings an OpenMP run-time without omp_pause_resource_all, and shares it if it is loaded first.
    The stand-in: this library's own run-time under another name, with the function's name changed."""
    maps = Path("/proc/self/maps").read_text()
    (own,) = {line.split()[-1] for line in maps.splitlines() if "/libgomp" in line}
    name = subprocess.run(["readelf", "-d", own], capture_output=True, text=True).stdout
    name = name.split("soname: [")[1].split("]")[0].encode()
    old = Path(own).read_bytes()
    for known, other in (
        (b"\0" + name, b"\0x" + name[1:]),
        (b"\0omp_pause_resource_all\0", b"\0xmp_pause_resource_all\0"),
    ):
        assert known in old
        old = old.replace(known, other)
    (tmp_path / "old.so").write_bytes(old)
    command = [sys.executable, "-c", OLD_RUN_TIME, tmp_path / "old.so", str(PATIENCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "0", done.stdout + done.stderr
