"""The peers of dense calls on an NVIDIA GPU: PyTorch's backends, and for bfloat16 FlashAttention-3 and -4 where they can
be imported.

FlashAttention-3 is PyPI's `fa3-fwd`, which has the forward pass alone; a build of it by nvcc 13 is a quarter slower, and
would be an unfair peer. FlashAttention-4 is PyPI's `flash-attn-4`.
"""

import functools
import importlib
import importlib.metadata

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# {name: (module, package, directions)}; their tensors are (batch, sequence, heads, d).
PACKAGES = {
    "FA3": ("fa3_fwd_interface", "fa3-fwd", ("forward",)),
    "FA4": ("flash_attn.cute", "flash-attn-4", ("forward", "backward")),
}
BACKENDS = {
    "bfloat16": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION},
    "float16": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION},
    "float32": {"torch mem-eff": SDPBackend.EFFICIENT_ATTENTION},
    "float64": {"torch math": SDPBackend.MATH},
}


@functools.cache
def package(name):
    """A package's function, or None where it is not installed."""
    try:
        return importlib.import_module(PACKAGES[name][0]).flash_attn_func
    except ImportError:
        return None


def versions():
    """ ", FA3 0.0.3": of those packages that are installed."""
    return "".join(f", {name} {version(PACKAGES[name][1])}" for name in PACKAGES if package(name))


def version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # unpacked by hand
        return "of unknown version"


def by_backend(backend, **options):
    """PyTorch's attention by that backend alone, a function of q, k, v."""

    def function(q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return function


def by_package(name, causal):
    """As by_backend: (batch, heads, sequence, d)."""

    def function(q, k, v):
        result = package(name)(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return function


def functions(type_, direction, causal):
    """{name: function of q, k, v} of the peers that there are for a type and a direction."""
    found = {name: by_backend(backend, is_causal=causal) for name, backend in BACKENDS[type_].items()}
    if type_ == "bfloat16":
        for name, (_, _, directions) in PACKAGES.items():
            if direction in directions and package(name):
                found[name] = by_package(name, causal)
    return found
