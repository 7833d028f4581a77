"""The front end as a part of the package: its documents, and what importing it brings along."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from snippets import snippets


def run(program, **options):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", snippets("python torch"))
def test_the_documents_example_runs(block, tmp_path):
    run(block, cwd=tmp_path)


def test_anyflash_alone_does_not_bring_pytorch():
    assert run("import sys, anyflash; print('torch' in sys.modules)") == "False\n"


def test_the_front_end_brings_nothing_more_of_pytorch():
    """torch._dynamo and sympy take seconds."""
    program = """
import sys, torch
before = {name for name in sys.modules}
import anyflash.torch, anyflash.torch.auto, anyflash.compat.flash_attn
print([name for name in sys.modules if name not in before and not name.startswith(("anyflash", "numpy"))])
"""
    assert run(program) == "[]\n"


def test_the_extension_s_calls_before_the_front_end_is_imported_raise():
    assert (
        run("""
import torch
from anyflash import _core
x, rows = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2)
for call in (lambda: _core.torch_attention(x, x, x, None, False, {}),
             lambda: _core.torch_attention_backward(x, x, x, x, x, rows, None, {}, 1)):
    try:
        call()
    except ValueError as error:
        print(error)
""")
        == "anyflash.torch: not imported, expected it before the call\n" * 2
    )


@pytest.mark.parametrize("module", ["anyflash.torch", "anyflash.compat.flash_attn", "anyflash.transformers"])
def test_everything_public_is_documented(module):
    run(f"""
import inspect, {module} as module
assert len(inspect.getdoc(module)) > 100
for name in getattr(module, "__all__", []):
    assert len(inspect.getdoc(getattr(module, name))) > 60, name
""")


# As python/src/dlpack_exchange.h has them: its own name of each field, and that of DLPack's header where it is another.
STRUCTURES = {
    "Version": ("DLPackVersion", "major minor"),
    "Device": ("DLDevice", "device_type device_id"),
    "DataType": ("DLDataType", "code bits lanes"),
    "Tensor": ("DLTensor", "data device ndim dtype shape strides byte_offset"),
    "ExchangeApi": (
        "DLPackExchangeAPI",
        "version:header.version previous:header.prev_api "
        "allocate:managed_tensor_allocator view_of_object:dltensor_from_py_object_no_sync "
        "current_stream:current_work_stream",
    ),
}


def test_declarations_are_those_of_pytorch_s_header(tmp_path):
    """A compiler compares the place and size of each field with those in the header that this PyTorch brings."""
    lines = [
        "#include <cstddef>",
        "#include <ATen/dlpack.h>",
        '#include "dlpack_exchange.h"',
        "namespace a = anyflash::dlpack;",
        "static_assert(DLPACK_MAJOR_VERSION == a::known_major);",
    ]
    for ours, (theirs, fields) in STRUCTURES.items():
        lines.append(f"static_assert(sizeof(a::{ours}) == sizeof({theirs}));")
        for field, _, other in (one.partition(":") for one in fields.split()):
            other = other or field
            lines.append(f"static_assert(offsetof(a::{ours}, {field}) == offsetof({theirs}, {other}));")
            lines.append(f"static_assert(sizeof(a::{ours}::{field}) == sizeof(decltype((({theirs}*)0)->{other})));")
    source = tmp_path / "same.cpp"
    source.write_text("\n".join(lines) + "\n")
    include = Path(torch.__file__).parent / "include"
    done = subprocess.run(
        [
            "c++",
            "-std=c++20",
            "-fsyntax-only",
            "-Wno-invalid-offsetof",
            "-I",
            include,
            "-I",
            Path(__file__).resolve().parents[2] / "python" / "src",
            source,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_no_copies():
    """Peak memory of a call on views of one packed tensor: its results, and far less than a copy of its inputs.
    (PyTorch's engine may copy the gradients that it hands on.)"""
    program = """
import re, torch
from pathlib import Path
from anyflash.torch import _attention, attention

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def peak(call):
    Path("/proc/self/clear_refs").write_text("5")
    before = megabytes("VmRSS")
    result = call()
    print(megabytes("VmHWM") - before)
    return result

qkv = torch.randn(2, 4096, 3, 8, 64).permute(2, 0, 3, 1, 4)
small = qkv[..., :64, :].detach().clone().requires_grad_()
attention(*small, rule="local(16)").sum().backward()
q, k, v = (x.detach().requires_grad_() for x in qkv)
out = peak(lambda: attention(q, k, v, rule="local(16)"))
gradients = _attention._gradients
_attention._gradients = lambda *given: peak(lambda: gradients(*given))
torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
"""
    forward, backward = map(float, run(program).split())
    one = 2 * 8 * 4096 * 64 * 4 / 2**20  # MB of q, of out, of each gradient
    assert 0.9 * one < forward < 1.5 * one and 2.9 * one < backward < 3.5 * one
