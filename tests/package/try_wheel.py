"""Does an installed anyflash work beside what is installed with it? scripts/wheel --try runs it.

NumPy's and each framework's front end, forward and backward, against the definition; with PyTorch also both orders of
import, since each of the two may then have an OpenMP run-time of its own.
"""

import importlib
import importlib.util
import multiprocessing
import subprocess
import sys
from importlib.metadata import version

import numpy as np


def tensors():
    random = np.random.default_rng(0)
    return [random.standard_normal((2, 4, 300, 64)).astype(np.float32) for _ in range(4)]


def definition(q, k, v, dout):
    """out and dV of causal attention, in float64."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    scores = q @ k.swapaxes(-1, -2) / 8
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p @ v, p.swapaxes(-1, -2) @ dout


def with_numpy(q, k, v, dout):
    import anyflash as af

    out, lse = af.attention(q, k, v, rule=af.causal(), return_lse=True)
    return out, af.attention_backward(dout, q, k, v, out, lse, rule=af.causal()).dv


def with_torch(q, k, v, dout):
    import anyflash as af
    import anyflash.torch
    import torch

    q, k, v, dout = (torch.from_numpy(x) for x in (q, k, v, dout))
    out = anyflash.torch.attention(q, k, v.requires_grad_(), rule=af.causal())
    out.backward(dout)
    return out.detach().numpy(), v.grad.numpy()


def with_jax(q, k, v, dout):
    import anyflash as af
    import anyflash.jax
    import jax

    out, back = jax.vjp(jax.jit(lambda v: anyflash.jax.attention(q, k, v, rule=af.causal())), v)
    return np.asarray(out), np.asarray(back(dout)[0])


def with_tensorflow(q, k, v, dout):
    import anyflash as af
    import anyflash.tensorflow
    import tensorflow as tf

    v = tf.constant(v)
    with tf.GradientTape() as tape:
        tape.watch(v)
        out = tf.function(lambda v: anyflash.tensorflow.attention(q, k, v, rule=af.causal()))(v)
    return out.numpy(), tape.gradient(out, v, tf.constant(dout)).numpy()


def check(front_end):
    given = tensors()
    for result, expected in zip(globals()[front_end](*given), definition(*given)):
        np.testing.assert_allclose(result, expected, atol=5e-6)
    return True


def in_order(*modules):
    """Both libraries' threads take turns, then a forked process computes."""
    for module in modules:
        importlib.import_module(module)
    import torch

    a = torch.ones(512, 512)
    for _ in range(20):
        check("with_numpy")
        assert (a @ a)[0, 0] == 512
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(check, ["with_numpy"])
    with open("/proc/self/maps") as maps:
        run_times = {line.split("/")[-1].strip() for line in maps if "gomp" in line}
    print("  imported", " then ".join(modules) + "; OpenMP:", *sorted(run_times))


if __name__ == "__main__":
    if sys.argv[1:]:
        in_order(*sys.argv[1:])
        sys.exit()
    print(f"  anyflash {version('anyflash')}, NumPy {np.__version__}:", "ok" if check("with_numpy") else "")
    for name in ("torch", "jax", "tensorflow"):
        if importlib.util.find_spec(name):
            check(f"with_{name}")
            print(f"  {name} {importlib.import_module(name).__version__}: ok")
    if importlib.util.find_spec("torch"):
        for order in ("anyflash", "torch"), ("torch", "anyflash"):
            subprocess.run([sys.executable, __file__, *order], check=True, timeout=300)
