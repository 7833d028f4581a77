"""scripts/test's and scripts/sanitize-gpu's options, and what the latter builds for which GPU (its tools are stand-ins)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STANDS = {
    "nvidia-smi": 'case $1 in *compute_cap) echo 9.0 ;; *index) printf "0\\n1\\n" ;; esac',
    "cmake": 'echo "$@" >>called; [[ $1 == --build ]] || mkdir -p "$4"',
    "compute-sanitizer": 'echo "GPU $CUDA_VISIBLE_DEVICES"',
}


@pytest.fixture
def sanitize(tmp_path):
    """Runs a copy; gives what has ended, and how it configured."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")

    def call(*arguments, stands=STANDS, **environment):
        for name, text in stands.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(
            [tmp_path / "scripts" / "sanitize-gpu", *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment,
        )
        called = tmp_path / "called"
        return done, [line for line in called.read_text().splitlines() if "-S" in line] if called.exists() else []

    return call


@pytest.mark.parametrize(
    "options", [["--gpu", "--fast"], ["--fast", "--nightly"], ["--arm", "--gpus", "2"]], ids=" ".join
)
def test_one_of_the_options_at_a_time(tmp_path, options):
    (tmp_path / "dpkg-query").symlink_to("/bin/false")  # so that nothing is installed and built if it goes on
    (tmp_path / "apt-get").symlink_to("/bin/false")
    done = subprocess.run(
        [SCRIPTS / "test", *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    line = "test: --fast, --nightly, --gpu, --gpus, --arm: one of them at a time\n"
    assert (done.returncode, done.stderr) == (1, line)


@pytest.mark.parametrize(
    "count, line",
    [("3", "--gpus 3: this machine has 2"), ("1", "--gpus: '1', expected 2 to 9 GPUs"), ("", "--gpus: '', expected")],
)
def test_too_few_gpus(tmp_path, count, line):
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\nprintf '0 NVIDIA\\n1 NVIDIA\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([SCRIPTS / "test", "--gpus", *count.split()], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stderr.startswith(f"test: {line}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("tools", [[], ["memcheck"]])
def test_help_wherever_it_is_asked_for(sanitize, tools):
    done, _ = sanitize(*tools, "--help")
    assert done.returncode == 0 and done.stdout.startswith("scripts/sanitize-gpu: ")
    assert done.stdout.endswith(" ANYFLASH_CUDA_SMALL_TILES=ON\n" + 48 * " " + "those of sm_75\n")


@pytest.mark.parametrize("environment", [{}, {"ANYFLASH_CUDA_ARCHITECTURES": "80"}], ids=["", "architectures"])
def test_no_gpu_is_said_before_what_else_is_missing(sanitize, environment):
    done, _ = sanitize(stands={"nvidia-smi": "echo none >&2; exit 9"}, **environment)
    assert (done.returncode, done.stderr) == (1, "sanitize-gpu: no NVIDIA GPU: nvidia-smi finds none\n")


def test_hopper_s_kernels_and_portable_ones_in_folders_of_their_own(sanitize):
    done, hopper = sanitize("memcheck", "racecheck")
    assert done.returncode == 0 and {"GPU 0", "GPU 1"} <= {
        line.split(": ")[-1].split(" (")[0] for line in done.stdout.splitlines()
    }, done.stderr
    done, portable = sanitize(
        "racecheck", ANYFLASH_CUDA_ARCHITECTURES="90-real", CUDAFLAGS="-DSOME", ANYFLASH_CUDA_SMALL_TILES="ON"
    )
    assert done.returncode == 0, done.stderr
    flags = [
        (
            line.split()[3],
            "=90a-real " in line,
            "=90-real " in line,
            "FOR_RACECHECK" in line,
            "-DSOME" in line,
            "SMALL_TILES=ON" in line,
        )
        for line in hopper + portable[2:]
    ]
    assert flags == [
        ("build-sanitize", True, False, False, False, False),
        ("build-racecheck", True, False, True, False, False),
        ("build-racecheck-90_realON_DSOME", False, True, True, True, True),
    ]
