"""What bench/compare --device cuda --gpus N measures: attention of a sequence split over N GPUs beside one GPU, and beside
PyTorch's context_parallel, in one run.

bfloat16, one batch entry, 16 heads of 128 channels, (batch, sequence, heads, channels) in memory. Efficiency is the time
of one GPU over N times that of N: 1 is best. Times are medians over rounds, in turns; a round is a few calls in a row.
That of N is the slowest GPU's. Results and gradients are compared with one GPU's before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

HEADS, CHANNELS = 16, 128
TOLERANCE = 3e-2  # of the largest number: as gpu.py has it for bfloat16


def cases(gpus, on):
    """(name, rule, shape, least efficiency on 2 GPUs, whether one GPU can do it in the time)"""
    import anyflash as af
    import torch

    k16, k64 = (16384, 65536) if on == "cuda" else (512, 1024)
    side = 256 if on == "cuda" else 32
    ends = [0, *[k64 * i * (i + 3) // 88 // 8 * 8 for i in range(1, 8)], k64]
    documents = af.documents_packed(torch.tensor(ends, dtype=torch.int32)) & af.causal()
    yield "causal, 16k", af.causal(), (k16,), 0.85, True
    yield "causal, 64k", af.causal(), (k64,), 0.97, True
    yield "8 documents, causal, 64k", documents, (k64,), 0.88, True
    yield "window of 4096, causal, 64k", af.local(k64 // 16, causal=True), (k64,), 0.9, True
    yield "2-D local(16), 256 x 256", af.local(side // 16), (side, side), 0.9, True
    if gpus >= 4:
        yield "causal, 128k", af.causal(), (2 * k64,), 0.93, True
        yield "causal, 1024k", af.causal(), (16 * k64,), None, False


def numbers(shape, on, generator):
    """(1, heads, sequence..., channels), with the heads inside the sequence in memory. The same on all GPUs."""
    import torch

    kind = torch.bfloat16 if on == "cuda" else torch.float32
    x = torch.randn(1, *shape, HEADS, CHANNELS, generator=generator, device=on, dtype=kind)
    return x.movedim(-2, 1)


class Clock:
    """Seconds of calls that all processes make together, or the first alone."""

    def __init__(self, on, side):
        self.on, self.side = on, side
        self.host = 0.0  # of the last calls: what the processor took to ask for each

    def wait(self):
        import torch
        import torch.distributed as dist

        if self.on == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self.side)

    def seconds(self, call, count):
        """Of one call of this process, of `count` in a row. A GPU is still busy when they are asked for, as in a model and
        in gpu.py: about half a millisecond for each, in which the host may go ahead."""
        import torch

        self.wait()
        if self.on != "cuda":
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000 * count)
        begin.record()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.host = (time.perf_counter() - start) / count
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def alone(self, call, count):
        """The same of the first process; the others go on, and wait for it at the next call."""
        import torch.distributed as dist

        if dist.get_rank() == 0:
            return self.seconds(call, count)
        self.wait()
        return 0.0

    def slowest(self, seconds):
        import torch
        import torch.distributed as dist

        found = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.side)
        return float(found)


def forward_of(call):
    import torch

    def run(q, k, v, dout):
        with torch.no_grad():
            return call(q, k, v)

    return run


def both_of(call):
    import torch

    def run(q, k, v, dout):
        return torch.autograd.grad(call(q, k, v), (q, k, v), dout)

    return run


def largest_difference(ours, theirs):
    scale = max(float(theirs.abs().max()), 1e-30)
    return float((ours.float() - theirs.float()).abs().max()) / scale


def check(name, sharding, together, alone, parts, whole, clock):
    """Out and gradients of the parts are those of one GPU; in all processes, or all end."""
    import torch

    grad = lambda x: [one.detach().requires_grad_() for one in x]
    own, every = grad(parts[:3]), grad(whole[:3])
    out, expected = together(*own), alone(*every)
    ours = [out.detach(), *torch.autograd.grad(out, own, parts[3])]
    theirs = [expected.detach(), *torch.autograd.grad(expected, every, whole[3])]
    found = [largest_difference(a, sharding.shard(b, dim=2)) for a, b in zip(ours, theirs)]
    worst = clock.slowest(max(found))
    if not worst <= TOLERANCE:
        raise SystemExit(
            f"bench/gpus.py: {name}: out, dq, dk, dv differ by {found} of their largest, expected {TOLERANCE}"
        )
    return worst


class ContextParallel:
    """PyTorch's own, of a causal text, with one of its kernels."""

    def __init__(self, mesh, backend, whole):
        import torch
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import sdpa_kernel

        self.kernel = lambda: sdpa_kernel(backend)
        self.tensors = [x.detach().clone(memory_format=torch.contiguous_format) for x in whole]
        self.within = context_parallel(
            mesh, buffers=self.tensors, buffer_seq_dims=[2] * 4, no_restore_buffers=set(self.tensors)
        )

    def __enter__(self):
        self.within.__enter__()
        for x in self.tensors[:3]:
            x.requires_grad_()
        return self

    def __exit__(self, *error):
        self.within.__exit__(*error)

    def call(self, q, k, v):
        import torch

        with self.kernel():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def peer_times(whole, mesh, clock, count, rounds):
    """{kernel: {direction: (one GPU's seconds, N GPUs')}} of PyTorch."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = {}
    every = [x.detach().contiguous() for x in whole]
    for x in every[:3]:
        x.requires_grad_()
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def alone(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        try:
            found[name] = {}
            for direction, made in (("forward", forward_of), ("forward + backward", both_of)):
                one, two = made(alone), []
                some = count if direction == "forward" else max(1, count // 4)
                with ContextParallel(mesh, backend, whole) as split:
                    for i in range(rounds + 1):
                        seconds = clock.slowest(clock.seconds(lambda: made(split.call)(*split.tensors), some))
                        two += [seconds] if i else []
                ones = []
                for i in range(rounds + 1):
                    seconds = clock.alone(lambda: one(*every), some)
                    ones += [seconds] if i else []
                found[name][direction] = statistics.median(ones), statistics.median(two)
        except Exception as error:
            found.pop(name, None)
            if torch.distributed.get_rank() == 0:
                print(f"  no context_parallel with {name}: {error!r:.200}", flush=True)
    return found


def measured(options, clock, mesh):
    import anyflash as af
    import torch
    import torch.distributed as dist
    from anyflash.torch import attention as of_one
    from anyflash.torch.distributed import attention, plan_sharding

    rank, gpus, rows = dist.get_rank(), dist.get_world_size(), []
    for name, rule, shape, least, fits in cases(gpus, options.on):
        if options.only not in name:
            continue
        rounds = options.rounds if fits else 1
        begun = time.perf_counter()
        generator = torch.Generator(options.on).manual_seed(0)
        whole = [numbers(shape, options.on, generator) for _ in range(4)]
        sharding = plan_sharding(rule, shape)
        split = lambda x: sharding.shard(x, dim=2).movedim(1, -2).contiguous().movedim(-2, 1)
        parts = [split(x) for x in whole]
        together = lambda q, k, v: attention(q, k, v, rule=rule, sharding=sharding, exchange="keys")
        plan = af.plan(*whole[:3], rule=rule) if fits else None  # as the parts' plans are kept
        alone = lambda q, k, v: of_one(q, k, v, rule=rule, plan=plan)
        worst = check(name, sharding, together, alone, parts, whole, clock) if fits else None
        for x in (*parts[:3], *whole[:3]):
            x.requires_grad_()
        traffic = sharding.traffic(channels=2 * CHANNELS, heads=HEADS)
        peers = None
        for direction, made in (("forward", forward_of), ("forward + backward", both_of)):
            first = clock.slowest(clock.seconds(lambda: made(together)(*parts), 2 if fits else 1))
            count = max(1, min(50, int(0.08 / first)))
            ones, twos = [], []
            for i in range(rounds + 1):
                two = clock.slowest(clock.seconds(lambda: made(together)(*parts), count))
                host = clock.host
                one = clock.alone(lambda: made(alone)(*whole), count) if fits else 0.0
                if i:
                    ones.append(one), twos.append(two)
            one, two = statistics.median(ones), statistics.median(twos)
            row = {"case": name, "shape": shape, "direction": direction, "gpus": gpus, "milliseconds": 1e3 * two}
            row |= {"one_gpu_milliseconds": 1e3 * one, "efficiency": one / (gpus * two), "least": least}
            row |= {"difference": worst, "imbalance": sharding.imbalance, "over_least": traffic["over_least"]}
            row |= {"bytes": sum(traffic["bytes"]), "host_milliseconds": 1e3 * host}
            if options.on == "cuda" and name.startswith("causal") and fits:
                peers = peers or peer_times(whole, mesh, clock, max(1, min(50, int(0.08 / first))), options.rounds)
                row["context_parallel"] = {
                    kernel: {
                        "one_gpu_milliseconds": 1e3 * times[direction][0],
                        "milliseconds": 1e3 * times[direction][1],
                        "efficiency": times[direction][0] / (gpus * times[direction][1]),
                    }
                    for kernel, times in peers.items()
                }
            rows.append(row)
            if rank == 0:
                print(line_of(row), flush=True)
                if options.json:
                    write(options.json, rows)
        if rank == 0:
            print(f"  ({time.perf_counter() - begun:.1f} s)", flush=True)
    return rows


def line_of(row):
    held = "" if row["least"] is None else f" (to reach {row['least']})"
    text = (
        f"{row['case']:28} {row['direction']:18} {row['milliseconds']:8.3f} ms, one {row['one_gpu_milliseconds']:8.3f} ms, "
        f"efficiency {row['efficiency']:.3f}{held}, {row['over_least']:.3f} of the least bytes, "
        f"host {row['host_milliseconds']:.3f} ms"
    )
    for kernel, times in row.get("context_parallel", {}).items():
        text += (
            f"; context_parallel {kernel} {times['milliseconds']:.3f} ms, one {times['one_gpu_milliseconds']:.3f} ms, "
            f"efficiency {times['efficiency']:.3f}"
        )
    return text


def write(path, rows):
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with open(path, "w") as file:
        json.dump({"device": "cuda", "machine": name, "torch": torch.__version__, "rows": rows}, file, indent=1)


def work(options):
    import torch
    import torch.distributed as dist

    own = {}
    if options.on == "cuda":
        torch.cuda.set_device(options.rank)
        own["device_id"] = torch.device("cuda", options.rank)
    backend = "nccl" if options.on == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{options.store}", rank=options.rank, world_size=options.gpus,
        timeout=timedelta(seconds=120), **own,
    )  # fmt: skip
    mesh = None
    if options.on == "cuda":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cuda", (options.gpus,))
    measured(options, Clock(options.on, dist.new_group(backend="gloo")), mesh)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda", help="cpu: short, to try the program")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        return work(options)
    if options.on == "cuda":
        import torch

        if torch.cuda.device_count() < options.gpus:
            sys.exit(f"bench/compare: --gpus {options.gpus}: this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--gpus", str(options.gpus), "--rounds", str(options.rounds)]
        command += ["--only", options.only]
        command += ["--json", options.json, "--on", options.on, "--store", f"{folder}/store", "--rank"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        ran = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(options.gpus)]
        failed = False
        while any(one.poll() is None for one in ran):
            time.sleep(0.2)
            if any(one.poll() for one in ran):  # the others would wait for it
                failed = True
                time.sleep(3)
                for one in ran:
                    one.kill()
        if failed or any(one.returncode for one in ran):
            sys.exit("bench/gpus.py: a process failed")


if __name__ == "__main__":
    main()
