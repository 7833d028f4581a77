"""Writes docs/gallery.md and docs/pictures: every rule under every alignment, and the field's known patterns as rules.

python docs/make_gallery.py            the pictures come from anyflash.explain
python docs/make_gallery.py --check    only says whether the files are up to date (exit code 1 if not)
"""

import argparse
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import anyflash as af
import numpy as np

DOCS = Path(__file__).resolve().parent
ALIGNMENTS = ("none_front", "none_end", "scale_front", "scale_end")
QUERIES, KEYS = 24, 12  # of the rules' pictures


IMPORTS = "import numpy as np\nimport anyflash as af"
DOCUMENTS = """\
ids_q = np.repeat([0, 1, 2], [6, 10, 8])  # the document of each query
ids_k = np.repeat([0, 1, 2], [2, 6, 4])  # and of each key
"""

# The rules: (heading, code whose last line is the rule, words)
RULES = [
    ("full", "af.full()", "Every query sees every key."),
    ("causal", "af.causal()", "A query sees the keys at or before its own coordinate, in row-major order."),
    ("local", "af.local(4)", "Keys closer than `window` in every dimension."),
    (
        "local, strided",
        "af.local(4, log2_stride=1)",
        "Keys at distances that are a multiple of 2^log2_stride, fewer than `window` strides away.",
    ),
    ("local, causal", "af.local(6, causal=True)", "The same as `local`, and causal."),
    ("window", "af.window(5, 1)", "From `left` before to `right` after, per dimension; a negative bound is unlimited."),
    ("prefix", "af.prefix(5)", "The keys at coordinates below n."),
    (
        "prefix_queries",
        "af.prefix_queries(5)",
        "The queries at coordinates below n see every key: the twin of `prefix`. `prefix(n) | prefix_queries(n)` makes the "
        "first n tokens global.",
    ),
    ("sink", "af.sink(3)", "The first n keys as they lie in memory, whatever the alignment."),
    (
        "documents",
        DOCUMENTS + "af.documents(ids_q, ids_k)",
        "Query and key of one document. In a sequence of one dimension the coordinates of the other rules restart "
        "inside each.",
    ),
    (
        "tiles",
        "af.tiles(3, 3)",
        "Sliding tiles: the kernel of tiles centred on the query's tile, kept inside where it fits.",
    ),
    ("neighbourhood", "af.neighbourhood(7)", "The `kernel` nearest keys, shifted inwards at the borders (NATTEN)."),
    (
        "neighbourhood, dilated",
        "af.neighbourhood(5, dilation=2)",
        "The same among the keys whose distance is a multiple of `dilation`.",
    ),
    (
        "blocks",
        "bitmap = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]], bool)\naf.blocks(bitmap, 6, 4)",
        "A bitmap of blocks, counted in memory order: here 4 x 3 blocks of 6 queries x 4 keys.",
    ),
    (
        "dense",
        "mask = np.random.default_rng(1).random((24, 12)) < 0.4\naf.dense(mask)",
        "Any mask, read from memory. No other rule reads a matrix: use it only where no rule says the same.",
    ),
    (
        "documents and causal",
        DOCUMENTS + "af.documents(ids_q, ids_k) & af.causal()",
        "The alignment holds inside each document.",
    ),
    ("not", "~af.local(4)", "Everything that the rule hides."),
]

# The patterns: (heading, code, shape of the queries, words); the keys have the same shape unless KEY_SHAPES says else
KEY_SHAPES = {"Flamingo's cross-attention": (48,), "Flamingo with overlapping intervals": (48,)}
PATTERNS = [
    (
        "Dilated sliding window",
        "af.local(6, log2_stride=2)",
        (64,),
        "Longformer's dilated heads: every 4th key, 5 steps each way.",
    ),
    (
        "Dilated window of any step",
        "af.neighbourhood(64, dilation=3) & af.window(15, 15)",
        (64,),
        "Every 3rd key, 5 steps each way. A `neighbourhood` as long as the sequence shows all keys of the query's residue "
        "class, so the step may be any number; `window` bounds the distance. With `& af.causal()` it looks back only.",
    ),
    (
        "Longformer",
        "af.window(6, 6) | af.prefix(4) | af.prefix_queries(4)",
        (64,),
        "A sliding window, and four global tokens, which see all and which all see.",
    ),
    (
        "StreamingLLM",
        "af.causal() & (af.window(15, 0) | af.sink(4))",
        (64,),
        "The last 16 keys and the first 4, the attention sinks.",
    ),
    ("Prefix LM", "af.causal() | af.prefix(20)", (64,), "A prompt that is seen both ways, then causal text."),
    (
        "Documents and causal",
        "ids = np.repeat([0, 1, 2], [20, 28, 16])\naf.documents(ids, ids) & af.causal()",
        (64,),
        "Packed training of a language model.",
    ),
    (
        "Shared prefix",
        """\
ids = np.repeat([0, 1, 2, 3], 16)  # the prompt and three continuations
same = af.documents(ids, ids)
(same & af.causal()) | (af.sink(16) & ~same)""",
        (64,),
        "Three continuations of one prompt of 16 tokens, in one sequence.",
    ),
    ("NATTEN", "af.neighbourhood(5)", (10, 10), "Neighbourhood attention on a 10 x 10 image, kernel 5 x 5."),
    ("Two-dimensional local", "af.local(3)", (10, 10), "A 5 x 5 window on a 10 x 10 image, cut at the borders."),
    (
        "Sliding tiles",
        "af.tiles((2, 2, 2), (3, 3, 3))",
        (6, 6, 8),
        "Sliding-tile attention for video: tiles of 2 x 2 x 2, a kernel of 3 x 3 x 3 tiles.",
    ),
    (
        "Flamingo's cross-attention",
        """\
images_so_far = np.repeat([0, 1, 2, 3], [8, 20, 12, 24])  # before each of 64 text tokens
image_of_key = np.repeat([1, 2, 3], 16)  # 3 images of 16 patches
af.documents(images_so_far, image_of_key)""",
        (64,),
        "Text sees the patches of the last image before it; text before the first image sees none.",
    ),
    (
        "Flamingo with overlapping intervals",
        """\
images_so_far = np.repeat([0, 1, 2, 3], [8, 20, 12, 24])  # before each of 64 text tokens
image = np.arange(1, 4)  # 3 images of 16 patches
last_two = (image <= images_so_far[:, None]) & (image > images_so_far[:, None] - 2)
af.blocks(last_two, 1, 16)""",
        (64,),
        "Text sees the patches of the last two images before it. The images that two texts see may overlap, which documents "
        "cannot say: the bitmap has a row for each text token and a column for each image.",
    ),
    (
        "Sparse VideoGen, spatial head",
        "af.window((1, -1, -1), (1, -1, -1)) | af.prefix(16)",
        (6, 4, 4),
        "Every place in the same frame and its neighbours; all see the first frame, which has 16 entries.",
    ),
    (
        "Sparse VideoGen, temporal head",
        "af.window((-1, 0, 1), (-1, 0, 1)) | af.prefix(16)",
        (6, 4, 4),
        "The same place in every frame, here with its neighbours in the row; all see the first frame.",
    ),
    (
        "Block diffusion",
        """\
same, before = np.eye(8, dtype=bool), np.tri(8, k=-1, dtype=bool)
bitmap = np.block([[same, before], [np.zeros_like(same), before | same]])
af.blocks(bitmap, 4, 4)""",
        (64,),
        "BD3-LM training, noisy blocks first, then the clean ones: a noisy block sees itself and the clean blocks before "
        "it, a clean block the clean blocks up to itself.",
    ),
    (
        "BigBird",
        """\
place = np.arange(16)  # of 16 blocks of 4 tokens
near = abs(place[:, None] - place) <= 1
first = (place[:, None] == 0) | (place == 0)
random = np.eye(16, dtype=bool)[np.random.default_rng(0).integers(0, 16, 16)]
af.blocks(near | first | random, 4, 4)""",
        (64,),
        "Window, global and random blocks.",
    ),
]


# The picture of README.md and docs/index.md: (name, words, code, shape of queries and keys).
SIX = [
    ("Causal", "causal()", "af.causal()", (48,)),
    (
        "Window with sinks",
        "causal() & (window(11, 0) | sink(4))",
        "af.causal() & (af.window(11, 0) | af.sink(4))",
        (48,),
    ),
    (
        "Packed documents",
        "documents(ids) & causal()",
        "ids = np.repeat([0, 1, 2], [14, 22, 12])\naf.documents(ids, ids) & af.causal()",
        (48,),
    ),
    ("Prefix LM", "causal() | prefix(16)", "af.causal() | af.prefix(16)", (48,)),
    ("Pixels, 2-D", "neighbourhood(5)", "af.neighbourhood(5)", (7, 7)),
    (
        "Block bitmap",
        "blocks(bitmap, 4, 4)",
        """\
place = np.arange(12)
random = np.eye(12, dtype=bool)[np.random.default_rng(2).integers(0, 12, 12)]
af.blocks((abs(place[:, None] - place) <= 1) | (place[:, None] == 0) | (place == 0) | random, 4, 4)""",
        (48,),
    ),
]


def six_rules():
    """Six rules beside each other, in two rows, as SVG."""
    side, step_x, step_y, top, width, height = 200, 280, 262, 46, 820, 520
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" fill="#222">',
        "<title>Six rules: queries run down, keys across; dark means that the query sees the key</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for n, (name, words, code, shape) in enumerate(SIX):
        visible = np.asarray(af.explain(rule_of(code), shape).pattern)
        x, y, step = 16 + n % 3 * step_x, top + n // 3 * step_y, side / len(visible)
        parts += [
            f'<text x="{x}" y="{y - 24}" font-size="15" font-weight="bold">{name}</text>',
            f'<text x="{x}" y="{y - 8}" font-size="12" font-family="DejaVu Sans Mono, monospace">{escape(words)}</text>',
            f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="#e8eef5"/>',
        ]
        path = ""
        for row, seen in enumerate(visible):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], seen.astype(int), [0]])))
            for begin, end in edges.reshape(-1, 2):
                path += f"M{x + begin * step:.6g} {y + row * step:.6g}h{(end - begin) * step:.6g}v{step:.6g}"
                path += f"h{(begin - end) * step:.6g}z"
        parts.append(f'<path d="{path}" fill="#1f5a96"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


# A bias has no pattern to draw.
SIGNED_ALIBI = """\
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 64, 32), np.float32)
slopes = 2.0 ** -np.arange(1, 9)  # of 8 heads
bias = (slopes[:, None] * np.arange(64)).astype(np.float32)
out = af.attention(q, k, v, bias=bias[None, :, None, :])  # (1, heads, 1, keys)"""


def rule_of(code):
    """The value of the code's last line."""
    *lines, last = code.split("\n")
    names = {}
    exec("\n".join([IMPORTS, *lines]), names)
    return eval(last, names)


def python(code):
    return ["```python", code, "```", ""]


def slug(heading):
    return "".join(c if c.isalnum() else "-" for c in heading.lower()).strip("-").replace("--", "-")


def size(shape):
    return " x ".join(map(str, shape))


def picture(files, name, rule, q_shape, k_shape, align="none_front"):
    files[f"pictures/{name}.svg"] = af.explain(rule, q_shape, k_shape, align=align).svg()
    return f"![{name}](pictures/{name}.svg)"


def gallery():
    """{file name: text}"""
    files = {"pictures/six-rules.svg": six_rules()}
    page = [
        "# Rule gallery",
        "",
        "Made by `docs/make_gallery.py` with `anyflash.explain`. Queries run down, keys across; dark means the "
        "query sees the key.\n"
        "The code runs as it stands, after",
        "",
        *python(IMPORTS),
        "## Every rule, every alignment",
        "",
        f"{QUERIES} queries and {KEYS} keys, so that the alignments differ: see [the guide](guide/masks.md#alignment).",
        "",
    ]
    for heading, code, words in RULES:
        name = slug(heading)
        cells = [picture(files, f"{name}-{align}", rule_of(code), (QUERIES,), (KEYS,), align) for align in ALIGNMENTS]
        page += [
            f"### {heading}",
            "",
            words,
            "",
            *python(code),
            "| " + " | ".join(ALIGNMENTS) + " |",
            "|---|---|---|---|",
            "| " + " | ".join(cells) + " |",
            "",
        ]
    page += ["## Known patterns", ""]
    for heading, code, shape, words in PATTERNS:
        keys = KEY_SHAPES.get(heading, shape)
        sizes = f"{size(shape)} queries and keys." if keys == shape else f"{size(shape)} queries, {size(keys)} keys."
        page += [
            f"### {heading}",
            "",
            words,
            sizes,
            "",
            *python(code),
            picture(files, f"pattern-{slug(heading)}", rule_of(code), shape, keys),
            "",
        ]
    page += [
        "## Biases",
        "",
        "### Signed ALiBi",
        "",
        "Scores gain slope times (key - query): keys behind a query lose, keys ahead of it gain. `alibi_slopes` takes "
        "the distance without its sign.\n"
        "The part of the query is the same for all keys of a row, so the softmax does not change without it. The part "
        "of the key is a bias of one row a head.\n"
        "`lse` is larger by slope times query than with both parts. With a sink logit use the whole bias: the sink "
        "does not move with the row.",
        "",
        *python(SIGNED_ALIBI),
    ]
    files["gallery.md"] = "\n".join(page)
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--check", action="store_true", help="only say whether the files are up to date (exit code 1 if not)"
    )
    check = parser.parse_args().check
    files = gallery()
    if check:
        old = [name for name, text in files.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text]
        sys.exit(f"out of date: {', '.join(old)}; run python docs/make_gallery.py" if old else 0)
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, text in files.items():
        (DOCS / name).write_text(text)
    print(f"wrote {len(files)} files to {DOCS}")


if __name__ == "__main__":
    main()
