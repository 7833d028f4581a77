"""How many examples a property gets."""

import os

from hypothesis import settings


def many():
    return int(os.environ.get("ANYFLASH_TEST_EXAMPLES", "1"))


def examples(count):
    return settings(max_examples=count * many())
