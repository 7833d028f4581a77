"""What a tiny call costs: one head, 8 queries and keys, 16 channels, float32, causal, one thread.

Through anyflash.torch beside PyTorch's scaled_dot_product_attention, forward alone, forward with its part of a graph,
and forward with backward; from NumPy; and from C++ (build-bench/bench/bench_calls, if it is there). Calls run in
turns, so that what slows the machine down slows all of them. Then what imports take. Exits with 1 where a limit is
missed.
"""

import statistics
import subprocess
import sys

import measure
from options import Parser

CALLS = measure.PROJECT / "build-bench/bench/bench_calls"
LOOPS, ROUNDS = 1000, 21
LIMIT = 25.0  # microseconds over the call from C++, or from NumPy where that was not built: PyTorch, forward
IMPORT_LIMIT = 0.05  # seconds over PyTorch's own


def calls():
    """{name: call without arguments}."""
    import torch
    import torch.nn.functional as F

    import anyflash as af
    import anyflash.torch

    torch.set_num_threads(1)
    q, k, v, dout = (torch.randn(1, 1, 8, 16) for _ in range(4))
    arrays = [x.numpy() for x in (q, k, v)]
    rule = af.causal()
    with_grad = q.clone().requires_grad_()
    ours = lambda q: anyflash.torch.attention(q, k, v, rule=rule)  # noqa: E731
    override = lambda q: anyflash.torch.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    theirs = lambda q: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    found = {"NumPy, forward": lambda: af.attention(*arrays, rule=rule, threads=1)}
    for name, call in (("anyflash.torch.attention", ours), ("the override", override), ("PyTorch's own", theirs)):
        found |= {
            f"{name}, forward": lambda call=call: call(q),
            f"{name}, forward for a gradient": lambda call=call: call(with_grad),
            f"{name}, forward and backward": lambda call=call: torch.autograd.grad(call(with_grad), with_grad, dout),
        }
    return found


def timed(calls):
    """{name: microseconds, one a round}."""

    def many(call):
        def run():
            for _ in range(LOOPS):
                call()

        return run

    rounds = measure.interleaved([many(call) for call in calls.values()], ROUNDS)
    return {name: [s / LOOPS * 1e6 for s in seconds] for name, seconds in zip(calls, rounds)}


def import_times():
    """Seconds that anyflash.torch adds to an interpreter that has PyTorch, several times."""
    code = "import torch, time; start = time.perf_counter(); import anyflash.torch; print(time.perf_counter() - start)"
    return [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
            for _ in range(5)]  # fmt: skip


def main():
    parser = Parser("overhead", description=__doc__)
    parser.parse_args()
    import torch

    print(f"{measure.processor()}; torch {torch.__version__}; fastest of {ROUNDS} rounds of {LOOPS} calls (median)")
    results = timed(calls())
    base = results["NumPy, forward"]
    if CALLS.is_file():
        seconds = measure.tiny_calls_from_cpp(CALLS)["forward"]
        base = [s * 1e6 for s in seconds]
        results = {"C++, forward": base} | results
    for name, microseconds in results.items():
        print(f"{name:50} {min(microseconds):7.2f} us  ({statistics.median(microseconds):.2f})")
    imports = import_times()
    over = min(results["anyflash.torch.attention, forward"]) - min(base)
    print(f"over the call from {'C++' if CALLS.is_file() else 'NumPy'}: {over:.2f} us, at most {LIMIT}")
    print(f"import: {min(imports):.3f} s over PyTorch's own, at most {IMPORT_LIMIT}")
    return over > LIMIT or min(imports) > IMPORT_LIMIT


if __name__ == "__main__":
    sys.exit(main())
