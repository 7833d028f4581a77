"""The options that flash_attn's users combine, in 16-bit types: a small grid of those of its own tests. Results and
gradients against the textbook in float64."""

import pytest
import torch
from anyflash.compat import flash_attn
from anyflash.compat.bert_padding import pad_input, unpad_input
from devices import DEVICE
from flash_attn_textbook import integers, rotated, textbook

SLOPES = torch.tensor([[0.3, 0.2, 0.1, 0.05, 0.15, 0.25], [0.05, 0.1, 0.2, 0.3, 0.25, 0.15]], device=DEVICE)
HEADS = {"mha": 6, "gqa": 3, "mqa": 1}
OPTIONS = [
    {},
    dict(causal=True),
    dict(window_size=torch.tensor([7, 3])),
    dict(window_size=torch.tensor([5, 2]), causal=True),
    dict(alibi_slopes=SLOPES),
    dict(alibi_slopes=SLOPES, causal=True),
    dict(softcap=3.0, causal=True),
]
grid = pytest.mark.parametrize("options", OPTIONS, ids=lambda one: "-".join(one) or "full")


def close(got, expected, steps):
    """steps: of the type's precision, at the largest number."""
    limit = steps * torch.finfo(got.dtype).eps * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=limit)


@grid
@pytest.mark.parametrize("heads, dtype", [("mha", torch.float16), ("gqa", torch.bfloat16), ("mqa", torch.float16)])
@pytest.mark.parametrize("n, m, d", [(23, 31, 59), (31, 23, 64), (1, 40, 40)])
@pytest.mark.parametrize("way", ["batch", "sequences", "packed sequences"])
def test_values_and_gradients(numbers, options, dtype, heads, n, m, d, way):
    of_keys = HEADS[heads]
    tensors = [numbers(2, n, 6, d, dtype=dtype), *(numbers(2, m, of_keys, d, dtype=dtype) for _ in range(2))]
    wide = [x.double().requires_grad_() for x in tensors]
    tensors = [x.requires_grad_() for x in tensors]
    lengths = [(n, m), (n, m)] if way == "batch" else [(n, m), (max(1, n - 9), m - 4)]
    if way == "batch":
        out, lse, rest = flash_attn.flash_attn_func(*tensors, return_attn_probs=True, **options)
        assert lse.shape == (2, 6, n) and lse.dtype == torch.float32 and rest.numel() == 0
    else:
        masks = [
            torch.arange(size, device=DEVICE) < integers([pair[side] for pair in lengths])[:, None]
            for side, size in ((0, n), (1, m), (1, m))
        ]
        (q, indices, *of_q), (k, _, *of_k), (v, *_) = (unpad_input(x, mask) for x, mask in zip(tensors, masks))
        ends = (of_q[0], of_k[0], of_q[1], of_k[1])
        if way == "sequences":
            out = flash_attn.flash_attn_varlen_func(q, k, v, *ends, **options)
        else:
            out = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *ends, **options)
        out = pad_input(out, indices, 2, n)
    expected = torch.zeros_like(wide[0])
    for b, (queries, keys) in enumerate(lengths):
        own = options | ({"alibi_slopes": SLOPES[b : b + 1]} if "alibi_slopes" in options else {})
        one, _ = textbook(*(x[b : b + 1, :size] for x, size in zip(wide, (queries, keys, keys))), **own)
        expected = expected.index_put((torch.tensor(b), torch.arange(queries)), one[0])
    close(out, expected.detach(), 2)
    weights = numbers(*out.shape, dtype=dtype)
    made = torch.autograd.grad((out * weights).sum(), tensors)
    for got, right in zip(made, torch.autograd.grad((expected * weights.double()).sum(), wide)):
        close(got, right, 6)


@grid
@pytest.mark.parametrize("heads", ["gqa", "mqa"])
@pytest.mark.parametrize("place", ["plain", "leftpad", "batch_idx", "pages"])
@pytest.mark.parametrize("new, fraction, interleaved", [(0, 0, False), (3, 0, False), (3, 0.5, True), (2, 1, False)])
def test_kvcache(numbers, options, heads, place, new, fraction, interleaved):
    dtype, n, d, room, lengths = torch.float16, 3, 32, 24, (9, 15)
    shape = {"batch_idx": (4, room), "pages": (9, 8)}.get(place, (2, room))
    q, caches = numbers(2, n, 6, d, dtype=dtype), [numbers(*shape, HEADS[heads], d, dtype=dtype) for _ in range(2)]
    k, v = [numbers(2, new, HEADS[heads], d, dtype=dtype) for _ in range(2)] if new else (None, None)
    cos, sin = [numbers(room, int(d * fraction) // 2, dtype=dtype) for _ in range(2)] if fraction else (None, None)
    of_place = {
        "plain": {},
        "leftpad": dict(cache_leftpad=integers([4, 0])),
        "batch_idx": dict(cache_batch_idx=integers([3, 1])),
        "pages": dict(block_table=integers([[8, 2, 5], [0, 7, 1]])),
    }[place]

    def rows(cache, b):
        if place == "pages":
            return cache[of_place["block_table"][b].long()].flatten(0, 1)
        return cache[of_place["cache_batch_idx"][b] if place == "batch_idx" else b]

    before = [[rows(cache, b).clone() for cache in caches] for b in range(2)]
    out = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=integers(lengths),
        num_splits=0,
        rotary_interleaved=interleaved,
        **of_place,
        **options,
    )
    moves = options.get("causal", False) or "window_size" in options
    for b, length in enumerate(lengths):
        own_q, keys, values = q[b].double(), *(one.double() for one in before[b])
        if new:
            fresh = k[b].double()
            if fraction:
                turns = cos.double(), sin.double(), interleaved
                fresh = rotated(fresh, *turns, range(length, length + new))
                own_q = rotated(own_q, *turns, [length + i * moves for i in range(n)]).to(dtype).double()
            keys[length : length + new], values[length : length + new] = fresh.to(dtype), v[b]
        close(rows(caches[0], b), keys, 1)
        assert torch.equal(rows(caches[1], b).double(), values)
        own = options | ({"alibi_slopes": SLOPES[b : b + 1]} if "alibi_slopes" in options else {})
        first = int(of_place["cache_leftpad"][b]) if place == "leftpad" else 0
        seen = length + new
        expected, _ = textbook(own_q[None], keys[None, :seen], values[None, :seen], first=first, **own)
        close(out[b], expected[0], 4)
