"""bench/overhead: what it times, and that a tiny call is within the limit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import overhead  # noqa: E402


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
