"""Every result, forward and backward, against the reference and its bar: random shapes, types, layouts, rules and
options."""

import pytest
from cases import check
from hypothesis import given
from profiles import examples
from strategies import ATOMS, FLOATS, calls, packed_cases, paged_cases, ragged_cases


@pytest.mark.parametrize("type", FLOATS)
def test_any_call(type):
    @examples(100)
    @given(calls(types=[type]))
    def property(case):
        check(case)

    property()


@pytest.mark.parametrize("atom", ATOMS)
def test_each_rule(atom):
    @examples(40)
    @given(calls(types=[type for type in ("float32", "float64") if type in FLOATS], atom=atom))
    def property(case):
        check(case)

    property()


@pytest.mark.parametrize("type", FLOATS)
def test_long_sequences(type):
    @examples(8)
    @given(calls(types=[type], long=True))
    def property(case):
        check(case)

    property()


@examples(60)
@given(packed_cases())
def test_packed_qkv(case):
    check(case)


@examples(100)
@given(ragged_cases())
def test_ragged_documents(case):
    check(case)


@examples(80)
@given(paged_cases())
def test_paged_caches(case):
    check(case)
