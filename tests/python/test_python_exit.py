"""The interpreter ends while threads of its own are in calls."""

import subprocess
import sys

PROGRAM = """
import threading, time
import anyflash as af, numpy as np
q = np.ones((1, 2, 64, 32), np.float32)
def call():
    while True:
        af.attention(q, q, q, threads=1)
for _ in range(2):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.3)
"""


def test_daemons_in_calls_do_not_end_the_process():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
