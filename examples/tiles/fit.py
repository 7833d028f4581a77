"""A sequence that fits a small tile machine only in chunks.

    python examples/tiles/fit.py

The machine has 16 tiles of 160 KiB. One head of 2,048 tokens does not fit in one piece, nor in eight chunks:
the refusal names the tile, the phase and the bytes. In chunks that the planner chooses it runs, forward and backward,
with the CPU's results.
"""

import anyflash as af
import numpy as np
from anyflash import tile_machine

LENGTH, CHANNELS, TILES, MEMORY = 2048, 32, 16, 160 * 1024


def main():
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 1, LENGTH, CHANNELS)).astype(np.float16) for _ in range(4))
    rule = af.causal()
    for chunks in (1, 8):
        try:
            with tile_machine.use(tiles=TILES, memory_per_tile=MEMORY):
                af.attention(q, k, v, rule=rule, num_chunks_q=chunks, num_chunks_kv=chunks)
        except MemoryError as error:
            print(f"{chunks} chunks: {error}\n")
        else:
            raise SystemExit(f"{chunks} chunks: fits, and should not")

    out, lse = af.attention(q, k, v, rule=rule, return_lse=True)
    gradients = af.attention_backward(dout, q, k, v, out, lse, rule=rule)
    with tile_machine.use(tiles=TILES, memory_per_tile=MEMORY) as used:
        on_tiles = af.attention(q, k, v, rule=rule)
        print("chosen chunks, forward:", used.report, sep="\n", end="\n\n")
        gradients_on_tiles = af.attention_backward(dout, q, k, v, out, lse, rule=rule)
        print("chosen chunks, backward:", used.report, sep="\n", end="\n\n")
    pairs = [(on_tiles, out), *zip(gradients_on_tiles[:3], gradients[:3])]
    error = max(np.abs(a.astype(np.float64) - b.astype(np.float64)).max() / np.abs(b).max() for a, b in pairs)
    print(f"largest difference from the CPU, relative to the largest number: {error:.1e}")


if __name__ == "__main__":
    main()
