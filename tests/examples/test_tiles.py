"""The example of the tile machine: refused in one piece, run in chunks."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiles" / "fit.py"


def test_a_sequence_fits_in_chunks_alone():
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    refusals = re.findall(r"tile \d+, phase '[^']+': (\d+) bytes live, expected at most 163840", ran.stdout)
    assert len(refusals) == 2 and all(int(bytes) > 163840 for bytes in refusals)
    assert len(re.findall(r"memory +[\d,]+ of 163,840 bytes", ran.stdout)) == 2
    assert float(re.search(r"largest number: (\S+)", ran.stdout)[1]) < 4e-3
