"""Wrong rules, and wrong calls of what takes a rule: each is answered in one line."""

import anyflash as af
import numpy as np
import pytest
from python_helpers import FLOATS, INDICES, check, k, q, unmade, v

RULES = {
    "local window": (lambda: af.local(0), ValueError, "rule local: window 0, expected at least 1"),
    "local stride": (lambda: af.local(2, 31), ValueError, "rule local: log2_stride 31, expected at most 30"),
    "local stride beyond 32 bits": (
        lambda: af.local(2, 2**32),
        ValueError,
        "rule local: log2_stride 4294967296, expected at most 30",
    ),
    "local of a float": (lambda: af.local(1.5), TypeError, "rule local: window type float, expected an integer"),
    "window numbers": (lambda: af.window((1, 2, 3, 4), 0), ValueError, "rule window: left length 4, expected 1 to 3"),
    "window of nothing": (lambda: af.window((), 0), ValueError, "rule window: left length 0, expected 1 to 3"),
    "window of words": (
        lambda: af.window(1, "right"),
        TypeError,
        "rule window: right type str, expected an integer or a sequence of 1 to 3",
    ),
    "prefix": (lambda: af.prefix(-1), ValueError, "rule prefix: n -1, expected at least 0"),
    "prefix_queries": (lambda: af.prefix_queries(-1), ValueError, "rule prefix_queries: n -1, expected at least 0"),
    "sink": (lambda: af.sink(-2), ValueError, "rule sink: n -2, expected at least 0"),
    "documents of floats": (
        lambda: af.documents(np.zeros(4)),
        TypeError,
        f"rule documents: ids_q type float64, {INDICES}",
    ),
    "documents of a list": (
        lambda: af.documents([0, 1]),
        TypeError,
        "rule documents: ids_q type list, expected an array (NumPy, or one with __dlpack__)",
    ),
    "documents of None": (lambda: af.documents(None), ValueError, "rule documents: ids_q not given"),
    "tiles kernel": (lambda: af.tiles(2, 2), ValueError, "rule tiles: kernel 2, expected an odd number"),
    "tiles shape": (lambda: af.tiles(0, 1), ValueError, "rule tiles: shape 0, expected at least 1"),
    "neighbourhood kernel": (
        lambda: af.neighbourhood(0),
        ValueError,
        "rule neighbourhood: kernel 0, expected at least 1",
    ),
    "neighbourhood dilation": (
        lambda: af.neighbourhood(3, 0),
        ValueError,
        "rule neighbourhood: dilation 0, expected at least 1",
    ),
    "blocks size": (
        lambda: af.blocks(np.ones((2, 2), bool), 0, 4),
        ValueError,
        "rule blocks: block_q 0, expected at least 1",
    ),
    "blocks type": (
        lambda: af.blocks(np.ones((2, 2)), 4, 4),
        TypeError,
        "rule blocks: bitmap type float64, expected boolean or uint8",
    ),
    "dense type": (
        lambda: af.dense(np.ones((2, 2), np.int64)),
        TypeError,
        "rule dense: mask type int64, expected boolean or uint8",
    ),
    "dense rank": (
        lambda: af.dense(np.ones(4, bool)),
        ValueError,
        "rule dense: mask shape (4), expected (queries, keys) or (batch, heads, queries, keys)",
    ),
    "parse of half a character": (
        lambda: af.parse_rule("\udc80"),
        ValueError,
        "text: a str with surrogates, expected one that UTF-8 can hold",
    ),
    "parse beyond a zero": (
        lambda: af.parse_rule("causal()\0&"),
        ValueError,
        "rule: column 9: expected & | or the end, found a character that is not printable ASCII",
    ),
    "align of half a character": (
        lambda: af.attention(q, k, v, align="\udc80"),
        ValueError,
        "align: a str with surrogates, expected one that UTF-8 can hold",
    ),
    "an empty rule": (
        lambda: af.attention(q, k, v, rule=unmade(af.full())),
        TypeError,
        "rule: type Rule, expected a rule such as anyflash.causal()",
    ),
    "an empty plan": (
        lambda: af.attention(q, k, v, plan=unmade(af.plan(q, k, v))),
        TypeError,
        "plan: type Plan, expected what anyflash.plan gives",
    ),
    "parse of a number": (lambda: af.parse_rule(3), TypeError, "text: type int, expected str"),
    "explain of words": (
        lambda: af.explain(af.full(), "12"),
        TypeError,
        "q_shape: type str, expected an integer or a sequence of 1 to 3",
    ),
    "explain in four dimensions": (
        lambda: af.explain(af.full(), (1, 2, 3, 4)),
        ValueError,
        "q_shape: length 4, expected 1 to 3",
    ),
    "explain of dimensions that differ": (
        lambda: af.explain(af.full(), (4, 4), 16),
        ValueError,
        "k_shape: (16), expected 2 sizes as in q_shape",
    ),
    "explain of bytes": (
        lambda: af.explain(af.full(), b"12"),
        TypeError,
        "q_shape: type bytes, expected an integer or a sequence of 1 to 3",
    ),
    "explain of a matrix": (
        lambda: af.explain(af.full(), np.ones((2, 2), int)),
        TypeError,
        "q_shape: type ndarray, expected an integer",
    ),
    "explain's head size": (
        lambda: af.explain(af.full(), 4, d_qk=-1),
        ValueError,
        "d_qk: head size -1, expected 1 to 256",
    ),
    "explain's value size": (
        lambda: af.explain(af.full(), 4, d_v=513),
        ValueError,
        "d_v: head size 513, expected 1 to 512",
    ),
    "explain of a negative size": (
        lambda: af.explain(af.full(), -1),
        ValueError,
        "q_shape: (-1), expected sizes from 0 to 2147483647",
    ),
    "explain of no rule": (
        lambda: af.explain(None, 4),
        TypeError,
        "rule: type NoneType, expected a rule such as anyflash.causal()",
    ),
    "explain's type": (lambda: af.explain(af.full(), 4, dtype="int8"), TypeError, f"dtype: type int8, {FLOATS}"),
    "explain's type of two lines": (
        lambda: af.explain(af.full(), 4, dtype="a\nb"),
        TypeError,
        f"dtype: type a\\x0ab, {FLOATS}",
    ),
    "explain's type an object": (
        lambda: af.explain(af.full(), 4, dtype=object()),
        TypeError,
        f"dtype: type object, {FLOATS}",
    ),
    "a picture's name of two lines": (
        lambda: af.explain(af.full(), 4).save("a\nb"),
        ValueError,
        "path: 'a\\x0ab', expected a name that ends in .svg, .txt or .png",
    ),
    "tables without an endless name": (
        lambda: af.parse_rule(f"dense({'x' * 1000})", {}),
        ValueError,
        f"tables: no array '{'x' * 40}...', which the rule's text names",
    ),
    "a table whose name is a number": (
        lambda: af.parse_rule("causal()", {3: None}),
        ValueError,
        "tables: 3, which the rule's text does not name",
    ),
    **{
        f"{text} with {tables!r}": (
            lambda text=text, tables=tables: af.parse_rule(text, tables),
            TypeError,
            f"tables: type {type(tables).__name__}, expected arrays by name",
        )
        for text in ("causal()", "documents(ids, ids)")
        for tables in (3, [3], [], (), "", set(), np.zeros(0))
    },
    "pattern too large": (
        lambda: af.explain(af.full(), 1 << 20).pattern,
        ValueError,
        "pattern: 1048576 queries x 1048576 keys, expected at most 2^28 pairs",
    ),
    "picture's side": (lambda: af.explain(af.full(), 4).grey(0), ValueError, "side: 0, expected 1 to 4096"),
}


def test_a_misspelt_name():
    with pytest.raises(
        TypeError, match=r"local\(\) got an unexpected keyword argument 'widow'.* [Dd]id you mean 'window'\?$"
    ):
        af.local(widow=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'window'"):
        af.local()


@pytest.mark.parametrize("name", list(RULES))
def test_rules_and_explain(name):
    check(*RULES[name])


def test_a_rule_has_no_truth_value():
    for use in (lambda: af.causal() and af.local(3), lambda: not af.full(), lambda: 1 if af.full() else 2):
        check(use, TypeError, "rule: has no truth value, expected & | ~ in place of and, or, not")
