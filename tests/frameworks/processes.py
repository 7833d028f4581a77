"""Programs that several processes of torch.distributed run together: with gloo on the CPU, or with NCCL, one a GPU."""

import os
import subprocess
import sys

BEGIN = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
store, rank, ranks, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
if device == "cuda":
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
backend = "gloo" if device == "cpu" else "nccl"
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
"""
# All are done; then each ends at once. What gloo's threads do while a process takes itself apart now and then aborts it.
END = """
dist.barrier()
if device != "cpu":
    torch.cuda.synchronize()
os._exit(0)
"""


def run_processes(program, folder, count=2, device="cpu", limit=300):
    """Each process runs the program, in which torch, dist, the default group, rank, ranks and its device are there.
    Returns what they print."""
    text, store = BEGIN + program + END, str(folder / "store")
    ran = [begin(text, store, str(rank), str(count), device) for rank in range(count)]
    try:
        answers = [one.communicate(timeout=limit) for one in ran]
    finally:
        for one in ran:
            one.kill()
    assert [one.returncode for one in ran] == [0] * count, "\n".join(error for _, error in answers)
    return [out for out, _ in answers]


def begin(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"},
    )
