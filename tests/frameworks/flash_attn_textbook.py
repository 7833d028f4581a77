"""What flash_attn's functions say in their documentation, with the whole matrix in memory."""

import torch
from devices import DEVICE


def textbook(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, softmax_scale=None, first=0):
    """(out, lse) of q (b, n, h, d) and k, v (b, m, hk, d); keys before `first` are hidden."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    n, m = q.shape[1], k.shape[1]
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(n, device=DEVICE)[:, None] + m - n, torch.arange(m, device=DEVICE)[None]
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(q.shape[0], -1).double()
        scores = scores - slopes[:, :, None, None] * (i - j).abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = j < first
    if left >= 0:
        hidden = hidden | (j < i - left)
    if right >= 0:
        hidden = hidden | (j > i + right)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    blind = hidden.all(-1)[:, None] if m else torch.tensor(True, device=DEVICE)
    p = torch.where(blind, 0.0, scores.softmax(-1)).nan_to_num(0.0)
    return torch.einsum("bhnm,bmhd->bnhd", p, v), lse


def integers(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def rotated(x, cos, sin, interleaved, places):
    """x (n, h, d), one position for each of n."""
    x, half = x.clone(), cos.shape[1]
    for row, place in enumerate(places):
        for c in range(half):
            a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
            first, second = x[row, :, a].clone(), x[row, :, b].clone()
            x[row, :, a] = first * cos[place, c] - second * sin[place, c]
            x[row, :, b] = first * sin[place, c] + second * cos[place, c]
    return x
