"""bench/overhead: what it times, and that a tiny call is within the limit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import overhead
import overhead_pairs


def test_the_calls_do_the_same():
    calls = overhead.calls()
    forward = {name: call() for name, call in calls.items() if not name.endswith("backward")}
    expected = forward.pop("NumPy, forward")
    assert len(forward) == 6
    for name, out in forward.items():
        assert abs(out.detach().numpy() - expected).max() < 1e-5, name
        assert out.requires_grad == name.endswith("gradient")
    gradients = [call()[0] for name, call in calls.items() if name.endswith("backward")]
    assert len(gradients) == 3 and all((one - gradients[-1]).abs().max() < 1e-5 for one in gradients)


def test_a_tiny_call_is_within_the_limit(monkeypatch):
    monkeypatch.setattr(overhead, "LOOPS", 200)
    calls = overhead.calls()
    chosen = {name: calls[name] for name in ("NumPy, forward", "anyflash.torch.attention, forward")}
    numpy, torch = (min(microseconds) for microseconds in overhead.timed(chosen).values())
    assert torch - numpy < overhead.LIMIT


def test_pairs_do_the_same():
    for name, pair in overhead_pairs.calls().items():
        ours, theirs = (made if isinstance(made, tuple) else (made,) for made in (call() for call in pair))
        assert all(abs(a - b).max() < 1e-5 for a, b in zip(ours, theirs, strict=True)), name
    models = [overhead_pairs.llama(name) for name in ("anyflash", "sdpa")]
    for static in (False, True):
        (_, ours), (_, theirs) = (overhead_pairs.tokens(model, static)() for model in models)
        assert abs(ours - theirs).max() < 1e-5
