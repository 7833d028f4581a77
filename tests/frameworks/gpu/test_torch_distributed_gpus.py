"""Attention of a sequence that is split over GPUs by NCCL: what the tests with gloo hold, on as many GPUs as
ANYFLASH_TEST_GPUS says (scripts/test --gpus N)."""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import test_torch_distributed as shared
import test_torch_distributed_faults as faults
import test_torch_join
from processes import run_processes

GPUS = int(os.environ.get("ANYFLASH_TEST_GPUS", "0"))
DEVICE = os.environ.get("ANYFLASH_TEST_GPUS_ON", "cuda")  # cpu: the tests themselves, with gloo
pytestmark = pytest.mark.skipif(GPUS < 2, reason="scripts/test --gpus N runs it")


def run(program, folder, limit=90):
    print("".join(run_processes(shared.BEGIN + program, folder, GPUS, DEVICE, limit)))


RANDOM = """
from distributed_cases import check
for dtype, seeds, tolerance in ((torch.float64, range(0, 70), 1e-9), (torch.float32, range(2000, 2020), 2e-4)):
    for seed in seeds: check(seed, dtype, tolerance, device)
"""

# Calls in a row without waiting, so that streams overlap and memory is used again, beside the same calls one by one.
IN_A_ROW = """
torch.manual_seed(rank)
big = 4096 if device != "cpu" else 256
rules = [(af.causal(), (big,)), (af.local(big // 8, causal=True), (big,)), (af.local(4), (64, big // 64))]
rules.append((af.documents_packed(torch.tensor([0, big // 5, big // 2, big], dtype=torch.int32)) & af.causal(), (big,)))
kind = torch.bfloat16 if device != "cpu" else torch.float32
inputs = []
for i in range(12):
    rule, shape = rules[i % 4]
    sharding = plan_sharding(rule, shape)
    own = sharding.shard(torch.empty(1, 1, *shape, 1), dim=2).shape[2:-1]
    x = [torch.randn(1, *own, 4, 64, device=device, dtype=kind) for _ in range(3)]
    inputs.append((rule, sharding, [one.movedim(-2, 1).requires_grad_() for one in x]))

def every(wait):
    made = []
    for rule, sharding, x in inputs:
        out = attention(*x, rule=rule, sharding=sharding, exchange="keys", deterministic=True)
        made.append([out, *torch.autograd.grad(out, x, torch.ones_like(out))])
        del out
        if wait and device != "cpu": torch.cuda.synchronize()
    return made

slow = every(True)
for _ in range(3):
    for ours, theirs in zip(every(False), slow):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
"""


def test_random_calls(tmp_path):
    run(RANDOM + shared.MANY_STAGES, tmp_path)


def test_accuracy_and_what_else_holds(tmp_path):
    programs = [shared.ACCURACY, shared.SAME_BITS, shared.SHARD, shared.OTHER_LOSSES, shared.NOT_FINITE, IN_A_ROW]
    programs += [shared.LARGE_LOGITS, *[shared.LOW_LOGITS] * (GPUS == 2)]
    run("\n".join([*programs, shared.GRAPHS]), tmp_path)


def test_join():
    device = "cuda" if DEVICE == "cuda" else "cpu"
    test_torch_join.check_join(device)
    test_torch_join.check_nan(device)


def test_errors_in_every_process(tmp_path):
    programs = faults.BEGIN, faults.MISMATCHES, faults.REFUSALS, faults.KNOWN, faults.OTHER_STEPS
    run_processes("".join(programs), tmp_path, 2, DEVICE, 90)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_process_that_dies(when, tmp_path):
    """With NCCL, one that dies within a call may leave its end to PyTorch's watchdog; none waits without end."""
    begun = time.monotonic()
    for code, out, error in faults.run_until_one_dies(when, tmp_path, GPUS, DEVICE):
        print(f"rank 1 dies {when} a call, another ends with {code} after {time.monotonic() - begun:.1f} s:\n{error}")
        assert code not in (3, -9), error
        assert when == "during" or (code, out) == (0, "told\n"), error
    assert time.monotonic() - begun < 60
