"""Hopper's forward kernel where there is little to do at once, against float64: sequences of one query block have a head in
each warpgroup (PackGQA); few tasks are split over their keys (split-KV)."""

import re
import sys
from pathlib import Path

import anyflash as af
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from make_kernel_table import launched

hopper = pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the kernels of Hopper")
RULES = {
    "full": af.full(),
    "causal": af.causal(),
    "a window and the first keys": af.local(100, causal=True) | af.sink(3),
    "no key for the first rows": af.causal() & ~af.local(300),
}


def tensors(heads, kv_heads, queries, keys, d, dtype=torch.bfloat16, d_v=None):
    generator = torch.Generator("cuda").manual_seed(queries + d)
    shapes = (2, heads, queries, d), (2, kv_heads, keys, d), (2, kv_heads, keys, d_v or d)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def check(q, k, v, on_gpu=True, **options):
    """The statistics' bars are below what a block of 64 of 5000 keys changes. Tables are on the GPU, or not."""
    wide = {name: x.double() if getattr(x, "is_floating_point", bool)() else x for name, x in options.items()}
    wide.pop("deterministic", None)
    there = {name: x.cuda() if isinstance(x, torch.Tensor) and on_gpu else x for name, x in options.items()}
    found = af.attention(q, k, v, return_lse="lm", **there)
    wanted = af.attention(*(x.double().cpu() for x in (q, k, v)), return_lse="lm", **wide)
    for got, want, bar in zip(found, wanted, (None, 1e-3, 1e-3, 1e-3)):
        got = got.double().cpu()
        hidden = want == -torch.inf
        assert torch.equal(got == -torch.inf, hidden)
        error, want = (got - want)[~hidden], want[~hidden]
        assert error.norm() <= 1e-2 * want.norm() if bar is None else error.abs().max() <= bar * want.abs().max()


def takes_the_split_kernel(call):
    return any(re.search(r"AttentionTraits<.*, true> ?>", name) for name in launched(call))


@pytest.mark.parametrize("extras", ["alone", "sink", "lengths"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads, kv_heads, queries", [(4, 2, 64), (6, 2, 33), (10, 2, 64), (14, 2, 20)])
def test_packed_heads(heads, kv_heads, queries, d, rule, extras):
    """deterministic: no call is split over its keys. At 64 channels heads are packed by three, where that is faster:
    groups of 3 and of 5, of which one warpgroup has no head."""
    q, k, v = tensors(heads, kv_heads, queries, 333, d)
    more = {
        "alone": {},
        "sink": dict(sink=torch.randn(heads)),
        "lengths": dict(key_lengths=torch.tensor([0, 320], dtype=torch.int32)),
    }[extras]
    on_gpu = extras != "lengths"  # with lengths there the portable kernel takes deterministic calls
    check(q, k, v, on_gpu, rule=RULES[rule], align="none_end", deterministic=True, **more)


WINDOW, MOVED = af.causal() & af.window(4999, 0), torch.tensor([16384, 5000], dtype=torch.int32)
OF_HEADS = (torch.arange(128) < 32 * (torch.arange(4)[:, None, None] + 1)).expand(4, 2, 128).contiguous()
SPLIT = {  # heads, key heads, queries, keys, rule, options: few tasks of many steps
    "packed heads": (32, 8, 64, 5000, af.full(), {}),
    "packed heads, a sink": (15, 5, 50, 5000, af.causal(), dict(sink=torch.randn(15))),
    "causal": (4, 2, 200, 5001, af.causal(), {}),
    "a window on the last keys": (4, 2, 130, 9000, af.local(5000, causal=True), dict(sink=torch.randn(4))),
    "lengths": (4, 2, 100, 6000, af.causal(), dict(key_lengths=torch.tensor([6000, 70], dtype=torch.int32))),
    "a window that moves with the length": (4, 2, 100, 16384, WINDOW, dict(key_lengths=MOVED)),
    "no keys": (4, 2, 100, 6000, af.full(), dict(key_lengths=torch.tensor([0, 6000], dtype=torch.int32))),
    "a bitmap of tiles": (4, 2, 128, 8192, af.blocks(torch.arange(128).reshape(2, 64) % 3 > 0, 64, 128), {}),
    "a bitmap of each head": (4, 2, 128, 8192, af.blocks(OF_HEADS, 64, 64), {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d, d_v", [(64, 64), (128, 128), (256, 256), (72, 40)])
@pytest.mark.parametrize("case", SPLIT)
def test_keys_in_parts(case, d, d_v, dtype):
    *sizes, rule, options = SPLIT[case]
    check(*tensors(*sizes, d, dtype, d_v), rule=rule, align="none_end", **options)


def test_parts_whose_scores_lie_far_apart():
    """The largest scores of a row are in the last part; a sink has still larger ones of some heads."""
    q, k, v = tensors(4, 2, 100, 5000, 128)
    q[..., 0], k[..., 0] = 30, 0
    k[:, :, 4900:, 0] = 60
    check(q, k, v)
    check(q, k, v, sink=torch.tensor([0.0, 100.0, 150.0, 200.0]))


def test_a_part_that_overflows_is_made_again():
    q, k, v = tensors(4, 2, 100, 5000, 128)
    expected = af.attention(q, k, v)
    v[1, 1, 4000, 5], v[1, 1, 100, 6] = torch.inf, torch.nan
    found = af.attention(q, k, v)
    assert found[1, 2:, :, 5].isinf().all() and found[1, 2:, :, 6].isnan().all()
    found[1, 2:, :, 5:7] = expected[1, 2:, :, 5:7] = 0
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1, :2], expected[1, :2])
    assert (found - expected).abs().max() < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_that_overflows_changes_no_other(dtype):
    q, k, v = tensors(12, 2, 64, 1000, 128, dtype)
    expected = af.attention(q, k, v, deterministic=True)
    q[1, 3] *= torch.inf
    found = af.attention(q, k, v, deterministic=True)
    assert found[1, 3].isnan().all()
    expected[1, 3] = found[1, 3] = 0
    assert torch.equal(found, expected)


def test_batches_that_fill_the_machine_are_not_split():
    """A call with tasks for all SMs has the bits of one that may not be split."""
    q, k, v = (x.repeat(40, 1, 1, 1) for x in tensors(8, 2, 64, 2000, 128))
    assert torch.equal(af.attention(q, k, v), af.attention(q, k, v, deterministic=True))


@hopper
@pytest.mark.parametrize(
    "heads, kv_heads, queries, d, options, split",
    [
        (4, 2, 64, 128, dict(deterministic=True), True),  # packed heads
        (10, 2, 64, 64, dict(deterministic=True), True),
        (4, 2, 100, 128, {}, True),  # parts
        (22, 22, 100, 64, {}, True),
        (30, 30, 100, 64, {}, False),  # two parts are no faster than tasks of one query block
        (4, 2, 100, 256, {}, True),
        (4, 2, 100, 128, dict(deterministic=True), False),
        (4, 2, 100, 128, dict(softcap=3.0), False),
        (4, 2, 100, 128, dict(memory_budget=1 << 18), False),  # less than parts would need
    ],
)
def test_which_calls_take_the_split_kernel(heads, kv_heads, queries, d, options, split):
    q, k, v = tensors(heads, kv_heads, queries, 5000, d)
    assert takes_the_split_kernel(lambda: af.attention(q, k, v, **options)) == split


@hopper
def test_keys_of_all_batch_entries_are_split_too():
    """Expanded keys, which TMA does not take for the forward kernel, are decode's."""
    q, k, v = tensors(32, 8, 64, 5000, 128)
    k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    assert any("bulk_decode_kernel" in name for name in launched(lambda: af.attention(q, k, v)))
    check(q, k, v)
