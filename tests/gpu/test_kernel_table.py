"""The guide's table of kernels, docs/kernels.json, is what this GPU launches. GPUs but Hopper's have the portable
kernels alone."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import make_kernel_table


def test_the_guide_s_table_is_what_is_launched():
    assert make_kernel_table.measured()["rows"] == json.loads(make_kernel_table.RECORD.read_text())["rows"]
