"""The calls that bench/overhead times with JAX: compiled ones, each waited for, beside JAX's own attention and beside
an addition, which is what any compiled call takes."""

LIMIT = 15.0  # microseconds over the call from C++, or from NumPy where that was not built
OURS = "anyflash.jax.attention, forward"
MODULE, FRAMEWORK = "anyflash.jax", "jax"


def wait():
    """Each call is waited for."""


def calls(device="cpu"):
    """{name: call without arguments}. JAX's default device is the one that is asked for."""
    import anyflash as af
    import anyflash.jax
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 1, 8, 16), np.float32) for _ in range(3)]
    given = [jnp.asarray(x) for x in arrays]
    rule = af.causal()

    def ours(q, k, v):
        return anyflash.jax.attention(q, k, v, rule=rule, threads=1)

    def theirs(q, k, v):  # it has heads behind the sequence; of one head both orders are the same memory
        out = jax.nn.dot_product_attention(*(x.reshape(1, 8, 1, 16) for x in (q, k, v)), is_causal=True)
        return out.reshape(1, 1, 8, 16)

    def waited(function):
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*given))

    assert given[0].device.platform == {"cpu": "cpu", "cuda": "gpu"}[device]
    arrays = arrays if device == "cpu" else given
    plain = "NumPy, forward" if device == "cpu" else "DLPack, forward"
    found = {plain: lambda: af.attention(*arrays, rule=rule, threads=1)}
    for name, call in (("anyflash.jax.attention", ours), ("JAX's own", theirs)):
        found |= {
            f"{name}, forward": waited(call),
            f"{name}, forward and backward": waited(jax.grad(lambda *x, call=call: call(*x).sum(), (0, 1, 2))),
        }
    return found | {"an addition": waited(lambda q, k, v: q + k + v)}
