"""examples/minilm with its layers in JAX: the embeddings are those of NumPy and of a plain encoder."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from test_minilm import MINILM, encoder, model, plain_embedding, random_texts, run, search, small_weights  # noqa: F401


def test_embeddings(model):
    coder = encoder.Encoder(model)
    tokens = coder.tokens(random_texts(12, 1, 20))
    bar = tqdm(total=12, disable=True)
    got = search.packed(coder, tokens, bar, "jax")
    np.testing.assert_allclose(got, search.packed(coder, tokens, bar), rtol=0, atol=2e-6)
    np.testing.assert_allclose(got, [plain_embedding(small_weights(), text) for text in tokens], rtol=0, atol=2e-6)


@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_program(model, tmp_path, framework):
    texts = random_texts(20, 4, 20)
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    done = run("text.txt", texts[13], "--model", model, "--framework", framework, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"  1. (1.00) {texts[13]}\n" in done.stdout
    assert (f"{encoder.Encoder(model).heads} heads in jax;" in done.stdout) == (framework == "jax")


def test_every_framework_of_the_program_has_its_functions():
    arguments = (MINILM / "arguments.py").read_text()
    import frameworks

    for name in frameworks.FRAMEWORKS:
        assert f'"{name}"' in arguments
