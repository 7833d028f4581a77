"""flash_attn's functions in torch.compile(fullgraph=True): nothing looks at numbers while the call is traced, and wrong
ones are refused when it runs, before a cache is written."""

import re

import pytest
import torch
import torch._dynamo.testing
from anyflash.compat import flash_attn, flash_attn_interface
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.of_the_cpu  # lengths on a GPU are looked at by nobody
BACKENDS = ["eager", "aot_eager"]
SLOPES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    assert torch.is_grad_enabled()  # after an error too


def compiled(function, backend):
    return torch.compile(function, backend=backend, fullgraph=True)


def attend(q, k_cache, v_cache, k=None, **given):
    return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, return_softmax_lse=True, **given)


TURNS = dict(rotary_cos=torch.linspace(0, 1, 24).reshape(8, 3), rotary_sin=torch.linspace(1, 0, 24).reshape(8, 3))
PLACES = {
    "plain": lambda i: {},
    "leftpad": lambda i: dict(cache_leftpad=integers(i, 1)),
    "batch_idx": lambda i: dict(cache_batch_idx=integers(2 - i, i)),
    "pages": lambda i: dict(block_table=integers([i, 2 - i], [3, 4])),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("new", [0, 1])
def test_kvcache_with_lengths_that_change(numbers, backend, place, new):
    """One graph: what it holds are no numbers of the first call's."""
    entries, room = {"plain": (2, 6), "leftpad": (2, 6), "batch_idx": (3, 6), "pages": (5, 3)}[place]
    q, cache = numbers(2, 2, 4, 8), numbers(entries, room, 2, 8)
    k, counter = (numbers(2, 2, 2, 8) if new else None), torch._dynamo.testing.CompileCounterWithBackend(backend)
    call = torch.compile(attend, backend=counter, fullgraph=True)
    for i in (0, 2):
        given = PLACES[place](i) | dict(cache_seqlens=integers(2 + i, 3), causal=True) | (TURNS if new else {})
        ours, theirs = ([cache.clone(), cache.clone()] for _ in range(2))
        for made, expected in zip(call(q, *ours, k, **given), attend(q, *theirs, k, **given)):
            torch.testing.assert_close(made, expected)
        assert all(map(torch.equal, ours, theirs)) and torch.equal(ours[0], cache) == (not new)
    assert counter.frame_count == 1


WRONG = {
    "cache_seqlens: 2 to 6, expected 0 to 5": dict(cache_seqlens=integers(2, 6)),
    "cache_seqlens: -1 to 6, expected 0 to 5": dict(cache_seqlens=integers(-1, 6)),
    "cache_seqlens: 2 new keys go up to 6, expected room for them in 5": dict(cache_seqlens=integers(1, 4)),
    "cache_leftpad: [2, 0], expected 0 to cache_seqlens [1, 2]": dict(cache_leftpad=integers(2, 0)),
    "cache_batch_idx: 3 at 1, expected 0 to 2": dict(cache_batch_idx=integers(0, 3)),
    "block_table: 3 at (1, 0), expected 0 to 2": dict(block_table=integers([0, 1], [3, 0])),
    "rotary_cos: 3 positions, expected at least 4": dict(rotary_cos=torch.ones(3, 4), rotary_sin=torch.ones(3, 4)),
    "scale: nan": dict(softmax_scale=float("nan")),
    "alibi_slopes: ": dict(alibi_slopes=torch.ones(3)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", WRONG)
def test_wrong_numbers_are_refused_before_a_cache_is_written(numbers, backend, start):
    given = dict(cache_seqlens=integers(1, 2)) | WRONG[start]
    entries = 3 if {"cache_batch_idx", "block_table"} & set(given) else 2
    caches = [numbers(entries, 5, 2, 8) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match="^" + re.escape(start)) as raised:
        compiled(attend, backend)(numbers(2, 2, 4, 8), *caches, numbers(2, 2, 2, 8), **given)
    assert "\n" not in str(raised.value) and all(map(torch.equal, caches, before))


WAYS = {"one call": {}, "slopes": dict(alibi_slopes=SLOPES), "pages": dict(block_table=integers([2, 0], [1, 3]))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_varlen_with_lengths_that_change(numbers, backend, way):
    """The last ones leave tokens that are in no sequence."""
    keys = (4, 4, 2, 8) if way == "pages" else (8, 2, 8)
    tensors = [numbers(*shape).requires_grad_(way != "pages") for shape in ((6, 4, 8), keys, keys)]
    attend = lambda q, k, v, *ends: flash_attn.flash_attn_varlen_func(
        q, k, v, *ends, 4, 5, causal=True, return_attn_probs=True, **WAYS[way]
    )[:2]
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    call = torch.compile(attend, backend=counter, fullgraph=True)
    for ends in ((integers(0, 2, 6), integers(0, 3, 8)), (integers(0, 0, 3), integers(0, 5, 6))):
        made, expected = call(*tensors, *ends), attend(*tensors, *ends)
        for one, other in zip(made, expected):
            torch.testing.assert_close(one, other)
        if way != "pages":
            for one, other in zip(*(torch.autograd.grad(out.sin().sum(), tensors) for out, _ in (made, expected))):
                torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


WRONG_ENDS = {
    "cu_seqlens_q: expected numbers from 0 on that do not fall": (integers(0, 3, 2), integers(0, 3, 8)),
    "cu_seqlens_k: ends at 9, expected 8 at most": (integers(0, 3, 6), integers(0, 4, 9)),
    "max_seqlen_q: 4, expected at least 5 as in cu_seqlens_q": (integers(0, 1, 6), integers(0, 3, 8)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("line", WRONG_ENDS)
def test_wrong_ends_are_refused(numbers, backend, line):
    call = compiled(flash_attn.flash_attn_varlen_func, backend)
    with pytest.raises(ValueError, match=f"^{line}$"):
        call(numbers(6, 4, 8), numbers(8, 2, 8), numbers(8, 2, 8), *WRONG_ENDS[line], 4, 5, alibi_slopes=SLOPES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_call_through_pages_is_refused_when_it_runs(numbers, backend):
    q, pages = numbers(3, 4, 8).requires_grad_(), numbers(4, 4, 2, 8)
    call = compiled(
        lambda q: (
            flash_attn.flash_attn_varlen_func(
                q * 2, pages, pages, integers(0, 3), integers(0, 7), 3, 7, block_table=integers([1, 2])
            )
            + q
        ),
        backend,
    )
    out = call(q)
    with pytest.raises(NotImplementedError, match="^block_table: a gradient was asked for"):
        out.sum().backward()


PACKED = {
    "flash_attn_func": ([(2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)], ()),
    "flash_attn_qkvpacked_func": ([(2, 5, 3, 4, 8)], ()),
    "flash_attn_kvpacked_func": ([(2, 5, 4, 8), (2, 6, 2, 2, 8)], ()),
    "flash_attn_varlen_qkvpacked_func": ([(6, 3, 4, 8)], (integers(0, 2, 5), 3)),
    "flash_attn_varlen_kvpacked_func": ([(6, 4, 8), (8, 2, 2, 8)], (integers(0, 2, 5), integers(0, 3, 8), 3, 5)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PACKED)
def test_the_others(numbers, backend, name):
    shapes, rest = PACKED[name]
    tensors = [numbers(*shape).requires_grad_() for shape in shapes]
    made, expected = (
        call(*tensors, *rest, causal=True, softcap=-1.0, alibi_slopes=SLOPES)
        for function in [getattr(flash_attn, name)]
        for call in (compiled(function, backend), function)
    )
    torch.testing.assert_close(made, expected)
    for one, other in zip(*(torch.autograd.grad(out.sin().sum(), tensors) for out in (made, expected))):
        torch.testing.assert_close(one, other)


OF_VERSION_3 = {
    "flash_attn_func": ([(2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)], dict(s_aux=SLOPES[0])),
    "flash_attn_qkvpacked_func": ([(2, 5, 8, 8)], dict(num_heads_q=4)),
    "flash_attn_varlen_func": (
        [(6, 4, 8), (8, 2, 8), (8, 2, 8)],
        dict(
            cu_seqlens_q=integers(0, 2, 5),
            cu_seqlens_k=integers(0, 3, 8),
            max_seqlen_q=3,
            max_seqlen_k=5,
            seqused_k=integers(2, 5),
        ),
    ),
    "flash_attn_with_kvcache": (
        [(2, 1, 4, 8), (4, 3, 2, 8), (4, 3, 2, 8)],
        dict(cache_seqlens=integers(4, 2), page_table=integers([3, 0], [1, 2]), s_aux=SLOPES[0]),
    ),
    "flash_attn_combine": ([(3, 2, 5, 4, 8), (3, 2, 5, 4)], {}),
}
WRONG_OF_VERSION_3 = {
    "flash_attn_varlen_func": (
        dict(seqused_k=integers(4, 5)),
        r"seqused_k: \[4, 5\], expected 0 to the lengths \[3, 5\]",
    ),
    "flash_attn_with_kvcache": (
        dict(page_table=integers([3, 9], [1, 2])),
        r"page_table: 9 at \(0, 1\), expected 0 to 3",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OF_VERSION_3)
def test_version_3(numbers, backend, name):
    shapes, given = OF_VERSION_3[name]
    tensors, function = [numbers(*shape) for shape in shapes], getattr(flash_attn_interface, name)
    call = compiled(function, backend)
    torch.testing.assert_close(call(*tensors, **given), function(*tensors, **given))
    if name in WRONG_OF_VERSION_3:
        wrong, line = WRONG_OF_VERSION_3[name]
        with pytest.raises(ValueError, match=f"^{line}$"):
            call(*tensors, **given | wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_sink(numbers, backend):
    tensors = [numbers(2, 5, 4, 8).requires_grad_(), numbers(4).requires_grad_()]
    call = lambda q, sink: flash_attn_interface.flash_attn_func(q, q, q, causal=True, s_aux=sink)
    outs = call(*tensors), compiled(call, backend)(*tensors)
    torch.testing.assert_close(*outs)
    for one, other in zip(*(torch.autograd.grad(out.sin().sum(), tensors) for out in outs)):
        torch.testing.assert_close(one, other)


class Decoder(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, k, lengths, leftpad):
        return attend(q, k_cache, v_cache, k, cache_seqlens=lengths, cache_leftpad=leftpad)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_look_at_numbers_too(numbers, strict):
    q, k, cache = numbers(2, 1, 4, 8), numbers(2, 1, 2, 8), numbers(2, 6, 2, 8)
    given = lambda lengths, leftpad: (q, cache.clone(), cache.clone(), k, integers(*lengths), integers(*leftpad))
    program = torch.export.export(Decoder(), given((1, 2), (0, 1)), strict=strict).module()
    ours, theirs = given((3, 4), (1, 2)), given((3, 4), (1, 2))
    for made, expected in zip(program(*ours), Decoder()(*theirs)):
        torch.testing.assert_close(made, expected)
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])
    wrong = given((3, 7), (1, 2))
    with pytest.raises(ValueError, match="^cache_seqlens: 3 to 7, expected 0 to 6$"):
        program(*wrong)
    assert torch.equal(wrong[1], cache) and torch.equal(wrong[2], cache)


def test_a_mode_sees_shapes_alone(numbers):
    """As torch.export and profilers have it."""
    ends, table = integers(0, 2, 6), integers([2, 0], [1, 3])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, pages = (mode.from_tensor(numbers(*shape)) for shape in ((6, 4, 8), (4, 4, 2, 8)))
        out = flash_attn.flash_attn_varlen_func(
            q, pages, pages, mode.from_tensor(ends), mode.from_tensor(ends), 4, 4, block_table=mode.from_tensor(table)
        )
    assert out.shape == q.shape
