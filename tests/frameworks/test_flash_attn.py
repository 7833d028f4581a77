"""flash_attn's functions against the formulas in their documentation, with the whole matrix in memory."""

import inspect
import re

import anyflash as af
import numpy as np
import pytest
import torch
from anyflash.compat import _rows, flash_attn
from anyflash.compat import _shared as shared
from anyflash.torch import _sdpa, attention
from devices import DEVICE
from flash_attn_textbook import close, integers, textbook

FUNCTIONS = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in parameters]
    assert " ".join(written) == FUNCTIONS[name]


SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE)
OPTIONS = [
    {},
    dict(causal=True),
    dict(window_size=(2, 1)),
    dict(window_size=(3, -1)),
    dict(window_size=(-1, 2)),
    dict(window_size=[2, 5], causal=True),
    dict(softcap=1.5),
    dict(softmax_scale=0.7, causal=True),
    dict(alibi_slopes=SLOPES, causal=True),
    dict(alibi_slopes=torch.stack([SLOPES, SLOPES * 2]), softcap=3.0),
]


@pytest.fixture
def qkv(numbers):
    return lambda n, m, b=2: (numbers(b, n, 4, 8), numbers(b, m, 2, 8), numbers(b, m, 2, 8))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("n, m", [(5, 5), (3, 9), (9, 3), (1, 7)])
def test_func_and_its_gradients(qkv, options, n, m):
    tensors = [x.requires_grad_() for x in qkv(n, m)]
    out, lse, probabilities = flash_attn.flash_attn_func(*tensors, return_attn_probs=True, **options)
    expected, rows = textbook(*tensors, **options)
    close(out, expected)
    close(lse, rows)
    assert probabilities.shape == (0,)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=DEVICE).reshape(out.shape)
    close(torch.autograd.grad((out * weights).sum(), tensors), torch.autograd.grad((expected * weights).sum(), tensors))
    close(flash_attn.flash_attn_func(*tensors, **options), out)


def test_packed(qkv):
    q, k, v = qkv(6, 6)
    alike = torch.stack([q, q * 0.5, q + 1], 2)
    close(flash_attn.flash_attn_qkvpacked_func(alike, causal=True), textbook(*alike.unbind(2), causal=True)[0])
    close(
        flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), window_size=(1, 1)),
        textbook(q, k, v, window_size=(1, 1))[0],
    )
    ends = integers([0, 2, 6])
    one = alike[0]
    close(
        flash_attn.flash_attn_varlen_qkvpacked_func(one, ends, 4, causal=True),
        flash_attn.flash_attn_varlen_func(*one.unbind(1), ends, ends, 4, 4, causal=True),
    )
    close(
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], torch.stack([k[0], v[0]], 1), ends, ends, 4, 4),
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen_and_its_gradients(qkv, options):
    tensors = [x[0].detach().requires_grad_() for x in qkv(10, 12)]
    ends_q, ends_k = integers([0, 4, 10]), integers([0, 7, 12])
    out, lse, _ = flash_attn.flash_attn_varlen_func(*tensors, ends_q, ends_k, 6, 7, return_attn_probs=True, **options)
    q, k, v = tensors
    parts = []
    for i, (a, b, c, d) in enumerate([(0, 4, 0, 7), (4, 10, 7, 12)]):
        own = dict(options)
        if "alibi_slopes" in own and own["alibi_slopes"].dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][i]
        parts.append(textbook(q[None, a:b], k[None, c:d], v[None, c:d], **own))
    expected = torch.cat([part[0][0] for part in parts])
    close(out, expected)
    close(lse, torch.cat([part[1][0] for part in parts], 1))
    close(torch.autograd.grad(out.sin().sum(), tensors), torch.autograd.grad(expected.sin().sum(), tensors))


def test_varlen_with_pages(qkv, numbers):
    q = numbers(5, 4, 8)
    pages_k, pages_v = numbers(6, 4, 2, 8), numbers(6, 4, 2, 8)
    table = integers([[5, 0], [2, 3]])
    ends_q, ends_k = integers([0, 2, 5]), integers([0, 7, 12])
    out = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, ends_q, ends_k, 3, 7, causal=True, block_table=table)
    for i, (a, b, n) in enumerate([(0, 2, 7), (2, 5, 5)]):
        k, v = (pages[table[i].long()].flatten(0, 1)[None, :n] for pages in (pages_k, pages_v))
        close(out[a:b], textbook(q[None, a:b], k, v, causal=True)[0][0])


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("slopes", [None, torch.ones(0, 4)])
def test_no_sequences(slopes):
    q, k, v, none = (torch.zeros(*shape) for shape in ((0, 4, 8), (0, 2, 8), (0, 2, 16), (1,)))
    for dtype in (torch.bfloat16, torch.float64):
        given = (*(x.to(dtype) for x in (q, k, v)), none.int(), none.int())
        out, lse, dropped = flash_attn.flash_attn_varlen_func(*given, 0, 0, alibi_slopes=slopes, return_attn_probs=1)
        assert dropped.shape == (0,) and out.shape == (0, 4, 16) and lse.shape == (4, 0)
        assert out.dtype == dtype and lse.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


@pytest.mark.of_the_cpu
@pytest.mark.parametrize(
    "start, given",
    [
        ("scale: nan, ", dict(softmax_scale=float("nan"))),
        ("softcap: nan", dict(softcap=float("nan"))),
        ("alibi_slopes: shape (7)", dict(alibi_slopes=torch.zeros(0, 7))),
        ("alibi_slopes: type int32", dict(alibi_slopes=torch.zeros(0, 4, dtype=torch.int32))),
    ],
)
def test_options_of_no_sequences_are_checked(start, given):
    q, none = torch.zeros(0, 4, 8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match="^" + re.escape(start)):
        flash_attn.flash_attn_varlen_func(q, q, q, none, none, 0, 0, **dict(alibi_slopes=torch.ones(0, 4)) | given)


X = torch.zeros(2, 5, 4, 8, device=DEVICE)


@pytest.mark.parametrize(
    "name, line",
    [
        ("dropout_p", "dropout_p: type Tensor, expected a number"),
        ("causal", "causal: type Tensor, expected True or False"),
        ("return_attn_probs", "return_attn_probs: type Tensor, expected True or False"),
        ("window_size", "window_size: tensor("),
    ],
)
def test_a_tensor_in_a_number_s_place_is_named(name, line):
    ends, x = torch.tensor([0, 5], dtype=torch.int32), X[0]
    for call, given in (
        (flash_attn.flash_attn_func, (X, X, X)),
        (flash_attn.flash_attn_varlen_func, (x, x, x, ends, ends, 5, 5)),
    ):
        with pytest.raises((ValueError, TypeError)) as raised:
            call(*given, **{name: X})
        assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


ENDS = torch.tensor([0, 5], dtype=torch.int32)  # on the CPU, where it is looked at
WRONG = {
    "dropout_p: 0.1, expected 0: dropout is not offered": lambda: flash_attn.flash_attn_func(X, X, X, 0.1),
    "window_size: 3, expected two integers": lambda: flash_attn.flash_attn_func(X, X, X, window_size=3),
    "qkv: shape (2, 5, 4, 8), expected rank 5": lambda: flash_attn.flash_attn_qkvpacked_func(X),
    "kv: shape (2, 5, 4, 8), expected rank 5": lambda: flash_attn.flash_attn_kvpacked_func(X, X),
    "cu_seqlens_q: ": lambda: flash_attn.flash_attn_varlen_func(X[0], X[0], X[0], ENDS + 1, ENDS, 5, 5),
    "block_table: 2 sequences, expected 1": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X, X, ENDS, ENDS, 5, 5, block_table=torch.zeros(2, 1, dtype=torch.int32)
    ),
    "block_table: 9 at (1, 0), expected 0 to 1": lambda: flash_attn.flash_attn_varlen_func(
        X[0],
        X,
        X,
        torch.tensor([0, 2, 5]),
        torch.tensor([0, 2, 5]),
        5,
        5,
        block_table=torch.tensor([[0], [9]], dtype=torch.int32),
    ),
    "v: 4 keys, expected 5 as in k": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X[0], X[0, :4], ENDS, ENDS, 5, 5, alibi_slopes=torch.ones(1, 4)
    ),
    "cache_seqlens: 5 new keys go up to 7, expected room": lambda: flash_attn.flash_attn_with_kvcache(
        X, X.clone(), X.clone(), X, X, cache_seqlens=2
    ),
    "cache_seqlens: not given": lambda: flash_attn.flash_attn_with_kvcache(X, X.clone(), X.clone(), X, X),
    "k_cache: batch 1, expected 2": lambda: flash_attn.flash_attn_with_kvcache(X, X[:1], X[:1]),
    "rotary_cos: 3 positions, expected at least 7": lambda: flash_attn.flash_attn_with_kvcache(
        X,
        torch.cat([X, X], 1),
        torch.cat([X, X], 1),
        X,
        X,
        X[0, :3, 0, :4],
        X[0, :3, 0, :4],
        cache_seqlens=2,
        causal=True,
    ),
    "cache_leftpad: [4, 0], expected 0 to cache_seqlens [3, 3]": lambda: flash_attn.flash_attn_with_kvcache(
        X, X, X, cache_seqlens=torch.tensor([3, 3]), cache_leftpad=torch.tensor([4, 0])
    ),
    "block_table: room for 5 keys, expected 9": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X, X, ENDS, torch.tensor([0, 9]), 5, 9, block_table=torch.zeros(1, 1, dtype=torch.int32)
    ),
    "block_table: given with cache_batch_idx": lambda: flash_attn.flash_attn_with_kvcache(
        X, X, X, cache_batch_idx=torch.zeros(2), block_table=torch.zeros(2, 1)
    ),
}


@pytest.mark.parametrize("start", WRONG)
def test_wrong_input(start):
    with pytest.raises(ValueError) as raised:
        WRONG[start]()
    assert str(raised.value).startswith(start) and "\n" not in str(raised.value)


CU = [[0, 9, 5], [1, 3, 5], [0, 3, 6]]  # they fall; begin late; end late


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("slopes", [None, torch.ones(2, 4)], ids=["one call", "one by one"])
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("wrong", CU)
def test_lengths_are_checked(side, wrong, slopes):
    right = torch.tensor([0, 2, 5], dtype=torch.int32)
    lengths = {"cu_seqlens_q": right, "cu_seqlens_k": right} | {side: torch.tensor(wrong, dtype=torch.int32)}
    with pytest.raises(ValueError, match=f"^{side}: "):
        flash_attn.flash_attn_varlen_func(
            X[0], X[0], X[0], **lengths, max_seqlen_q=5, max_seqlen_k=5, alibi_slopes=slopes
        )


@pytest.mark.parametrize("slopes", [None, torch.stack([SLOPES, SLOPES * 2])], ids=["one call", "one by one"])
@pytest.mark.parametrize("place", sorted({DEVICE, "cpu"}))
@pytest.mark.parametrize("behind", [(2, 3), (0, 3), (2, 0)])
def test_tokens_behind_the_last_length_are_in_no_sequence(numbers, slopes, place, behind):
    tensors = [
        numbers(count, heads, 8).requires_grad_()
        for count, heads in ((5 + behind[0], 4), (7 + behind[1], 2), (7 + behind[1], 2))
    ]
    ends = [torch.tensor(end, dtype=torch.int32, device=place) for end in ([0, 2, 5], [0, 3, 7])]
    attend = lambda q, k, v: flash_attn.flash_attn_varlen_func(
        q, k, v, *ends, 3, 4, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )[:2]
    inside = [tensor[:count].detach().requires_grad_() for tensor, count in zip(tensors, (5, 7, 7))]
    (out, lse), (expected, rows) = attend(*tensors), attend(*inside)
    close(out[:5], expected)
    close(lse[:, :5], rows)
    assert out[5:].eq(0).all() and lse[:, 5:].isneginf().all()
    grads = torch.autograd.grad((out + out.sin()).sum(), tensors)
    for got, own in zip(grads, torch.autograd.grad((expected + expected.sin()).sum(), inside)):
        close(got[: len(own)], own)
        assert got[len(own) :].eq(0).all()


@pytest.mark.parametrize("softcap", [-1.0, -50, float("-inf")])
def test_a_negative_softcap_is_none(qkv, softcap):
    q, k, v = qkv(5, 7)
    ends_q, ends_k = integers([0, 2, 5]), integers([0, 3, 7])
    calls = [
        lambda cap: flash_attn.flash_attn_func(q, k, v, softcap=cap),
        lambda cap: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends_q, ends_k, 3, 4, softcap=cap),
        lambda cap: flash_attn.flash_attn_with_kvcache(q, k, v, softcap=cap),
    ]
    for call in calls:
        assert torch.equal(call(softcap), call(0.0))


@pytest.mark.parametrize("which", ["q", "k", "v", "alibi_slopes"])
@pytest.mark.parametrize("function", ["varlen", "kvcache"])
def test_pages_beside_what_requires_a_gradient(numbers, function, which):
    """Only a backward call is refused."""
    given = dict(q=numbers(2, 4, 8), k=numbers(3, 4, 2, 8), v=numbers(3, 4, 2, 8), alibi_slopes=SLOPES.clone())
    table, ends = integers([[2, 0]]), integers([0, 2])

    def call(q, k, v, alibi_slopes):
        if function == "varlen":
            return flash_attn.flash_attn_varlen_func(
                q,
                k,
                v,
                ends,
                integers([0, 7]),
                2,
                7,
                alibi_slopes=alibi_slopes,
                block_table=table,
                return_attn_probs=True,
            )[:2]
        return flash_attn.flash_attn_with_kvcache(
            q[None], k, v, cache_seqlens=7, alibi_slopes=alibi_slopes, block_table=table, return_softmax_lse=True
        )

    expected = call(**given)
    given[which].requires_grad_()
    line = "^(block_table|flash_attn_with_kvcache): a gradient was asked for, expected forward calls alone; [^\\n]*$"
    for made, wanted in zip(call(**given), expected):
        assert torch.equal(made, wanted) and made.requires_grad
        with pytest.raises(NotImplementedError, match=line):
            made.sum().backward()
    with torch.no_grad():
        assert not call(**given)[0].requires_grad


@pytest.mark.parametrize("ends", [[0, 2, 5], [0]])
def test_autocast_where_sequences_go_one_by_one(ends):
    ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x = X[0, : int(ends[-1])]
    with torch.autocast(DEVICE, torch.bfloat16):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            x, x, x, ends, ends, 5, 5, return_attn_probs=True, alibi_slopes=torch.ones(len(ends) - 1, 4, device=DEVICE)
        )
    assert out.shape == x.shape and out.dtype == torch.bfloat16
    assert lse.shape == (4, len(x)) and lse.dtype == torch.float32


@pytest.mark.parametrize("options", [dict(), dict(causal=True, window_size=(3, 0))])
@pytest.mark.parametrize(
    "ends", [([0, 1, 5], [0, 8, 12]), ([0, 0, 5], [0, 8, 12]), ([0, 1, 5], [0, 0, 0]), ([0, 0], [0, 0]), ([0], [0])]
)
def test_rows_of_a_batch_give_the_same(ends, options):
    """What a GPU takes for lengths that are there; a key that no query sees holds NaN."""
    q, k, v = (torch.randn(end[-1], 4, 8, requires_grad=True) for end in (ends[0], ends[1], ends[1]))
    if options and len(k):
        k.data[3] = v.data[2] = torch.nan
    cu_q, cu_k = (torch.tensor(end, dtype=torch.int32) for end in ends)
    slopes = torch.rand(len(cu_q) - 1, 4)
    call = shared.options(0.0, None, options.get("causal", False), options.get("window_size", (-1, -1)), 0.0, False)
    out, lse = _rows.in_rows(q, k, v, cu_q, cu_k, (5, 8), None, alibi_slopes=slopes, **call)
    expected = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 8, alibi_slopes=slopes, return_attn_probs=True, **options
    )
    made, wanted = (
        (x, y, *torch.autograd.grad((x * x.cos()).sum() + y.exp().sum(), (q, k, v)))
        for x, y in ((out, lse), expected[:2])
    )
    for one, other in zip(made, wanted):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.of_the_cpu
def test_another_default_device():
    q, k_cache, new = (torch.randn(shape) for shape in ((2, 3, 4, 8), (4, 5, 4, 8), (2, 1, 4, 8)))
    lengths, pages = torch.tensor([4, 7], dtype=torch.int32), torch.tensor([[1, 3], [0, 2]], dtype=torch.int32)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    ids = np.array([0, 0, 1])
    calls = [
        lambda: flash_attn.flash_attn_with_kvcache(
            q, k_cache.clone(), k_cache.clone(), new, new, cache_seqlens=lengths, block_table=pages
        ),
        lambda: flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), k_cache, k_cache, ends, ends, 4, 4, block_table=pages
        ),
        lambda: torch.func.vmap(lambda q: attention(q, q, q, rule=af.documents(ids, ids), layout="bshd"))(q[:, None]),
    ]
    for call in calls:
        expected = call()
        with torch.device("meta"):
            assert torch.equal(call(), expected)


@pytest.mark.of_the_cpu
def test_a_gpu_is_asked_in_a_transform_too():
    """What it is asked is a call of its own. Shown on the CPU."""
    answers = []

    def function(x):
        answers.append(_sdpa._asked.__wrapped__(torch.device("cpu"), True))
        return x.sum()

    torch.func.vmap(torch.func.grad(function))(torch.ones(2, 3))
    assert answers == [""]


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([X[0], X[0, :3]], layout=torch.jagged)
    calls = {
        "query": lambda: flash_attn.flash_attn_func(nested, X, X),
        "qkv": lambda: flash_attn.flash_attn_qkvpacked_func(nested),
        "q": lambda: flash_attn.flash_attn_with_kvcache(nested, X, X),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: a nested tensor, expected a plain one$"):
            call()


PAGED = dict(block_table=torch.zeros(1, 1, dtype=torch.int32))
ONE_BY_ONE = {
    "alibi_slopes: type ndarray, expected a torch.Tensor": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X, X, ENDS, ENDS, 5, 5, alibi_slopes=np.ones(4), **PAGED
    ),
    "alibi_slopes: rank 0, expected": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X, X, ENDS, ENDS, 5, 5, alibi_slopes=X.sum(), **PAGED
    ),
    "k: rank 0, expected 4": lambda: flash_attn.flash_attn_varlen_func(X[0], X.sum(), X, ENDS, ENDS, 5, 5, **PAGED),
    "v: rank 3, expected 4": lambda: flash_attn.flash_attn_varlen_func(X[0], X, X[0], ENDS, ENDS, 5, 5, **PAGED),
    "cu_seqlens_k: torch.sparse_coo, expected torch.strided": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X, X, ENDS, ENDS.to_sparse(), 5, 5, **PAGED
    ),
    "block_table: room for 5 keys, expected 1099511627776": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X, X, ENDS, torch.tensor([0, 2**40]), 5, 5, **PAGED
    ),
    "cu_seqlens_q: on the device meta, expected": lambda: flash_attn.flash_attn_varlen_func(
        X[0], X, X, ENDS.to("meta"), ENDS, 5, 5, **PAGED
    ),
}


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("start", ONE_BY_ONE)
def test_wrong_input_where_sequences_go_one_by_one(start):
    with pytest.raises((ValueError, TypeError)) as raised:
        ONE_BY_ONE[start]()
    assert str(raised.value).startswith(start) and "\n" not in str(raised.value)


NO_INTEGERS = {
    "cache_seqlens": (torch.tensor([2.5, 3.0]), [2, 3]),
    "cache_batch_idx": (torch.tensor([0.0, 1.0]), [0, 1]),
    "cache_leftpad": (torch.tensor([0.5, 1.0]), [0, 1]),
    "block_table": (torch.tensor([[0.0], [1.0]]), [[0], [1]]),
}


@pytest.mark.parametrize("name", NO_INTEGERS)
def test_what_is_no_tensor_of_integers(name):
    for given in NO_INTEGERS[name]:
        with pytest.raises(TypeError, match=f"^{name}: "):
            flash_attn.flash_attn_with_kvcache(X, X, X, **{name: given})


def test_what_is_no_tensor_of_queries_or_narrow_pages():
    with pytest.raises(TypeError, match="^q: type list, expected a torch.Tensor"):
        flash_attn.flash_attn_varlen_func([1.0], X[0], X[0], ENDS, ENDS, 5, 5)
    pages = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    turns = torch.ones(9, 4, dtype=torch.complex64, device=DEVICE)
    with pytest.raises(TypeError, match="^rotary_cos: torch.complex64, expected a floating-point type"):
        flash_attn.flash_attn_with_kvcache(X, X.clone(), X.clone(), X, X, turns, turns.real, cache_seqlens=0)
    with pytest.raises(TypeError, match="^block_table: torch.int64, expected torch.int32"):
        flash_attn.flash_attn_varlen_func(X[0], X, X, ENDS, ENDS, 5, 5, block_table=pages)
