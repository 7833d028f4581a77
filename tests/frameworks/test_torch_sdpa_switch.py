"""How the override of torch.nn.functional.scaled_dot_product_attention comes and goes: sdpa() and auto, beside what
others put in its place, in processes, threads and PyTorch's own layers."""

import inspect
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from anyflash.torch import _sdpa, sdpa
from devices import DEVICE
from processes import run_processes

OWN = _sdpa._pytorch_s_own


@pytest.fixture
def ours_called(monkeypatch):
    """How often anyflash is called."""
    calls = []
    for name in ("attention", "plain_attention"):
        real = getattr(_sdpa, name)
        monkeypatch.setattr(_sdpa, name, lambda *args, real=real, **options: calls.append(1) or real(*args, **options))

    def counted(call):
        calls.clear()
        call()
        return len(calls)

    return counted


@pytest.fixture
def ours(ours_called):
    """Does a call of the function that F has at present reach anyflash?"""
    q = torch.zeros(1, 1, 2, 8, device=DEVICE)
    return lambda: ours_called(lambda: F.scaled_dot_product_attention(q, q, q)) == 1


def test_in_place_for_a_block(ours):
    assert F.scaled_dot_product_attention is OWN
    with sdpa():
        assert ours()
        with sdpa():
            pass
        assert ours()
    assert F.scaled_dot_product_attention is OWN
    with pytest.raises(KeyError), sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is OWN


def test_blocks_that_end_out_of_order(ours):
    first, second = sdpa(), sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ours()
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is OWN


def test_the_override_tells_what_it_stands_in_place_of():
    with sdpa():
        override = F.scaled_dot_product_attention
        assert override.__wrapped__ is OWN and override.__name__ == "scaled_dot_product_attention"
        assert inspect.signature(override) == inspect.signature(_sdpa.scaled_dot_product_attention)
        assert pickle.loads(pickle.dumps(override)) is override


def test_what_others_have_put_in_place_is_neither_taken_nor_lost(monkeypatch):
    others = lambda *args, **options: OWN(*args, **options)
    monkeypatch.setattr(F, "scaled_dot_product_attention", others)
    line = (
        "^anyflash.torch: scaled_dot_product_attention is replaced by test_torch_sdpa_switch.*lambda>, expected PyTorch's "
        "own; switch anyflash on first"
    )
    with pytest.raises(RuntimeError, match=line), sdpa():
        pass
    assert F.scaled_dot_product_attention is others
    monkeypatch.undo()
    with sdpa():  # nothing is left of the refused one
        pass
    assert F.scaled_dot_product_attention is OWN


def test_what_others_put_around_it_stays(ours, monkeypatch):
    def hook(*args, **options):
        seen.append(1)
        return found(*args, **options)

    seen, block = [], sdpa()
    block.__enter__()
    found = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", hook)
    assert ours() and seen == [1]
    with pytest.raises(RuntimeError, match="is replaced by"), sdpa():
        pass
    block.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is hook and not ours() and seen == [1, 1]
    monkeypatch.setattr(F, "scaled_dot_product_attention", found)  # what the hook puts back: PyTorch's own by now
    assert not ours()
    with sdpa():
        assert ours()
    assert F.scaled_dot_product_attention is OWN


def test_blocks_in_many_threads():
    q = torch.zeros(1, 1, 2, 8, device=DEVICE)

    def enter(_):
        for _ in range(50):
            with sdpa():
                F.scaled_dot_product_attention(q, q, q)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter, range(8)))
    assert F.scaled_dot_product_attention is OWN


CONTEXT_PARALLEL = """
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
expected = F.scaled_dot_product_attention(q, k, v)
sharded = lambda: context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2])
def attend():
    return context_parallel_unshard(mesh, [F.scaled_dot_product_attention(q, k, v)], [2])[0]
"""


@pytest.mark.of_the_cpu
def test_context_parallel_keeps_its_calls(tmp_path):
    run_processes(
        CONTEXT_PARALLEL
        + """
from anyflash.torch import _sdpa, sdpa  # inside of the block it would find another function
with sdpa(), sharded():
    assert (attend() - expected).abs().max() < 1e-5
with sharded():
    try:
        with sdpa():
            raise AssertionError("entered")
    except RuntimeError as error:
        assert "is replaced by torch.distributed.tensor.experimental._context_parallel" in str(error), error
    assert (attend() - expected).abs().max() < 1e-5
assert F.scaled_dot_product_attention is _sdpa._pytorch_s_own
""",
        tmp_path,
    )


@pytest.mark.of_the_cpu
def test_auto_is_refused_in_context_parallel(tmp_path):
    run_processes(
        CONTEXT_PARALLEL
        + """
own = F.scaled_dot_product_attention
with sharded():
    try:
        import anyflash.torch.auto
        raise AssertionError("imported")
    except RuntimeError as error:
        assert "is replaced by" in str(error), error
    assert (attend() - expected).abs().max() < 1e-5
assert F.scaled_dot_product_attention is own
import anyflash.torch.auto
assert F.scaled_dot_product_attention.__wrapped__ is own
""",
        tmp_path,
    )


def test_auto_stays_and_layers_of_pytorch_use_it():
    program = """
import sys, torch, anyflash.torch.auto
from anyflash import _arrays, _core
from anyflash.torch import _sdpa, sdpa
with sdpa(): pass
calls = []
for name in ("attention", "plain_attention"):
    real = getattr(_sdpa, name)
    setattr(_sdpa, name, lambda *a, real=real, **o: calls.append(1) or real(*a, **o))
made = dict(dtype=torch.float64, device=sys.argv[1])
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **made)
x = torch.randn(2, 5, 16, **made)
ours = layer(x)
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    torch.nn.functional.scaled_dot_product_attention = _sdpa._pytorch_s_own
    assert (ours - layer(x)).abs().max() < 1e-12 and calls
"""
    ran = subprocess.run([sys.executable, "-c", program, DEVICE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


LAYERS = {
    "attention": lambda **made: torch.nn.MultiheadAttention(16, 2, batch_first=True, **made),
    "layer": lambda **made: torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **made),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_switch_of_pytorch_s_fused_layers(ours_called, numbers, name, frozen):
    """As the guide has it: in eval() they go past the function where nothing needs a gradient, but for the switch."""
    layer, x = LAYERS[name](dtype=torch.float64, device=DEVICE).eval().requires_grad_(not frozen), numbers(2, 5, 16)
    given = (x, x, x) if name == "attention" else (x,)
    options = {"need_weights": False} if name == "attention" else {}
    with torch.set_grad_enabled(frozen), sdpa():
        assert ours_called(lambda: layer(*given, **options)) == 0
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert ours_called(lambda: layer(*given, **options)) == 1
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    with sdpa():
        assert ours_called(lambda: layer.train()(*given, **options)) == 1


def test_auto_can_be_undone():
    program = """
import torch.nn.functional as F
own = F.scaled_dot_product_attention
import anyflash.torch.auto
from anyflash.torch import sdpa
first = anyflash.torch.auto
assert F.scaled_dot_product_attention.__wrapped__ is own
with sdpa():
    first.undo()
    assert F.scaled_dot_product_attention is not own  # of the block
assert F.scaled_dot_product_attention is own
first.undo()
from anyflash.torch import auto
assert auto is first and F.scaled_dot_product_attention is own
import anyflash.torch.auto
assert F.scaled_dot_product_attention.__wrapped__ is own
first.undo()  # not of this one
assert F.scaled_dot_product_attention.__wrapped__ is own
anyflash.torch.auto.undo()
assert F.scaled_dot_product_attention is own
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
