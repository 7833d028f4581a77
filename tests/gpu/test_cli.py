"""The program on a GPU. It copies tensors there and back."""

import subprocess

import numpy as np
import pytest


@pytest.fixture
def run(program, tmp_path):
    def call(*arguments, code=0):
        done = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return call


def test_devices(run):
    assert "cuda:0" in run("devices")


def test_run_gives_what_the_cpu_gives(run, tmp_path):
    random = np.random.default_rng(0)
    names = dict(q=(2, 4, 100, 64), k=(2, 2, 100, 64), v=(2, 2, 100, 64), dout=(2, 4, 100, 64), sink=(4,))
    np.savez(tmp_path / "in.npz", **{name: random.standard_normal(shape, np.float32) for name, shape in names.items()})
    np.save(tmp_path / "lengths.npy", np.array([100, 37], np.int32))
    made = []
    for device in ("cpu", "cuda:0"):
        run(
            "run",
            "-i",
            "in.npz",
            "--key-lengths",
            "lengths.npy",
            "--rule",
            "causal() & local(70)",
            "--lse",
            "--backward",
            "--device",
            device,
            "-o",
            f"{device[:3]}.npz",
        )
        made.append(np.load(tmp_path / f"{device[:3]}.npz"))
    assert set(made[0]) == set(made[1])
    for name in made[0]:
        assert np.allclose(made[0][name], made[1][name], rtol=1e-4, atol=1e-5), name


def test_check_and_bench(run):
    assert "checks passed" in run("check", "--quick", "--type", "float64", "--rule", "causal()", "--device", "cuda")
    check = ("check", "--quick", "--type", "float32", "--rule", "causal()", "--device", "cuda", "--allow-tf32")
    assert "checks passed" in run(*check)
    assert "checks passed" in run(*check, "--deterministic")
    assert "backward" in run("bench", "--shape", "512", "--type", "float16", "--device", "cuda:0")


def test_no_such_gpu(run):
    line = run("bench", "--device", "cuda:77", code=1)
    assert line.startswith("anyflash: query: on cuda:77, expected cuda:0") and line.count("\n") == 1


def test_too_little_memory(run):
    line = run(
        "bench",
        "--shape",
        "4194304",
        "--heads",
        "4096",
        "--head-size",
        "256",
        "--type",
        "float16",
        "--rule",
        "local(1)",
        "--device",
        "cuda",
        "--direction",
        "forward",
        code=1,
    )
    assert "of memory" in line and line.count("\n") == 1  # of the machine: it is asked first
