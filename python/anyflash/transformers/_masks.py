"""The masks that Transformers makes for "anyflash", and their rules.

A mask is a boolean tensor, as for "sdpa". A causal or windowed mask without padding carries its rule, so that the
matrix need not be read. A model that cuts or changes the mask gets a tensor without the rule.
"""

from __future__ import annotations

import functools
import inspect
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask

from .. import _rules
from ._models import check_config

_FULL = _rules.full()


class Known(NamedTuple):
    """What a mask is: `rule` over the first `keys` keys, aligned at the end; the others are hidden."""

    rule: Any
    keys: int
    version: int  # the tensor's version, to detect changes


def make_mask(**options: Any) -> Tensor | None:
    """For Transformers' AttentionMaskInterface, which calls it like sdpa_mask. Returns None if every query sees every
    key, and for a causal mask with as many queries as keys: if a model cuts off the first queries, the others stay the
    last."""
    positions: Tensor | None = options.get("cache_position")  # in Transformers 4
    queries = options["q_length"] if positions is None else positions.shape[0]
    config = options.get("config")
    check_config(config)
    # Modules of such a configuration say that they are not causal, even where their mask is. One query needs no mask.
    if queries > 1 and (options["kv_length"] != queries or getattr(config, "use_bidirectional_attention", None)):
        options["allow_is_causal_skip"] = False
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        in_graph: Tensor | None = sdpa_mask(**options)
        return in_graph
    if queries == 1 and options.get("allow_is_causal_skip", True):
        if options.get("attention_mask") is None is options.get("local_size"):
            return None  # as sdpa_mask says, later
    if not torch.is_inference_mode_enabled():
        return _made(positions, queries, options)
    with torch.inference_mode(False):  # where tensors have no versions
        return _made(positions, queries, options)


def _made(positions: Tensor | None, queries: int, options: dict[str, Any]) -> Tensor | None:
    """The mask, and on it what it is."""
    mask: Any = None
    if options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip"):
        mask = sdpa_mask(**options)
        if mask is None:
            return None
    first = int(options.get("q_offset", 0) if positions is None else positions[0])
    first_key, all_keys = options.get("kv_offset", 0), options["kv_length"]
    keys = first + queries - first_key
    bounds = None
    if _is_unpadded(options.get("attention_mask"), first_key + keys):
        bounds = _bounds(options.get("mask_function", masking_utils.causal_mask_function))
    given = options.get("attention_mask")
    # What lies beyond a given mask is hidden; from a causal query it is so anyway.
    whole = given is None or given.shape[-1] >= first_key + all_keys or (bounds is not None and bounds[1] == 0)
    if mask is None and bounds is not None and not bounds[2] and whole:  # as sdpa_mask makes it, in fewer steps
        device = options.get("device", "cpu") if positions is None else positions.device
        mask = torch.ones(queries, all_keys, dtype=torch.bool, device=device)
        if bounds[1] >= 0:
            mask.tril_(first - first_key + bounds[1])
        if bounds[0] >= 0:
            mask.triu_(first - first_key - bounds[0])
        mask = mask.expand(options["batch_size"], 1, queries, all_keys)
    elif mask is None:
        mask = sdpa_mask(**options)
    rule = _rule(bounds, first, first_key, keys, all_keys)
    mask._anyflash = None if rule is None else Known(rule, keys, mask._version)
    out: Tensor | None = mask
    return out


def known(mask: Any, query: Tensor, key: Tensor) -> Known | None:
    """The mask's rule, if it was made for this call and has not been changed since."""
    if torch.compiler.is_compiling():
        return None
    found: Known | None = getattr(mask, "_anyflash", None)
    if found is None or found.version != mask._version or found.keys > key.shape[2]:
        return None
    return found if mask.shape[2] == query.shape[2] and mask.shape[3] >= key.shape[2] else None


def _is_unpadded(attention_mask: Tensor | None, keys: int) -> bool:
    if attention_mask is None:
        return True
    if type(attention_mask) is not Tensor or attention_mask.is_meta or attention_mask.shape[-1] < keys:
        return False
    if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():  # values cannot be read during a capture
        return False
    return bool(attention_mask.all())


def _rule(bounds: tuple[int, int, int] | None, first: int, first_key: int, keys: int, all_keys: int) -> Any:
    """The rule of a mask within these bounds over the first `keys` of all keys, the last of which is at the last
    query's place. None if it is not known."""
    if bounds is None or first < first_key or keys > all_keys or (bounds[1] != 0 and keys < all_keys):
        return None
    left, right, chunk = bounds
    if not chunk and keys == first - first_key + 1 and (left < 0 or left >= keys - 1):  # one query, which sees them all
        return _FULL
    if not chunk:
        return _window(left, right)
    chunks = torch.arange(first_key, first_key + keys) // chunk
    return _window(left, right) & _rules.documents(chunks[first - first_key :], chunks)


@functools.lru_cache(256)
def _window(left: int, right: int) -> Any:
    return _rules.window(left, right)


def _code(name: str) -> CodeType | None:
    """The shared code object of the functions that a mask factory returns."""
    inside = getattr(getattr(masking_utils, name, None), "__code__", None)
    codes = [] if inside is None else [one for one in inside.co_consts if isinstance(one, CodeType)]
    return next((one for one in codes if not one.co_name.startswith("<")), None)  # skips "<genexpr>" and the like


_AND, _CHUNK, _WINDOW = (_code(name) for name in ("and_masks", "chunked_overlay", "sliding_window_overlay"))
_BOTH_WAYS = _code("sliding_window_bidirectional_overlay")


def _bounds(function: Any) -> tuple[int, int, int] | None:
    """(left, right, chunk) of one of Transformers' own mask functions: how many keys a query sees on each side, -1 for
    no limit, and the chunk length, 0 for no chunks. None for any other function."""
    if function is masking_utils.causal_mask_function:
        return -1, 0, 0
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return -1, -1, 0
    code = getattr(function, "__code__", None)
    if code not in (_AND, _CHUNK, _WINDOW, _BOTH_WAYS) or code is None:
        return None
    given = inspect.getclosurevars(function).nonlocals
    if code is _AND:
        parts = [_bounds(part) for part in given["mask_functions"]]
        if any(part is None for part in parts):
            return None
        left, right = (min((part[side] for part in parts if part and part[side] >= 0), default=-1) for side in (0, 1))
        chunks = [part[2] for part in parts if part and part[2]]
        return (left, right, sum(chunks)) if len(chunks) < 2 else None
    number = given.get("chunk_size" if code is _CHUNK else "sliding_window")
    if not isinstance(number, int) or number < 1:
        return None
    return {_CHUNK: (-1, -1, number), _WINDOW: (number - 1, -1, 0), _BOTH_WAYS: (number, number, 0)}[code]
