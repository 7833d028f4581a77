"""The table "which kernel takes my call" of docs/guide/gpu.md, from the kernels that a Hopper GPU was seen to launch.

python docs/make_kernel_table.py             writes the table from docs/kernels.json
python docs/make_kernel_table.py --check     only says whether the table is up to date (exit code 1 if not)
python docs/make_kernel_table.py --record    makes every call on this machine's GPU and writes docs/kernels.json first
                                             (needs PyTorch with CUDA, and anyflash built for sm_90a)
"""

import argparse
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RECORD, PAGE = DOCS / "kernels.json", DOCS / "guide" / "gpu.md"
BLOCK = re.compile(r"(<!-- kernels:.*? -->\n).*?(<!-- end of kernels -->)", re.S)
TYPES = {"16-bit": ("bfloat16", "float16"), "float32": ("float32",), "float64": ("float64",)}
DIRECTIONS = ("forward", "backward")
# A call's family, by the first of these that a kernel's name has. Hopper's kernels are followed by the portable one,
# which ends at once unless something is not finite: so Hopper's come first.
FAMILIES = {"bulk_decode_kernel": "Hopper decode", "group_kernel": "Hopper", "decode_kernel": "decode"}
PORTABLE = {"forward": "forward_kernel", "backward": "gradients_kernel"}


def calls():
    """{what: (options, q's shape, k's shape)} of the rows; options may be a function of (torch, af)."""
    plain, odd, wide, deep = ((1, 4, 1024, d) for d in (128, 100, 192, 256))
    one, keys = (2, 8, 1, 128), (2, 2, 2048, 128)
    image, video, steps = (1, 4, 64, 64, 64), (1, 4, 8, 16, 16, 64), (1, 4, 1024, 64)
    ids = lambda torch: torch.arange(1024) // 300
    ends = lambda torch: torch.tensor([0, 300, 1024], dtype=torch.int32)
    lengths = lambda torch, *n: torch.tensor(n, dtype=torch.int32)
    bitmap = lambda torch: torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = lambda torch: torch.rand(1024, 1024, generator=torch.Generator().manual_seed(0)) < 0.5
    table = lambda torch, n: torch.arange(2 * 2048 // n, dtype=torch.int32).view(2, -1)
    packed = (1024, 4, 128)
    paged = lambda n: (2 * 2048 // n, n, 2, 128)

    def pages(n, **more):
        return lambda torch, af: dict(page_table=table(torch, n), key_lengths=lengths(torch, 2000, 900), **more)

    end = lambda af: dict(rule=af.causal(), align="none_end")
    return {
        "`causal`": (lambda torch, af: dict(rule=af.causal()), plain, plain),
        "fewer key heads (grouped queries)": (lambda torch, af: dict(rule=af.causal()), plain, (1, 2, 1024, 128)),
        "`documents`, ids on the CPU": (lambda torch, af: dict(rule=af.documents(ids(torch))), plain, plain),
        "`documents`, ids on the GPU": (lambda torch, af: dict(rule=af.documents(ids(torch).cuda())), plain, plain),
        '`layout="thd"`, lengths on the CPU': (
            lambda torch, af: dict(layout="thd", cu_seqlens_q=ends(torch), cu_seqlens_k=ends(torch)),
            packed,
            packed,
        ),
        '`layout="thd"`, lengths on the GPU': (
            lambda torch, af: dict(layout="thd", cu_seqlens_q=ends(torch).cuda(), cu_seqlens_k=ends(torch).cuda()),
            packed,
            packed,
        ),
        "`key_lengths` on the CPU": (lambda torch, af: dict(key_lengths=lengths(torch, 800)), plain, plain),
        "`key_lengths` on the GPU": (lambda torch, af: dict(key_lengths=lengths(torch, 800).cuda()), plain, plain),
        "`blocks`, bitmap on the CPU": (lambda torch, af: dict(rule=af.blocks(bitmap(torch), 128, 128)), plain, plain),
        "`blocks`, bitmap on the GPU": (
            lambda torch, af: dict(rule=af.blocks(bitmap(torch).cuda(), 128, 128)),
            plain,
            plain,
        ),
        "`dense`, mask on the CPU": (lambda torch, af: dict(rule=af.dense(mask(torch))), plain, plain),
        "`dense`, mask on the GPU": (lambda torch, af: dict(rule=af.dense(mask(torch).cuda())), plain, plain),
        "two dimensions, `neighbourhood`": (lambda torch, af: dict(rule=af.neighbourhood(13)), image, image),
        "three dimensions, `tiles`": (lambda torch, af: dict(rule=af.tiles((2, 4, 4), (3, 3, 3))), video, video),
        "steps of 4, `log2_stride=2`": (lambda torch, af: dict(rule=af.local(16, log2_stride=2)), steps, steps),
        "steps of 3, `dilation=3`": (lambda torch, af: dict(rule=af.neighbourhood(63, dilation=3)), steps, steps),
        "head size 192": (lambda torch, af: {}, wide, wide),
        "head size 256": (lambda torch, af: {}, deep, deep),
        "head size 100, no multiple of 8": (lambda torch, af: {}, odd, odd),
        "`sink`": (lambda torch, af: dict(sink=torch.zeros(4)), plain, plain),
        "`softcap`": (lambda torch, af: dict(softcap=20.0), plain, plain),
        "`bias` of queries and keys": (lambda torch, af: dict(bias=torch.zeros(1, 4, 1024, 1024)), plain, plain),
        "`bias` with one number for all keys": (lambda torch, af: dict(bias=torch.zeros(1, 4, 1024, 1)), plain, plain),
        "`alibi_slopes`": (lambda torch, af: dict(alibi_slopes=torch.ones(4) / 8), plain, plain),
        "`deterministic=True`": (lambda torch, af: dict(deterministic=True), plain, plain),
        '`layout="bhds"`': (lambda torch, af: dict(layout="bhds"), (1, 4, 128, 1024), (1, 4, 128, 1024)),
        "many queries, pages of 16": (pages(16), (2, 8, 128, 128), paged(16)),
        "few queries": (lambda torch, af: end(af), one, keys),
        "few queries, `key_lengths`": (
            lambda torch, af: dict(key_lengths=lengths(torch, 2000, 900), **end(af)),
            one,
            keys,
        ),
        "few queries, a window": (lambda torch, af: dict(rule=af.window(500, 0), align="none_end"), one, keys),
        "few queries, pages of 16": (pages(16), one, paged(16)),
        "few queries, pages of 8": (pages(8), one, paged(8)),
        "few queries, `dense`": (
            lambda torch, af: dict(rule=af.dense(torch.ones(1, 2048, dtype=torch.bool).tril(1000))),
            one,
            keys,
        ),
        "few queries, `softcap`": (lambda torch, af: dict(softcap=20.0), one, keys),
    }


def family(names, direction):
    for part, found in FAMILIES.items():
        if any(re.search(rf"\b{part}\b", name) for name in names):
            return found
    if any(re.search(rf"\b{PORTABLE[direction]}\b", name) for name in names):
        return "portable"
    raise SystemExit(f"docs/make_kernel_table.py: no family of kernels for {sorted(set(names))}")


def launched(call):
    """The names of the kernels that a call launches, after one call that makes its plan."""
    import torch

    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "anyflash" in event.name]


def kernels_of(options, q_shape, k_shape, type_):
    """{direction: family} of one call; None where it is refused, as gradients through pages are."""
    import anyflash as af
    import torch

    dtype = getattr(torch, type_)
    given = options(torch, af)
    for name in ("sink", "bias", "alibi_slopes"):
        if name in given:
            given[name] = given[name].to("cuda", dtype if name == "bias" else given[name].dtype)
    q = torch.randn(q_shape, device="cuda", dtype=dtype)
    k, v = (torch.randn(k_shape, device="cuda", dtype=dtype) for _ in range(2))
    found = {"forward": family(launched(lambda: af.attention(q, k, v, **given)), "forward"), "backward": None}
    if "page_table" in given:
        return found
    out, lse = af.attention(q, k, v, return_lse=True, **given)
    backward = lambda: af.attention_backward(torch.ones_like(out), q, k, v, out, lse, **given)
    return found | {"backward": family(launched(backward), "backward")}


def measured():
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("docs/make_kernel_table.py: --record: expected a Hopper GPU")
    rows = {}
    for what, call in calls().items():
        rows[what] = {}
        for column, types in TYPES.items():
            found = [kernels_of(*call, type_) for type_ in types]
            if any(one != found[0] for one in found):
                raise SystemExit(f"docs/make_kernel_table.py: {what}: {types} take different kernels, {found}")
            rows[what][column] = found[0]
    return {"device": torch.cuda.get_device_name(), "rows": rows}


def table(record):
    cell = lambda kernels: (
        kernels["forward"]
        if kernels["backward"] in (None, kernels["forward"])
        else (f"{kernels['forward']}; backward {kernels['backward']}")
    )
    lines = ["| call | " + " | ".join(TYPES) + " |", "|---|" + "---|" * len(TYPES)]
    for what, row in record["rows"].items():
        lines.append(f"| {what} | " + " | ".join(cell(row[column]) for column in TYPES) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the table is up to date")
    parser.add_argument("--record", action="store_true", help="make every call on this machine's GPU first")
    arguments = parser.parse_args()
    if arguments.record:
        RECORD.write_text(json.dumps(measured(), indent=1) + "\n")
    old = PAGE.read_text()
    new = BLOCK.sub(lambda found: found[1] + table(json.loads(RECORD.read_text())) + found[2], old)
    if arguments.check and new != old:
        sys.exit("docs/guide/gpu.md: its table is not what docs/make_kernel_table.py writes")
    if not arguments.check:
        PAGE.write_text(new)


if __name__ == "__main__":
    main()
