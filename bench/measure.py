"""Timing and memory, in pairs or in processes of their own."""

import json
import statistics
import subprocess
import sys
import time


def once(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pairs(ours, theirs, count):
    """Median seconds of both and the median over pairs of theirs / ours (above 1: ours is faster)."""
    for call in (ours, theirs):
        call()
    times = [(once(ours), once(theirs)) for _ in range(count)]
    mine, peer = zip(*times)
    return statistics.median(mine), statistics.median(peer), statistics.median(b / a for a, b in times)


LOCAL = """
import json, re, sys, time
from pathlib import Path
import numpy as np, anyflash as af
what, length = sys.argv[1], int(sys.argv[2])
memory = lambda field: 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal((1, 1, length, 64), np.float32) for _ in range(4))
rule = af.local(256)
out = np.zeros_like(q)
lse = np.zeros((1, 1, length), np.float32)
if what == "forward":
    outputs = q.nbytes
    call = lambda: af.attention(q, k, v, rule=rule)
else:  # any out and lse will do for time and memory, and no forward call has warmed a workspace
    outputs = 3 * q.nbytes
    lse += 5
    call = lambda: af.attention_backward(dout, q, k, v, out, lse, rule=rule)
out += 0  # its pages exist
Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
before = memory("VmRSS")
times = []
for _ in range(3):
    start = time.perf_counter(); call(); times.append(time.perf_counter() - start)
print(json.dumps([sorted(times)[1], (memory("VmHWM") - before - outputs) / 1e6]))
"""


def local_in_own_process(what, length):
    """(median seconds, peak MB beyond inputs and outputs) of one head, d64, local(256)."""
    run = subprocess.run([sys.executable, "-c", LOCAL, what, str(length)], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def tiny_call():
    """Median seconds of a call on 1x1x8x16 float32 NumPy arrays."""
    import numpy as np

    import anyflash as af

    q = np.ones((1, 1, 8, 16), np.float32)
    loops = 2000

    def many():
        for _ in range(loops):
            af.attention(q, q, q)

    many()
    return statistics.median(once(many) for _ in range(7)) / loops


def import_time():
    """Median seconds of `import anyflash` in a fresh interpreter, less an empty interpreter's time."""
    def start(code):
        return once(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    start("import anyflash")
    return statistics.median(start("import anyflash") - start("pass") for _ in range(5))


def processor():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "unknown processor"
