"""Writes docs/gallery.md and docs/pictures: every rule under every alignment, and the field's known patterns as rules.

    python docs/make_gallery.py            the pictures come from anyflash.explain
    python docs/make_gallery.py --check    only says whether the files are up to date (exit code 1 if not)
"""

import sys
from pathlib import Path

import numpy as np

import anyflash as af

DOCS = Path(__file__).resolve().parent
ALIGNMENTS = ("none_front", "none_end", "scale_front", "scale_end")
QUERIES, KEYS = 24, 12  # of the rules' pictures


def ids(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def longformer_bitmap(blocks=16, globals_=1):
    bitmap = np.zeros((blocks, blocks), bool)
    bitmap[:globals_] = bitmap[:, :globals_] = True
    return bitmap


def bigbird_bitmap(blocks=16):
    bitmap = abs(np.subtract.outer(np.arange(blocks), np.arange(blocks))) <= 1
    bitmap |= longformer_bitmap(blocks)
    bitmap[np.arange(blocks), np.random.default_rng(0).integers(0, blocks, blocks)] = True
    return bitmap


def block_diffusion_bitmap(blocks=8):
    """Noisy blocks first, then the clean ones: a noisy block sees itself and the clean blocks before it, a clean block the
    clean blocks up to itself."""
    before = np.tri(blocks, k=-1, dtype=bool)
    eye = np.eye(blocks, dtype=bool)
    return np.block([[eye, before], [np.zeros_like(eye), before | eye]])


# The rules: (heading, code shown, rule for QUERIES x KEYS, words)
RULES = [
    ("full", "af.full()", af.full(), "Every query sees every key."),
    ("causal", "af.causal()", af.causal(), "A query sees the keys at or before its own coordinate, in row-major order."),
    ("local", "af.local(4)", af.local(4), "Keys closer than `window` in every dimension."),
    ("local, strided", "af.local(4, log2_stride=1)", af.local(4, log2_stride=1),
     "Keys at distances that are a multiple of 2^log2_stride, fewer than `window` strides away."),
    ("local, causal", "af.local(6, causal=True)", af.local(6, causal=True), "The same, and causal."),
    ("window", "af.window(5, 1)", af.window(5, 1), "From `left` before to `right` after, per dimension; a negative bound is unlimited."),
    ("prefix", "af.prefix(5)", af.prefix(5), "The keys at coordinates below n."),
    ("sink", "af.sink(3)", af.sink(3), "The first n keys as they lie in memory, whatever the alignment."),
    ("documents", "af.documents(ids_q, ids_k)", af.documents(ids(6, 10, 8), ids(2, 6, 4)),
     "Query and key of one document; coordinates restart inside each. Here documents of 6, 10 and 8 queries and 2, 6 and 4 keys."),
    ("tiles", "af.tiles(3, 3)", af.tiles(3, 3), "Sliding tiles: the kernel of tiles centred on the query's tile, kept inside where it fits."),
    ("neighbourhood", "af.neighbourhood(7)", af.neighbourhood(7), "The `kernel` nearest keys, shifted inwards at the borders (NATTEN)."),
    ("neighbourhood, dilated", "af.neighbourhood(5, dilation=2)", af.neighbourhood(5, dilation=2), "The same inside each residue class."),
    ("blocks", "af.blocks(bitmap, 6, 4)", af.blocks(np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]], bool), 6, 4),
     "A bitmap of blocks, counted in memory order."),
    ("dense", "af.dense(mask)", af.dense(np.random.default_rng(1).random((QUERIES, KEYS)) < 0.4),
     "Any mask, read from memory: the slow path, and the only one."),
    ("documents and causal", "af.documents(ids_q, ids_k) & af.causal()",
     af.documents(ids(6, 10, 8), ids(2, 6, 4)) & af.causal(), "The alignment holds inside each document."),
    ("not", "~af.local(4)", ~af.local(4), "Everything that the rule hides."),
]

SHARED = af.documents(ids(16, 16, 16, 16), ids(16, 16, 16, 16))

# The patterns: (heading, code shown, rule, shape of the queries, words); the keys have the same shape unless KEY_SHAPES says else
KEY_SHAPES = {"Flamingo's cross-attention": (48,)}
PATTERNS = [
    ("Dilated sliding window", "af.local(6, log2_stride=2)", af.local(6, log2_stride=2), (64,),
     "Longformer's dilated heads: every 4th key, 5 steps each way."),
    ("Longformer", "af.window(6, 6) | af.blocks(cross, 4, 4)", af.window(6, 6) | af.blocks(longformer_bitmap(), 4, 4), (64,),
     "A sliding window, and four global tokens that see all and that all see: the first row and column of a block bitmap."),
    ("StreamingLLM", "af.causal() & (af.window(15, 0) | af.sink(4))", af.causal() & (af.window(15, 0) | af.sink(4)), (64,),
     "The last 16 keys and the first 4, the attention sinks."),
    ("Prefix LM", "af.causal() | af.prefix(20)", af.causal() | af.prefix(20), (64,), "A prompt that is seen both ways, then causal text."),
    ("Documents and causal", "af.documents(ids, ids) & af.causal()", af.documents(ids(20, 28, 16), ids(20, 28, 16)) & af.causal(), (64,),
     "Packed training of a language model."),
    ("Shared prefix", "(af.documents(ids, ids) & af.causal()) | (af.sink(16) & ~af.documents(ids, ids))",
     (SHARED & af.causal()) | (af.sink(16) & ~SHARED), (64,), "Three continuations of one prompt of 16 tokens, in one sequence."),
    ("NATTEN", "af.neighbourhood(5)", af.neighbourhood(5), (10, 10), "Neighbourhood attention on a 10 x 10 image, kernel 5 x 5."),
    ("Two-dimensional local", "af.local(3)", af.local(3), (10, 10), "A 5 x 5 window on a 10 x 10 image, cut at the borders."),
    ("Sliding tiles", "af.tiles((2, 2, 2), (3, 3, 3))", af.tiles((2, 2, 2), (3, 3, 3)), (6, 6, 8),
     "Sliding-tile attention for video: tiles of 2 x 2 x 2, a kernel of 3 x 3 x 3 tiles."),
    ("Flamingo's cross-attention", "af.documents(images_so_far, image_of_key)",
     af.documents(np.repeat(np.arange(4, dtype=np.int32), [8, 20, 12, 24]), np.repeat(np.arange(1, 4, dtype=np.int32), 16)),
     (64,), "Text sees the patches of the last image before it; text before the first image sees none."),
    ("Block diffusion", "af.blocks(bitmap, 4, 4)", af.blocks(block_diffusion_bitmap(), 4, 4), (64,),
     "BD3-LM training: noisy blocks beside the clean sequence."),
    ("BigBird", "af.blocks(bitmap, 4, 4)", af.blocks(bigbird_bitmap(), 4, 4), (64,), "Window, global and random blocks."),
]


def slug(heading):
    return "".join(c if c.isalnum() else "-" for c in heading.lower()).strip("-").replace("--", "-")


def picture(files, name, rule, q_shape, k_shape, align="none_front"):
    files[f"pictures/{name}.svg"] = af.explain(rule, q_shape, k_shape, align=align).svg()
    return f"![{name}](pictures/{name}.svg)"


def gallery():
    """{file name: text}"""
    files = {}
    page = ["# Rule gallery", "",
            "Made by `docs/make_gallery.py` with `anyflash.explain`. Queries run down, keys across; dark means the query sees the key.",
            "", "## Every rule, every alignment", "",
            f"{QUERIES} queries and {KEYS} keys, so that the alignments differ: see [the guide](guide.md#alignment).", ""]
    for heading, code, rule, words in RULES:
        name = slug(heading)
        cells = [picture(files, f"{name}-{align}", rule, (QUERIES,), (KEYS,), align) for align in ALIGNMENTS]
        page += [f"### {heading}", "", f"`{code}`", "", words, "", "| " + " | ".join(ALIGNMENTS) + " |", "|---|---|---|---|",
                 "| " + " | ".join(cells) + " |", ""]
    page += ["## Known patterns", ""]
    for heading, code, rule, shape, words in PATTERNS:
        page += [f"### {heading}", "", f"`{code}`", "", words, "",
                 picture(files, f"pattern-{slug(heading)}", rule, shape, KEY_SHAPES.get(heading, shape)), ""]
    files["gallery.md"] = "\n".join(page)
    return files


def main():
    files = gallery()
    if "--check" in sys.argv[1:]:
        old = [name for name, text in files.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text]
        sys.exit(f"out of date: {', '.join(old)}; run python docs/make_gallery.py" if old else 0)
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, text in files.items():
        (DOCS / name).write_text(text)
    print(f"wrote {len(files)} files to {DOCS}")


if __name__ == "__main__":
    main()
