"""Finds the paragraphs of a text that answer a question, with every attention on anyflash.

All paragraphs are packed into one sequence; the rule `documents` keeps them apart. The same paragraphs then go one by
one through textbook attention, and both are compared: embeddings, time, memory.
"""

import functools
import itertools
import multiprocessing
import re
import sys
import textwrap
import time
from pathlib import Path

import anyflash as af
import numpy as np
from arguments import OTHER_QUESTION, QUESTION, parse_arguments
from encoder import Encoder, model_folder, textbook_attention
from tqdm import tqdm

PROJECT = Path(__file__).resolve().parents[2]


def prose(markdown):
    """Without code, tables, headings, pictures and comments; the items of a list stand apart."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", markdown, flags=re.S | re.M)
    text = re.sub(r"^(#|\||!\[|    ).*", "", text, flags=re.M)
    return re.sub(r"^ *[-*] ", "\n", text, flags=re.M)


def paragraphs_of(files):
    """Paragraphs (blocks between blank lines) with at least four words; of Markdown files only the prose."""
    blocks = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"search: {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise SystemExit(f"search: {file}: not a text in UTF-8")
        if str(file).endswith(".md"):
            text = prose(text)
        blocks += [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [block for block in blocks if len(block.split()) >= 4]


def packed(encoder, tokens, bar, framework="numpy"):
    """Every paragraph in one sequence, one attention call a layer."""
    ids = np.repeat(np.arange(len(tokens), dtype=np.int32), [len(t) for t in tokens])
    if framework != "numpy":
        from frameworks import encode

        return encode(encoder, tokens, ids, framework, bar)
    rule = af.documents(ids, ids)
    layers = itertools.count(1)

    def attention(q, k, v):
        out = af.attention(q[None], k[None], v[None], rule=rule)[0]
        bar.update(len(tokens) * next(layers) // encoder.layers - bar.n)
        return out

    return encoder.encode(tokens, attention)


def one_by_one(encoder, tokens, bar):
    """Each paragraph alone, by the textbook formula."""
    rows = []
    for paragraph in tokens:
        rows.append(encoder.encode([paragraph], textbook_attention))
        bar.update(1)
    return np.concatenate(rows)


def memory(field):
    """VmRSS, memory now, or VmHWM, its highest so far, in MiB (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1024


def measured(way, model, texts, label):
    """Runs in a process of its own, so that its peak memory is its own: (embeddings, seconds, MiB beyond the model)."""
    encoder = Encoder(model)
    tokens = encoder.tokens(texts)
    way(encoder, tokens[:2], tqdm(disable=True))  # warm up: threads, pages of the weights
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
    before = memory("VmRSS")
    with tqdm(
        total=len(tokens), desc=label, mininterval=0.5, bar_format="{desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
    ) as bar:
        start = time.perf_counter()
        embeddings = way(encoder, tokens, bar)
        seconds = time.perf_counter() - start
    return embeddings, seconds, memory("VmHWM") - before


def in_own_process(*arguments):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(measured, arguments)
        pool.close()  # the process ends by itself: one that is stopped leaves its semaphores behind, with a warning
        pool.join()
        return result


def draw_rule(tokens, path):
    """The rule over the first paragraphs, as a picture."""
    shown = np.repeat(np.arange(len(tokens), dtype=np.int32), [len(t) for t in tokens])[:1024]
    try:
        af.explain(af.documents(shown, shown), (len(shown),)).save(path)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"search: --picture: {error}") from None


def main():
    arguments = parse_arguments()
    pages = [
        PROJECT / "README.md",
        *sorted((PROJECT / "docs").glob("*.md")),
        *sorted((PROJECT / "docs/guide").glob("*.md")),
    ]
    files = [arguments.text] if arguments.text else pages
    texts = paragraphs_of(files)
    if not texts:
        raise SystemExit(f"search: no paragraphs of four words or more in {files[0]}")
    model = arguments.model or model_folder()
    encoder = Encoder(model)
    tokens = encoder.tokens(texts)
    draw_rule(tokens, arguments.picture)
    total = sum(len(t) for t in tokens)
    what = arguments.text or "this project's documentation"
    print(f"{len(texts)} paragraphs, {total} tokens: {what}")
    name = arguments.model or "all-MiniLM-L6-v2"
    arrays = "" if arguments.framework == "numpy" else f" in {arguments.framework}"
    print(
        f"model {name}, {encoder.layers} layers of {encoder.heads} heads{arrays}; every paragraph is embedded twice:",
        flush=True,
    )

    way = functools.partial(packed, framework=arguments.framework)
    embeddings, packed_seconds, packed_memory = in_own_process(way, model, texts, "packed, anyflash    ")
    expected, textbook_seconds, textbook_memory = in_own_process(one_by_one, model, texts, "one by one, textbook")
    difference = float(np.abs(embeddings - expected).max())

    asked = arguments.question or (OTHER_QUESTION if arguments.text else QUESTION)
    question = encoder.encode(encoder.tokens([asked]), lambda q, k, v: af.attention(q[None], k[None], v[None])[0])
    scores = embeddings @ question[0]
    print(f"\n{asked}\nThe paragraphs nearest in meaning (1 would be the same):")
    for rank, index in enumerate(np.argsort(-scores)[: arguments.best], 1):
        print(f"  {rank}. ({scores[index]:.2f}) {textwrap.shorten(texts[index], 400, placeholder=' ...')}")

    mask, all_scores = total * total / 2**20, encoder.heads * total * total * 4 / 2**20
    print(f"""
                 packed, anyflash   one by one, textbook
time             {packed_seconds:14.2f} s   {textbook_seconds:18.2f} s
memory           {packed_memory:12.0f} MiB   {textbook_memory:16.0f} MiB   (highest, beside the model's weights)

largest difference of the embeddings: {difference:.1e} (at most 1e-5)
memory of a dense mask of the packed sequence: {mask:.0f} MiB, of its scores: {all_scores:.0f} MiB (anyflash: none)
picture of the rule (the first 1024 tokens): {arguments.picture}""")
    if not difference <= 1e-5:
        sys.exit("search: the embeddings differ by more than 1e-5")


if __name__ == "__main__":
    main()
