"""What a tiny call costs: one head, 8 queries and keys, 16 channels, float32, causal, one thread.

Through anyflash.torch beside PyTorch's scaled_dot_product_attention, forward alone, forward with its part of a graph,
and forward with backward; from NumPy; and from C++ (build-bench/bench/bench_calls, if it is there). Calls run in
turns, so that what slows the machine down slows all of them. Then what imports take. For PyTorch, also calls of
scaled_dot_product_attention without and with a boolean mask, recorded forward and backward, and a token of a tiny Llama
in Transformers, each in pairs with PyTorch's own (overhead_pairs.py). Exits with 1 where a limit is missed. With
--framework the same, but the pairs, through anyflash.tensorflow or anyflash.jax.

With --device cuda the tensors are on a GPU (PyTorch and JAX): a round's calls are queued one after the other and then
waited for, beside anyflash.attention on the same tensors by DLPack. No limit is set there.
"""

import importlib
import statistics
import subprocess
import sys

import measure
import overhead_pairs
from options import Parser

CALLS = measure.PROJECT / "build-bench/bench/bench_calls"
LOOPS, ROUNDS = 1000, 21
LIMIT = 25.0  # microseconds over the call from C++, or from NumPy where that was not built: PyTorch, forward
OURS = "anyflash.torch.attention, forward"
MODULE, FRAMEWORK = "anyflash.torch", "torch"
IMPORT_LIMIT = 0.05  # seconds over the framework's own


def calls(device="cpu"):
    """{name: call without arguments}."""
    import anyflash as af
    import anyflash.torch
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    q, k, v, dout = (torch.randn(1, 1, 8, 16, device=device) for _ in range(4))
    arrays = [x.numpy() for x in (q, k, v)] if device == "cpu" else (q, k, v)
    rule = af.causal()
    with_grad = q.clone().requires_grad_()
    ours = lambda q: anyflash.torch.attention(q, k, v, rule=rule)
    override = lambda q: anyflash.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = lambda q: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    plain = "NumPy, forward" if device == "cpu" else "DLPack, forward"
    found = {plain: lambda: af.attention(*arrays, rule=rule, threads=1)}
    for name, call in (("anyflash.torch.attention", ours), ("the override", override), ("PyTorch's own", theirs)):
        found |= {
            f"{name}, forward": lambda call=call: call(q),
            f"{name}, forward for a gradient": lambda call=call: call(with_grad),
            f"{name}, forward and backward": lambda call=call: torch.autograd.grad(call(with_grad), with_grad, dout),
        }
    return found


def wait():
    """For the GPU."""
    import torch

    torch.cuda.synchronize()


def timed(calls, wait=lambda: None):
    """{name: microseconds, one a round}."""

    def many(call):
        def run():
            for _ in range(LOOPS):
                call()
            wait()

        return run

    rounds = measure.interleaved([many(call) for call in calls.values()], ROUNDS)
    return {name: [s / LOOPS * 1e6 for s in seconds] for name, seconds in zip(calls, rounds)}


def import_times(module, framework):
    """Seconds that the module adds to an interpreter that has the framework, several times."""
    code = f"import {framework}, time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    return [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]


def main():
    parser = Parser("overhead", description=__doc__)
    parser.add_argument("--framework", choices=["torch", "tensorflow", "jax"], default="torch", help="default: torch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    given = parser.parse_args()
    name, on_gpu = given.framework, given.device == "cuda"
    if on_gpu and name == "tensorflow":
        parser.error("--device cuda: of torch and jax alone")
    chosen = sys.modules[__name__] if name == "torch" else importlib.import_module(f"overhead_{name}")
    version = importlib.import_module(chosen.FRAMEWORK).__version__
    print(f"{measure.processor()}; {chosen.FRAMEWORK} {version}; fastest of {ROUNDS} rounds of {LOOPS} calls (median)")
    if on_gpu:
        results = timed(chosen.calls("cuda"), chosen.wait)
        for name, microseconds in results.items():
            print(f"{name:50} {min(microseconds):7.2f} us  ({statistics.median(microseconds):.2f})")
        return 0
    results = timed(chosen.calls())
    base = results["NumPy, forward"]
    if CALLS.is_file():
        seconds = measure.tiny_calls_from_cpp(CALLS)["forward"]
        base = [s * 1e6 for s in seconds]
        results = {"C++, forward": base} | results
    for name, microseconds in results.items():
        print(f"{name:50} {min(microseconds):7.2f} us  ({statistics.median(microseconds):.2f})")
    imports = import_times(chosen.MODULE, chosen.FRAMEWORK)
    over = min(results[chosen.OURS]) - min(base)
    print(f"over the call from {'C++' if CALLS.is_file() else 'NumPy'}: {over:.2f} us, at most {chosen.LIMIT}")
    print(f"import: {min(imports):.3f} s over {chosen.FRAMEWORK}'s own, at most {IMPORT_LIMIT}")
    missed = over > chosen.LIMIT or min(imports) > IMPORT_LIMIT
    if chosen is sys.modules[__name__]:
        print(f"in pairs, medians of {overhead_pairs.ROUNDS}:")
        missed |= overhead_pairs.report()
    return missed


if __name__ == "__main__":
    sys.exit(main())
