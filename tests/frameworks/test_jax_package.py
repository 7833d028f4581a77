"""The front end as a part of the package: its documents, what importing it brings along, the binary interface that it
declares, and that nothing is copied."""

import ctypes
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from snippets import snippets

PROJECT = Path(__file__).resolve().parents[2]


def run(program, **options):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", snippets("python jax"))
def test_the_documents_example_runs(block, tmp_path):
    run(block, cwd=tmp_path)


def test_anyflash_alone_does_not_bring_jax():
    assert run("import sys, anyflash; print('jax' in sys.modules)") == "False\n"


def test_the_front_end_brings_nothing_more_of_jax():
    program = """
import sys, jax
before = set(sys.modules)
import anyflash.jax
print([name for name in sys.modules if name not in before and not name.startswith(("anyflash", "numpy"))])
print(jax._src.xla_bridge.backends_are_initialized())
"""
    assert run(program) == "[]\nFalse\n"


def test_everything_public_is_documented():
    run("""
import inspect, anyflash.jax as module
assert len(inspect.getdoc(module)) > 100
for name in module.__all__:
    assert len(inspect.getdoc(getattr(module, name))) > 60, name
""")


STRUCTURES = {
    "Extension": ("Extension_Base", "struct_size type next"),
    "Version": ("Api_Version", "struct_size extensions:extension_start major:major_version minor:minor_version"),
    "Metadata": ("Metadata", "struct_size version:api_version traits"),
    "MetadataExtension": ("Metadata_Extension", "base:extension_base metadata"),
    "ErrorCreateArgs": ("Error_Create_Args", "struct_size extensions:extension_start message code:errc"),
    "StreamGetArgs": ("Stream_Get_Args", "struct_size extensions:extension_start context:ctx stream"),
    "Api": (
        "Api",
        "struct_size extensions:extension_start version:api_version internal:internal_api "
        "error_create:XLA_FFI_Error_Create stream_get:XLA_FFI_Stream_Get",
    ),
    "Buffer": ("Buffer", "struct_size extensions:extension_start type:dtype data rank sizes:dims"),
    "Text": ("ByteSpan", "data:ptr size:len"),
    "Attributes": ("Attrs", "struct_size extensions:extension_start count:size types names values:attrs"),
    "CallFrame": (
        "CallFrame",
        "struct_size extensions:extension_start api context:ctx stage arguments:args results:rets attributes:attrs",
    ),
}
VALUES = {
    "metadata_extension": "Extension_Metadata",
    "text_attribute": "AttrType_STRING",
    "invalid_argument": "Error_Code_INVALID_ARGUMENT",
    "resource_exhausted": "Error_Code_RESOURCE_EXHAUSTED",
    "internal": "Error_Code_INTERNAL",
} | {name: f"DataType_{name.upper()}" for name in ("pred", "s32", "s64", "u8", "f16", "f32", "f64", "bf16")}


def test_declarations_are_those_of_jaxlib_s_header(tmp_path):
    """A compiler compares each field's place and size with the header that this jaxlib brings."""
    lines = [
        "#include <xla/ffi/api/c_api.h>",
        '#include "xla_ffi.h"',
        "namespace a = anyflash::xla;",
        "static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR >= a::oldest_minor);",
    ]
    fields = [
        (ours, theirs, *field.partition(":")[::2])
        for ours, (theirs, all) in STRUCTURES.items()
        for field in all.split()
    ]
    of_buffers = "struct_size extensions:extension_start count:size types buffers:"
    fields += [
        ("Buffers", whose, *field.partition(":")[::2])
        for whose in ("Args", "Rets")
        for field in f"{of_buffers}{whose.lower()}".split()
    ]
    for ours, whose, field, other in fields:
        other = other or field
        lines.append(f"static_assert(offsetof(a::{ours}, {field}) == offsetof(XLA_FFI_{whose}, {other}));")
        lines.append(f"static_assert(sizeof(a::{ours}::{field}) == sizeof(XLA_FFI_{whose}::{other}));")
    lines += [f"static_assert(int(a::{ours}) == int(XLA_FFI_{theirs}));" for ours, theirs in VALUES.items()]
    source = tmp_path / "same.cpp"
    source.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [
            "c++",
            "-std=c++20",
            "-fsyntax-only",
            "-Wno-invalid-offsetof",
            "-I",
            jax.ffi.include_dir(),
            "-I",
            PROJECT / "python" / "src",
            source,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


class Extension(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    ]


def version_answered(caller):
    """By a handler, to an XLA that says it is 0.`caller`, or says nothing."""
    from anyflash import _core

    metadata = (ctypes.c_int64 * 8)()
    extension = Extension(24, 1, None, ctypes.addressof(metadata))
    api = (ctypes.c_int32 * 64)()
    api[9] = caller or 0  # behind two pointers' sizes, again two, and the major number
    frame = (ctypes.c_void_p * 32)()
    frame[1] = ctypes.addressof(extension)
    frame[2] = ctypes.addressof(api) if caller is not None else None
    capsule = _core.jax_handlers()["cpu"]["anyflash_forward"]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(pointer(capsule, None))
    assert handler(ctypes.addressof(frame)) is None
    return tuple(ctypes.cast(metadata, ctypes.POINTER(ctypes.c_int32))[6:8])


@pytest.mark.parametrize("caller, answer", [(None, 1), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_a_handler_is_of_its_caller_s_version(caller, answer):
    """Up to the newest known; an XLA of the first versions does not tell its own."""
    assert version_answered(caller) == (0, answer)


def test_no_copies():
    """Peak memory of compiled calls: their results, and far less than a copy of an operand; linear in the length."""
    program = """
import re, jax, jax.numpy as jnp
from pathlib import Path
from anyflash.jax import attention

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def peak(call, *arrays):
    Path("/proc/self/clear_refs").write_text("5")
    before = megabytes("VmRSS")
    result = jax.block_until_ready(call(*arrays))
    print(megabytes("VmHWM") - before)
    return result

options = dict(rule="local(16)", layout="bshd")
forward = jax.jit(lambda *x: attention(*x, **options, return_lse=True))
backward = jax.jit(lambda dout, *x: jax.vjp(lambda *x: attention(*x, **options), *x)[1](dout))
numbers = lambda length: [jax.random.normal(jax.random.key(i), (2, length, 8, 64)) for i in range(3)]
small, large = numbers(32), jax.block_until_ready(numbers(8192))
for call, first in ((forward, ()), (backward, (small[0],))):
    jax.block_until_ready(call(*first, *small))
compiled = forward.lower(*large).compile(), backward.lower(large[0], *large).compile()
peak(compiled[0], *large)
peak(compiled[1], large[0], *large)
"""
    forward, backward = map(float, run(program).split())
    one = 2 * 8 * 8192 * 64 * 4 / 2**20  # MB of q, of out, of each gradient
    assert 0.9 * one < forward < 1.5 * one  # out
    assert 3.9 * one < backward < 4.6 * one  # dq, dk and dv, and the out that they are made from
