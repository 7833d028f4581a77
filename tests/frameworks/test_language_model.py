"""examples/language_model: it learns, with anyflash in PyTorch's place, as it does without."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from anyflash.torch import _sdpa, sdpa

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "language_model"
sys.path.insert(0, str(FOLDER))

import train


@pytest.fixture
def text():
    return torch.tensor(list((train.PROJECT / "README.md").read_bytes()))


def losses(text):
    torch.manual_seed(0)
    model = train.LanguageModel()
    return train.train(model, text, 40), model


def test_loss_falls_as_with_pytorch_s_attention(text, monkeypatch):
    calls = []
    for name in ("attention", "plain_attention"):
        real = getattr(_sdpa, name)
        monkeypatch.setattr(_sdpa, name, lambda *a, real=real, **o: calls.append(1) or real(*a, **o))
    expected, _ = losses(text)
    assert not calls
    with sdpa():
        got, model = losses(text)
        assert train.sample(model, b"Attention ", 5).startswith("Attention ")
    assert len(calls) == train.LAYERS * (40 + 5)
    assert got[-1] < 0.75 * got[0]
    assert got == pytest.approx(expected, abs=0.02)


def test_program(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"exact attention for any mask rule; " * 20)
    run = subprocess.run([sys.executable, FOLDER / "train.py", "--steps", "10", file], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].endswith("700 bytes of text") and lines[1].startswith("step    1  loss ")
    file.write_bytes(b"short")
    run = subprocess.run([sys.executable, FOLDER / "train.py", file], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.splitlines()[-1].endswith("files: 5 bytes, expected more than 128")
    run = subprocess.run([sys.executable, FOLDER / "train.py", tmp_path], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.splitlines()[-1].endswith(f"files: {tmp_path}: Is a directory")
    run = subprocess.run([sys.executable, FOLDER / "train.py", "--steps", "0"], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.splitlines()[-1].endswith("--steps: 0, expected at least 1")
