"""Random calls of distributed attention, each in all processes of a group, against one process that has all of it."""

import random
from math import prod

import anyflash as af
import torch
import torch.distributed as dist
from anyflash.torch import attention as alone
from anyflash.torch.distributed import attention, plan_sharding

ALIGN = ("none_front", "none_end", "scale_front", "scale_end")
SEQUENCE = {"bhsd": 2, "bshd": 1, "bhds": 3, "thd": 0, "qkv": 2}  # the axis of the outermost dimension


def random_rule(chosen, generator, shapes, batch, heads):
    """A rule of any kind, or a combination of two."""
    q_shape, k_shape = shapes
    queries, keys = prod(q_shape), prod(k_shape)
    side = max(*q_shape, *k_shape)

    def ids(n):
        style = chosen.randrange(3)
        shape = (n,) if chosen.random() < 0.7 else (batch, n)
        numbers = torch.randint(0, 4, shape, generator=generator)
        return numbers if style == 0 else numbers.sort(-1)[0] if style == 1 else numbers.cummax(-1)[0]

    def documents():
        of_queries = ids(queries)
        return af.documents(of_queries, of_queries if queries == keys else ids(keys))

    def blocks():
        q, k = chosen.randint(1, 20), chosen.randint(1, 20)
        shape = chosen.choice([(), (heads,), (batch, heads)])
        return af.blocks(torch.rand(*shape, -(-queries // q), -(-keys // k), generator=generator) < 0.6, q, k)

    leaves = [
        af.full,
        af.causal,
        lambda: af.local(chosen.randint(1, side), chosen.randint(0, 2), chosen.random() < 0.5),
        lambda: af.window(chosen.randint(-1, side), chosen.randint(-1, side)),
        lambda: af.prefix(chosen.randint(0, keys)),
        lambda: af.prefix_queries(chosen.randint(0, queries)),
        lambda: af.sink(chosen.randint(0, keys)),
        lambda: af.tiles(chosen.randint(1, side), chosen.choice([1, 3])),
        lambda: af.neighbourhood(chosen.randint(1, side), chosen.randint(1, 3), chosen.random() < 0.3),
        blocks,
        lambda: af.dense(torch.rand(queries, keys, generator=generator) < 0.5),
    ]
    one = chosen.choice(leaves)()
    other = chosen.choice([documents, documents, *leaves])()
    return chosen.choice([one, one, one & other, one | other, one & ~other, other])


def split(chosen, size, ranks):
    """Lengths of contiguous parts, some of them empty."""
    ends = sorted(chosen.choice([0, size, chosen.randint(0, size)]) for _ in range(ranks - 1))
    if chosen.random() < 0.5:
        ends = [size * (i + 1) // ranks for i in range(ranks - 1)]
    return [b - a for a, b in zip([0, *ends], [*ends, size])]


class Case:
    """The whole call, and how it is split. Equal in all processes."""

    def __init__(self, seed, ranks, dtype=torch.float64, device="cpu"):
        chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = dtype
        d = chosen.choice([1, 1, 1, 2, 3])
        layout = chosen.choice(["bhsd", "bhsd", "bshd", "bhds"] + (["thd", "qkv"] if d == 1 else []))
        most = (90, 9, 5)[d - 1]
        q_shape = tuple(chosen.randint(1, most) for _ in range(d))
        same = layout == "qkv" or chosen.random() < 0.6
        k_shape = q_shape if same else tuple(chosen.randint(1, most) for _ in range(d))
        batch = 1 if layout in ("thd", "qkv") else chosen.randint(1, 2)
        heads_k = chosen.choice([1, 2, ranks])
        heads = heads_k if layout == "qkv" else heads_k * chosen.choice([1, 2])
        d_qk = chosen.choice([4, 8, 13])
        d_v = d_qk if layout == "qkv" else chosen.choice([d_qk, 5, 16])
        numbers = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
        self.layout, self.shapes = layout, (q_shape, k_shape)

        def tensor(n, shape, channels):
            sizes = {
                "thd": (*shape, n, channels),
                "bshd": (batch, *shape, n, channels),
                "bhds": (batch, n, channels, *shape),
            }
            return numbers(*sizes.get(layout, (batch, n, *shape, channels)))

        if layout == "qkv":
            self.qkv = [numbers(3, heads, *q_shape, d_qk)]
        else:
            self.qkv = [tensor(heads, q_shape, d_qk), tensor(heads_k, k_shape, d_qk), tensor(heads_k, k_shape, d_v)]
        queries, keys = prod(q_shape), prod(k_shape)
        options = {"layout": layout}
        if chosen.random() < 0.8:
            options["rule"] = random_rule(chosen, generator, self.shapes, batch, heads)
        if layout == "thd":
            documents = chosen.randint(1, 4)
            ends = lambda n: torch.tensor([0, *sorted(chosen.randint(0, n) for _ in range(documents - 1)), n])
            options |= {"cu_seqlens_q": ends(queries), "cu_seqlens_k": ends(keys)}
            if same:
                options["cu_seqlens_k"] = options["cu_seqlens_q"]
            options["rule"] = chosen.choice([af.full(), af.causal(), af.local(7) | af.sink(2)])
        if chosen.random() < 0.5:
            options["align"] = chosen.choice(ALIGN)
        if chosen.random() < 0.3:
            options["softcap"] = 2.0
        if chosen.random() < 0.3:
            options["scale"] = 0.7
        if chosen.random() < 0.3:
            options["alibi_slopes"] = torch.rand(*chosen.choice([(heads,), (batch, heads)]), generator=generator).to(
                device
            )
        if d == 1 and batch > 1 and chosen.random() < 0.4:
            options["key_lengths"] = torch.tensor([chosen.randint(0, keys) for _ in range(batch)])
        self.options = options
        self.sink = numbers(heads) if chosen.random() < 0.3 else None
        self.bias = None
        if chosen.random() < 0.35:
            sizes = [chosen.choice([1, n]) for n in (batch, heads, queries, keys)]
            if queries == ranks:  # one row may be that of each process' one query, or of all
                sizes[2] = queries
            self.bias = numbers(*sizes)
        self.return_lse = chosen.choice([False, True, True, "lm"])
        self.exchange = chosen.choice(["auto", "keys", "heads"])
        per_head = (
            any(table.ndim > 2 and table.shape[-3] > 1 for table in options["rule"]._parts[1].values())
            if "rule" in options
            else False
        )
        if heads_k % ranks or self.bias is not None or per_head:
            self.exchange = chosen.choice(["auto", "keys"])
        self.planned = chosen.random() < 0.5
        self.lengths = split(chosen, q_shape[0], ranks)
        self.key_lengths = self.lengths if k_shape == q_shape and same else split(chosen, k_shape[0], ranks)
        self.weights_seed = chosen.randrange(1 << 30)
        self.grads = [chosen.random() < 0.85 for _ in range(3)] if layout != "qkv" else [True]
        if d == 1 and layout not in ("thd", "qkv") and chosen.random() < 0.25:
            self.shorten(chosen, batch, keys)
        if self.bias is not None and chosen.random() < 0.5:  # rows that see keys, and all their logits are -inf
            self.bias[:, :, :: chosen.randint(1, 3)] = -torch.inf
        self.has_budget = chosen.random() < 0.25  # the least that works

    def shorten(self, chosen, batch, keys):
        """Lengths move the queries and keys of most alignments against each other, and so what a window sees."""
        size = chosen.randint(1, 12)
        rules = (
            af.window(size, size // 2),
            af.local(size),
            af.tiles(size, 3),
            af.neighbourhood(2 * size + 1),
            af.causal(),
        )
        rule = chosen.choice(rules)
        self.options["rule"] = chosen.choice([rule, rule, rule & af.causal(), rule | af.sink(2)])
        self.options["align"] = chosen.choice(ALIGN)
        self.options["key_lengths"] = torch.tensor([chosen.randint(0, keys) for _ in range(batch)])
        self.exchange = "keys"

    def named(self):
        return (
            f"{self.layout} {self.shapes} {self.options} bias {None if self.bias is None else self.bias.shape} "
            f"sink {self.sink is not None} {self.return_lse} {self.exchange} planned {self.planned} "
            f"{self.lengths} {self.key_lengths} grads {self.grads}"
        )

    def run(self, call, tensors, bias, sink, weigh, **more):
        """out and lse, then the gradients of tensors, bias and sink."""
        tensors = [x.detach().clone().requires_grad_(wanted) for x, wanted in zip(tensors, self.grads)]
        more_tensors = [None if x is None else x.detach().clone().requires_grad_() for x in (bias, sink)]
        made = call(
            *tensors, **self.options, bias=more_tensors[0], sink=more_tensors[1], return_lse=self.return_lse, **more
        )
        made = made if isinstance(made, tuple) else (made,)
        of = [x for x in (*tensors, *more_tensors) if x is not None and x.requires_grad]
        if not of:
            return list(made), []
        differentiable = made[:1] if self.return_lse == "lm" else made
        grads = torch.autograd.grad(differentiable, of, weigh(differentiable))
        return [x.detach() for x in made], list(grads)


def least_budget(call):
    """What the refusal of no bytes names; 0 if that works."""
    try:
        call(0)
    except ValueError as error:
        assert str(error).startswith("memory_budget: 0 bytes, expected at least "), error
        return int(str(error).split()[6])
    return 0


def check(seed, dtype=torch.float64, tolerance=1e-10, device="cpu"):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case(seed, ranks, dtype, device)
    q_shape, k_shape = case.shapes
    inner_q = prod(q_shape[1:])
    axis = SEQUENCE[case.layout]
    more = {"exchange": case.exchange}
    if case.planned:
        same = q_shape == k_shape
        rule = case.options.get("rule", af.full())
        sharding = plan_sharding(
            rule, q_shape, None if same else k_shape, align=case.options.get("align", "none_front")
        )
        more["sharding"] = sharding
        pieces = [sharding.pieces(side) for side in ("query", "key")]
    else:
        pieces = [[(sum(lengths[:rank]), lengths[rank])] for lengths in (case.lengths, case.key_lengths)]
    own = [torch.cat([torch.arange(0), *[torch.arange(a, a + n) for a, n in one]]) for one in pieces]
    rows = (own[0][:, None] * inner_q + torch.arange(inner_q)).flatten().to(device)
    own = [one.to(device) for one in own]
    weights = {}

    def weigh_whole(results):
        generator = torch.Generator().manual_seed(case.weights_seed)
        found = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
        weights["own"] = [
            x.index_select(axis if case.layout != "qkv" else 1, own[0]) if i == 0 else x.index_select(-1, rows)
            for i, x in enumerate(found)
        ]
        return found

    # lse of a row that sees nothing is -inf: its gradient is 0 in both
    whole, whole_grads = case.run(alone, case.qkv, case.bias, case.sink, weigh_whole)
    parts = [x.index_select(axis, own[min(i, 1)] if len(case.qkv) > 1 else own[0]) for i, x in enumerate(case.qkv)]
    bias = case.bias
    if bias is not None and bias.shape[2] > 1:
        bias = bias.index_select(2, rows)
    of_parts = lambda **more: case.run(attention, parts, bias, case.sink, lambda results: weights["own"], **more)
    if case.has_budget:
        more["memory_budget"] = least_budget(lambda budget: of_parts(**{**more, "memory_budget": budget}))
    got, grads = of_parts(**more)
    close = lambda one, other, what: torch.testing.assert_close(
        one, other, rtol=tolerance, atol=tolerance, msg=lambda line: f"seed {seed} {what}: {line}\n{case.named()}"
    )
    close(got[0], whole[0].index_select(axis if case.layout != "qkv" else 1, own[0]), "out")
    for one, other in zip(got[1:], whole[1:], strict=True):
        close(one, other.index_select(-1, rows), "lse, l or m")
    i = 0
    for j, wanted in enumerate(case.grads):
        if wanted:
            close(
                grads[i],
                whole_grads[i].index_select(axis, own[min(j, 1)] if len(case.qkv) > 1 else own[0]),
                f"gradient {j}",
            )
            i += 1
    if bias is not None:
        expected = whole_grads[i]
        close(grads[i], expected.index_select(2, rows) if expected.shape[2] > 1 else expected, "gradient of bias")
        i += 1
    if case.sink is not None:
        close(grads[i], whole_grads[i], "gradient of sink")
