"""No queries x keys buffer sneaks in: memory of long calls, each measured alone, in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, re, sys
from pathlib import Path
import numpy as np
import anyflash as af

n, kind = int(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape, np.float32)

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1.024e-3

def beside_results(call):
    ctypes.CDLL(None).malloc_trim(0)  # nothing that was freed before can serve the call
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
    before = megabytes("VmRSS")
    results = call()
    print(megabytes("VmHWM") - before - sum(x.nbytes for x in results if x is not None) / 1e6)
    return results

q, k, v, dout = (normal(1, 1, n, 64) for _ in range(4))
bias = {"keys": lambda: normal(1, 1, 1, n), "queries": lambda: normal(1, 1, n, 1)}.get(kind, lambda: None)()
options = dict(rule=af.local(256), threads=2, softcap=5.0 if kind == "softcap" else 0.0, bias=bias)
out, lse = beside_results(lambda: af.attention(q, k, v, return_lse=True, **options))
beside_results(lambda: af.attention_backward(dout, q, k, v, out, lse, **options))
beside_results(lambda: [np.ones(40_000_000, np.uint8) for _ in range(2)][:1])  # 40 MB of 80 are told
"""


@pytest.mark.parametrize("n", [16_384, 131_072])
@pytest.mark.parametrize("kind", ["none", "softcap", "keys", "queries"])
def test_memory_is_small(n, kind):
    """A boolean n x n matrix would take 268 MB and 17 GB, the panels of a block a few MB a thread, one array of the
    size of q 4 MB and 34 MB. The measurement itself is tested by a call of known size."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(n), kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward, backward, known = map(float, done.stdout.split())
    assert abs(known - 40) < 2, known
    assert forward < 20, f"forward: {forward:.1f} MB beside inputs and outputs"
    assert backward < 20 + 60 * n / 131_072, f"backward: {backward:.1f} MB beside inputs and outputs"
