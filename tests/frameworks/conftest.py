"""Tests of the front ends, with the frameworks themselves. They use the reference, the cases and the bar of
tests/contract, and run only when asked for, since the frameworks take gigabytes:

    ANYFLASH_TEST_FRAMEWORKS=1 pytest tests/frameworks

They run where ANYFLASH_TEST_DEVICE says (tests/contract/devices.py): on cuda with the folder gpu, without the tests
that are marked as the CPU's, and fail where a framework finds no GPU (scripts/test --gpu).
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests run side by side

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import profiles
import pytest
from devices import DEVICE

profiles.load()

# A folder's run takes what is installed; scripts/test names the files, so that what is missing fails there.
collect_ignore_glob = [f"test_{name}*" for name in ("jax", "tensorflow") if not find_spec(name)]
os.environ.setdefault("JAX_PLATFORMS", {"cpu": "cpu", "cuda": "cuda,cpu"}[DEVICE])
if DEVICE == "cpu":
    collect_ignore_glob.append("gpu")
    if find_spec("torch"):
        import torch

        torch.set_num_threads(2)


def pytest_configure(config):
    config.addinivalue_line("markers", "of_the_cpu: what is asked has to do with the CPU; not run on cuda")


def pytest_collection_modifyitems(config, items):
    if DEVICE == "cuda":
        of_the_cpu = [item for item in items if item.get_closest_marker("of_the_cpu")]
        config.hook.pytest_deselected(items=of_the_cpu)
        items[:] = [item for item in items if item not in of_the_cpu]


def pytest_terminal_summary(terminalreporter):
    """How many architectures test_transformers_walk.py found equal, refused, not built."""
    counts = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name.startswith("architectures "):
                counts[name] = counts.get(name, 0) + len(value)
    if counts:
        terminalreporter.write_line("Transformers' " + ", ".join(f"{name}: {n}" for name, n in counts.items()))


@pytest.fixture(autouse=True, scope="module")
def on_the_device(request):
    """JAX and TensorFlow take the CPU where they find no GPU; PyTorch fails by itself."""
    if DEVICE == "cuda" and request.module.__name__.startswith("test_jax"):
        import jax

        assert jax.devices()[0].platform == "gpu", "ANYFLASH_TEST_DEVICE is cuda, but JAX finds no GPU"
    if DEVICE == "cuda" and request.module.__name__.startswith("test_tensorflow"):
        import tensorflow as tf

        assert tf.config.list_physical_devices("GPU"), "ANYFLASH_TEST_DEVICE is cuda, but TensorFlow finds no GPU"


@pytest.fixture
def numbers():
    """numbers(*shape, dtype=float64): a new tensor of normal numbers on the device, the same in every run."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.float64):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    return make
