"""vmap, scan, checkpoint, shard_map, several threads, programs kept on disk."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anyflash as af
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anyflash.jax import attention
from devices import DEVICE

jax.config.update("jax_enable_x64", True)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape))


Q, K, V = numbers(3, 2, 4, 5, 8), numbers(3, 2, 2, 6, 8, seed=1), numbers(3, 2, 2, 6, 8, seed=2)  # 3 to be mapped
IDS = np.arange(6) // 3
# What is mapped beside the options that are not, and whether the calls become one.
MAPPED = {
    "q, k and v": (dict(q=Q, k=K, v=V), dict(rule=af.causal()), True),
    "q alone": (dict(q=Q), dict(k=K[0], v=V[0]), True),
    "keys and values": (dict(k=K, v=V), dict(q=Q[0]), True),
    "with options": (
        dict(q=Q, k=K, v=V),
        dict(bias=numbers(1, 4, 1, 6), sink=numbers(4), alibi_slopes=numbers(2, 4) ** 2, key_lengths=np.array([4, 6])),
        True,
    ),
    "bias of a batch": (dict(q=Q, k=K, v=V, bias=numbers(3, 2, 1, 5, 6)), {}, True),
    "slopes": (dict(q=Q, k=K, v=V, alibi_slopes=numbers(3, 2, 4) ** 2), {}, True),
    "lengths": (dict(q=Q, k=K, v=V, key_lengths=jnp.array([[1, 2], [3, 4], [5, 6]])), {}, True),
    "lengths alone": (dict(key_lengths=jnp.array([[1, 2], [3, 4], [5, 6]])), dict(q=Q[0], k=K[0], v=V[0]), True),
    "a shared table": (dict(q=Q, k=K, v=V), dict(rule=af.documents(IDS[:5], IDS)), True),
    "a shared mask": (dict(q=Q, k=K, v=V), dict(rule=af.dense(np.arange(30).reshape(5, 6) % 4 > 0)), True),
    "bias of one entry": (dict(q=Q, k=K, v=V, bias=numbers(3, 1, 1, 5, 6)), {}, False),
    "bias for all batches": (dict(q=Q, k=K, v=V), dict(bias=numbers(2, 1, 5, 6)), False),
    "bias alone": (dict(bias=numbers(3, 2, 4, 5, 6)), dict(q=Q[0], k=K[0], v=V[0]), True),
    "sink": (dict(q=Q, k=K, v=V, sink=numbers(3, 4)), {}, False),
    "slopes of heads": (dict(q=Q, k=K, v=V, alibi_slopes=numbers(3, 4) ** 2), {}, False),
    "a table": (
        dict(q=Q, k=K, v=V, ids=jnp.stack([IDS, IDS % 2, IDS * 0])),
        dict(rule="documents(own, ids)", own=IDS[:5]),
        False,
    ),
    "a batch of tables": (dict(q=Q, k=K, v=V), dict(rule=af.documents(np.stack([IDS[:5], IDS[1:]]), IDS)), False),
    "a batch of masks": (dict(q=Q, k=K, v=V), dict(rule=af.dense(np.arange(60).reshape(2, 1, 5, 6) % 4 > 0)), False),
    "packed": (dict(q=numbers(3, 3, 2, 5, 4)), dict(layout="qkv"), False),
    "documents": (
        dict(q=numbers(3, 5, 2, 4), k=numbers(3, 5, 2, 4), v=numbers(3, 5, 2, 4)),
        dict(layout="thd", cu_seqlens_q=np.array([0, 2, 5]), cu_seqlens_k=np.array([0, 2, 5])),
        False,
    ),
}


def call(**options):
    tables = {name: options.pop(name) for name in ("own", "ids") if name in options}
    return attention(**options, **({"tables": tables} if tables else {}))


def one_by_one(function, of_map):
    made = [function(**{name: array[i] for name, array in of_map.items()}) for i in range(3)]
    return jax.tree.map(lambda *parts: np.stack(parts), *made)


def same(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), got, expected)


def loops(function, *arrays):
    return str(jax.make_jaxpr(function)(*arrays)).count("scan[")


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name):
    of_map, options, is_one = MAPPED[name]
    function = lambda of_map: call(return_lse=True, **of_map, **options)
    same(jax.vmap(function)(of_map), one_by_one(lambda **x: function(x), of_map))
    assert loops(jax.vmap(function), of_map) == (0 if is_one else 1)


@pytest.mark.parametrize("name", MAPPED)
def test_gradients_under_vmap(name):
    of_map, options, _ = MAPPED[name]
    names = [one for one in ("q", "k", "v", "bias", "sink") if one in of_map or one in options]

    def loss(of_map):
        given = {one: array for one, array in (options | of_map).items() if one in names}
        others = {one: value for one, value in (options | of_map).items() if one not in names}

        def inner(given):
            out, lse = call(return_lse=True, **given, **others)
            return jnp.sin(out).sum() + jnp.cos(lse).sum()

        return jax.grad(inner)(given)

    got = jax.jit(jax.vmap(loss))(of_map)
    same(got, one_by_one(lambda **x: loss(x), of_map))
    parts, rest = ({one: array for one, array in of_map.items() if (one in names) == its} for its in (True, False))
    all_at_once = lambda parts: jnp.sin(jax.vmap(lambda x: call(**x, **options))(parts | rest)).sum()
    apart = lambda parts: sum(
        jnp.sin(call(**{one: array[i] for one, array in (parts | rest).items()}, **options)).sum() for i in range(3)
    )
    same(jax.grad(all_at_once)(parts), jax.grad(apart)(parts))


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("change", [lambda call: call, jax.jit, jax.vmap])
def test_tf32_changes_nothing_on_the_cpu(change):
    given = [x.astype(jnp.float32) if change is jax.vmap else x[0].astype(jnp.float32) for x in (Q, K, V)]

    def both(allow):
        def call(*x):
            results, backward = jax.vjp(lambda *x: attention(*x, return_lse=True, allow_tf32=allow), *x)
            return *results, *backward(results)

        return change(call)(*given)

    for got, expected in zip(both(True), both(False), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("sink", [False, True])
def test_vmap_over_nothing(sink):
    of_map = dict(q=Q[:0], k=K[:0], v=V[:0]) | (dict(sink=numbers(0, 4)) if sink else {})
    out, lse = jax.vmap(lambda x: call(return_lse=True, **x))(of_map)
    assert out.shape == (0, *Q.shape[1:-1], V.shape[-1]) and lse.shape == (0, *Q.shape[1:-1])
    made = jax.vmap(jax.grad(lambda x: call(**x).sum()))(of_map)
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in of_map.items()}


def test_vmap_in_vmap_along_other_axes():
    q, k, v = numbers(2, 3, 1, 2, 5, 8), numbers(1, 2, 6, 8, 3), numbers(1, 2, 6, 8)
    inner = jax.vmap(lambda q, k, v: attention(q, k, v), in_axes=(0, 4, None), out_axes=1)
    got = jax.vmap(inner, in_axes=(0, None, None))(q, k, v)
    assert got.shape == (2, 1, 3, 2, 5, 8) and loops(jax.vmap(inner, (0, None, None)), q, k, v) == 0
    for i in range(2):
        for j in range(3):
            same(got[i, :, j], attention(q[i, j], k[..., j], v))


def test_scan_and_checkpoint():
    def body(x, k):
        return x + attention(x, k, k, rule=af.causal()), None

    plain = lambda x, ks: jnp.sin(body(body(x, ks[0])[0], ks[1])[0]).sum()
    scanned = lambda x, ks: jnp.sin(jax.lax.scan(jax.checkpoint(body), x, ks)[0]).sum()
    x, ks = numbers(1, 2, 6, 8), numbers(2, 1, 2, 6, 8)
    same(jax.jit(jax.grad(scanned, (0, 1)))(x, ks), jax.grad(plain, (0, 1))(x, ks))


def test_several_threads():
    """Of one compiled function, and of ones that are compiled meanwhile."""
    expected = [attention(Q[0], K[0], V[0], rule=af.local(i + 1)) for i in range(4)]
    shared = jax.jit(lambda q: attention(q, q, q, rule=af.causal()))
    x = numbers(1, 2, 70, 16)
    of_x = shared(x)

    def work(i):
        for _ in range(10):
            own = jax.jit(lambda q: attention(q, K[0], V[0], rule=af.local(i + 1)))(Q[0])
            assert np.array_equal(own, expected[i]) and np.array_equal(shared(x), of_x)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def run(program, *arguments, **options):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.of_the_cpu
def test_shard_map_over_batch_and_heads():
    """On four devices, which are the CPU four times: results, gradients, and no communication."""
    run("""
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import anyflash as af
from anyflash.jax import attention
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "heads"))
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((4, heads, 70, 16)), jnp.float32) for heads in (8, 4, 4))
sink = jnp.asarray(rng.standard_normal(8), jnp.float32)
parts, of_heads = P("batch", "heads"), P("heads")
rule = af.causal() & af.documents(np.arange(70) // 30)
call = lambda q, k, v, sink: attention(q, k, v, sink=sink, rule=rule, return_lse=True)
split = jax.shard_map(call, mesh=mesh, in_specs=(parts, parts, parts, of_heads), out_specs=(parts, parts))
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, k, v, sink), (parts,) * 3 + (of_heads,))]
compiled = jax.jit(split).lower(*placed).compile()
assert not [word for word in ("all-reduce", "all-gather", "collective") if word in compiled.as_text()]
for got, expected in zip(compiled(*placed), call(q, k, v, sink)):
    assert got.sharding.spec == parts and np.array_equal(got, expected)
loss = lambda f: lambda *x: sum(jnp.sin(y).sum() for y in f(*x))
got = jax.jit(jax.grad(loss(split), (0, 1, 2, 3)))(*placed)
expected = jax.grad(loss(call), (0, 1, 2, 3))(q, k, v, sink)
for a, b in zip(got[:3], expected[:3]):
    assert np.array_equal(a, b)
np.testing.assert_allclose(got[3], expected[3], rtol=1e-5)
""")


@pytest.mark.of_the_cpu
def test_several_devices():
    """Gradients are spread over the explicit axes of a mesh as their arrays are; results stay on the arrays' device;
    shapes that are no numbers are refused."""
    run("""
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import anyflash as af
from anyflash.jax import attention
def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
rng = np.random.default_rng(0)
alone = [jnp.asarray(rng.standard_normal((2, 4, 9, 8)), jnp.float32) for _ in range(3)]
there = [jax.device_put(x, jax.devices()[2]) for x in alone]
assert af.attention(*there).devices() == attention(*there).devices() == {jax.devices()[2]}
with jax.set_mesh(jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)):
    spread = [jax.device_put(x, P("b", "h")) for x in alone]
    assert refused(lambda: af.attention(*spread)).startswith("query: on 4 devices, expected one; use anyflash.jax")
    gradients = jax.grad(lambda *x: jnp.sin(attention(*x)).sum(), (0, 1, 2))
    for made in (gradients(*spread), jax.jit(gradients)(*spread)):
        assert all(one.sharding.is_equivalent_to(x.sharding, 4) for one, x in zip(made, spread))
made = [np.asarray(one) for one in made]
for one, expected in zip(made, gradients(*alone)):
    np.testing.assert_allclose(one, expected, atol=1e-6)
shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 4, 9, 8), jnp.float32)
line = refused(lambda: jax.export.export(jax.jit(attention))(*[shape] * 3))
assert line == "query: a symbolic shape, expected numbers"
""")


KEPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import anyflash as af
from anyflash.jax import attention
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 50, 16)), jnp.float32)
rule = af.local(9) & af.documents(np.arange(50) // 20)
call = lambda x: attention(x, x, x, rule=rule, softcap=3.0, scale=0.3)
out = jax.jit(call)(x)
expected = af.attention(*[np.asarray(x)] * 3, rule=rule, softcap=3.0, scale=0.3)
assert abs(np.asarray(out) - expected).max() <= float(sys.argv[2])
print(len(hits) > 0)
"""


def test_programs_kept_on_disk(tmp_path):
    """They hold all that they need: a later process runs them without having traced the call."""
    bound = 0 if DEVICE == "cpu" else 1e-5  # from what the CPU gives
    assert run(KEPT, tmp_path, bound) == "False\n"
    assert run(KEPT, tmp_path, bound) == "True\n"
