"""What splitting a sequence over processes costs, without a group:

python -m anyflash.torch.distributed.explain --rule "causal()" --shape 65536 --ranks 8
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import parse_rule
from ._planner import plan_sharding
from ._sharding import Sharding

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def figures(plan: Sharding, head_size: int, value_size: int, kv_heads: int, number: int) -> dict[str, Any]:
    """The figures of a split. Bytes are those that a forward pass moves; lists have one number for each process."""
    traffic = plan.traffic(channels=head_size + value_size, heads=kv_heads, bytes_of_number=number)
    ranks = range(plan.ranks)
    return {
        "rule": str(plan.rule),
        "query_shape": plan.q_shape,
        "key_shape": plan.k_shape,
        "align": plan.align,
        "ranks": plan.ranks,
        "visible_pairs": plan.visible_pairs,
        "imbalance": plan.imbalance,
        "positions": [len(plan.positions("query", rank)) for rank in ranks],
        "key_positions": [len(plan.positions("key", rank)) for rank in ranks],
        "pieces": [plan.pieces("query", rank) for rank in ranks],
        "key_pieces": [plan.pieces("key", rank) for rank in ranks],
        **traffic,
    }


def text_of(made: dict[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, made[name])) for name in ("query_shape", "key_shape"))
    lines = [
        f"rule            {made['rule']}",
        f"queries, keys   {sizes} ({made['align']})",
        f"balance         {made['imbalance']:.3f}: visible pairs of the busiest rank over the mean (from samples)",
        f"moved           {sum(made['bytes']):,} bytes in {made['stages']} stages, {made['over_least']:.3f} of the least",
        f"all gathered    {sum(made['gathered']):,} bytes",
    ]
    for rank in range(made["ranks"]):
        pieces = made["pieces"][rank]
        ranges = " ".join(f"{first}-{first + count - 1}" for first, count in pieces[:4])
        more = f" and {len(pieces) - 4} more" if len(pieces) > 4 else ""
        lines.append(
            f"rank {rank:<10} {made['positions'][rank]} positions ({ranges or 'none'}{more}), "
            f"receives {made['bytes'][rank]:,} bytes"
        )
    return "\n".join(lines)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _table(text: str) -> tuple[str, NDArray[Any]]:
    name, _, file = text.partition("=")
    return name, np.load(file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m anyflash.torch.distributed.explain", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rule", default="full()")
    parser.add_argument("--shape", type=_shape, required=True, help="the sequence: 4096, 512x512 or 16x64x64")
    parser.add_argument("--keys", type=_shape, help="the keys' sequence, if it is another")
    parser.add_argument("--align", default="none_front")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--value-size", type=int, help="as --head-size if not given")
    parser.add_argument("--kv-heads", type=int, default=1, help="times the batch")
    parser.add_argument("--type", choices=_BYTES, default="float32")
    parser.add_argument("--tensor", type=_table, action="append", default=[], metavar="NAME=FILE.npy")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        rule = parse_rule(given.rule, dict(given.tensor))
        plan = plan_sharding(rule, given.shape, given.keys, align=given.align, ranks=given.ranks)
    except (TypeError, ValueError) as error:
        sys.exit(f"explain: {error}")
    value_size = given.head_size if given.value_size is None else given.value_size
    made = figures(plan, given.head_size, value_size, given.kv_heads, _BYTES[given.type])
    print(json.dumps(made, indent=2) if given.json else text_of(made))


if __name__ == "__main__":
    main()
