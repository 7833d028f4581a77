"""--device: what it says where there is no such GPU. tests/gpu/test_cli.py has what it computes on one."""

import re

import numpy as np
import pytest

NO_GPU = re.compile(
    "query: on cuda:0, (expected cpu, the only device of this build|but CUDA finds no GPU here|"
    r"but the driver is for CUDA \d+\.\d, expected \d+\.0 or newer)$"
)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_no_gpu(anyflash, name):
    q = np.ones((1, 1, 4, 8), np.float32)
    np.savez(anyflash.folder / "in.npz", q=q, k=q, v=q)
    assert NO_GPU.match(anyflash.fails("run", "-i", "in.npz", "-o", "out.npz", "--device", name))
    assert not (anyflash.folder / "out.npz").exists()
    assert NO_GPU.match(anyflash.fails("bench", "--shape", "16", "--device", name))
    assert NO_GPU.match(anyflash.fails("check", "-i", "in.npz", "--device", name))
    assert NO_GPU.match(anyflash.fails("check", "--device", name))
    assert "cuda" not in anyflash.succeeds("devices")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1234", "cpu:0", ""])
def test_no_device(anyflash, name):
    for command in (["bench"], ["check"], ["run", "-o", "out.npz"]):
        assert anyflash.fails(*command, "--device", name).startswith("--device: ")


def test_the_cpu(anyflash):
    q = np.ones((1, 1, 4, 8), np.float32)
    np.savez(anyflash.folder / "in.npz", q=q, k=q, v=q)
    anyflash.succeeds("run", "-i", "in.npz", "-o", "out.npz", "--device", "cpu")
    assert (np.load(anyflash.folder / "out.npz")["out"] == 1).all()
