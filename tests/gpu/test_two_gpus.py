"""Tensors on the second GPU, while the first is the current one, and on both at once."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anyflash as af
import numpy as np
import pytest
import torch

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SECOND = torch.device("cuda", 1)


def tensors(dtype=torch.bfloat16, h=4, n=300, d=64, seed=0):
    """q, k, v and dout on the first GPU, the same ones on the second."""
    generator = torch.Generator().manual_seed(seed)
    first = [torch.randn(2, h, n, d, generator=generator).to("cuda:0", dtype) for _ in range(4)]
    return first, [x.to(SECOND) for x in first]


def all_of(q, k, v, dout, **options):
    """out, lse, dq, dk and dv."""
    out, lse = af.attention(q, k, v, return_lse=True, **options)
    return [out, lse, *af.attention_backward(dout, q, k, v, out, lse, deterministic=True, **options)[:3]]


def same(ours, theirs):
    """Bit for bit, wherever they are; the current GPU is still the first."""
    assert torch.cuda.current_device() == 0
    return all(x.dtype == y.dtype and torch.equal(x.cpu(), y.cpu()) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rule", [af.full(), af.causal() & af.local(100)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_both_give_the_same_bits(dtype, rule):
    first, second = tensors(dtype)
    made = all_of(*second, rule=rule)
    assert all(x.device == SECOND for x in made)
    assert same(made, all_of(*first, rule=rule))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_query_and_pages(dtype):
    first, second = tensors(dtype, n=512)
    results = []
    for q, k, v, _ in (second, first):
        q = q[:, :, :1]
        plain = af.attention(q, k, v)
        # (page, entry, head, channel): the 512 keys of both sequences in pages of 64, the last page first
        pages = [x.view(2, 4, 8, 64, 64).permute(0, 2, 3, 1, 4).reshape(16, 64, 4, 64).flip(0) for x in (k, v)]
        table = torch.arange(15, -1, -1, dtype=torch.int32, device=q.device).view(2, 8)
        lengths = torch.full((2,), 512, dtype=torch.int32, device=q.device)
        paged = af.attention(q, *pages, page_table=table, key_lengths=lengths)
        assert torch.allclose(paged.float(), plain.float(), atol=1e-2)
        results.append([plain, paged])
    assert same(*results)


def test_tables_come_to_each():
    first, second = tensors()
    rule = af.documents(np.repeat([0, 1, 2], 100))
    assert same(all_of(*second, rule=rule), all_of(*first, rule=rule))
    ends = torch.tensor([0, 120, 300], dtype=torch.int32)
    rule = [af.documents_packed(ends.to(x[0].device)) for x in (second, first)]
    assert same(all_of(*second, rule=rule[0]), all_of(*first, rule=rule[1]))


def test_one_thread_for_each_at_once():
    pairs = [tensors(seed=seed) for seed in range(8)]
    expected = [all_of(*first, rule=af.causal()) for first, _ in pairs]

    def run(device):
        torch.cuda.set_device(1 - device)
        return [all_of(*pair[device], rule=af.causal()) for _ in range(20) for pair in pairs]

    with ThreadPoolExecutor(2) as pool:
        for made in pool.map(run, (0, 1)):
            assert all(same(one, expected[i % len(pairs)]) for i, one in enumerate(made))


def test_a_graph_of_the_second():
    _, (q, k, v, _) = tensors()
    out = torch.empty_like(q)
    with torch.cuda.device(SECOND):
        af.attention(q, k, v, rule=af.causal(), out=out)
        expected = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            af.attention(q, k, v, rule=af.causal(), out=out)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert same([out], [expected])


class Elsewhere:
    """A tensor of the first GPU that says it were of the second."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return 2, 1

    def __dlpack__(self, *, stream=None):
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 12).value = 1  # DLTensor.device.device_id
        return capsule


@pytest.mark.parametrize(
    "wrong, line",
    [
        (lambda first, k: first, "key: on cuda:0, expected cuda:1"),
        (lambda first, k: Elsewhere(first), "key: in memory of cuda:0, expected memory of cuda:1"),
    ],
    ids=["said", "not said"],
)
def test_tensors_of_both_are_an_error(wrong, line):
    first, (q, k, v, _) = tensors()
    out = torch.full_like(q, 7)
    with pytest.raises(ValueError) as error:
        af.attention(q, wrong(first[1], k), v, out=out)
    assert str(error.value) == line
    assert (out == 7).all() and torch.cuda.current_device() == 0


def test_a_plan_is_for_one_of_them():
    first, second = tensors()
    with pytest.raises(ValueError, match="^plan: made for cuda:0, the call has cuda:1$"):
        af.attention(*second[:3], plan=af.plan(*first[:3]))


def test_a_process_of_the_second_leaves_the_first_alone():
    """It makes no context there, which would take hundreds of MB; nor in a new thread, whose current GPU is the first."""
    program = """
import ctypes, threading
import anyflash as af, torch
q, k, v, out = (torch.randn(1, 2, 100, 64, device="cuda:1") for _ in range(4))
torch.cuda.set_device(1)
expected = af.attention(q, k, v, rule=af.causal())
thread = threading.Thread(target=lambda: af.attention(q, k, v, rule=af.causal(), out=out))
thread.start()
thread.join()
torch.cuda.synchronize(1)
assert torch.equal(out, expected)
flags, active = ctypes.c_uint(), ctypes.c_int()
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print(active.value)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "0"
