"""What flash_attn's users import beside its functions: bert_padding, the functions of version 3, and the names of the
packages themselves."""

import inspect
import subprocess
import sys

import pytest
import torch
from anyflash.compat import bert_padding, flash_attn_interface
from anyflash.compat.flash_attn import flash_attn_varlen_func
from devices import DEVICE
from flash_attn_textbook import close, integers, textbook

MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], device=DEVICE)
UNUSED = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_unpad_and_pad_and_their_gradients(numbers, dtype):
    x = numbers(3, 4, 2, 5).requires_grad_()
    rows, indices, ends, longest, used = bert_padding.unpad_input(x, MASK.to(dtype), UNUSED.to(dtype))
    assert indices.tolist() == [0, 1, 2, 5, 6, 7] and ends.tolist() == [0, 3, 6, 6]
    assert (longest, used.tolist(), ends.dtype, used.dtype) == (3, [2, 3, 0], torch.int32, torch.int32)
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    whole = bert_padding.pad_input(rows.sin(), indices, 3, 4)
    kept = (MASK + UNUSED)[..., None, None]
    close(whole, x.sin() * kept)
    close(torch.autograd.grad(whole.exp().sum(), x)[0], (x.sin().exp() * x.cos() * kept).detach())


def test_concatenated_sequences(numbers):
    x = numbers(3, 6, 5)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=DEVICE)
    rows, indices, ends, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert ends.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6 and ends.dtype == torch.int32
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_rows_and_their_gradients(numbers):
    x, indices = numbers(5, 2, 3).requires_grad_(), torch.tensor([3, 0, 3], device=DEVICE)
    rows, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(residual, x)
    (gradient,) = torch.autograd.grad(rows.sum() + residual.sum(), x)
    assert gradient[:, 0, 0].tolist() == [2, 1, 1, 3, 1]  # twice of row 3
    back = bert_padding.index_put_first_axis(rows[:2], indices[:2], 4)
    assert torch.equal(back[[3, 0]], rows[:2]) and back[1:3].eq(0).all()


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rows_in_a_graph(numbers, backend):
    torch._dynamo.reset()
    there_and_back = lambda x, i: bert_padding.pad_input(bert_padding.index_first_axis(x, i), i, 2, 3)
    call, x = torch.compile(there_and_back, backend=backend, fullgraph=True), numbers(6, 4)
    assert torch.equal(call(x, torch.tensor([1, 5])), there_and_back(x, torch.tensor([1, 5])))
    with pytest.raises(ValueError, match="^indices: 1 to 6, expected 0 to 5$"):
        call(x, torch.tensor([1, 6]))


X = torch.zeros(3, 4, 5)
NO_PADDING = {
    "attention_mask: shape (3, 5), expected (3, 4) as hidden_states begins": lambda: bert_padding.unpad_input(
        X, torch.ones(3, 5)
    ),
    "attention_mask: a sum of 24 in 12 places, expected 0 and 1 alone": lambda: bert_padding.unpad_input(
        X, torch.full((3, 4), 2)
    ),
    "attention_mask + unused_mask: a sum of 24 in 12 places": lambda: bert_padding.unpad_input(
        X, torch.ones(3, 4), torch.ones(3, 4)
    ),
    "attention_mask_in_length: rows of [5, 0, 0] tokens, expected 0 to 4": lambda: (
        bert_padding.unpad_input_for_concatenated_sequences(X, torch.tensor([[2, 3, 0, 0], [0] * 4, [0] * 4]))
    ),
    "indices: 0 to 9, expected 0 to 5": lambda: bert_padding.pad_input(X[:2], torch.tensor([0, 9]), 2, 3),
    "indices: 3 numbers, expected 2 as rows": lambda: bert_padding.pad_input(X[:2], torch.tensor([0, 1, 2]), 2, 3),
    "indices: torch.bool, expected torch.int32": lambda: bert_padding.index_first_axis(X, torch.ones(3).bool()),
}


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("start", NO_PADDING)
def test_wrong_padding(start):
    with pytest.raises((ValueError, TypeError)) as raised:
        NO_PADDING[start]()
    assert str(raised.value).startswith(start) and "\n" not in str(raised.value)


TAIL = "softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False s_aux=None"
SCALES = "qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0"
VERSION_3 = {
    "flash_attn_func": f"q k v softmax_scale=None causal=False {SCALES} {TAIL}",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
    f"softmax_scale=None causal=False {SCALES} {TAIL}",
    "flash_attn_qkvpacked_func": "qkv softmax_scale=None causal=False q_descale=None k_descale=None v_descale=None "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 "
    "return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
    "max_seqlen_q=None rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 "
    "pack_gqa=None sm_margin=0 return_softmax_lse=False s_aux=None",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None "
    "max_seqlen_k_new=0 causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None "
    "sm_margin=0",
}  # beside s_aux, by keyword alone, as there


@pytest.mark.parametrize("name", VERSION_3)
def test_signature_of_version_3(name):
    parameters = inspect.signature(getattr(flash_attn_interface, name)).parameters.values()
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in parameters]
    assert " ".join(written) == VERSION_3[name]
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] in ([], ["s_aux"])


def with_sink(out, lse, sink):
    """Of textbook's results."""
    whole = torch.logaddexp(lse, sink[:, None])
    return out * (lse - whole).exp().transpose(1, 2)[..., None], whole


@pytest.mark.parametrize("options", [dict(causal=True), dict(window_size=(3, 1), softcap=2.0), dict(softmax_scale=0.3)])
@pytest.mark.parametrize("sunk", [False, True])
def test_func_of_version_3(numbers, options, sunk):
    q, k, v, sink = numbers(2, 5, 4, 8), numbers(2, 7, 2, 8), numbers(2, 7, 2, 6), numbers(4)
    tensors = [x.requires_grad_() for x in (q, k, v, sink)[: 3 + sunk]]
    given = dict(s_aux=sink) if sunk else {}
    out, lse = flash_attn_interface.flash_attn_func(
        q, k, v, return_attn_probs=True, num_splits=3, pack_gqa=True, sm_margin=2, **options, **given
    )
    expected, rows = textbook(q, k, v, **options)
    if sunk:
        expected, rows = with_sink(expected, rows, sink)
    close(out, expected)
    close(lse, rows)
    close(torch.autograd.grad(out.sin().sum(), tensors), torch.autograd.grad(expected.sin().sum(), tensors))
    assert torch.equal(flash_attn_interface.flash_attn_func(q, k, v, **options, **given), out)


def test_packed_of_version_3(numbers):
    alike, grouped = numbers(2, 5, 3, 4, 8), numbers(2, 5, 8, 8)
    close(
        flash_attn_interface.flash_attn_qkvpacked_func(alike, causal=True), textbook(*alike.unbind(2), causal=True)[0]
    )
    out, lse = flash_attn_interface.flash_attn_qkvpacked_func(grouped, num_heads_q=4, return_attn_probs=True)
    expected, rows = textbook(*grouped.split([4, 2, 2], 2))
    close(out, expected)
    close(lse, rows)
    for heads in (None, 3, 8, 0):
        with pytest.raises(ValueError, match=rf"^qkv: shape \(2, 5, 8, 8\) with num_heads_q {heads}, expected"):
            flash_attn_interface.flash_attn_qkvpacked_func(grouped, num_heads_q=heads)


@pytest.mark.parametrize("used", [((1, 3), (2, 0)), (None, (3, 4)), ((2, 0), None), (None, None)])
@pytest.mark.parametrize("behind", [0, 2])
def test_tokens_in_use(numbers, used, behind):
    """Of each sequence's tokens the first ones; the others are in none."""
    q, k, v = (numbers(5 + 2 + behind, heads, 8).requires_grad_() for heads in (4, 2, 2))
    ends = (0, 2, 5), (0, 3, 7)
    given = {f"seqused_{side}": None if own is None else integers(own) for side, own in zip("qk", used)}
    out, lse = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, *map(integers, ends), 3, 4, causal=True, return_attn_probs=True, **given
    )
    expected, rows = torch.zeros_like(q), torch.full((4, len(q)), -torch.inf, dtype=q.dtype, device=DEVICE)
    for i in range(2):
        first, start = ends[0][i], ends[1][i]
        last = first + used[0][i] if used[0] else ends[0][i + 1]
        stop = start + used[1][i] if used[1] else ends[1][i + 1]
        one, row = textbook(q[None, first:last], k[None, start:stop], v[None, start:stop], causal=True)
        expected, rows = expected.clone(), rows.clone()
        expected[first:last], rows[:, first:last] = one[0], row[0]
    close(out, expected)
    close(lse, rows)
    close(torch.autograd.grad(out.sin().sum(), (q, k, v)), torch.autograd.grad(expected.sin().sum(), (q, k, v)))


def test_kvcache_of_version_3(numbers):
    q, k, v, sink = numbers(2, 1, 4, 8), numbers(2, 1, 2, 8), numbers(2, 1, 2, 6), numbers(4)
    k_pages, v_pages, table = numbers(5, 3, 2, 8), numbers(5, 3, 2, 6), integers([[4, 0], [1, 2]])
    keys = k_pages[table.long()].flatten(1, 2)
    out, lse, *parts = flash_attn_interface.flash_attn_with_kvcache(
        q,
        k_pages,
        v_pages,
        k,
        v,
        cache_seqlens=integers([2, 4]),
        page_table=table,
        causal=True,
        s_aux=sink,
        return_softmax_lse=True,
    )
    assert [part.shape for part in parts] == [(0,), (0,)]
    plan = flash_attn_interface.get_scheduler_metadata(2, 1, 6, 4, 2, 8, integers([2, 4]), headdim_v=6, page_size=3)
    again = flash_attn_interface.flash_attn_with_kvcache(
        q, k_pages, v_pages, cache_seqlens=integers([3, 5]), s_aux=sink, page_table=table, scheduler_metadata=plan
    )
    close(again, out)
    values = v_pages[table.long()].flatten(1, 2)
    for b, length in enumerate((2, 4)):
        assert torch.equal(values[b, length], v[b, 0])
        whole = torch.cat([keys[b, :length], k[b]])
        expected, rows = with_sink(*textbook(q[b : b + 1], whole[None], values[b : b + 1, : length + 1]), sink)
        close(out[b], expected[0])
        close(lse[b], rows[0])
    with pytest.raises(ValueError, match="^page_table: 3 sequences, expected 2$"):
        flash_attn_interface.flash_attn_with_kvcache(q, k_pages, v_pages, page_table=integers([[0], [0], [0]]))


def test_combined_parts(numbers):
    q, k, v = numbers(2, 3, 4, 8), numbers(2, 9, 4, 8), numbers(2, 9, 4, 8)
    parts = [textbook(q, k[:, part], v[:, part]) for part in (slice(0, 4), slice(4, 4), slice(4, 9))]
    outs, rows = torch.stack([part[0] for part in parts]), torch.stack([part[1].transpose(1, 2) for part in parts])
    outs[1] = torch.nan  # of no keys: counts nothing
    out, lse = flash_attn_interface.flash_attn_combine(outs, rows)
    expected, whole = textbook(q, k, v)
    close(out, expected)
    close(lse, whole.transpose(1, 2))
    room = torch.empty_like(out, dtype=torch.float32)
    assert flash_attn_interface.flash_attn_combine(outs, rows, room, torch.float32)[0] is room
    assert torch.equal(room, out.float())
    none = torch.full_like(rows, -torch.inf)
    out, lse = flash_attn_interface.flash_attn_combine(outs, none)
    assert out.eq(0).all() and lse.isneginf().all()


Y = torch.zeros(2, 5, 4, 8)
NOT_OFFERED = {
    "qv": torch.ones(1),
    "q_descale": torch.ones(1),
    "k_descale": torch.ones(1),
    "v_descale": torch.ones(1),
    "attention_chunk": 4,
}
OF_CACHES = {
    name: torch.ones(1) for name in ("cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens", "scheduler_metadata")
}


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("name", [*NOT_OFFERED, *OF_CACHES])
def test_what_is_not_offered_of_version_3_is_refused(name):
    given, ends = {name: (NOT_OFFERED | OF_CACHES)[name]}, torch.tensor([0, 5])
    calls = [lambda: flash_attn_interface.flash_attn_with_kvcache(Y, Y, Y, **given)]
    if name in NOT_OFFERED:
        calls += [
            lambda: flash_attn_interface.flash_attn_func(Y, Y, Y, **given),
            lambda: flash_attn_interface.flash_attn_varlen_func(Y[0], Y[0], Y[0], ends, ends, 5, 5, **given),
        ]
    if name in NOT_OFFERED and name != "qv":
        calls.append(lambda: flash_attn_interface.flash_attn_qkvpacked_func(torch.stack([Y, Y, Y], 2), **given))
    for call in calls:
        with pytest.raises(ValueError, match=f"^{name}: (given|4), expected (None|0): [^\n]*$"):
            call()


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "wrong, line",
    [
        (torch.zeros(3), "shape"),
        (torch.zeros(2, 4), "rank"),
        (torch.zeros(4, dtype=torch.int64), ""),
        ("four", "type str"),
    ],
)
def test_a_wrong_sink_is_named_as_it_was_given(wrong, line, compiled):
    torch._dynamo.reset()
    ends = torch.tensor([0, 5], dtype=torch.int32)
    for call in (
        lambda: flash_attn_interface.flash_attn_func(Y, Y, Y, s_aux=wrong),
        lambda: flash_attn_interface.flash_attn_varlen_func(Y[0], Y[0], Y[0], ends, ends, 5, 5, s_aux=wrong),
        lambda: flash_attn_interface.flash_attn_with_kvcache(Y, Y, Y, s_aux=wrong),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^s_aux: {line}[^\n]*$"):
            (torch.compile(call, backend="aot_eager", fullgraph=line != "type str") if compiled else call)()


@pytest.mark.of_the_cpu
def test_numbers_in_use_are_checked():
    ends = torch.tensor([0, 2, 5])
    for name, used, line in (
        ("seqused_q", [3, 1], r"seqused_q: \[3, 1\], expected 0 to the lengths \[2, 3\]"),
        ("seqused_k", [1, -1], r"seqused_k: \[1, -1\], expected 0 to the lengths \[2, 3\]"),
        ("seqused_k", [1], "seqused_k: 1 sequences, expected 2 as in cu_seqlens_q"),
    ):
        with pytest.raises(ValueError, match=f"^{line}$"):
            flash_attn_interface.flash_attn_varlen_func(
                Y[0], Y[0], Y[0], ends, ends, 3, 3, **{name: torch.tensor(used)}
            )


def python(code, *folders):
    """What a new process prints."""
    paths = [f"sys.path.insert(0, {str(folder)!r})" for folder in folders]
    code = "\n".join(["import sys, importlib.util", *paths, code])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


INSTALL = "from anyflash.compat.flash_attn import install; print(*install()); print(*install())\n"


@pytest.mark.of_the_cpu
def test_names_of_packages_that_are_not_installed():
    lines = python(
        INSTALL
        + """
import flash_attn, flash_attn_interface
import anyflash.compat.flash_attn as ours, anyflash.compat.flash_attn_interface as third, anyflash.compat.bert_padding as padding
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import unpad_input
print(flash_attn_func is ours.flash_attn_func, flash_attn_with_kvcache is ours.flash_attn_with_kvcache)
print(unpad_input is padding.unpad_input, flash_attn_interface.flash_attn_func is third.flash_attn_func)
print(tuple(map(int, flash_attn.__version__.split("."))) >= (2, 7), importlib.util.find_spec("flash_attn").name)
for name in ("flash_attn.ops", "flash_attn.layers.rotary", "flash_attn.losses.cross_entropy", "flash_attn.modules.mha"):
    try: importlib.import_module(name)
    except ModuleNotFoundError as error: print(error)
try: from flash_attn import flash_attn_triton
except ImportError as error: print("no", error.name)
from transformers.utils import is_flash_attn_2_available
from transformers import LlamaConfig, LlamaForCausalLM
print(is_flash_attn_2_available() in (True, False))
"""
    )
    both = "flash_attn flash_attn_interface"
    assert lines == [
        both,
        both,
        "True True",
        "True True",
        "True flash_attn",
        "No module named 'flash_attn.ops'",
        "No module named 'flash_attn.layers'",
        "No module named 'flash_attn.losses'",
        "No module named 'flash_attn.modules'",
        "no flash_attn",
        "True",
    ]


@pytest.mark.of_the_cpu
def test_an_installed_package_is_left_alone(tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("__version__ = '2.9'\n")
    lines = python(INSTALL + "import flash_attn, flash_attn_interface; print(flash_attn.__version__)", tmp_path)
    assert lines == ["flash_attn_interface", "flash_attn_interface", "2.9"]


@pytest.mark.of_the_cpu
def test_other_versions_parts_stay(tmp_path):
    """Version 4 alone is a part of a package flash_attn that has no other."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").write_text("name = 'fourth'\n")
    lines = python(INSTALL + "import flash_attn.cute; print(flash_attn.cute.name, flash_attn.__version__[0])", tmp_path)
    assert lines[1:] == ["flash_attn flash_attn_interface", "fourth 2"]


def test_padded_batches_by_way_of_sequences(numbers):
    """As FlashAttention's users have it: unpad, attend, pad."""
    q, k, v = (numbers(3, 4, heads, 8) for heads in (4, 2, 2))
    (q_rows, indices, ends, longest, _), (k_rows, *_), (v_rows, *_) = (
        bert_padding.unpad_input(x, MASK) for x in (q, k, v)
    )
    out = bert_padding.pad_input(
        flash_attn_varlen_func(q_rows, k_rows, v_rows, ends, ends, longest, longest, causal=True), indices, 3, 4
    )
    for b in range(3):
        own = MASK[b].bool()
        close(out[b, own], textbook(*(x[b, own][None] for x in (q, k, v)), causal=True)[0][0])
        assert out[b, ~own].eq(0).all()
