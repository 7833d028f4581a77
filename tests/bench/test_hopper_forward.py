"""bench/hopper_forward/run.py where no GPU is: its options, and what it says of a variant that ptxas serializes.
A script takes the compiler's place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "bench/hopper_forward/run.py"
VARIANT = "d128_n128_w2_s2_q2"


def run(*arguments, compiler="nvcc"):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDACXX": str(compiler)},
    )


@pytest.fixture
def compiler(tmp_path):
    """compiler(says, status): a program that says this, notes its arguments in the file `arguments`, and ends so."""

    def make(says, status=0):
        program = tmp_path / "compiler"
        program.write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/arguments"\necho "{says}"\nexit {status}\n')
        program.chmod(0o755)
        return program

    return make


def test_help_and_names_of_variants():
    assert "--check" in run("--help").stdout
    done = run("d96_n128_w2_s2_q2")
    assert done.returncode == 2 and "d96_n128_w2_s2_q2, expected a name such as d64" in done.stderr


def test_a_variant_s_name_chooses_its_macros(compiler, tmp_path):
    done = run(
        "--build",
        "--folder",
        tmp_path,
        f"{VARIANT}_half",
        compiler=compiler("Used 168 registers, 8 bytes spill stores"),
    )
    assert done.stdout == f"{VARIANT}_half: 168 registers, 8 bytes spill stores\n"
    told = (tmp_path / "arguments").read_text().split()
    macros = {"HEAD_SIZE=128", "KEYS=128", "SCORE=scale", "TYPE=__half", "BLOCKS=1"}
    assert {f"-D{macro}" for macro in macros} < set(told)


@pytest.mark.parametrize(
    "says, status",
    [("ptxas info : (C7510) Potential Performance Loss: serialized", 0), ("kernel.cu(3): error: expected a ;", 2)],
)
def test_serialized_products_and_errors_end_the_build(says, status, compiler, tmp_path):
    done = run("--build", "--folder", tmp_path, VARIANT, compiler=compiler(says, status))
    assert done.returncode == 1 and done.stderr == f"{VARIANT}: {says}\n"
