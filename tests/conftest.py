"""Where the tests find the program: ANYFLASH_PROGRAM, or the newest build*/src/cli/anyflash of this checkout. They
fail, and are not skipped, where there is none."""

import os
import sys
from pathlib import Path

import pytest

# Tests that run side by side share a GPU's memory: a framework takes what it needs, not most of it at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

collect_ignore = [] if os.environ.get("ANYFLASH_TEST_DEVICE") == "cuda" else ["gpu"]  # scripts/test --gpu
if not os.environ.get("ANYFLASH_TEST_FRAMEWORKS"):  # set where they are installed: scripts/test does, last
    collect_ignore.append("frameworks")
if not os.environ.get("CUDACXX"):  # scripts/test sets it, but for --fast
    collect_ignore.append("scripts/test_sass.py")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "wrong_input"))  # wrong_calls.py


def find_program():
    named = os.environ.get("ANYFLASH_PROGRAM")
    if named:
        return Path(named)
    return max(ROOT.glob("build*/src/cli/anyflash"), key=lambda path: path.stat().st_mtime, default=None)


@pytest.fixture(scope="session")
def program():
    path = find_program()
    if path is None or not path.is_file():
        pytest.fail("the anyflash program is not built: cmake -B build && cmake --build build, or set ANYFLASH_PROGRAM")
    return path.resolve()
