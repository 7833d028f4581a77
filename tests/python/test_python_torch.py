"""PyTorch's own tensors on the CPU. PyTorch is too large to be installed for the tests: conftest.py collects this file
only where it is there (test_python_arrays.py has a stand-in). bench/compare installs it:

    .venv-bench/bin/python -m pip install . pytest && .venv-bench/bin/python -m pytest tests/python/test_python_torch.py
"""

import gc

import anyflash as af
import numpy as np
import pytest
import torch

TYPES = [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5), (torch.float64, 1e-13)]


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def textbook(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)


def assert_close(got, expected, most=1e-5):
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=most)


@pytest.fixture
def qkv():
    return [numbers(i, 1, 2, 17, 16) for i in range(3)]


@pytest.mark.parametrize("dtype, most", TYPES)
def test_every_type_forward_and_backward(dtype, most):
    q, k, v = (numbers(i, 2, 3, 17, 16, dtype=dtype) for i in range(3))
    out, lse = af.attention(q, k, v, rule=af.causal(), return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected = textbook(*wide, is_causal=True)
    assert_close(out, expected.detach(), most)
    dout = numbers(4, 2, 3, 17, 16, dtype=dtype)
    expected.backward(dout.double())
    gradients = af.attention_backward(dout, q, k, v, out, lse, rule=af.causal())
    for got, one in zip(gradients[:3], wide):
        assert type(got) is torch.Tensor and got.dtype == dtype
        assert_close(got, one.grad, 4 * most)


def test_bias_and_sink_have_gradients_of_their_own_types(qkv):
    bias, sink = numbers(5, 1, 2, 1, 17, dtype=torch.bfloat16), numbers(6, 2)
    out, lse = af.attention(*qkv, bias=bias, sink=sink, return_lse=True)
    gradients = af.attention_backward(out, *qkv, out, lse, bias=bias, sink=sink)
    for got, owner in ((gradients.dbias, bias), (gradients.dsink, sink)):
        assert got.dtype == owner.dtype and got.shape == owner.shape


VIEWS = {
    "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda x: x[:, :, ::2],
    "one head for all": lambda x: x[:, :1].expand(x.shape),
    "the real part": lambda x: torch.complex(x, x + 1).real,
    "without a gradient": lambda x: x.clone().requires_grad_().detach(),
    "under inference_mode": torch.inference_mode()(torch.clone),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_are_read(qkv, view):
    views = [VIEWS[view](x) for x in qkv]
    assert_close(af.attention(*views), textbook(*(x.contiguous() for x in views)))


def test_tables_of_rules(qkv):
    mask, ids = numbers(7, 17, 17) < 0.3, torch.arange(17) // 5
    mask[:, 0] = True
    for table in (mask, mask.T.contiguous().T, mask.to(torch.uint8), mask.expand(1, 2, 17, 17)):
        assert_close(af.attention(*qkv, rule=af.dense(table)), textbook(*qkv, attn_mask=mask))
    for table in (ids, ids.int()):
        assert_close(af.attention(*qkv, rule=af.documents(table)), textbook(*qkv, attn_mask=ids[:, None] == ids))


@pytest.mark.parametrize("shape", [(0, 2, 17, 16), (1, 0, 17, 16), (1, 2, 0, 16)])
def test_nothing_in_gives_nothing_out(shape):
    x = torch.zeros(shape)
    out, lse = af.attention(x, x, x, return_lse=True)
    assert out.shape == shape and lse.shape == shape[:3]
    assert all(one.shape == shape for one in af.attention_backward(out, x, x, x, out, lse)[:3])


def test_no_keys_give_zeros(qkv):
    assert not af.attention(qkv[0], torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, 16)).any()


def test_out_is_written(qkv):
    out = torch.full((1, 2, 17, 16), 7.0)
    assert af.attention(*qkv, out=out) is out
    assert_close(out, textbook(*qkv))


def test_a_derived_class_gives_tensors(qkv):
    class Mine(torch.Tensor):
        pass

    assert type(af.attention(*(x.as_subclass(Mine) for x in qkv))) is torch.Tensor


def test_results_outlive_the_call(qkv):
    out = af.attention(*qkv)
    expected = out.clone()
    for _ in range(20):
        gc.collect()
        np.full(out.nbytes + 64, 255, np.uint8)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_requires_a_gradient_is_taken_where_none_is_recorded(qkv, mode):
    ids = torch.arange(17) // 5
    out, lse = af.attention(*qkv, return_lse=True)
    gradients = af.attention_backward(out, *qkv, out, lse)
    parameters = [torch.nn.Parameter(x) for x in (*qkv, torch.zeros(2))]
    with mode():
        *qkv, sink = parameters
        assert torch.equal(af.attention(*qkv), out)
        assert not torch.equal(af.attention(*qkv, sink=sink, rule=af.documents(ids)), out)
        for one, other in zip(af.attention_backward(out, *qkv, out, lse)[:3], gradients):
            assert torch.equal(one, other) and not one.requires_grad
        with pytest.raises(ValueError, match="^out: requires a gradient, and this call records none; "):
            af.attention(*qkv, out=torch.nn.Parameter(out))


complex_numbers = torch.complex(numbers(8, 1, 2, 17, 16), numbers(9, 1, 2, 17, 16))
gradient = (
    "requires a gradient, and this call records none; use anyflash.torch.attention, or pass key.detach() and use "
    "attention_backward"
)
REFUSED = {
    "requires a gradient": (lambda x: x.clone().requires_grad_(), ValueError, gradient),
    "a parameter": (torch.nn.Parameter, ValueError, gradient),
    "negated": (
        lambda x: complex_numbers.conj().imag,
        ValueError,
        "negated lazily, expected plain memory; pass key.resolve_neg()",
    ),
    "complex": (lambda x: complex_numbers, TypeError, "type complex64, expected float16, bfloat16, float32 or float64"),
    "conjugated": (lambda x: complex_numbers.conj(), ValueError, "__dlpack__ failed: "),
    "integers": (torch.Tensor.int, TypeError, "type int32, expected float32 as in query"),
    "eight bits": (lambda x: x.to(torch.float8_e4m3fn), TypeError, "type code 10 of 8, expected float16, "),
    "sparse": (torch.Tensor.to_sparse, ValueError, "torch.sparse_coo, expected torch.strided"),
    "without memory": (lambda x: x.to("meta"), ValueError, "on the device meta, expected the CPU or CUDA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(qkv, case):
    make, kind, message = REFUSED[case]
    with pytest.raises(kind) as caught:
        af.attention(qkv[0], make(qkv[1]), qkv[2])
    assert type(caught.value) is kind and str(caught.value).startswith(f"key: {message}")
    assert "\n" not in str(caught.value)
