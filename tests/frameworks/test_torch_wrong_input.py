"""Wrong input: the library's one line, as ValueError or TypeError, eagerly and in graphs."""

from functools import partial

import anyflash as af
import numpy as np
import pytest
import torch
import wrong_calls
from anyflash import _options
from anyflash.torch import attention, flash_attention_qkv_packed
from devices import DEVICE

zeros = partial(torch.zeros, device=DEVICE)
X = zeros(1, 2, 5, 8)


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([zeros(2, 3, 8), zeros(2, 5, 8)], layout=layout)


class Broken:
    def __dlpack__(self, **options):
        raise RuntimeError("no data\nat all")

    def __dlpack_device__(self):
        return 1, 0


WRONG = {
    "no tensor": (
        TypeError,
        "query: type ndarray, expected a torch.Tensor",
        lambda: attention(np.zeros((1, 2, 5, 8)), X, X),
    ),
    "key no tensor": (
        TypeError,
        "key: type ndarray, expected a torch.Tensor",
        lambda: attention(X, np.zeros((1, 2, 5, 8)), X),
    ),
    "value no tensor": (TypeError, "value: type list, expected a torch.Tensor", lambda: attention(X, X, [1.0])),
    "no key": (ValueError, "key: ", lambda: attention(X)),
    "rule": (TypeError, "rule: type int", lambda: attention(X, X, X, rule=3)),
    "tables of no names": (
        TypeError,
        "tables: type list, expected arrays by name",
        lambda: attention(X, X, X, rule="documents(a, a)", tables=[X]),
    ),
    "a table's name": (
        ValueError,
        "tables: name 'a b', expected a word",
        lambda: attention(X, X, X, rule="documents(a, a)", tables={"a": torch.arange(5), "a b": X}),
    ),
    "a table's name that is a number": (
        TypeError,
        "tables: a name of type int, expected a word",
        lambda: attention(X, X, X, rule="documents(a, a)", tables={1: X}),
    ),
    "tables": (ValueError, "tables: given with a Rule", lambda: attention(X, X, X, rule=af.causal(), tables={"a": X})),
    "no table": (ValueError, "", lambda: attention(X, X, X, rule="documents(a, a)")),
    "layout": (ValueError, "layout: 'sbhd', expected", lambda: attention(X, X, X, layout="sbhd")),
    "slopes in a list": (TypeError, "alibi_slopes: type list", lambda: attention(X, X, X, alibi_slopes=[1.0, 2.0])),
    "lengths": (ValueError, "key_lengths: ", lambda: attention(X, X, X, key_lengths=torch.tensor([7]))),
    "threads in a tensor": (
        TypeError,
        "threads: type Tensor, expected an integer",
        lambda: attention(X, X, X, threads=zeros(2)),
    ),
    "plan": (TypeError, "plan: type int", lambda: attention(X, X, X, plan=3)),
    "sparse": (ValueError, "query: torch.sparse_coo, expected torch.strided", lambda: attention(X.to_sparse(), X, X)),
    "sparse bias, vmap": (
        ValueError,
        "bias: torch.sparse_coo, expected torch.strided",
        lambda: torch.func.vmap(lambda x: attention(x, X, X, bias=zeros(1, 1, 5, 5).to_sparse()))(X[None]),
    ),
    "no data": (ValueError, "key: on the device meta, expected the CPU or CUDA", lambda: attention(X, X.to("meta"), X)),
    "no data, vmap": (
        ValueError,
        "key: on meta, expected ",
        lambda: torch.func.vmap(lambda x: attention(x, X.to("meta"), x))(X[None]),
    ),
    "sink without data, vmap": (
        ValueError,
        "sink: on meta, expected ",
        lambda: torch.func.vmap(lambda x: attention(x, x, x, sink=zeros(9).to("meta")))(X[None]),
    ),
    "tables without data, vmap": (
        ValueError,
        "tables: on meta, expected ",
        lambda: torch.func.vmap(
            lambda x: attention(
                x,
                x,
                x,
                rule="documents(a, a) & documents(b, b)",
                tables={"a": torch.zeros(5, dtype=torch.int32, device="meta"), "b": torch.zeros(5, dtype=torch.int32)},
            )
        )(X[None]),
    ),
    "data beside a query without": (ValueError, "value: on ", lambda: attention(*[X.to("meta")] * 2, X)),
    "scale without data, vmap": (
        TypeError,
        "scale: type Tensor",
        lambda: torch.func.vmap(lambda x: attention(x, x, x, scale=zeros(()).to("meta")))(X[None]),
    ),
    "bias that cannot be had": (ValueError, "bias: no data", lambda: attention(X, X, X, bias=Broken())),
    "nested": (ValueError, "query: a nested tensor", lambda: attention(nested(), X, X)),
    "nested, jagged": (ValueError, "key: a nested tensor", lambda: attention(X, nested(torch.jagged), X)),
    "nested bias": (ValueError, "bias: a nested tensor", lambda: attention(X, X, X, bias=nested())),
    "nested table": (
        ValueError,
        "tables: m a nested tensor",
        lambda: attention(X, X, X, rule="dense(m)", tables={"m": nested()}),
    ),
    "nested, vmap": (
        ValueError,
        "value: a nested tensor",
        lambda: torch.func.vmap(lambda x: attention(x, X, nested()))(X[None]),
    ),
    "packed nested": (ValueError, "qkv: a nested tensor", lambda: flash_attention_qkv_packed(nested(), 1, 1)),
    "nested, not in the front end": (ValueError, "query: a nested tensor", lambda: af.attention(nested(), X, X)),
    "bias no tensor": (TypeError, "bias: type list, expected a torch.Tensor", lambda: attention(X, X, X, bias=[1.0])),
    "bias of a class": (
        TypeError,
        "bias: type _TensorMeta, expected a torch.Tensor",
        lambda: attention(X, X, X, bias=torch.Tensor),
    ),
    "sink no tensor": (TypeError, "sink: type dtype, expected", lambda: attention(X, X, X, sink=torch.float32)),
    "slopes no tensor": (
        TypeError,
        "alibi_slopes: type Size, expected",
        lambda: attention(X, X, X, alibi_slopes=X.shape),
    ),
    "a module, not in the front end": (
        TypeError,
        "key: type Identity, expected",
        lambda: af.attention(X, torch.nn.Identity(), X),
    ),
    "return_lse with gradient": (
        ValueError,
        "return_lse: tensor(",
        lambda: attention(X.clone().requires_grad_(), X, X, return_lse=zeros(2)),
    ),
    "tables in a tensor": (
        TypeError,
        "tables: type Tensor, expected arrays by name",
        lambda: attention(X, X, X, tables=X),
    ),
    "scale with gradient": (
        ValueError,
        "scale: requires a gradient, and none is computed; pass scale.detach()",
        lambda: attention(X, X, X, scale=torch.tensor(0.5, requires_grad=True)),
    ),
    "softcap with gradient": (
        ValueError,
        "softcap: requires a gradient",
        lambda: torch.func.grad(lambda cap: attention(X, X, X, softcap=cap).sum())(torch.tensor(0.5)),
    ),
    "rank, vmap": (
        ValueError,
        "query: rank 0, expected",
        lambda: torch.func.vmap(lambda x: attention(x, X, X))(zeros(3)),
    ),
    "bias' rank, vmap": (
        ValueError,
        "bias: rank 0, expected 4",
        lambda: torch.func.vmap(lambda x: attention(x, X, X, bias=zeros(())))(X[None]),
    ),
    "value's rank, meta": (
        ValueError,
        "value: rank 0, expected 4 as in query",
        lambda: attention(*[X.to("meta")] * 2, torch.zeros((), device="meta")),
    ),
    "out": (ValueError, "out: ", lambda: attention(X, X, X, out=zeros(3))),
    "out of a class": (
        TypeError,
        "out: type _TensorMeta, expected an array",
        lambda: attention(X, X, X, out=torch.Tensor),
    ),
    "out with gradient": (
        ValueError,
        "out: given where a gradient is recorded",
        lambda: attention(X.clone().requires_grad_(), X, X, out=torch.zeros_like(X)),
    ),
    "out that is no tensor, with gradient": (
        ValueError,
        "out: given where a gradient is recorded",
        lambda: attention(X.clone().requires_grad_(), X, X, out=np.zeros(X.shape, "f")),
    ),
    "out that records": (
        ValueError,
        "out: given where a gradient is recorded",
        lambda: attention(X, X, X, out=torch.zeros_like(X).requires_grad_()),
    ),
    "packed's rank": (
        ValueError,
        "qkv: shape (2, 5, 8), expected (3, heads, length, channels)",
        lambda: flash_attention_qkv_packed(X[0], 1, 1),
    ),
    "packed's chunks of queries": (
        ValueError,
        "num_chunks_q: 2, expected a positive divisor of the length 5",
        lambda: flash_attention_qkv_packed(zeros(3, 2, 5, 8), 2, 1),
    ),
    "packed's chunks of keys": (
        ValueError,
        "num_chunks_kv: 0, expected a positive divisor of the length 5",
        lambda: flash_attention_qkv_packed(zeros(3, 2, 5, 8), 1, 0),
    ),
    "packed's types": (
        TypeError,
        "num_chunks_kv: type float, expected an integer",
        lambda: flash_attention_qkv_packed(zeros(3, 2, 5, 8), 1, 1.0),
    ),
    "packed integers": (
        TypeError,
        "qkv: type torch.int32, expected float16",
        lambda: flash_attention_qkv_packed(zeros(3, 2, 5, 8).int(), 1, 1),
    ),
    "packed sparse": (
        ValueError,
        "qkv: torch.sparse_coo, expected torch.strided",
        lambda: flash_attention_qkv_packed(zeros(3, 2, 5, 8).to_sparse(), 1, 1),
    ),
    "packed's chunks of NumPy": (
        ValueError,
        "num_chunks_q: 2, expected a positive divisor of the length 5",
        lambda: flash_attention_qkv_packed(zeros(3, 2, 5, 8), np.int64(2), 1),
    ),
    "packed channels": (
        ValueError,
        "qkv: 300 channels, expected 1 to 256",
        lambda: flash_attention_qkv_packed(zeros(3, 2, 4, 300), 1, 1),
    ),
    "out beside no tensor": (
        TypeError,
        "key: type ndarray, expected a torch.Tensor",
        lambda: attention(X, X.cpu().numpy(), X, out=X.clone()),
    ),
    "packed no tensor": (TypeError, "qkv: type list", lambda: flash_attention_qkv_packed([], 1, 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_line(name):
    kind, start, call = WRONG[name]
    with pytest.raises(kind) as raised:
        call()
    line = str(raised.value)
    assert line.startswith(start) and "\n" not in line and len(line) > 10, line
    assert type(raised.value) is kind


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        *wrong_calls.ARRAYS,
        *wrong_calls.OPTIONS,
        *(pytest.param(name, marks=pytest.mark.of_the_cpu) for name in wrong_calls.NUMBERS),  # on a GPU nobody looks
    ],
)
def test_what_every_front_end_refuses(name, direct, monkeypatch):
    """Directly, and through the operator that graphs hold."""
    if not direct:
        monkeypatch.setattr("anyflash.torch._attention.is_direct", lambda *tensors: False)
    kind, line, _ = wrong_calls.CALLS[name]
    make = lambda array: torch.from_numpy(array).to("cpu" if array.dtype in (bool, np.int32) else DEVICE)
    arrays, options = wrong_calls.arguments(name, make)
    with pytest.raises(kind) as raised:
        attention(*arrays, **options)
    assert str(raised.value) == line and type(raised.value) is kind


OF_ANOTHER_TYPE = [
    dict(align=3),
    dict(layout=None),
    dict(scale="3"),
    dict(softcap=None),
    dict(threads="3"),
    dict(threads=1.5),
    dict(threads=10**30),
    dict(scale=10**400),
    dict(rule=3),
    dict(rule=True),
    dict(rule=[af.causal()]),
    dict(scale=np.ones(2)),
    dict(softcap=zeros(2)),
    dict(deterministic=2),
    dict(allow_tf32=None),
    *({name: object()} for name in _options.DEFAULTS),
]


@pytest.mark.parametrize("option", OF_ANOTHER_TYPE, ids=lambda option: next(iter(option)))
def test_options_of_another_type_are_told_alike_under_transforms(option):
    with pytest.raises((TypeError, ValueError)) as expected:
        attention(X, X, X, **option)
    with pytest.raises(expected.type) as raised:
        torch.func.grad(lambda x: attention(x, X, X, **option).sum())(X)
    assert str(raised.value) == str(expected.value)


def test_nothing_is_written(numbers):
    out = torch.full_like(X, 7.0)
    with pytest.raises(ValueError):
        attention(X, X, X, out=out, softcap=-1.0)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "name, more", [("softcp", ", did you mean 'softcap'?"), ("is_causal", ", use rule=anyflash.causal()")]
)
def test_a_name_that_is_none(name, more):
    with pytest.raises(TypeError) as raised:
        attention(X, X, X, **{name: 1})
    assert str(raised.value) == f"attention() got an unexpected keyword argument '{name}'{more}"
