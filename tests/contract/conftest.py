"""How the contract tests run: the same examples every time, or many new ones.

pytest tests/contract -n 2                                    as continuous integration runs them
ANYFLASH_TEST_EXAMPLES=20 pytest tests/contract -n 2          20 times as many, new ones in each run
ANYFLASH_TEST_SHRINK=1 pytest tests/contract -n 2             also makes a failing example small: minutes
"""

import os

for library in ("OPENBLAS", "MKL"):  # the reference's matrix products leave the cores to the tests
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from devices import DEVICE, require_gpu_of_pytorch
from hypothesis import HealthCheck, Phase, settings
from profiles import many

if DEVICE == "cuda":
    require_gpu_of_pytorch()
else:
    collect_ignore = ["test_tables_on_gpu.py"]

settings.register_profile(
    "contract",
    deadline=None,
    derandomize=many() == 1,
    phases=list(Phase) if os.environ.get("ANYFLASH_TEST_SHRINK") else [Phase.explicit, Phase.generate],
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("contract")
