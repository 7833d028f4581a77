"""Tests of the front ends, with the frameworks themselves. They use the reference, the cases and the bar of
tests/contract, and run only when asked for, since the frameworks take gigabytes:

    ANYFLASH_TEST_FRAMEWORKS=1 pytest tests/frameworks
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests run side by side

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import pytest  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from profiles import many  # noqa: E402

settings.register_profile(
    "frameworks", deadline=None, derandomize=many() == 1, phases=[Phase.explicit, Phase.generate], print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
settings.load_profile("frameworks")

# A folder's run takes what is installed; scripts/test names the files, so that what is missing fails there.
collect_ignore_glob = [f"test_{name}*" for name in ("jax", "tensorflow") if not find_spec(name)]
if find_spec("torch"):
    import torch

    torch.set_num_threads(2)


@pytest.fixture
def numbers():
    """numbers(*shape, dtype=float64): a new tensor of normal numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float64: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
