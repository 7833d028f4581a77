"""Rules as Python objects: what they say, how they combine, what they keep alive."""

import copy
import gc
import itertools
import multiprocessing
import pickle
import re
import weakref

import anyflash as af
import numpy as np
import pytest


def pattern(rule, queries, keys=None, align="none_front"):
    return af.explain(rule, queries, keys, align).pattern


y, x = np.mgrid[:6, :6]


@pytest.mark.parametrize(
    "rule, expected",
    [
        (af.full(), np.ones((6, 6), bool)),
        (af.causal(), y >= x),
        (af.local(2), abs(y - x) < 2),
        (af.local(2, 1), (abs(y - x) % 2 == 0) & (abs(y - x) < 4)),
        (af.local(3, causal=True), (abs(y - x) < 3) & (y >= x)),
        (af.window(2, 1), (x - y >= -2) & (x - y <= 1)),
        (af.window(-1, 0), y >= x),
        (af.window((2,), (1,)), (x - y >= -2) & (x - y <= 1)),
        (af.prefix(2), x < 2),
        (af.prefix_queries(2), y < 2),
        (af.sink(3), x < 3),
        (af.documents(np.array([0, 0, 1, 1, 1, 0])), np.isin(y, (2, 3, 4)) == np.isin(x, (2, 3, 4))),
        (af.documents_packed(np.array([0, 2, 6], np.int32)), (y < 2) == (x < 2)),
        (af.tiles(2, 1), y // 2 == x // 2),
        (af.neighbourhood(3), abs(x - np.clip(y, 1, 4)) <= 1),
        (af.neighbourhood(3, causal=True), (x <= y) & (x > y - 3)),
        (af.neighbourhood(2, 3), y % 3 == x % 3),
        (af.blocks(np.array([[1, 0], [1, 1]], bool), 3, 3), y // 3 >= x // 3),
        (af.dense(y * x % 3 == 0), y * x % 3 == 0),
    ],
    ids=str,
)
def test_each_rule_shows_what_it_says(rule, expected):
    np.testing.assert_array_equal(pattern(rule, 6), expected)
    np.testing.assert_array_equal(pattern(~rule, 6), ~expected)


def test_rules_combine():
    near, early = af.local(2), af.prefix(3)
    np.testing.assert_array_equal(pattern(near & early, 6), (abs(y - x) < 2) & (x < 3))
    np.testing.assert_array_equal(pattern(near | early, 6), (abs(y - x) < 2) | (x < 3))
    np.testing.assert_array_equal(pattern(~(near | ~early), 6), (abs(y - x) >= 2) & (x < 3))


def test_per_dimension_numbers():
    rule = af.window((0, 1), (0, 1))
    places = list(itertools.product(range(2), range(3)))
    expected = [[a[0] == b[0] and abs(a[1] - b[1]) <= 1 for b in places] for a in places]
    np.testing.assert_array_equal(pattern(rule, (2, 3)), expected)


def test_a_rule_prints_as_it_is_written_and_reads_itself():
    for rule in (
        af.full(),
        af.causal() & af.local(8, 2),
        ~(af.window(3, -1) | af.prefix(5)) & af.sink(4),
        af.neighbourhood((3, 5), 2, (True, False)) | af.tiles((2, 4), 3),
    ):
        assert repr(af.parse_rule(repr(rule))) == repr(rule)
    assert repr(af.causal()) == "causal()"
    assert str(af.causal() & ~af.sink(2)) == "causal() & ~sink(2)"


def test_a_rule_keeps_its_arrays_alive_through_every_combination():
    ids = np.array([0, 0, 1, 1, 2, 2], np.int32)
    mask = np.ones((6, 6), np.bool_)
    gone = weakref.ref(ids), weakref.ref(mask)
    rule = ~(af.documents(ids) & af.causal()) | ~af.dense(mask)
    del ids, mask
    gc.collect()
    assert gone[0]() is not None and gone[1]() is not None
    np.testing.assert_array_equal(pattern(rule, 6), ~((y // 2 == x // 2) & (y >= x)))
    del rule
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_documents_of_keys_may_be_given_apart():
    rule = af.documents(np.array([0, 1], np.int64), np.array([1, 0, 1], np.int64))
    np.testing.assert_array_equal(pattern(rule, 2, 3), [[False, True, False], [True, False, True]])


@pytest.mark.parametrize("align, offset", [("none_front", 0), ("none_end", 3)])
def test_alignment(align, offset):
    expected = np.arange(3)[:, None] + offset >= np.arange(6)
    np.testing.assert_array_equal(pattern(af.causal(), 3, 6, align), expected)


def test_numpy_integers_count_as_integers():
    assert repr(af.local(np.int64(3), np.int8(1))) == repr(af.local(3, 1))
    assert repr(af.window([np.int32(1), 2], 0)) == repr(af.window((1, 2), 0))


ids = np.array([3, 1, 3, 2, 1, 3], np.int32)
tables = [
    af.full(),
    ~(af.causal() & af.local(2, 1)) | af.window((1,), -1) & ~af.neighbourhood(3, 2, True) & af.tiles(2, 3),
    af.documents(ids) & af.causal(),
    af.documents(ids[::-1], np.arange(12)[::2] // 3) | af.sink(1),
    (af.documents(ids) & af.causal()) | (af.documents(ids) & af.local(2)),
    af.documents_packed(np.array([0, 2, 6], np.int64)),
    af.blocks(np.array([[1, 0], [7, 1]], np.uint8).T, 3, 3) & ~af.dense(np.broadcast_to(x[:1] > 1, (1, 6))),
    af.dense((y * x % 3 == 0)[None, None]) & af.dense((y * x % 2 == 0)[::-1]),
]


@pytest.mark.parametrize("rule", tables, ids=str)
def test_rules_can_be_pickled_and_copied(rule):
    for again in (pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule), copy.copy(rule)):
        assert str(again) == str(rule)
        np.testing.assert_array_equal(pattern(again, 6), pattern(rule, 6))


def test_rules_of_many_tables_and_levels_can_be_pickled():
    rule = af.dense(np.eye(6, dtype=bool))
    for i in range(31):
        rule = ~(af.dense(y > x * i % 5) & rule)
    np.testing.assert_array_equal(pattern(pickle.loads(pickle.dumps(rule)), 6), pattern(rule, 6))


def test_a_deep_copy_has_tables_of_its_own_and_a_copy_has_not():
    mask = np.ones((6, 6), bool)
    rule = af.dense(mask)
    apart, shared = copy.deepcopy(rule), copy.copy(rule)
    mask[:] = False
    assert pattern(apart, 6).all()
    assert not pattern(shared, 6).any()


def test_rules_go_to_other_processes():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(pattern, (tables[2], 6)), pattern(tables[2], 6))


def test_tables_by_name():
    rule = af.parse_rule("documents(ids, ids) & ~dense(mask)", {"ids": ids, "mask": y > x})
    np.testing.assert_array_equal(pattern(rule, 6), (ids[:, None] == ids) & ~(y > x))
    for given, line in (
        ({}, "tables: no array 'ids', which the rule's text names"),
        ({3: ids, "\ud800": ids, "id": ids}, "which the rule's text names, did you mean 'id'?"),
    ):
        with pytest.raises(ValueError, match=re.escape(line)):
            af.parse_rule("documents(ids, ids)", given)
    with pytest.raises(TypeError, match="tables: ids type"):
        af.parse_rule("documents(ids, ids)", {"ids": "abc"})
    with pytest.raises(TypeError, match="tables: ids type complex128, expected boolean, uint8, int32 or int64"):
        af.parse_rule("documents(ids, ids)", {"ids": np.zeros(3, np.complex128)})


def test_a_rule_is_no_number_and_no_number_a_rule():
    for combine in (lambda: af.full() & 1, lambda: 1 | af.full(), lambda: af.full() & None):
        with pytest.raises(TypeError, match="unsupported operand"):
            combine()
