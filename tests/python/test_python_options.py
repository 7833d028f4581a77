"""One schema of options: C++'s Options, its list by name, and what each front end takes, all say the same."""

import inspect
import re
import subprocess
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import anyflash as af
import numpy as np
import pytest
from anyflash import _core, _options
from python_helpers import check, k, q, v

OR_NONE = {True: float | None, False: int | None}
HEADERS = Path(__file__).parents[2] / "include/anyflash"
NOT_BY_NAME = {"rule", "stream", "workspace", "plan"}  # neither a scalar nor a tensor of all front ends
OF_CPP = {"out_of_core"}  # has a function that is called


def fields(header, struct):
    text = re.sub(r"/\*.*?\*/", "", (HEADERS / header).read_text(), flags=re.S)
    body = re.sub(r"//.*", "", re.search(rf"struct {struct} {{(.*?)\n}}", text, re.S)[1])
    return re.findall(r"^\s*[\w:<>\* ]+[ \*](\w+)\s*(?:=[^;]*)?;", body, re.M)


def test_every_field_is_in_the_list_or_known_not_to_be():
    listed = {*_options.DEFAULTS, *_options.TENSORS}
    assert set(fields("attention.h", "Options")) == listed | NOT_BY_NAME | OF_CPP
    assert not listed & NOT_BY_NAME


def test_the_schema_is_the_library_s():
    assert list(_options.DEFAULTS.items()) == list(_core.scalar_options.items())
    assert [type(one) for one in _options.DEFAULTS.values()] == [type(one) for one in _core.scalar_options.values()]


def test_c_has_all_of_them():
    assert set(fields("c_api.h", "anyflash_options")) == {
        *_options.DEFAULTS,
        *_options.TENSORS,
        *NOT_BY_NAME,
        "struct_size",
        "has_scale",
    }


def words(name):
    """Those that C++ lists."""
    header = (HEADERS / "attention.h").read_text()
    return re.findall(r'"(\w+)"', re.search(rf"{name}_names\[\] = {{(.*?)}}", header)[1])


def test_type_checkers_are_told_the_same():
    hints = get_type_hints(_options.Scalars)
    assert list(hints) == list(_options.DEFAULTS)
    for name, default in _options.DEFAULTS.items():
        if isinstance(default, str):
            assert get_origin(hints[name]) is Literal
            assert list(get_args(hints[name])) == words(name) and default in words(name)
        else:
            assert hints[name] == (OR_NONE[name == "scale"] if default is None else type(default))


@pytest.mark.parametrize("call", [af.attention, af.attention_backward, af.plan])
def test_signatures_have_every_option_and_its_default(call):
    parameters = inspect.signature(call).parameters
    assert set(_options.TENSORS) <= set(parameters)
    for name, default in _options.DEFAULTS.items():
        assert parameters[name].default == default


def test_defaults_change_nothing():
    expected = af.attention(q, k, v)
    for name, default in _options.DEFAULTS.items():
        np.testing.assert_array_equal(af.attention(q, k, v, **{name: default}), expected)


def test_a_text_holds_what_is_not_the_default():
    checked = _options.constants({"softcap": 2, "align": "none_end", "allow_tf32": np.True_, "threads": np.int8(3)})
    assert list(checked) == list(_options.DEFAULTS)
    assert _options.text_of(checked) == "; align=none_end; softcap=2.0; allow_tf32=1; threads=3"
    assert _options.text_of(_options.constants({})) == ""


@pytest.mark.parametrize(
    "name, more",
    [
        ("stream", ""),
        ("softcp", ", did you mean 'softcap'?"),
        ("aling", ", did you mean 'align'?"),
        ("rules", ", did you mean 'rule'?"),
        ("alibi_slope", ", did you mean 'alibi_slopes'?"),
        ("is_causal", ", use rule=anyflash.causal()"),
        ("attn_mask", ", use rule=anyflash.dense(mask), or bias= for a mask that is added"),
        ("\ud800", ""),
    ],
)
def test_a_name_that_is_none(name, more):
    line = f"() got an unexpected keyword argument '{_core.echoed(name)}'{more}"
    given = {name: 1}
    check(lambda: af.attention(q, k, v, **given), TypeError, f"attention{line}")
    check(lambda: af.attention_backward(q, q, k, v, q, q, **given), TypeError, f"attention_backward{line}")
    check(lambda: af.plan(q, k, v, **given), TypeError, f"plan{line}")


def test_the_extension_takes_no_other_name():
    check(lambda: _core.plan(q, k, v, {"rule": af.full(), "scal": 1}), TypeError, "options: no 'scal'")
    check(lambda: _core.plan(q, k, v, {1: 1}), TypeError, "options: no '1'")
    joined = "".join(["soft", "cap"])  # not the interned name
    check(lambda: _core.plan(q, k, v, {joined: "x"}), TypeError, "softcap: type str, expected a number")


def test_the_program_has_all_of_them(program):
    shown = subprocess.run([program, "run", "--help"], capture_output=True, text=True, check=True).stdout
    for name in _options.DEFAULTS:
        assert f"--{name.replace('_', '-')} " in shown
