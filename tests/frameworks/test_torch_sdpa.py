"""The override of torch.nn.functional.scaled_dot_product_attention: results and gradients are PyTorch's own; what is
not covered goes to PyTorch and is logged once."""

import itertools
import logging
import re
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from anyflash import _arrays, _core
from anyflash.torch import _sdpa, sdpa
from devices import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

OWN = _sdpa._pytorch_s_own
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


@pytest.fixture
def left_to_pytorch(caplog, monkeypatch):
    """The reasons that are logged."""
    monkeypatch.setattr(_sdpa, "_told", set())
    caplog.set_level(logging.WARNING, "anyflash.torch")
    return lambda: [record.getMessage() for record in caplog.records]


def with_gradients(function, tensors, mask, options):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().clone().requires_grad_()
        tensors.append(mask)
    out = function(*tensors[:3], attn_mask=mask, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=DEVICE).reshape(out.shape)
    return out, torch.autograd.grad((out * weights).sum(), tensors, allow_unused=True, materialize_grads=True)


def check(q, k, v, mask=None, **options):
    bound = BOUNDS[q.dtype]
    with (
        patch.object(_sdpa, "attention", wraps=_sdpa.attention) as ours,
        patch.object(_sdpa, "plain_attention", wraps=_sdpa.plain_attention) as ours_at_once,
    ):
        out, gradients = with_gradients(_sdpa.scaled_dot_product_attention, (q, k, v), mask, options)
    assert ours.call_count + ours_at_once.call_count == 1
    wide = [x.double() for x in (q, k, v)]
    wide_mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    expected, others = with_gradients(OWN, wide, wide_mask, options)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    for one, other in zip(gradients, others):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=4 * bound)


@st.composite
def sdpa_calls(draw):
    """Shapes of any rank from 2 on, masks of every broadcast shape."""
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    queries, keys = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    d, d_v = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    q, k, v = (torch.randn(*lead, n, c).to(DEVICE, dtype) for n, c in ((queries, d), (keys, d), (keys, d_v)))
    options = {}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.3, 1.0, -0.5]))
    kind = draw(st.sampled_from(["none", "causal", "boolean", "added", "added with -inf"]))
    mask = None
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        full = [*lead, queries, keys]
        shape = [size if draw(st.booleans()) else 1 for size in full]
        shape = shape[draw(st.integers(0, len(lead))) :]
        hidden = (torch.rand(shape) < 0.3).to(DEVICE)
        mask = ~hidden if kind == "boolean" else torch.randn(shape).to(DEVICE, dtype)
        if kind == "added with -inf":
            mask = mask.masked_fill(hidden, float("-inf"))
            if not mask.isfinite().any():
                mask = torch.zeros_like(mask)
    return (q, k, v, mask), options


@examples(150)
@given(sdpa_calls())
def test_any_call(call):
    arguments, options = call
    check(*arguments, **options)


@st.composite
def loose_calls(draw):
    """Tensors whose sizes and types may fit or not, most of rank 4."""
    size = st.sampled_from([0, 1, 2, 2, 4])
    shape = st.lists(size, min_size=2, max_size=5) | st.tuples(*[st.just(2)] * 4) | st.tuples(size, size, size, size)
    dtype = st.sampled_from([torch.float32] * 4 + [torch.float64, torch.int32])
    tensors = [torch.ones(tuple(draw(shape)), dtype=draw(dtype)) for _ in range(3)]
    of_mask = shape | st.tuples(size, size) | st.tuples(size, size, size) | st.tuples(*[st.sampled_from([1, 2])] * 3)
    mask = draw(st.none() | st.tuples(of_mask, st.sampled_from([torch.bool, torch.bool, torch.float32])))
    mask = None if mask is None else torch.ones(tuple(mask[0]), dtype=mask[1])
    return (*tensors, mask), draw(st.booleans()), draw(st.booleans())


@pytest.mark.of_the_cpu
@examples(400)
@given(loose_calls())
def test_usual_calls_are_those_that_are_covered(call):
    """What the extension says at once of tensors of rank 2 to 4 and boolean masks is what the whole list of reasons
    says."""
    tensors, causal, gqa = call
    mask = tensors[3]
    usual = tensors[0].dim() in (2, 3, 4) and (mask is None or mask.dtype == torch.bool)
    covered = _sdpa._reason(*tensors, 0.0, causal, gqa) is None
    assert _core.torch_covers(*tensors, causal, gqa) == (usual and covered)


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    "rank, kind",
    [
        *itertools.product([2, 3, 4], ["full", "causal", "mask", "scale", "two axes", "one row"]),
        *itertools.product([3, 4], ["groups", "three axes"]),
    ],
)
def test_usual_calls_take_the_short_way(numbers, monkeypatch, kind, records, rank):
    """They look for no reason, and a mask needs no DLPack capsule."""
    for module, name in ((_sdpa, "_reason"), (_sdpa, "attention"), (_arrays, "capsule_of")):
        monkeypatch.setattr(module, name, None)
    heads = 2 if kind == "groups" else 4
    q, k, v = numbers(2, 4, 5, 8), numbers(2, heads, 7, 8), numbers(2, heads, 7, 6)
    q, k, v = (x[(0,) * (4 - rank)] for x in (q, k, v))
    mask = torch.arange(280).reshape(2, 4, 5, 7) % 3 > 0
    masks = {
        "mask": mask[:, :1, :1][(0,) * (4 - rank)],
        "two axes": mask[0, 0],
        "three axes": mask[0],
        "one row": mask[0, 0, :1],
    }
    options = {
        "causal": {"is_causal": True},
        "groups": {"enable_gqa": True},
        "scale": {"scale": 0.3},
        **{name: {"attn_mask": one} for name, one in masks.items()},
    }.get(kind, {})
    q.requires_grad_(records)
    out = _sdpa.scaled_dot_product_attention(q, k, v, **options)
    expected = OWN(q, k, v, **options)
    torch.testing.assert_close(out, expected)
    assert out.requires_grad == records
    if records:
        torch.testing.assert_close(*[torch.autograd.grad(one.sin().sum(), q) for one in (out, expected)])


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("change", ["negated", "zeros", "meta", "sparse", "a subclass", "no tensor"])
@pytest.mark.parametrize("place", range(4))
def test_tensors_without_plain_memory_are_not_usual(change, place):
    tensors = [torch.ones(1, 2, 3, 3) for _ in range(3)] + [torch.ones(1, 1, 3, 3, dtype=torch.bool)]
    assert _core.torch_covers(*tensors, False, False)
    one = tensors[place]
    tensors[place] = {
        "negated": torch._neg_view,
        "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        "meta": lambda x: x.to("meta"),
        "sparse": lambda x: x.to_sparse(),
        "no tensor": lambda x: x.numpy(),
        "a subclass": lambda x: x.as_subclass(type("Own", (torch.Tensor,), {})),
    }[change](one)
    assert not _core.torch_covers(*tensors, False, False)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(numbers, causal):
    check(numbers(2, 6, 7, 8), numbers(2, 2, 9, 8), numbers(2, 2, 9, 8), enable_gqa=True, is_causal=causal)
    check(numbers(6, 7, 8), numbers(3, 9, 8), numbers(3, 9, 8), enable_gqa=True)


@pytest.mark.parametrize("kept", [[0], [1], [0, 1], [2], []])
def test_masks_that_broadcast_over_one_of_several_batch_axes(numbers, kept):
    q, k = numbers(2, 3, 2, 5, 8), numbers(2, 3, 2, 7, 8)
    mask = numbers(*(size if axis in kept else 1 for axis, size in enumerate((2, 3, 2))), 5, 7)
    check(q, k, k, mask)
    check(q, k, k, mask > -1)


def test_causal_is_top_left(numbers):
    check(numbers(1, 2, 5, 8), numbers(1, 2, 9, 8), numbers(1, 2, 9, 8), is_causal=True)
    check(numbers(1, 2, 9, 8), numbers(1, 2, 5, 8), numbers(1, 2, 5, 8), is_causal=True)


def test_a_query_that_sees_no_key_gives_0_as_in_pytorch(numbers):
    mask = torch.ones(5, 5, dtype=torch.bool, device=DEVICE)
    mask[2] = False
    q = numbers(1, 2, 5, 8)
    check(q, q, q, mask)
    out = _sdpa.scaled_dot_product_attention(q, q, q, mask)
    assert (out[:, :, 2] == 0).all() and (OWN(q, q, q, mask)[:, :, 2] == 0).all()


def test_transposed_and_sliced_inputs_are_not_copied(numbers):
    qkv = numbers(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
    check(*qkv, is_causal=True)
    check(*(x[..., ::2] for x in qkv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_beside_other_types(numbers, dtype):
    q, k = numbers(2, 4, 5, 8, dtype=dtype), numbers(2, 4, 9, 8, dtype=dtype)
    check(q, k, k, numbers(4, 5, 9, dtype=torch.float32))


def test_types_that_autocast_makes_one(numbers):
    q, k, mask = numbers(2, 4, 5, 8, dtype=torch.float32), numbers(2, 4, 9, 8, dtype=torch.float32), numbers(5, 9)
    v = k.bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16), patch.object(_sdpa, "attention", wraps=_sdpa.attention) as ours:
        for given in (None, mask.float(), mask.bfloat16()):
            out = _sdpa.scaled_dot_product_attention(q, k, v, given)
            expected = OWN(q, k, v, given)
            assert out.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(out, expected, rtol=6e-2, atol=6e-2)
    assert ours.call_count == 3


def test_masks_that_vmap_maps(numbers):
    q, masks = numbers(2, 4, 5, 8), numbers(3, 5, 5) > -0.5
    masks[..., 0] = True
    for each in (masks, masks.double()):
        out = torch.vmap(lambda mask: _sdpa.scaled_dot_product_attention(q, q, q, mask))(each)
        torch.testing.assert_close(out, torch.stack([OWN(q, q, q, mask) for mask in each]))


NOT_COVERED = {
    "dropout_p is not 0": (dict(dropout_p=0.5), (1, 2, 5, 8), torch.float32),
    "300 and 300 channels": ({}, (1, 1, 5, 300), torch.float32),
    "type torch.complex64": (None, (1, 1, 5, 8), torch.complex64),
}


@pytest.mark.parametrize("reason", NOT_COVERED)
def test_left_to_pytorch_and_logged_once(left_to_pytorch, reason):
    options, shape, dtype = NOT_COVERED[reason]
    q = torch.randn(shape).to(DEVICE, dtype)
    for _ in range(2):
        if options is None:
            with pytest.raises(RuntimeError):
                _sdpa.scaled_dot_product_attention(q, q, q)
        else:
            torch.manual_seed(1)
            out = _sdpa.scaled_dot_product_attention(q, q, q, **options)
            torch.manual_seed(1)
            assert torch.equal(out, OWN(q, q, q, **options))
    assert left_to_pytorch() == [f"scaled_dot_product_attention: left to PyTorch: {reason}"]


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan")])
def test_an_infinite_scale_is_left_to_pytorch(left_to_pytorch, numbers, scale):
    q = numbers(1, 2, 5, 8)
    out = _sdpa.scaled_dot_product_attention(q, q, q, scale=scale)
    torch.testing.assert_close(out, OWN(q, q, q, scale=scale), equal_nan=True)
    assert left_to_pytorch() == [f"scaled_dot_product_attention: left to PyTorch: scale {scale}"]


def test_a_scale_that_float32_does_not_hold_is_left_to_pytorch(left_to_pytorch, numbers):
    q = numbers(1, 2, 5, 8)
    _sdpa.scaled_dot_product_attention(q, q, q, scale=1e40)
    assert not left_to_pytorch()
    q = q.float()
    out = _sdpa.scaled_dot_product_attention(q, q, q, scale=1e40)
    torch.testing.assert_close(out, OWN(q, q, q, scale=1e40), equal_nan=True)
    assert left_to_pytorch() == ["scaled_dot_product_attention: left to PyTorch: scale 1e+40"]


def test_what_is_negated_by_name_alone_is_left_to_pytorch(left_to_pytorch, numbers):
    x = numbers(1, 2, 5, 8)
    negated = torch.complex(x, x).conj().imag
    for tensors in ((negated, x, x), (x, x, negated), (x, x, x, negated[..., :5])):
        assert torch.equal(_sdpa.scaled_dot_product_attention(*tensors), OWN(*tensors))
    reason = "lazily negated or zero tensors"
    assert left_to_pytorch() == [f"scaled_dot_product_attention: left to PyTorch: {reason}"]


def test_forward_mode_is_left_to_pytorch(left_to_pytorch, numbers):
    q = numbers(1, 2, 5, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for got, expected in zip(
            *(torch.func.jvp(lambda q: call(q, q, q), (q,), (q,)) for call in (_sdpa.scaled_dot_product_attention, OWN))
        ):
            assert torch.equal(got, expected)
    assert left_to_pytorch() == ["scaled_dot_product_attention: left to PyTorch: a forward-mode derivative"]


def test_heads_that_broadcast_are_left_to_pytorch(left_to_pytorch, numbers):
    q, k = numbers(2, 4, 5, 8), numbers(2, 1, 5, 8)
    assert torch.equal(_sdpa.scaled_dot_product_attention(q, k, k), OWN(q, k, k))
    assert left_to_pytorch() == ["scaled_dot_product_attention: left to PyTorch: batches and heads that broadcast"]


@pytest.mark.of_the_cpu
def test_nested_tensors_are_left_to_pytorch(left_to_pytorch, numbers):
    q = torch.nested.nested_tensor([numbers(2, 5, 8), numbers(2, 3, 8)])
    for one, expected in zip(_sdpa.scaled_dot_product_attention(q, q, q).unbind(), OWN(q, q, q).unbind()):
        assert torch.equal(one, expected)
    assert left_to_pytorch() == ["scaled_dot_product_attention: left to PyTorch: nested tensors"]


WRONG = [
    lambda q: dict(attn_mask=torch.ones(3, 3, dtype=torch.bool, device=DEVICE)),
    lambda q: dict(key=q[..., :4]),
    lambda q: dict(scale="1"),
    lambda q: dict(scale=torch.tensor(0.5, requires_grad=True)),
    lambda q: dict(scale=torch.ones(2)),
    lambda q: dict(is_causal=1),
    lambda q: dict(value=q.double()),
    lambda q: dict(value=q.to_sparse()),
    lambda q: dict(attn_mask=torch.zeros(5, 5, device=DEVICE).to_sparse()),
    lambda q: dict(dropout_p=q),
    lambda q: dict(dropout_p=None),
    lambda q: dict(enable_gqa=1),
    lambda q: dict(scale=q.cpu().numpy()),
]
if DEVICE == "cpu":  # masks of fewer than two axes
    WRONG += [lambda q: dict(attn_mask=torch.ones(5, dtype=torch.bool)), lambda q: dict(attn_mask=torch.zeros(()))]
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):  # before, it takes both
    WRONG.append(lambda q: dict(attn_mask=torch.ones(5, 5, dtype=torch.bool, device=DEVICE), is_causal=True))


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_refused_by_pytorch(left_to_pytorch, wrong):
    q = torch.zeros(1, 2, 5, 8, device=DEVICE)
    given = dict(query=q, key=q, value=q) | wrong(q)
    with pytest.raises((RuntimeError, TypeError, IndexError)) as expected:
        OWN(**given)
    with pytest.raises(expected.type) as raised:
        _sdpa.scaled_dot_product_attention(**given)
    assert re.sub(r" \(position \d+\)", "", str(raised.value)) == str(expected.value) and not left_to_pytorch()


@pytest.mark.parametrize("keys", [5, 9])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("compiled", [False, True])
def test_masks_that_are_an_object_of_pytorch_s(numbers, make, keys, compiled):
    q, k, mask = numbers(2, 4, 5, 8), numbers(2, 4, keys, 8), make(5, keys)
    seen = torch.ones(5, keys, dtype=torch.bool, device=DEVICE).tril(keys - 5 if make is causal_lower_right else 0)
    call = lambda q: F.scaled_dot_product_attention(q, k, k, mask)
    with sdpa():
        out = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q)
    torch.testing.assert_close(out, OWN(q, k, k, seen))
    torch.testing.assert_close(_sdpa.scaled_dot_product_attention(q, k, k, mask), OWN(q, k, k, mask))
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        _sdpa.scaled_dot_product_attention(q, k, k, mask, is_causal=True)


def test_such_masks_by_a_name_from_before_and_derived_ones(numbers):
    class Derived(CausalBias):
        pass

    q, k, mask = numbers(2, 4, 5, 8), numbers(2, 4, 9, 8), causal_lower_right(5, 9)
    expected = OWN(q, k, k, mask)
    assert type(expected) is torch.Tensor
    derived = Derived(mask.variant, 5, 9)
    with sdpa():
        assert torch.equal(OWN(q, k, k, mask), F.scaled_dot_product_attention(q, k, k, mask))
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, derived), expected)
    assert torch.equal(OWN(q, k, k, mask), expected)


def test_functionalize_is_left_to_pytorch(left_to_pytorch, numbers):
    q = numbers(1, 2, 5, 8)
    call = lambda q: _sdpa.scaled_dot_product_attention(q, q, q).sum()
    made = torch.func.functionalize(torch.func.grad(call))(q)
    torch.testing.assert_close(made, torch.func.grad(lambda q: OWN(q, q, q).sum())(q))
    assert left_to_pytorch() == ["scaled_dot_product_attention: left to PyTorch: torch.func.functionalize"]


def test_graphs_made_behind_the_override_know_pytorch_s_own():
    program = """
import torch, torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from anyflash.torch import sdpa
q = torch.ones(1, 1, 5, 8).cumsum(2)
call = lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask)
with sdpa():
    torch.compile(call, fullgraph=True, backend="aot_eager")(q, None)
torch._dynamo.reset()
made = torch.compile(call, fullgraph=True, backend="aot_eager")(q, causal_lower_right(5, 5))
assert (made - F.scaled_dot_product_attention(q, q, q, is_causal=True)).abs().max() < 1e-5
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_scripts_keep_pytorch_s_own(numbers):
    layer, q = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64, device=DEVICE).eval(), numbers(5, 2, 8)
    with sdpa():
        out = torch.jit.script(layer)(q, q, q, need_weights=False)[0]
    torch.testing.assert_close(out, layer(q, q, q, need_weights=False)[0])
