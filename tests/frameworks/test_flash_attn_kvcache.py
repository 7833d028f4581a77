"""flash_attn_with_kvcache: its results, and caches that stay as they were when a call fails."""

import pytest
import torch
from anyflash.compat import flash_attn
from devices import DEVICE
from flash_attn_textbook import close, integers, rotated, textbook
from torch.autograd import forward_ad

SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE)
CACHE_OPTIONS = [{}, dict(causal=True), dict(window_size=(4, 0)), dict(alibi_slopes=SLOPES, softcap=2.0)]


@pytest.mark.parametrize("options", CACHE_OPTIONS, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("way", ["plain", "batch_idx and leftpad", "pages"])
def test_kvcache(numbers, options, interleaved, way):
    q, k, v = numbers(2, 3, 4, 8), numbers(2, 3, 2, 8), numbers(2, 3, 2, 8)
    cos, sin = numbers(20, 3), numbers(20, 3)
    lengths, leftpad = integers([5, 0]), integers([2, 0])
    given = dict(cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    if way == "pages":
        k_cache, v_cache = numbers(7, 4, 2, 8), numbers(7, 4, 2, 8)
        table = integers([[6, 1, 3], [0, 5, 2]])
        given["block_table"] = table
        entry = lambda cache, b: cache[table[b].long()].flatten(0, 1)
    elif way == "plain":
        k_cache, v_cache = numbers(2, 12, 2, 8), numbers(2, 12, 2, 8)
        entry = lambda cache, b: cache[b]
    else:
        k_cache, v_cache = numbers(3, 12, 2, 8), numbers(3, 12, 2, 8)
        places = integers([2, 0])
        given |= dict(cache_batch_idx=places, cache_leftpad=leftpad)
        entry = lambda cache, b: cache[int(places[b])]
    padded = "cache_leftpad" in given
    before = [(entry(k_cache, b).clone(), entry(v_cache, b).clone()) for b in range(2)]
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, return_softmax_lse=True, **given, **options
    )
    moves = options.get("causal", False) or "window_size" in options
    for b, length in enumerate([5, 0]):
        new_k = rotated(k[b], cos, sin, interleaved, range(length, length + 3))  # whatever the padding is
        own_q = rotated(q[b], cos, sin, interleaved, [length + i * moves for i in range(3)])
        keys, values = before[b]
        keys[length : length + 3], values[length : length + 3] = new_k, v[b]
        close(entry(k_cache, b), keys)
        close(entry(v_cache, b), values)
        expected, rows = textbook(
            own_q[None],
            keys[None, : length + 3],
            values[None, : length + 3],
            first=int(leftpad[b]) if padded else 0,
            **options,
        )
        close(out[b], expected[0])
        close(lse[b], rows[0])


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("pad", [0, 6])
def test_a_rotation_needs_positions_for_all_keys(numbers, pad):
    q, cache, new = numbers(1, 1, 4, 8), numbers(1, 12, 2, 8), numbers(1, 1, 2, 8)
    call = lambda count: flash_attn.flash_attn_with_kvcache(
        q,
        cache.clone(),
        cache.clone(),
        new,
        new,
        numbers(count, 4),
        numbers(count, 4),
        integers([8]),
        cache_leftpad=integers([pad]),
    )
    assert call(9).shape == q.shape
    with pytest.raises(ValueError, match="^rotary_cos: 8 positions, expected at least 9$"):
        call(8)


def test_kvcache_alone(numbers):
    q, cache = numbers(2, 1, 4, 8), numbers(2, 9, 2, 8)
    close(flash_attn.flash_attn_with_kvcache(q, cache, cache), textbook(q, cache, cache)[0])
    close(
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4), textbook(q, cache[:, :4], cache[:, :4])[0]
    )


LATE = {
    "scale: nan": dict(softmax_scale=float("nan")),
    "softcap: nan": dict(softcap=float("nan")),
    "alibi_slopes: ": dict(alibi_slopes=torch.ones(3, device=DEVICE)),
    "window_size: (None, None), expected two integers": dict(window_size=(None, None)),
    "block_table: 9 at (1, 0), expected 0 to 1": dict(block_table=torch.tensor([[0], [9]], dtype=torch.int32)),
    "block_table: 9 at (1, 0), expected 0 to 1 ": dict(
        block_table=torch.tensor([[0, 0], [9, 1]], dtype=torch.int32),
        cache_seqlens=torch.tensor([1, 14], dtype=torch.int32),
    ),
    "block_table: 9 at (1, 1), expected 0 to 1": dict(
        block_table=torch.tensor([[0, 0], [1, 9]], dtype=torch.int32),
        cache_seqlens=torch.tensor([1, 12], dtype=torch.int32),
    ),
    "block_table: 3 sequences, expected 2": dict(block_table=torch.zeros(3, 1, dtype=torch.int32)),
    "cache_batch_idx: 2 at 1, expected 0 to 1": dict(cache_batch_idx=torch.tensor([0, 2])),
    "cache_batch_idx: 4294967296 at 0, expected 0 to 1": dict(cache_batch_idx=torch.tensor([2**32, 1])),
    "cache_seqlens: -1 to 2, expected 0 to 12": dict(cache_seqlens=torch.tensor([-1, 2])),
}


@pytest.mark.parametrize("start", LATE)
def test_kvcache_that_fails_has_written_nothing(start, numbers):
    q, k, v = numbers(2, 1, 4, 8), numbers(2, 1, 2, 8), numbers(2, 1, 2, 8)
    caches = [numbers(2, 12, 2, 8) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    options = dict(cache_seqlens=torch.tensor([1, 2], dtype=torch.int32)) | LATE[start]
    with pytest.raises(ValueError) as raised:
        flash_attn.flash_attn_with_kvcache(q, *caches, k, v, **options)
    assert str(raised.value).startswith(start.strip()) and "\n" not in str(raised.value)
    assert all(map(torch.equal, caches, before))


def unwritable(cache, way):
    if way == "share memory":
        return cache[:, :1].expand_as(cache)
    with torch.inference_mode():
        return cache.clone()


@pytest.mark.parametrize("way", ["share memory", "inference mode"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_cache_that_cannot_be_written(numbers, way, side):
    caches = [numbers(2, 12, 2, 8) for _ in range(2)]
    caches[side] = unwritable(caches[side], way)
    before, new = [cache.clone() for cache in caches], numbers(2, 1, 2, 8)
    with pytest.raises(ValueError, match=f"^{'kv'[side]}_cache: .*{way}"):
        flash_attn.flash_attn_with_kvcache(numbers(2, 1, 4, 8), *caches, new, new, cache_seqlens=3)
    assert all(map(torch.equal, caches, before))


def test_lengths_beyond_the_cache_are_named(numbers):
    cache = numbers(2, 12, 2, 8)
    for lengths in (torch.tensor([2**32, 2]), torch.tensor([2, 13])):
        with pytest.raises(ValueError, match=f"^cache_seqlens: 2 to {lengths.max()}, expected 0 to 12"):
            flash_attn.flash_attn_with_kvcache(numbers(2, 1, 4, 8), cache, cache, cache_seqlens=lengths)


NO_FLAGS = {
    "causal: type Tensor, expected True or False": dict(causal=torch.ones(2)),
    "return_softmax_lse: type Tensor, expected True or False": dict(return_softmax_lse=torch.ones(2)),
    "rotary_interleaved: type str, expected True or False": dict(rotary_interleaved="no"),
    "k: on meta, expected ": dict(k=torch.ones(2, 1, 2, 8, dtype=torch.float64, device="meta")),
    "v: on meta, expected ": dict(v=torch.ones(2, 1, 2, 8, dtype=torch.float64, device="meta")),
    "cache_seqlens: on the device meta, ": dict(cache_seqlens=torch.ones(2, dtype=torch.int32, device="meta")),
    "rotary_cos: on meta, expected ": dict(rotary_cos=torch.ones(9, 4, device="meta"), rotary_sin=torch.ones(9, 4)),
}


@pytest.mark.parametrize("start", NO_FLAGS)
def test_flags_and_places_are_checked_before_the_cache_is_written(start, numbers):
    caches, new = [numbers(2, 12, 2, 8) for _ in range(2)], numbers(2, 1, 2, 8)
    before = [cache.clone() for cache in caches]
    given = dict(k=new, v=new, cache_seqlens=3) | NO_FLAGS[start]
    with pytest.raises((ValueError, TypeError)) as raised:
        flash_attn.flash_attn_with_kvcache(numbers(2, 1, 4, 8), *caches, **given)
    assert str(raised.value).startswith(start) and "\n" not in str(raised.value)
    assert all(map(torch.equal, caches, before))


def test_what_has_no_numbers_to_write_is_refused_before_the_cache_is_written(numbers):
    q, new, caches = numbers(2, 1, 4, 8), numbers(2, 1, 2, 8), [numbers(2, 12, 2, 8) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    call = lambda q, *caches: flash_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=3)
    zeros = torch._efficientzerotensor(caches[1].shape, dtype=q.dtype, device=DEVICE)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivative"):
        call(forward_ad.make_dual(q, q), *caches)
    with pytest.raises(ValueError, match="^v_cache: of zeros without memory"):
        call(q, caches[0], zeros)
    with pytest.raises(ValueError, match="^k: given under torch.func"):
        torch.func.vmap(lambda q: call(q, *caches))(q[None])
    assert all(map(torch.equal, caches, before))


def test_new_keys_beside_what_requires_a_gradient(numbers):
    q, new, cache = numbers(1, 1, 4, 8).requires_grad_(), numbers(1, 1, 2, 8).requires_grad_(), numbers(1, 5, 2, 8)
    caches = cache.clone(), cache.clone()
    out = flash_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=3)
    whole = torch.cat([cache[:, :3], new], 1)
    close(out, textbook(q, whole, whole)[0])
    close(caches[0][:, :4], whole.detach())
    with pytest.raises(NotImplementedError, match="^flash_attn_with_kvcache: a gradient was asked for"):
        out.sum().backward()
