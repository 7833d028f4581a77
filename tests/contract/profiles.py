"""How many random examples a property gets, and which.

pytest tests/contract -n 2                                    as continuous integration runs them: the same every time
ANYFLASH_TEST_EXAMPLES=20 pytest tests/contract -n 2          20 times as many, new ones in each run: scripts/test --nightly
ANYFLASH_TEST_EXAMPLES=0.25 pytest tests/contract -n 2        a quarter of them: scripts/test --fast
ANYFLASH_TEST_SHRINK=1 pytest tests/contract -n 2             also makes a failing example small: minutes
"""

import os

from hypothesis import HealthCheck, Phase, settings

many = float(os.environ.get("ANYFLASH_TEST_EXAMPLES", "1"))


def examples(count):
    return settings(max_examples=max(1, round(count * many)))


def load():
    settings.register_profile(
        "anyflash",
        deadline=None,
        derandomize=many <= 1,
        phases=list(Phase) if os.environ.get("ANYFLASH_TEST_SHRINK") else [Phase.explicit, Phase.generate],
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("anyflash")
