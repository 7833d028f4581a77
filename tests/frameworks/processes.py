"""Programs that several processes of torch.distributed run together, on the CPU."""

import os
import subprocess
import sys

BEGIN = """
import os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=int(sys.argv[3]))
"""
# All are done; then each ends at once. What gloo's threads do while a process takes itself apart now and then aborts it.
END = """
dist.barrier()
os._exit(0)
"""


def run_processes(program, folder, count=2):
    """Each process runs the program, in which torch, dist and the default group are there."""
    text, store = BEGIN + program + END, str(folder / "store")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ran = [
        subprocess.Popen(
            [sys.executable, "-c", text, store, str(rank), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(count)
    ]
    try:
        answers = [one.communicate(timeout=300) for one in ran]
    finally:
        for one in ran:
            one.kill()
    assert [one.returncode for one in ran] == [0] * count, "\n".join(error for _, error in answers)
