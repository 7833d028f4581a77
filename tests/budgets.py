"""The smallest budget of a call."""

import re

LEAST = re.compile(r"memory_budget: \d+ bytes, expected at least (\d+)")


def least_of(call):
    """The smallest memory_budget of a call, from its error; 0 if it needs none."""
    try:
        call(memory_budget=0)
    except ValueError as error:
        return int(LEAST.fullmatch(str(error))[1])
    return 0
