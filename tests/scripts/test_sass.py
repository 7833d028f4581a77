"""scripts/sass on a tiny kernel. Needs a CUDA compiler, $CUDACXX, but no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SASS = Path(__file__).resolve().parents[2] / "scripts/sass"
KERNEL = """namespace { __device__ float twice(float x) { return 2 * x; } struct Tag {}; }
template <class T> __global__ void scale(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }
template __global__ void scale<Tag>(float*);
__global__ void other(float* x) { *x = 1; }
"""


@pytest.fixture
def project(tmp_path):
    """project(text): a repository whose only commit has KERNEL, with this in the work tree; returns what sass says."""
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "tiny.cu").write_text(KERNEL)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)

    def run(text, *options):
        (tmp_path / "tiny.cu").write_text(text)
        return subprocess.run([sys.executable, SASS, "tiny.cu", *options], cwd=tmp_path, capture_output=True, text=True)

    return run


def test_other_names_make_the_same_code(project):
    done = project(KERNEL.replace("twice", "double_of"), "--same")
    assert done.returncode == 0 and done.stdout.endswith("all kernels are the same\n"), done.stdout + done.stderr
    assert done.stdout.count("    same: ") == 2 and " registers, 0 B spilled" in done.stdout


def test_other_arithmetic_does_not(project):
    text = KERNEL.replace("2 * x", "x / 3 + x")
    done = project(text, "--same")
    assert done.returncode == 1 and done.stdout.endswith("not the same: 1\n"), done.stdout + done.stderr
    assert done.stdout.count("differs: ") == done.stdout.count("    same: ") == 1
    assert project(text).returncode == 0


def test_kernels_that_come_and_go(project):
    done = project(KERNEL.replace("other", "another"))
    assert done.stdout.count("    same: ") == 2 and ", was other(float*)" in done.stdout
    done = project(KERNEL.replace("other(float* x) { *x = 1", "another(float* x) { *x = 2"))
    assert done.stdout.count("new: ") == done.stdout.count("gone: ") == 1


def test_what_does_not_compile_ends_in_a_line(project):
    done = project("nonsense")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("tiny.cu: tiny.cu(1): error")


def test_ignored_register_counts_are_an_error(project):
    """ptxas ignores setmaxnreg in a kernel without a register cap."""
    text = KERNEL + '__global__ void third() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }\n'
    done = project(text)
    assert done.returncode == 1 and "C7508" in done.stderr and "tiny.cu, sm_90a: " in done.stderr


def test_an_unknown_revision_is_one_line(project):
    done = project(KERNEL, "--base", "nowhere")
    assert done.returncode == 1 and done.stderr == "sass: fatal: not a valid object name: nowhere\n"
