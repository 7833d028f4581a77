"""ANYFLASH_CUDA (cmake/cuda.cmake) where no CUDA compiler of use is: ON ends in one line, AUTO goes on and says so."""

import os
import re
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
COMPILERS = {
    "nowhere": None,
    "a wrapper without a toolkit": 'exec /no/toolkit/bin/nvcc "$@"',
    "too old": 'echo "Cuda compilation tools, release 11.8, V11.8.89"',
    "compiles nothing": 'echo "Cuda compilation tools, release 99.0, V99.0.1"',
}


def configure(folder, nvcc, *options):
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.25)\nproject(one NONE)\ninclude({PROJECT}/cmake/cuda.cmake)\n"
        'message(STATUS "with CUDA: ${ANYFLASH_HAS_CUDA}")\n'
    )
    return subprocess.run(
        ["cmake", "-S", folder, "-B", folder / "build", *options],
        env=os.environ | {"CUDACXX": str(nvcc)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("option", ["ON", "AUTO"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_compiler_of_use(tmp_path, compiler, option):
    nvcc = tmp_path / "nvcc"
    if COMPILERS[compiler]:
        nvcc.write_text(f"#!/bin/sh\n{COMPILERS[compiler]}\n")
        nvcc.chmod(0o755)
    done = configure(tmp_path, nvcc, f"-DANYFLASH_CUDA={option}")
    if option == "AUTO":
        assert done.returncode == 0 and done.stderr == ""
        assert re.search(r"no nvcc 12\.\d or newer works here, so not for NVIDIA GPUs\n-- with CUDA: OFF", done.stdout)
    else:
        assert done.returncode == 1 and done.stderr.count("CMake Error") == 1
        assert re.search(
            r"ANYFLASH_CUDA is ON, but no nvcc 12\.\d or newer works here: install the CUDA toolkit "
            r"12\.\d or newer, or set CUDACXX$",
            re.sub(r"\n +", " ", done.stderr.split("\nCall")[0]),
        )


@pytest.mark.parametrize("refused", ["75", "75;80", "80;75-virtual", "OFF"])
@pytest.mark.parametrize("option", ["ON", "AUTO"])
def test_no_code_of_sm_75_for_newer_gpus(tmp_path, option, refused):
    done = configure(tmp_path, "/nowhere", f"-DANYFLASH_CUDA={option}", f"-DANYFLASH_CUDA_ARCHITECTURES={refused}")
    assert done.returncode == 1 and done.stderr.count("CMake Error") == 1
    assert f"ANYFLASH_CUDA_ARCHITECTURES: {refused}, expected GPUs" in done.stderr


@pytest.mark.parametrize("option", [[], ["75-real"], ["75-real;80;90a-real"], ["175"], ["native"]], ids=str)
def test_other_architectures(tmp_path, option):
    done = configure(tmp_path, "/nowhere", *(f"-DANYFLASH_CUDA_ARCHITECTURES={gpus}" for gpus in option))
    assert done.returncode == 0 and done.stderr == ""
