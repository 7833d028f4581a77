"""anyflash.torch.attention against the contract's reference: results and, through autograd, gradients, as an eager
call and through the operator that graphs hold."""

import warnings
from functools import partial

import anyflash as af
import anyflash.torch
import cases
import numpy as np
import pytest
import torch
from anyflash import _core
from cases import Laid, same_bits
from devices import DEVICE, as_tensor, from_device
from hypothesis import given
from profiles import examples
from strategies import FLOATS, calls, packed_cases, paged_cases, ragged_cases
from test_core import CALLS, core_case


class TorchLaid(Laid):
    """A case's tensors as PyTorch's."""

    place = staticmethod(partial(as_tensor, device=DEVICE))

    def differentiable(self):
        return [self.q, self.k, self.v, self.options.get("bias"), self.options.get("sink")]

    def forward(self, **changes):
        options = self.options | changes
        for tensor in self.differentiable():
            if tensor is not None and not self.case.page_size:
                tensor.requires_grad_()

        def call(wanted):
            return anyflash.torch.attention(self.q, self.k, self.v, return_lse=wanted, **options)

        (out, lse), (again, l, m) = call(True), call("lm")
        self.results = [out] if self.dlse is None else [out, lse]
        assert same_bits(from_device(out), from_device(again))
        with torch.no_grad():
            assert same_bits(from_device(out), from_device(call(False)))
        return tuple(map(from_device, (out, lse, l, m)))

    def backward(self, out, lse, **changes):
        dout = as_tensor(self.dout, DEVICE)
        given = [dout] if self.dlse is None else [dout, self.dlse]
        tensors = self.differentiable()
        made = iter(torch.autograd.grad(self.results, [x for x in tensors if x is not None], given))
        return af.Gradients(*(None if x is None else from_device(next(made)) for x in tensors))


@pytest.fixture(autouse=True, params=["eager", "operator"])
def way(request, monkeypatch):
    """The operator with tensors read as those of PyTorch before 2.10 are."""
    monkeypatch.setattr(cases, "Laid", TorchLaid)
    if request.param == "eager":
        yield
        return
    monkeypatch.setattr(anyflash.torch._attention, "is_direct", lambda *tensors: False)
    _core.use_torch(torch, None)
    yield
    _core.use_torch(torch, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("name", CALLS)
def test_call(name, type):
    cases.check(core_case(name, type))


@examples(60)
@given(calls())
def test_any_call(case):
    cases.check(case)


@examples(15)
@given(packed_cases())
def test_packed(case):
    cases.check(case)


@examples(20)
@given(ragged_cases())
def test_documents_end_to_end(case):
    cases.check(case)


@examples(15)
@given(paged_cases())
def test_pages(case):
    cases.check(case)


@pytest.mark.of_the_cpu
def test_biases_that_are_read_only_or_run_backwards():
    x, bias = torch.randn(1, 2, 5, 8), np.random.default_rng(0).standard_normal((5, 5))
    for array in (
        np.broadcast_to(bias, (1, 2, 5, 5)),
        bias[None, None, ::-1],
        np.broadcast_to(np.float32(1), (1, 1, 1, 1)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = anyflash.torch.attention(x, x, x, bias=array)
        assert torch.equal(out, anyflash.torch.attention(x, x, x, bias=torch.tensor(array.copy())))
