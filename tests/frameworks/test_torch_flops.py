"""Operations as torch.utils.flop_counter counts them: 2 d + 2 d_v a visible pair forward, 6 d + 4 d_v backward."""

import subprocess
import sys

import anyflash as af
import pytest
import torch
from anyflash.torch import attention, sdpa
from devices import DEVICE
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def zeros(*shape, **options):
    return torch.zeros(shape, device=DEVICE, **options)


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


X = zeros(1, 12, 64, 64)
MASK = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) % 7 == 0


def thd(tokens, heads, ends, **options):
    return attention(
        zeros(tokens, heads, 8),
        *[zeros(tokens, 1, 8)] * 2,
        layout="thd",
        cu_seqlens_q=integers(*ends),
        cu_seqlens_k=integers(*ends),
        **options,
    )


def paged(lengths, **options):
    pages = zeros(9, 16, 2, 8)
    return attention(
        zeros(2, 4, 3, 8),
        pages,
        pages,
        page_table=integers(*range(8)).reshape(2, 4),
        key_lengths=integers(*lengths),
        **options,
    )


CALLS = {  # what is called, its pairs in all heads and batch entries, d + d_v
    "all": (lambda: attention(X, X, X), 12 * 64 * 64, 128),
    "a rule": (lambda: attention(X, X, X, rule=af.causal() & af.local(3)), 12 * (1 + 2 + 62 * 3), 128),
    "an alignment": (lambda: attention(X[:, :, :2], X, X, rule=af.causal(), align="none_end"), 12 * (63 + 64), 128),
    "grouped heads, other values": (
        lambda: attention(zeros(2, 6, 9, 8), zeros(2, 3, 7, 8), zeros(2, 3, 7, 5)),
        2 * 6 * 9 * 7,
        13,
    ),
    "bshd": (lambda: attention(zeros(2, 9, 6, 8), *[zeros(2, 7, 3, 8)] * 2, layout="bshd"), 2 * 6 * 9 * 7, 16),
    "bhds": (lambda: attention(zeros(2, 6, 8, 9), zeros(2, 3, 8, 7), zeros(2, 3, 5, 7), layout="bhds"), 756, 13),
    "qkv": (lambda: attention(zeros(3, 2, 9, 8), layout="qkv", rule=af.causal()), 2 * 45, 16),
    "images": (lambda: attention(*[zeros(1, 2, 4, 5, 8)] * 3, rule=af.local(1)), 2 * 20, 16),
    "packed sequences": (lambda: thd(10, 2, (0, 4, 4, 10), rule=af.causal()), 2 * (10 + 21), 16),
    "lengths": (lambda: attention(zeros(2, 4, 3, 8), *[zeros(2, 4, 9, 8)] * 2, key_lengths=integers(5, 0)), 4 * 15, 16),
    "pages": (lambda: paged((40, 17)), 4 * 3 * 57, 16),
    "pages, at the end": (lambda: paged((40, 17), rule=af.causal(), align="none_end"), 4 * 3 * (40 + 17 - 2), 16),
    "a table": (
        lambda: attention(zeros(2, 3, 4, 8), *[zeros(2, 3, 5, 8)] * 2, rule=af.dense(MASK)),
        int(MASK.sum()),
        16,
    ),
    "a table by name": (
        lambda: attention(
            *[zeros(2, 3, 6, 8)] * 3, rule="documents(a, a)", tables={"a": torch.tensor([0, 0, 1, 1, 1, 1])}
        ),
        6 * (4 + 16),
        16,
    ),
    "no pairs": (lambda: attention(X, X[:, :, :0], X[:, :, :0]), 0, 0),
    "in the place of PyTorch's": (lambda: in_the_place_of_pytorch_s(), 12 * 65 * 32, 128),
}


def in_the_place_of_pytorch_s():
    with sdpa():
        torch.nn.functional.scaled_dot_product_attention(X, X, X, is_causal=True)


@pytest.mark.parametrize("name", CALLS)
def test_forward(name):
    call, pairs, channels = CALLS[name]
    assert counted(call) == 2 * channels * pairs


@pytest.mark.parametrize("rule, pairs", [(af.full(), 12 * 64 * 64), (af.causal(), 12 * 65 * 32)])
def test_backward_in_the_same_block_and_in_one_of_its_own(rule, pairs):
    x = X.clone().requires_grad_()
    assert counted(lambda: attention(x, x, x, rule=rule).sum().backward()) == (4 * 64 + 10 * 64) * pairs
    expected, x.grad = x.grad, None
    out = attention(x, x, x, rule=rule)
    assert counted(lambda: out.sum().backward()) == 10 * 64 * pairs
    assert torch.equal(x.grad, expected)


def test_all_gradients_of_an_eager_call_when_they_are_counted(numbers):
    """Bias, sink, lse, lengths as they are given; what is not asked for stays away."""
    q, k, bias, sink = numbers(2, 4, 5, 8), numbers(2, 2, 7, 8), numbers(1, 4, 1, 7), numbers(4)
    given = [x.requires_grad_() for x in (q, k, bias, sink)]
    ids = torch.tensor([[0] * 3 + [1] * 4] * 2)

    def gradients(block):
        out, lse = attention(
            q,
            k,
            k.detach(),
            bias=bias,
            sink=sink,
            return_lse=True,
            rule="documents(a, b) | sink(1)",
            tables={"a": ids[:, :5], "b": ids},
            key_lengths=torch.tensor([6, 7]),
            alibi_slopes=torch.ones(4).numpy() if DEVICE == "cpu" else zeros(4),
        )
        with block:
            return torch.autograd.grad(out.sin().sum() + lse.sum(), given)

    with FlopCounterMode(display=False) as counter:
        pass
    for one, other in zip(gradients(counter), gradients(torch.enable_grad()), strict=True):
        assert torch.equal(one, other)
    assert counter.get_total_flops() > 0


def test_without_numbers_all_pairs_count():
    ids = torch.tensor([0, 0, 1, 1, 1, 1])
    with FakeTensorMode() as fake:
        x, fake_ids = torch.zeros(2, 3, 6, 8), fake.from_tensor(ids)
        named = lambda: attention(x, x, x, rule="documents(a, a)", tables={"a": fake_ids})
        assert counted(lambda: attention(x, x, x, rule=af.causal())) == 32 * 6 * 21
        assert counted(named) == 32 * 6 * 36
    x = torch.zeros(2, 3, 6, 8, device="meta")
    assert counted(lambda: attention(x, x, x, rule=af.causal())) == 32 * 6 * 21
    assert counted(lambda: attention(x, x, x, key_lengths=torch.zeros(2, dtype=torch.int32, device="meta"))) == 32 * 216


@pytest.mark.parametrize(
    "layout, shape",
    [("bhsd", (2, 3, 6, 8)), ("bshd", (2, 6, 3, 8)), ("bhds", (2, 3, 8, 6)), ("thd", (6, 3, 8)), ("qkv", (3, 3, 6, 8))],
)
def test_of_sizes_that_are_symbols_all_pairs_count(layout, shape):
    def call(x):
        ends = x.new_tensor([0, 6], dtype=torch.int32) if layout == "thd" else None
        rest = () if layout == "qkv" else (x, x)
        totals.append(
            counted(lambda: attention(x, *rest, rule=af.causal(), layout=layout, cu_seqlens_q=ends, cu_seqlens_k=ends))
        )
        return x

    totals = []
    make_fx(call, tracing_mode="symbolic")(zeros(*shape))
    assert isinstance(totals[0], torch.SymInt) and totals[0] == 32 * (3 if layout in ("thd", "qkv") else 6) * 36


PROGRAM = """
import torch
{first}
{second}
from torch.utils.flop_counter import FlopCounterMode
import torch.utils.flop_counter as module
x = torch.zeros(1, 1, 4, 8)
with FlopCounterMode(display=False) as counter:
    attention(x, x, x)
assert counter.get_total_flops() == 512
assert type(module.__spec__.loader) is type(module.__loader__) is type(torch.__loader__)
"""
IMPORTS = "import torch.utils.flop_counter", "from anyflash.torch import attention"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_whatever_is_imported_first(order):
    program = PROGRAM.format(first=IMPORTS[order[0]], second=IMPORTS[order[1]])
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
