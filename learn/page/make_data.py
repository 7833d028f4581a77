"""Makes data.js: the numbers of the page and, for each rule, what the library says of it and computes.

python learn/page/make_data.py            writes it
python learn/page/make_data.py --check    only says whether it is up to date (exit code 1 if not), but for last digits,
                                          which differ between processors
"""

import argparse
import json
import sys
from pathlib import Path

import anyflash as af
import numpy as np

FILE = Path(__file__).with_name("data.js")
TOKENS, CHANNELS, BLOCK = 12, 3, 4
IDS = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2], np.int32)
RULES = {
    "causal()": af.causal(),
    "full()": af.full(),
    "causal window of 5": af.local(5, causal=True),
    "three documents": af.documents(IDS),
    "prefix of 4, else causal": af.prefix(4) | af.causal(),
    "every 2nd key, window of 3": af.local(3, log2_stride=1),
}


def numbers(name):
    """Three short numbers a row: they fit on the page, and are the same in every language."""
    values = np.random.default_rng(ord(name)).standard_normal((TOKENS, CHANNELS))
    return np.round(values * 1.5, 1)


def of_rule(rule, q, k, v):
    tensors = [x[None, None] for x in (q, k, v)]
    out, lse = af.attention(*tensors, rule=rule, return_lse=True)
    sees = np.asarray(af.explain(rule, (TOKENS,)).pattern).astype(int)
    return dict(sees=sees.tolist(), out=out[0, 0].tolist(), lse=lse[0, 0].tolist())


def data():
    q, k, v = (numbers(name) for name in "qkv")
    rules = {name: of_rule(rule, q, k, v) for name, rule in RULES.items()}
    return dict(block=BLOCK, q=q.tolist(), k=k.tolist(), v=v.tolist(), rules=rules)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=0, atol=1e-12)


def text(data):
    rows = json.dumps(data).replace('"rules"', '\n"rules"').replace(']}, "', ']},\n"')
    return f"// Written by make_data.py: the library's results in float64.\nconst DATA = {rows};\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return 0 if same(json.loads(FILE.read_text().partition("DATA = ")[2].rstrip(";\n")), data()) else 1
    FILE.write_text(text(data()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
