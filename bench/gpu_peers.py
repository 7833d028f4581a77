"""The peers of calls on an NVIDIA GPU: PyTorch's backends, and for bfloat16 FlashAttention-3 and -4 where they can
be imported.

FlashAttention-3 is PyPI's `fa3-fwd`, which has the forward pass alone; a build of it by nvcc 13 is a quarter slower, and
would be an unfair peer. FlashAttention-4 is PyPI's `flash-attn-4`.
"""

import functools
import importlib
import importlib.metadata
import inspect

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
    """A package's module, or None where it is not installed."""
    try:
        return importlib.import_module(PACKAGES[name][0])
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
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options
            )

    return function


def by_package(name, **options):
    """As by_backend: (batch, heads, sequence, d)."""

    def function(q, k, v):
        return first(package(name).flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)).transpose(1, 2)

    return function


def by_packages(direction, **options):
    """{name: function of q, k, v} of those packages that can be imported."""
    return {
        name: by_package(name, **options)
        for name, (_, _, directions) in PACKAGES.items()
        if direction in directions and package(name)
    }


def first(result):
    return result[0] if isinstance(result, tuple) else result


def functions(type_, direction, causal):
    """{name: function of q, k, v} of the peers that there are for a type and a direction."""
    found = {name: by_backend(backend, is_causal=causal) for name, backend in BACKENDS[type_].items()}
    return found | (by_packages(direction, causal=causal) if type_ == "bfloat16" else {})


def packed_functions(direction, cu_seqlens, longest, causal):
    """As functions(), for packed bfloat16 sequences (tokens, heads, d), whose lengths are on the GPU."""
    from torch.nn.attention.varlen import varlen_attn

    named = inspect.signature(varlen_attn).parameters
    mask = dict(is_causal=causal) if "is_causal" in named else dict(window_size=(-1, 0 if causal else -1))
    ends = [cu_seqlens, cu_seqlens, longest, longest]
    found = {"torch varlen": lambda q, k, v: varlen_attn(q, k, v, *ends, **mask)}
    for name, (_, _, directions) in PACKAGES.items():
        if direction in directions and package(name):
            varlen, names = (
                package(name).flash_attn_varlen_func,
                ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
            )
            found[name] = lambda q, k, v, varlen=varlen: first(varlen(q, k, v, **dict(zip(names, ends)), causal=causal))
    return found


def few_query_functions(seen, queries, keys):
    """As decode_functions(), for some queries at the end of the keys, in order or, by `seen` (queries, keys), as a tree."""
    from torch.nn.attention import bias
    from torch.nn.attention import flex_attention as flex

    if seen is None:
        found = {
            "torch flash": by_backend(SDPBackend.FLASH_ATTENTION, attn_mask=bias.causal_lower_right(queries, keys))
        }
        if package("FA3"):
            found["FA3"] = by_cache(causal=True)
        return found
    torch._dynamo.reset()
    blocks = flex.create_block_mask(lambda b, h, i, j: seen[i, j], None, None, queries, keys, device="cuda")
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return {
        "torch cuDNN": by_backend(SDPBackend.CUDNN_ATTENTION, attn_mask=seen[None, None]),
        "FlexAttention": lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=True),
    }


def by_cache(**options):
    """FlashAttention-3's call for decoding, which chooses into how many parts to split the keys."""
    cached = package("FA3").flash_attn_with_kvcache
    return lambda q, k, v: first(cached(*(x.transpose(1, 2) for x in (q, k, v)), **options)).transpose(1, 2)


def decode_functions():
    """As functions(), for one bfloat16 query on many keys, (batch, heads, sequence, d)."""
    backends = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
    found = {name: by_backend(backend) for name, backend in backends.items()}
    if package("FA3"):
        found["FA3"] = by_cache()
    return found
