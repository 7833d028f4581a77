"""examples/packed_text: it learns as with JAX's own attention under a mask; packs give what paragraphs alone do."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "packed_text"
sys.path.insert(0, str(FOLDER))

import train


@pytest.fixture
def paragraphs():
    return train.paragraphs_of([train.PROJECT / "README.md"])


def test_packs(paragraphs):
    text, ids, places = train.pack_of(paragraphs)
    assert len(text) == len(ids) == len(places) == train.PACK and (np.diff(ids) >= 0).all()
    for i in range(ids[-1]):
        assert any(np.array_equal(text[ids == i], one) for one in paragraphs)
        assert (places[ids == i] == np.arange((ids == i).sum())).all()


def test_loss_falls_as_with_jax_s_attention(paragraphs, monkeypatch):
    monkeypatch.setattr(train, "PACK", 512)  # bytes
    with jax.enable_x64(False):
        got, weights = train.train(paragraphs, 20)
        expected, _ = train.train(paragraphs, 20, seen_by=train.seen_with_a_mask)
        packed, alone = train.packed_and_alone(weights, paragraphs)
    assert got[-1] < 0.8 * got[0]
    assert got == pytest.approx(expected, abs=0.02)
    assert packed == pytest.approx(alone, abs=1e-4)


def test_program(tmp_path):
    file = tmp_path / "text"
    file.write_text("exact attention for any mask rule\n\nand a second paragraph of it\n\n" * 20)
    call = [sys.executable, FOLDER / "train.py", "--steps", "10"]
    done = subprocess.run([*call, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("40 paragraphs, ") and lines[1].startswith("step    1  loss ")
    assert lines[-1].startswith("loss of a pack of paragraphs ")
    file.write_text("short\n\n" + 40 * "\0")
    done = subprocess.run([*call, file], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith("files: no paragraphs of more than 20 bytes")
    done = subprocess.run([*call[:-1], "0", file], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith("--steps: 0, expected at least 1")
