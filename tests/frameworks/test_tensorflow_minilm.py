"""examples/minilm with its layers in TensorFlow: the embeddings are those of NumPy and of a plain encoder."""

import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from test_minilm import encoder, model, plain_embedding, random_texts, run, search, small_weights  # noqa: F401


def test_embeddings(model):
    coder = encoder.Encoder(model)
    tokens = coder.tokens(random_texts(12, 1, 20))
    bar = tqdm(total=12, disable=True)
    got = search.packed(coder, tokens, bar, "tensorflow")
    np.testing.assert_allclose(got, search.packed(coder, tokens, bar), rtol=0, atol=2e-6)
    np.testing.assert_allclose(got, [plain_embedding(small_weights(), text) for text in tokens], rtol=0, atol=2e-6)


def test_program(model, tmp_path):
    texts = random_texts(20, 4, 20)
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    done = run("text.txt", texts[13], "--model", model, "--framework", "tensorflow", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"  1. (1.00) {texts[13]}\n" in done.stdout
    assert f"{encoder.Encoder(model).heads} heads in tensorflow;" in done.stdout
