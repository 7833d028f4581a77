"""As test_values.py, with lengths, page tables and the tables of rules in the GPU's memory. Collected only where
ANYFLASH_TEST_DEVICE is cuda (conftest.py)."""

import pytest
from cases import check
from hypothesis import assume, given
from profiles import examples
from strategies import FLOATS, calls, paged_cases, ragged_cases


def atoms(rule):
    """The names in a rule."""
    if rule[0] in ("and", "or", "not"):
        return set().union(*map(atoms, rule[1:]))
    return {rule[0]}


def check_late(case):
    names = atoms(case.rule)
    assume(case.cu_q or case.key_lengths or case.page_size or names & {"documents_packed", "blocks", "dense"})
    assume("documents" not in names)  # ids are read on the CPU
    assume(case.key_lengths is None or "documents_packed" not in names)
    check(case.but(late=True))


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("atom", ["documents_packed", "blocks", "dense"])
def test_tables_of_rules(atom, type):
    @examples(15)
    @given(calls(types=[type], atom=atom))
    def property(case):
        check_late(case)

    property()


@pytest.mark.parametrize("strategy", [calls, ragged_cases, paged_cases])
@pytest.mark.parametrize("type", FLOATS)
def test_lengths_and_pages(type, strategy):
    @examples(25)
    @given(strategy(types=[type]))
    def property(case):
        check_late(case)

    property()
