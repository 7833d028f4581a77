"""The functions of flash_attn.bert_padding: they pack the tokens of padded batches, as the varlen functions expect
them, and unpack them. All are differentiable. Wrong input raises ValueError or TypeError with one line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._checks import checked
from ._shared import check_indices, check_tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of input (rows, ...) at indices (n,)."""
    _check_rank("input", input, 1)
    return input.index_select(0, _places(indices, input.shape[0]))


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """index_first_axis, and input itself."""
    return index_first_axis(input, indices), input.view_as(input)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...): zeros, with the rows of values (n, ...) at indices (n,)."""
    _check_rank("values", values, 1)
    places = _places(indices, first_axis_dim)
    if values.shape[0] != places.shape[0]:
        raise ValueError(f"indices: {places.shape[0]} numbers, expected {values.shape[0]} as rows of values")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, places, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of hidden_states (batch, length, ...) that a mask names. attention_mask (batch, length), any type:
    1 for tokens, 0 for padding. unused_mask alike: 1 for tokens that have a place and are not used.

    Returns (tokens (total, ...), indices (total,) of them in the flattened batch, cu_seqlens (batch + 1,) int32, the
    longest length, seqused (batch,) int32: the numbers of attention_mask alone).
    """
    _check_rank("hidden_states", hidden_states, 2)
    _check_mask("attention_mask", attention_mask, hidden_states)
    both = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        both = attention_mask + unused_mask
    lengths = both.sum(-1, dtype=torch.int32)
    indices = both.flatten().nonzero().flatten()
    cu_seqlens, longest = _ends(lengths)
    if int(cu_seqlens[-1]) != indices.shape[0]:
        name = "attention_mask" if unused_mask is None else "attention_mask + unused_mask"
        raise ValueError(f"{name}: a sum of {int(cu_seqlens[-1])} in {indices.shape[0]} places, expected 0 and 1 alone")
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same where rows hold several sequences. attention_mask_in_length (batch, length), integers: each row's
    lengths of sequences, from its front on, and zeros after them, as [[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]].

    Returns (tokens, indices, cu_seqlens (sequences + 1,) int32, the longest length).
    """
    _check_rank("hidden_states", hidden_states, 2)
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    of_rows, length = attention_mask_in_length.sum(-1), hidden_states.shape[1]
    if bool((attention_mask_in_length < 0).any()) or bool((of_rows > length).any()):
        raise ValueError(f"attention_mask_in_length: rows of {of_rows.tolist()} tokens, expected 0 to {length} in each")
    kept = torch.arange(length, device=of_rows.device) < of_rows[:, None]
    indices = kept.flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    cu_seqlens, longest = _ends(lengths[lengths.nonzero().flatten()])
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...): zeros, with the tokens hidden_states (total, ...) where unpad_input's indices say."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _ends(lengths: Tensor) -> tuple[Tensor, int]:
    longest = int(lengths.max()) if lengths.numel() else 0
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), longest


def _places(indices: Any, rows: int) -> Tensor:
    check_indices("indices", indices, 1)
    return checked("indices", indices, sizes=(rows,)).long()


def _check_rank(name: str, tensor: Any, least: int) -> None:
    check_tensor(name, tensor)
    if tensor.dim() < least:
        raise ValueError(f"{name}: rank {tensor.dim()}, expected at least {least}")


def _check_mask(name: str, mask: Any, hidden_states: Tensor) -> None:
    check_tensor(name, mask)
    if mask.shape != hidden_states.shape[:2]:
        expected = tuple(hidden_states.shape[:2])
        raise ValueError(f"{name}: shape {tuple(mask.shape)}, expected {expected} as hidden_states begins")
