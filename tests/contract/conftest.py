"""How the contract tests run; profiles.py says how many examples they get."""

import os

for library in ("OPENBLAS", "MKL"):  # the reference's matrix products leave the cores to the tests
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import profiles
from devices import DEVICE, TILES, require_gpu_of_pytorch

if DEVICE == "cuda":
    require_gpu_of_pytorch()
else:
    collect_ignore = ["test_tables_on_gpu.py"]
if DEVICE == "tiles":
    from anyflash import tile_machine

    used = tile_machine.use(**TILES)  # as long as the process lives
    used.__enter__()

    def pytest_collection_modifyitems(config, items):
        """The tile machine has float16 and float32."""
        types = ("bfloat16", "float64")
        values = lambda one: one.callspec.params.values() if hasattr(one, "callspec") else ()
        other = [one for one in items if any(str(getattr(x, "__name__", x)) in types for x in values(one))]
        config.hook.pytest_deselected(items=other)
        items[:] = [one for one in items if one not in other]


profiles.load()
