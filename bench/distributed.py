"""Attention on a sequence split over two gloo processes with a thread each, beside one process with two threads.

    python bench/distributed.py [--tokens 4096] [--heads 4] [--channels 64] [--rounds 5] [--json FILE]

Efficiency is the time of one process over that of two: 1 is best. All of it is timed in the same run, in turns: the
processes do one call together, then the first does its call alone. Times are the least of the rounds. `CPU` is the same
ratio of processor time, all threads and processes together: it shows the extra work where other programs disturb the
clock. Short calls get more rounds, up to 40. Exchanged bytes are those of keys and values in a forward pass, and over the least that the rule allows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import anyflash as af
import torch
import torch.distributed as dist


def rules(tokens):
    side = round((tokens // 2) ** 0.5) // 8 * 8
    ends = torch.tensor([0, *sorted({tokens * i * i // 36 for i in range(1, 6)}), tokens], dtype=torch.int32)
    return {
        "full": (af.full(), (tokens,)),
        "causal": (af.causal(), (tokens,)),
        "documents": (af.documents_packed(ends) & af.causal(), (tokens,)),
        "window": (af.local(tokens // 8, causal=True), (tokens,)),
        "2-D local": (af.local(8), (2 * side, side)),
    }


def once(call, threads):
    """(start, end, seconds of all threads)"""
    torch.set_num_threads(threads)
    start, used = time.monotonic(), time.process_time()
    call()
    return start, time.monotonic(), time.process_time() - used


def timed(together, alone, rounds):
    """The least times of one process (in the first) and of both, in turns, after a round that does not count. Each with
    that of all threads, of both processes together. The time of both is from the first start to the last end."""
    one, two = [float("inf")] * 2, [float("inf")] * 2
    every = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    i = 0
    while i <= max(rounds, min(40, 1.5 / two[0])):
        dist.barrier()
        dist.all_gather(every, torch.tensor(once(together, 1), dtype=torch.float64))
        starts, ends, used = torch.stack(every).T
        start, end, alone_used = once(alone, 2) if dist.get_rank() == 0 else (0.0, 0.0, 0.0)
        if i > 0:
            one = [min(one[0], end - start), min(one[1], alone_used)]
            two = [min(two[0], float(ends.max() - starts.min())), min(two[1], float(used.sum()))]
        i += 1
    return one, two


def work(options):
    from anyflash.torch import attention as alone
    from anyflash.torch.distributed import attention, plan_sharding

    rank, found = dist.get_rank(), []
    for name, (rule, shape) in rules(options.tokens).items():
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(1, options.heads, *shape, options.channels, generator=generator) for _ in range(3)]
        sharding = plan_sharding(rule, shape)
        parts = [sharding.shard(x, dim=2).contiguous() for x in whole]

        def forward(call, tensors, **more):
            with torch.no_grad():
                call(*tensors, rule=rule, **more)

        def both(call, tensors, **more):
            tensors = [x.detach().requires_grad_() for x in tensors]
            call(*tensors, rule=rule, **more).sum().backward()

        traffic = sharding.traffic(channels=2 * options.channels, heads=options.heads, bytes_of_number=4)
        row = {"rule": name, "shape": shape, "imbalance": sharding.imbalance, "over_least": traffic["over_least"]}
        row["bytes"] = sum(traffic["bytes"])
        for kind, run in (("forward", forward), ("forward + backward", both)):
            together = lambda: run(attention, parts, sharding=sharding, exchange="keys")
            one, two = timed(together, lambda: run(alone, whole), options.rounds)
            row[kind] = {"one_ms": 1e3 * one[0], "two_ms": 1e3 * two[0], "efficiency": one[0] / two[0]}
            row[kind]["cpu"] = one[1] / two[1]
        if rank == 0:
            found.append(row)
            line = "  ".join(
                f"{kind} {row[kind]['one_ms']:7.1f} / {row[kind]['two_ms']:7.1f} ms = {row[kind]['efficiency']:.2f} (CPU {row[kind]['cpu']:.2f})"
                for kind in ("forward", "forward + backward")
            )
            print(f"{name:10} {line}  {row['bytes'] / 1e6:.2f} MB, {row['over_least']:.3f} of the least", flush=True)
    if rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "torch": torch.__version__, "rows": found}, file, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=2)
        work(options)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may abort a process that ends in the usual way
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, __file__, *sys.argv[1:], "--store", f"{folder}/store", "--rank"]
        ran = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
        if any([one.wait() for one in ran]):
            sys.exit("bench/distributed.py: a process failed")


if __name__ == "__main__":
    main()
