"""What a rule looks like and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from os import PathLike, fspath
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from . import _core
from ._core import Rule

_Shape = SupportsIndex | Sequence[SupportsIndex]


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


class Explanation:
    """The figures of a rule on given shapes, as the CPU's plan runs it, and its picture. Made by explain.

    rule, align             the arguments of explain
    queries, keys           entries of the flattened sequences
    visible_pairs           pairs of a query and a key that it sees, of queries * keys
    visited_pairs           pairs in the tiles that are computed, padding included
    visited_per_visible     the cost of computing whole tiles: 1 is best; 0 if nothing is visible
    tiles_skipped, tiles_partial, tiles_full
    query_block, query_step, key_block, key_step
                            the boxes that the sequence is cut into: extent and step per dimension (z, y, x)
    forward_flops, backward_flops
                            useful floating-point operations of one head: 2 d_qk + 2 d_v and 6 d_qk + 4 d_v a visible
                            pair
    bytes                   size of q, k, v, out and lse of one head
    dense_mask_bytes        size of the rule as a boolean matrix, one head
    threads                 of the plan
    workspace_bytes         of a call of one head: forward or, if asked for, backward
    tile_classes            (query blocks, key blocks), uint8: 0 skip, 1 partial, 2 full; None if over 2**24 tiles
    """

    rule: Rule
    align: str
    queries: int
    keys: int
    visible_pairs: int
    visited_pairs: int
    visited_per_visible: float
    tiles_skipped: int
    tiles_partial: int
    tiles_full: int
    query_block: tuple[int, int, int]
    query_step: tuple[int, int, int]
    key_block: tuple[int, int, int]
    key_step: tuple[int, int, int]
    forward_flops: float
    backward_flops: float
    bytes: float
    dense_mask_bytes: float
    threads: int
    workspace_bytes: int
    tile_classes: NDArray[np.uint8] | None

    _q_shape: tuple[int, ...]
    _k_shape: tuple[int, ...]

    def __init__(self, rule: Rule, align: str, figures: dict[str, Any]) -> None:
        self.rule = rule
        self.align = align
        self.__dict__.update(figures)

    @cached_property
    def pattern(self) -> NDArray[np.bool_]:
        """(queries, keys), True where the query sees the key. Each pair is evaluated from the rule's definition.
        ValueError over 2**28 pairs."""
        return _core.pattern(*self._pattern).view(np.bool_)

    def grey(self, side: int = 256) -> NDArray[np.uint8]:
        """The picture: queries down, keys across, at most `side` (1 to 4096) pixels a side. 0: no pair is visible;
        255: the densest pixel. Levels between are in proportion to the visible share of a pixel's pairs."""
        return _core.picture(*self._pattern, side)

    @cached_property
    def picture(self) -> str:
        """The picture for a terminal: one character for 1 x 2 pixels."""
        return _core.picture_text(*self._pattern, 64)

    def svg(self, side: int = 256) -> str:
        """The picture with title, axes and legend, as an SVG document."""
        return _core.picture_svg(*self._pattern, side, self._title())

    def save(self, path: str | PathLike[str], side: int = 256) -> None:
        """Writes the picture with title, axes and legend. The name's ending is the format: .svg, .txt, or .png (needs
        Pillow). Raises ValueError for other endings, ImportError without Pillow, OSError if writing fails."""
        name = fspath(path)
        if name.endswith(".svg"):
            text = self.svg(side)
        elif name.endswith(".txt"):
            text = f"{self}\n\n{self.picture}\n"
        elif name.endswith(".png"):
            try:
                from PIL import Image
            except ImportError:
                raise ImportError("path: .png needs Pillow (pip install pillow); .svg and .txt do not") from None
            Image.fromarray(_core.picture_image(*self._pattern, side, self._title())).save(name)
            return
        else:
            raise ValueError(f"path: '{_core.echoed(name)}', expected a name that ends in .svg, .txt or .png")
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)

    @property
    def _pattern(self) -> tuple[Rule, tuple[int, ...], tuple[int, ...], str]:
        return self.rule, self._q_shape, self._k_shape, self.align

    def _title(self) -> str:
        return f"{self.rule}, {_text(self._q_shape)} queries, {_text(self._k_shape)} keys, {self.align}"

    def __str__(self) -> str:
        pairs = self.queries * self.keys
        shown = self.visible_pairs / pairs if pairs else 0.0

        def block(extent: tuple[int, ...], step: tuple[int, ...]) -> str:
            return _text(extent) + (f" every {_text(step)}" if max(step) > 1 else "")

        return "\n".join(
            (
                self._title(),
                f"visible pairs  {self.visible_pairs:,} of {pairs:,} ({shown:.2%})",
                f"visited pairs  {self.visited_pairs:,} ({self.visited_per_visible:.2f} a visible one)",
                f"tiles          {self.tiles_full:,} full, {self.tiles_partial:,} partial, {self.tiles_skipped:,} skipped",
                f"blocks         {block(self.query_block, self.query_step)} queries, "
                f"{block(self.key_block, self.key_step)} keys",
                f"operations     {self.forward_flops:.4g} forward, {self.backward_flops:.4g} backward (one head)",
                f"bytes          {self.bytes:.4g} (q, k, v, out and lse of one head), "
                f"{self.dense_mask_bytes:.4g} of a dense mask",
                f"workspace      {self.workspace_bytes:,} bytes, {self.threads} threads",
            )
        )

    def __repr__(self) -> str:
        return f"<anyflash.Explanation of {self._title()}>"


def explain(
    rule: Rule,
    q_shape: _Shape,
    k_shape: _Shape | None = None,
    align: str = "none_front",
    *,
    d_qk: SupportsIndex = 64,
    d_v: SupportsIndex = 64,
    dtype: Any = "float32",
    backward: bool = False,
) -> Explanation:
    """What a rule looks like and what it costs.

    q_shape, k_shape: the sizes of the two sequences, 1 to 3 numbers, outermost first, or one integer; k_shape is
    q_shape if not given. align as in attention. d_qk, d_v: channels; dtype: "float16", "bfloat16", "float32" or
    "float64", by name or as a NumPy dtype; backward: describe the backward plan. `.pattern` is made when it is first
    read.

    Raises ValueError or TypeError, as attention would for these shapes.
    """
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = type(dtype).__name__  # the extension raises for it
    return Explanation(rule, align, _core.explain(rule, q_shape, k_shape, align, d_qk, d_v, name, backward))
