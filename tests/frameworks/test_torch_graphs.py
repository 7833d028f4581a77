"""anyflash.torch.attention in what is not a plain call: compiled and exported graphs, torch.func, autocast, fake
tensors, checkpoints. What is expected is the plain call's result, to the bit."""

import anyflash as af
import pytest
import torch
from anyflash._options import DEFAULTS, TENSORS
from anyflash.torch import attention, flash_attention_qkv_packed, sdpa
from devices import DEVICE
from torch.autograd import forward_ad
from torch.func import grad, vmap

IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])  # read on the CPU
DOCUMENTS = af.documents(IDS)
LOCAL = af.local(3)


@pytest.fixture
def qkv(numbers):
    return [numbers(2, 4, 9, 8) for _ in range(3)]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


CALLS = {
    "full": lambda q, k, v: attention(q, k, v),
    "rules from outside": lambda q, k, v: attention(q, k, v, rule=LOCAL & af.causal() | LOCAL | DOCUMENTS & LOCAL),
    "rule made inside": lambda q, k, v: attention(q, k, v, rule=af.causal() & af.window(3, (2,)) | af.sink(1)),
    "rule from outside": lambda q, k, v: attention(q, k, v, rule=DOCUMENTS),
    "both": lambda q, k, v: attention(q, k, v, rule=af.causal() & DOCUMENTS),
    "a rule's text": lambda q, k, v: attention(q, k, v, rule="local(2) | sink(1)"),
    "tables": lambda q, k, v: attention(q, k, v, rule="documents(ids, ids)", tables={"ids": IDS}),
    "table made inside": lambda q, k, v: attention(q, k, v, rule=af.dense(q[0, 0] @ k[0, 0].mT > 0)),
    "options": lambda q, k, v: attention(
        q,
        k,
        v,
        bias=q @ k.mT,
        sink=q[0, :, 0, 0],
        softcap=3.0,
        scale=0.2,
        alibi_slopes=torch.ones(4, device=DEVICE),
        align="none_end",
    ),
    "switches": lambda q, k, v: attention(q, k, v, rule=LOCAL, deterministic=True, allow_tf32=True),
    "lse": lambda q, k, v: sum(x.sum() for x in attention(q, k, v, return_lse=True)),
    "l and m": lambda q, k, v: sum(x.sum() for x in attention(q, k, v, return_lse="lm")),
    "packed": lambda q, k, v: flash_attention_qkv_packed(torch.stack([q[0], k[0], v[0]]), 3, 1),
}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):  # before, it does not trace ~ of an object
    CALLS["rule negated inside"] = lambda q, k, v: attention(q, k, v, rule=af.causal() & ~af.window(3, (2,)))
    CALLS["rule from outside negated"] = lambda q, k, v: attention(q, k, v, rule=~(LOCAL & ~DOCUMENTS))


def gradients(call, tensors):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out = call(*tensors)
    return out, torch.autograd.grad(out.sin().sum(), tensors)


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", CALLS)
def test_compiled_as_one_graph(qkv, name):
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(*qkv), CALLS[name](*qkv))
    assert_same(gradients(compiled, qkv), gradients(CALLS[name], qkv))


def test_compiled_to_machine_code(qkv):
    call = lambda q, k, v: attention(q * 2, k, v, rule=af.causal()).relu()
    assert_same(gradients(torch.compile(call, fullgraph=True), qkv), gradients(call, qkv))


def test_compiled_for_any_length(numbers):
    compiled = torch.compile(CALLS["rule made inside"], fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 5, 17):
        qkv = [numbers(1, 2, length, 8) for _ in range(3)]
        assert_same(compiled(*qkv), CALLS["rule made inside"](*qkv))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_rules_of_any_size(qkv, dynamic):
    call = lambda q, k, v, size: attention(q, k, v, rule=af.local(size) | af.window([size], 0))
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (2, 5, 3):
        assert_same(compiled(*qkv, size), call(*qkv, size))


OF_SIZES = {
    "window": lambda n: af.window(n // 2, (n - 1,)),
    "local": lambda n: af.local(n // 2, 1, True) | af.causal(),
    "prefix": lambda n: af.prefix(n // 3),
    "prefix_queries": lambda n: af.prefix_queries(n // 3) | af.causal(),
    "sink": lambda n: af.sink(n - 3) | af.causal(),
    "tiles": lambda n: af.tiles([n // 2], 3) & af.window(-1, n),
    "neighbourhood": lambda n: af.neighbourhood(n // 2 + 1, 1, [True]),
    "blocks": lambda n: af.blocks(torch.ones(1, 1, dtype=torch.bool), n, n),
    "dense": lambda n: af.dense(torch.ones(1, n, dtype=torch.bool)) & af.window(n // 2, 0),
    "documents": lambda n: af.documents(torch.arange(n) // 3) & af.local(n // 2),
}


@pytest.mark.parametrize("dynamic, most", [(True, 1), (None, 2)])
@pytest.mark.parametrize("name", OF_SIZES)
def test_a_rule_made_of_a_size_compiles_once_for_all_sizes(numbers, name, dynamic, most):
    call = lambda q: attention(q, q, q, rule=OF_SIZES[name](q.shape[2]))
    graphs = []
    backend = lambda graph, inputs: graphs.append(graph) or graph
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
    for length in range(4, 44, 2):
        q = numbers(1, 1, length, 8)
        assert_same(compiled(q), call(q))
    assert len(graphs) == most


def test_gradients_through_a_rule_made_of_sizes(numbers):
    call = lambda *qkv: attention(*qkv, rule=af.tiles(qkv[0].shape[2:4], 1) | af.local(qkv[0].shape[3] // 2))
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for size in (4, 6, 8):
        qkv = [numbers(1, 2, size, size + 2, 8) for _ in range(3)]
        assert_same(gradients(compiled, qkv), gradients(call, qkv))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_rule_made_of_a_size(numbers, strict):
    class Model(torch.nn.Module):
        def forward(self, q):
            return attention(q, q, q, rule=af.window(q.shape[2] // 2, [q.shape[2] // 3]))

    dynamic = {"q": {2: torch.export.Dim("length", min=4, max=64)}}
    exported = torch.export.export(Model(), (numbers(1, 1, 9, 8),), dynamic_shapes=dynamic, strict=strict).module()
    for length in (5, 12, 30):
        q = numbers(1, 1, length, 8)
        assert_same(exported(q), Model()(q))


def test_a_wrong_number_in_a_graph_is_told_when_it_runs(numbers):
    compiled = torch.compile(
        lambda q: attention(q, q, q, rule=af.local(q.shape[2] - 5)), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    compiled(numbers(1, 1, 9, 8))
    with pytest.raises(ValueError, match="^rule: "):
        compiled(numbers(1, 1, 4, 8))


def test_a_rule_that_is_made_in_a_graph_and_used_behind_it(qkv):
    behind = torch.compiler.disable(attention)
    call = lambda q, k, v: behind(q, k, v, rule=af.causal() & LOCAL | ~af.documents(IDS))
    assert_same(torch.compile(call, backend="aot_eager")(*qkv), call(*qkv))


@pytest.mark.parametrize("value", [None, 2.5, "yes"], ids=repr)
@pytest.mark.parametrize("name", ["deterministic", "allow_tf32"])
def test_a_switch_is_refused_as_in_eager_calls(name, value):
    q = torch.zeros(1, 1, 4, 8)
    call = lambda q: attention(q, q, q, **{name: value})
    for one in (call, torch.compile(call, fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match=f"{name}: type {type(value).__name__}, expected True or False"):
            one(q)


def test_another_rule_compiles_anew(qkv):
    compiled = torch.compile(lambda q, k, v, rule: attention(q, k, v, rule=rule), fullgraph=True, backend="aot_eager")
    for rule in (af.causal(), af.local(2), af.full()):
        assert_same(compiled(*qkv, rule), attention(*qkv, rule=rule))


def test_compiled_override(qkv):
    call = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa():
        graphs = []
        backend = lambda graph, inputs: graphs.append(graph) or graph
        assert_same(torch.compile(call, fullgraph=True, backend=backend)(*qkv), call(*qkv))
        assert "anyflash.attention" in graphs[0].code


@pytest.mark.parametrize(
    "mask", [lambda q: q[0, 0] @ q[0, 0].mT > 0, lambda q: q @ q.mT, lambda q: q[:1, :1, :1] @ q[:1, :1].mT]
)
def test_compiled_override_with_masks(qkv, mask):
    def call(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask(q))

    with sdpa():
        assert_same(gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), qkv), gradients(call, qkv))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_override(qkv, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=q @ k.mT > 0)

    with sdpa():
        exported = torch.export.export(Model(), tuple(qkv), strict=strict)
        assert "anyflash.attention" in exported.graph_module.code
        assert_same(exported.module()(*qkv), Model()(*qkv))


OF_UNKNOWN_SIZE = {  # x's shape, the axis that is cut, and the mask's shape, where n is its new size
    "batch": ((6, 2, 3, 8), 0, lambda n: (n, 1, 3, 3)),
    "all": ((6, 2, 3, 8), 0, lambda n: (n, 2, 3, 3)),
    "heads, of fewer axes": ((2, 6, 3, 8), 1, lambda n: (n, 3, 3)),
    "none": ((6, 2, 3, 8), 0, lambda n: (3, 1)),
    "queries and keys": ((2, 2, 6, 8), 2, lambda n: (n, n)),
    "keys": ((2, 2, 6, 8), 2, lambda n: (2, 1, 1, n)),
    "three axes": ((6, 3, 8), 0, lambda n: (n, 3, 3)),
    "five axes, first": ((6, 2, 2, 3, 8), 0, lambda n: (n, 1, 1, 3, 3)),
    "five axes, second": ((2, 6, 2, 3, 8), 1, lambda n: (2, 1, 1, 3, 3)),
}


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
@pytest.mark.parametrize("name", OF_UNKNOWN_SIZE)
def test_exported_override_with_a_size_known_only_at_run_time(numbers, name, kind):
    shape, axis, mask_shape = OF_UNKNOWN_SIZE[name]

    class Model(torch.nn.Module):
        def forward(self, x, keep):
            x = x[(slice(None),) * axis + (keep,)]
            mask = torch.ones(mask_shape(x.shape[axis]), dtype=kind, device=x.device)
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    check_exported(Model(), numbers(*shape), torch.tensor([True, False, True, True, False, True], device=DEVICE))


def test_exported_override_compares_two_unknown_sizes_at_run_time(numbers):
    class Model(torch.nn.Module):
        def forward(self, x, keep, mask, keep_of_mask):
            x, mask = x[:, :, keep], mask[:, keep_of_mask]
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    keep = torch.tensor([True, False, True, True, False, True], device=DEVICE)
    x, mask = numbers(2, 2, 6, 8), numbers(1, 6)
    exported = check_exported(Model(), x, keep, mask, keep.clone())
    with pytest.raises(RuntimeError, match="Eq"):
        exported.module()(x, keep, mask, keep.logical_not())


def check_exported(model, *given):
    with sdpa():
        exported = torch.export.export(model, given, strict=False)
        assert "anyflash.attention" in exported.graph_module.code
        assert_same(exported.module()(*given), model(*given))
    return exported


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["rule from outside", "a rule's text", "options", "lse"])
def test_exported(qkv, name, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return CALLS[name](q, k, v)

    exported = torch.export.export(Model(), tuple(qkv), strict=strict)
    assert_same(exported.module()(*qkv), CALLS[name](*qkv))


def arguments(q, k, v, **changes):
    options = dict(**dict.fromkeys(TENSORS), tables=[], names="", rule="causal()", numbers=[], **DEFAULTS, statistics=1)
    return q, k, v, *(options | changes).values()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(statistics=2),
        dict(rule="window($0, $1)", numbers=[3, 2]),
        dict(rule="documents(a, a)", names="a", tables=[IDS]),
        dict(
            bias=torch.zeros(1, 4, 1, 9, requires_grad=True, device=DEVICE),
            sink=torch.zeros(4, requires_grad=True, device=DEVICE),
            softcap=2.0,
        ),
    ],
)
def test_operator_check(qkv, changes):
    q, k, v = (x.requires_grad_() for x in qkv)
    torch.library.opcheck(torch.ops.anyflash.attention.default, arguments(q, k, v, **changes))
    bshd = [x.detach().transpose(1, 2) for x in qkv]
    torch.library.opcheck(torch.ops.anyflash.attention.default, arguments(*bshd, layout="bshd"))


def test_backward_operator_check(qkv):
    out, lse = attention(*qkv, return_lse=True)
    given = arguments(*qkv)[:-1]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.anyflash.attention_backward.default, (out, lse, out, lse, *given, 7), test_utils=tests
    )


LAYOUTS = {"bhsd": (2, 3, 7, 8), "bshd": (2, 7, 3, 8), "bhds": (2, 3, 8, 7), "qkv": (3, 2, 7, 8), "thd": (7, 2, 8)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_shapes_and_strides_without_data(numbers, layout, order):
    """What a graph is told of results is what the calls give, strides too."""
    shape = LAYOUTS[layout]
    order = order[: len(shape)] if layout != "thd" else (1, 0, 2)
    x = numbers(*(shape[axis] for axis in order)).permute([order.index(i) for i in range(len(shape))])
    ends = torch.tensor([0, 3, 7], device=DEVICE) if layout == "thd" else None
    given = arguments(
        x, *((None, None) if layout == "qkv" else (x, x)), layout=layout, cu_seqlens_q=ends, cu_seqlens_k=ends
    )
    real = torch.ops.anyflash.attention(*given)
    assert layout in ("qkv", "thd") or attention(*[x.to("meta")] * 3, layout=layout).shape == real[0].shape
    meta = torch.ops.anyflash.attention(*(one.to("meta") if isinstance(one, torch.Tensor) else one for one in given))
    assert [(one.shape, one.stride(), one.dtype) for one in real] == [
        (one.shape, one.stride(), one.dtype) for one in meta
    ]


def test_mapped_over_a_batch(numbers):
    q, k, v, bias, sink = (
        numbers(3, 2, 4, 9, 8),
        *(numbers(3, 2, 2, 9, 8) for _ in "kv"),
        numbers(3, 1, 4, 9, 9),
        numbers(3, 4),
    )
    one = lambda *x: attention(*x, rule=af.causal())
    assert_same(vmap(one)(q, k, v), torch.stack([one(*x) for x in zip(q, k, v)]))
    assert_same(vmap(one, (0, None, None))(q, k[0], v[0]), torch.stack([one(x, k[0], v[0]) for x in q]))
    assert_same(vmap(one, (2, 0, 0), 1)(q.movedim(0, 2), k, v), torch.stack([one(*x) for x in zip(q, k, v)], 1))
    more = lambda q, k, v, bias, sink: attention(q, k, v, bias=bias, sink=sink, return_lse=True)
    assert_same(vmap(more)(q, k, v, bias, sink), tuple(map(torch.stack, zip(*map(more, q, k, v, bias, sink)))))
    packed = numbers(4, 3, 2, 6, 8)
    in_chunks = lambda qkv: flash_attention_qkv_packed(qkv, 3, 2)
    assert_same(vmap(in_chunks)(packed), torch.stack(list(map(in_chunks, packed))))
    twice = vmap(vmap(lambda q, k, v: one(q[None], k[None], v[None])[0]))
    assert_same(twice(q, k, v), torch.stack([one(*x) for x in zip(q, k, v)]))


@pytest.mark.of_the_cpu
def test_tf32_changes_nothing_on_the_cpu(numbers):
    qkv = [numbers(3, 2, 4, 9, 8, dtype=torch.float32) for _ in range(3)]
    exact, allowed = (lambda *x, allow=allow: attention(*x, allow_tf32=allow) for allow in (False, True))
    for change in (lambda call: call, vmap, lambda call: torch.compile(call, fullgraph=True)):
        one = qkv if change is vmap else [x[0] for x in qkv]
        expected, got = (gradients(change(call), one) for call in (exact, allowed))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_mapped_over_nothing(numbers):
    q, sink = numbers(0, 2, 4, 9, 8), numbers(0, 4)
    one = lambda q, sink=None: attention(q, q, q, sink=sink, return_lse=True)
    for arguments in ((q,), (q, sink)):
        out, lse = vmap(one)(*arguments)
        assert out.shape == q.shape and lse.shape == q.shape[:-1]
        assert vmap(grad(lambda *x: one(*x)[0].sum()))(*arguments).shape == q.shape
    assert vmap(one, 1)(q.movedim(0, 1))[0].shape == q.shape


def test_gradients_of_functions(numbers):
    q, k, v, sink = numbers(3, 2, 4, 9, 8), numbers(3, 2, 4, 9, 8), numbers(3, 2, 4, 9, 8), numbers(3, 4)
    loss = lambda q, k, v, sink: attention(q, k, v, sink=sink, rule=DOCUMENTS).sin().sum()
    each = [grad(loss, (0, 1, 2, 3))(*x) for x in zip(q, k, v, sink)]
    one = [x[0].clone().requires_grad_() for x in (q, k, v, sink)]
    assert_same(each[0], torch.autograd.grad(loss(*one), one))
    assert_same(vmap(grad(loss, (0, 1, 2, 3)))(q, k, v, sink), tuple(map(torch.stack, zip(*each))))
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad(lambda q: grad(loss)(q, k[0], v[0], sink[0]).sum())(q[0])


def test_forward_mode_is_refused(qkv):
    with pytest.raises(RuntimeError, match="forward"):
        torch.func.jvp(lambda q: attention(q, *qkv[1:]), (qkv[0],), (qkv[0],))


def test_forward_mode_is_not_dropped(qkv):
    q, k, v = (x.detach() for x in qkv)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a forward-mode derivative was asked for"):
        attention(forward_ad.make_dual(q, q), k, v)
    with forward_ad.dual_level():
        assert torch.equal(attention(q, k, v), attention(q, k, v))
    with pytest.raises(NotImplementedError, match="a forward-mode derivative was asked for"):
        torch.func.linearize(lambda q: attention(q, k, v), q)


def test_functionalize(qkv):
    q, k, v = (x.detach() for x in qkv)
    assert torch.equal(torch.func.functionalize(attention)(q, k, v), attention(q, k, v))


def test_autocast(qkv):
    q, k, v = (x.float().requires_grad_() for x in qkv)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = attention(q, k, v, rule=af.causal())
        assert attention(*qkv).dtype == torch.float64  # as PyTorch's own functions
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), rule=af.causal()))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_checkpoint(qkv):
    call = lambda q, k, v: torch.utils.checkpoint.checkpoint(CALLS["full"], q, k, v, use_reentrant=False)
    assert_same(gradients(call, qkv), gradients(CALLS["full"], qkv))


def test_plan_and_out_are_not_for_graphs(qkv):
    plan, out = af.plan(*qkv), torch.empty_like(qkv[0])
    for given in (dict(plan=plan), dict(out=out)):
        assert torch.equal(attention(*qkv, **given), attention(*qkv))
        with pytest.raises(
            ValueError, match=f"^{next(iter(given))}: given in a graph or transform, expected none there$"
        ):
            vmap(lambda q: attention(q, *qkv[1:], **given))(qkv[0][None])


def test_out_lies_as_q_does(numbers):
    q = numbers(2, 9, 4, 8).transpose(1, 2)
    assert attention(q, q, q).stride() == q.stride()
    assert attention(q, q, q[..., :5]).is_contiguous()


def test_threads_are_pytorch_s(qkv, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen.append(1) or 1)
    attention(*qkv)
    assert seen
