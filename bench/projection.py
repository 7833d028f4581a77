"""A projection, not a measurement: attention of a million tokens on 8, 64 and 1024 GPUs, by a simple cost model.

    python bench/projection.py

Work and bytes are those of plan_sharding for the rule. The rates are assumptions about one H100 of a node of 8:
FLOPS useful bfloat16 operations a second in a forward pass; LINK bytes a second into each GPU within a node, and NET
between nodes, which all bytes take beyond 8 GPUs; LATENCY seconds for each stage of the exchange. Exchange and work
overlap, so a pass takes the longer of both, and the latencies. Efficiency: the time of perfectly divided work over it.
"""

import anyflash as af
import torch
from anyflash.torch.distributed import plan_sharding

FLOPS, LINK, NET, LATENCY = 450e12, 300e9, 40e9, 20e-6
HEADS, CHANNELS, TOKENS = 16, 128, 1 << 20


def rules():
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, TOKENS, (127,), generator=generator).sort()[0]
    ends = torch.tensor([0, *ends.tolist(), TOKENS], dtype=torch.int32)
    yield "causal", af.causal(), TOKENS
    yield "128 documents, causal", af.documents_packed(ends) & af.causal(), TOKENS
    yield "1024 x 1024 pixels, local(32)", af.local(32), (1024, 1024)


def main():
    print("| rule | GPUs | work: busiest / mean | received, busiest | over the least | stages | forward | efficiency |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rule, shape in rules():
        for ranks in (8, 64, 1024):
            sharding = plan_sharding(rule, shape, ranks=ranks)
            traffic = sharding.traffic(channels=2 * CHANNELS, heads=HEADS)
            of_pairs = 4 * CHANNELS * HEADS / FLOPS
            pairs = sharding.visible_pairs
            moving = max(traffic["bytes"]) / (LINK if ranks <= 8 else NET)
            own = TOKENS // ranks * 2 * CHANNELS * HEADS * 2
            stages = traffic["stages"] or -(-max(traffic["bytes"]) // own)
            time = max(max(pairs) * of_pairs, moving) + LATENCY * stages
            efficiency = sum(pairs) / ranks * of_pairs / time
            print(
                f"| {name} | {ranks} | {sharding.imbalance:.2f} | {max(traffic['bytes']) / 1e6:,.0f} MB "
                f"| {traffic['over_least']:.3f} | {stages} | {1e3 * time:,.2f} ms | {efficiency:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
