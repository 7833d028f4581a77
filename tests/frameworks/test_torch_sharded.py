"""attention on DTensors, in processes of their own: each attends with what it has, and results and gradients are those
of the whole tensors."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.of_the_cpu

BEGIN = """
import itertools
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
import anyflash as af
from anyflash.torch import attention

mesh = init_device_mesh("cpu", (2,))
numbers = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
generator = torch.Generator().manual_seed(0)
spread = lambda x, *placements: distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.requires_grad)

def check(tensors, placements, communications=0, integers={}, mesh=mesh, **options):
    # tensors and integers by name; their placements likewise, Replicate where none is given
    placements.setdefault("key", placements["query"])
    placements.setdefault("value", placements["key"])
    place = lambda name, x: distribute_tensor(x.detach(), mesh, placements.get(name, [Replicate()] * mesh.ndim))
    whole = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    parts = {name: place(name, x).requires_grad_() for name, x in tensors.items()}
    expected = run(whole, integers, options)
    placed = {name: place(name, x) for name, x in integers.items()}
    with CommDebugMode() as counter:
        got = run(parts, placed, options)
    assert counter.get_total_counts() == communications, counter.get_comm_counts()
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert isinstance(one, DTensor) and one.shape == other.shape
        assert i > 0 or one.stride() == other.stride(), (one.stride(), other.stride())
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-12, atol=1e-12)
    return got

def run(tensors, integers, options):
    given = dict(tensors) | integers
    q, k, v = (given.pop(name, None) for name in ("query", "key", "value"))
    results = attention(q, k, v, **given, **options)
    results = results if isinstance(results, tuple) else (results,)
    differentiable = results[:1] if options.get("return_lse") == "lm" else results
    if not all(x.requires_grad for x in differentiable):
        return results
    weights = [x.detach().sin() for x in differentiable]
    return *results, *torch.autograd.grad(differentiable, list(tensors.values()), weights)
"""

PROGRAMS = {
    "batch and heads, every layout": """
for layout, shape, kv, places in (
        ("bhsd", (2, 4, 5, 8), (2, 2, 7, 8), (0, 1)), ("bshd", (2, 5, 4, 8), (2, 7, 2, 8), (0, 2)),
        ("bhds", (2, 4, 8, 5), (2, 2, 8, 7), (0, 1)), ("bhsd", (2, 4, 3, 5, 8), (2, 4, 3, 5, 8), (0, 1)),
        ("bshd", (2, 3, 5, 4, 8), (2, 3, 5, 4, 8), (0, 3))):
    for place, return_lse in itertools.product(places, (False, True, "lm")):
        got = check(dict(query=numbers(*shape), key=numbers(*kv), value=numbers(*kv)), dict(query=[Shard(place)]),
                    layout=layout, return_lse=return_lse, rule=af.causal())
        assert got[0].placements == (Shard(place),)
        assert all(row.placements == (Shard(0 if place == 0 else 1),) for row in got[1:1 + bool(return_lse)])
check(dict(query=numbers(3, 4, 5, 8)), dict(query=[Shard(1)]), layout="qkv", return_lse=True)
ends = torch.tensor([0, 3, 9], dtype=torch.int32)
tensors = dict(query=numbers(9, 4, 8), key=numbers(9, 2, 8), value=numbers(9, 2, 8))
packed = dict(cu_seqlens_q=ends, cu_seqlens_k=ends)
check(tensors, dict(query=[Shard(1)]), layout="thd", return_lse=True, integers=packed)
""",
    "replicated": """
x = numbers(2, 4, 5, 8)
got = check(dict(query=x, key=x, value=x, sink=numbers(4)), dict(query=[Replicate()]))
assert got[0].placements == (Replicate(),)
check(dict(query=x, key=x, value=x), dict(query=[Replicate()], key=[Shard(1)]), 1)  # of the gradient
""",
    "bias, sink, slopes and lengths": """
qkv = lambda: dict(query=numbers(2, 4, 5, 8), key=numbers(2, 2, 7, 8), value=numbers(2, 2, 7, 6))
for place in (0, 1):
    for shape in ((1, 1, 5, 7), (2, 1, 1, 7), (1, 4, 5, 1), (2, 4, 1, 1)):
        of_bias = [Replicate() if shape[place] == 1 else Shard(place)]
        check(qkv() | dict(bias=numbers(*shape)), dict(query=[Shard(place)], bias=of_bias))
    check(qkv() | dict(sink=numbers(4)), dict(query=[Shard(place)], sink=[Shard(0) if place else Replicate()]))
    for shape in ((4,), (2, 4)):
        check(qkv(), dict(query=[Shard(place)]), integers=dict(alibi_slopes=numbers(*shape)), return_lse=True)
    check(qkv(), dict(query=[Shard(place)]), integers=dict(key_lengths=torch.tensor([3, 7], dtype=torch.int32)))
    pages, table = numbers(6, 4, 2, 8), torch.arange(4, dtype=torch.int32).reshape(2, 2)
    with torch.no_grad():
        check(dict(query=numbers(2, 4, 5, 8), key=pages, value=pages),
              dict(query=[Shard(place)], key=[Shard(2) if place else Replicate()]),
              integers=dict(key_lengths=torch.tensor([3, 7], dtype=torch.int32), page_table=table))
""",
    "rules with tables": """
ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]])
shapes = (5, 5), (2, 1, 5, 5), (1, 4, 5, 5), (2, 4, 5, 5)
masks = {shape: torch.rand(shape, generator=generator) < 0.5 for shape in shapes}
bits = torch.rand(4, 2, 2, generator=generator) < 0.5
for place in (0, 1):
    tensors = lambda: dict(query=numbers(2, 4, 5, 8), key=numbers(2, 4, 5, 8), value=numbers(2, 4, 5, 8))
    for rule in (af.documents(ids) & af.causal(), af.blocks(bits, 3, 4), ~af.documents(ids[0]) | af.sink(1),
                 *map(af.dense, masks.values()), af.dense(masks[2, 4, 5, 5]) & af.documents(ids)):
        check(tensors(), dict(query=[Shard(place)]), rule=rule)
    check(tensors(), dict(query=[Shard(place)]), rule="documents(ids_q=a, ids_k=a) | dense(m)",
          tables=dict(a=ids, m=masks[2, 4, 5, 5]))
""",
    "one head of keys, uneven parts": """
check(dict(query=numbers(2, 4, 5, 8), key=numbers(2, 1, 5, 8), value=numbers(2, 1, 5, 8)),
      dict(query=[Shard(1)], key=[Replicate()]))
for place, shape in ((0, (3, 2, 5, 8)), (1, (2, 3, 5, 8)), (0, (1, 2, 5, 8))):
    x = numbers(*shape)
    check(dict(query=x, key=x, value=x), dict(query=[Shard(place)]), return_lse=True)
""",
    "what is compiled": """
plain = lambda q, k, v: attention(q, k, v, rule=af.causal() & af.local(3))
call = torch.compile(plain, backend="aot_eager", fullgraph=True)
for place in (0, 1):
    q, k, v = (spread(numbers(2, 4, 5, 8).requires_grad_(), Shard(place)) for _ in range(3))
    for run in (call, torch.no_grad()(call)):
        out, expected = run(q, k, v), plain(*(x.full_tensor() for x in (q, k, v)))
        assert out.placements == (Shard(place),)
        torch.testing.assert_close(out.full_tensor(), expected)
    q.grad = None
    call(q, k, v).sum().backward()
    assert q.grad.placements == (Shard(place),)
""",
    "wrong input": """
x = numbers(2, 4, 6, 8)
d, plain = spread(x, Shard(1)), x.clone()
six, three = numbers(2, 6, 5, 8), numbers(2, 3, 5, 8)
pages = spread(x, Replicate())
for line, call in (
        ("query: placed as Shard(2), expected its batch or heads sharded or none; redistribute it to Shard(0) or Shard(1)",
         lambda: attention(*[spread(x, Shard(2))] * 3)),
        ("key: placed as Shard(3), ", lambda: attention(d, spread(x, Shard(3)), d)),
        ("query: placed as Shard(1), expected its batch or heads sharded or none; redistribute it to Shard(0) or Shard(2)",
         lambda: attention(d, d, d, layout="bshd")),
        ("key: a plain tensor beside a DTensor, expected a DTensor", lambda: attention(d, plain, d)),
        ("query: a plain tensor beside a DTensor", lambda: attention(plain, d, d)),
        ("bias: a plain tensor beside a DTensor", lambda: attention(d, d, d, bias=numbers(1, 1, 6, 6))),
        ("key_lengths: a plain tensor beside", lambda: attention(d, d, d, key_lengths=torch.tensor([1, 2]))),
        ("key: 3 heads over 2 processes, expected a multiple; redistribute query to Replicate() or Shard(0)",
         lambda: attention(spread(six, Shard(1)), *[spread(three, Replicate())] * 2)),
        ("key: 3 heads over 2 processes, expected a multiple; redistribute query, key to Replicate() or Shard(0)",
         lambda: attention(spread(six, Shard(1)), spread(three, Shard(1)), spread(three, Replicate()))),
        ("key: 3 heads over 2 processes, expected a multiple; redistribute sink to Replicate()",
         lambda: attention(spread(six, Replicate()), *[spread(three, Replicate())] * 2,
                           sink=spread(numbers(6), Shard(0)))),
        ("out: given beside DTensors", lambda: attention(d, d, d, out=d)),
        ("layout: 'sbhd', expected one of ", lambda: attention(d, d, d, layout="sbhd")),
        ("key: head size 4, expected 8 as in query", lambda: attention(d, spread(numbers(2, 4, 6, 4), Shard(1)), d))):
    try:
        call()
    except ValueError as error:
        assert str(error).startswith(line) and "\\n" not in str(error), error
    else:
        raise AssertionError(line)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_two_processes(name, tmp_path):
    run_processes(BEGIN + PROGRAMS[name], tmp_path)


def test_a_mesh_of_two_dimensions(tmp_path):
    run_processes(
        BEGIN.replace("(2,)", "(2, 2)")
        + """
tensors = dict(query=numbers(2, 8, 5, 8), key=numbers(2, 4, 5, 8), value=numbers(2, 4, 5, 8), sink=numbers(8))
for places in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(1)]):
    of_sink = [Shard(0) if place == Shard(1) else Replicate() for place in places]
    got = check(tensors, dict(query=places, sink=of_sink), rule=af.causal(), return_lse=True)
    assert list(got[0].placements) == places
""",
        tmp_path,
        4,
    )
