"""bench/profile's reading of Nsight Compute's list: which kernel is of which call, its shares, and what it waits for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import gpu_profile

STALLS = ("barrier", "wait", "long_scoreboard", "gmma", "selected")
COLUMNS = [
    "ID",
    "Kernel Name",
    *gpu_profile.METRICS,
    *(f"smsp__average_warps_issue_stalled_{one}_per_issue_active.ratio" for one in STALLS),
]


def line(*values):
    return ",".join(f'"{value}"' for value in values)


def kernel(name, nanoseconds, stalls):
    return line(0, name, nanoseconds, "89.94", "31.5", "12.25", "80", "168", *stalls)


def test_each_kernel_has_its_call_and_its_longest_waits():
    mark = kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 2000, ["", "", "", "", ""])
    report = [
        "==PROF== Connected to process 7",
        line(*COLUMNS),
        line("", "", "nsecond", *[""] * (len(COLUMNS) - 3)),
        mark,
        kernel("void anyflash::cuda::prepare<__half, 64>(anyflash::cuda::Args)", "1,999", [1, 0, 0, 0, 0]),
        kernel("void anyflash::cuda::attend<anyflash::cuda::Block<128> >(Args)", "1,234,500", [1, 2, 3, 4, 10]),
        kernel("anyflash::cuda::(anonymous namespace)::words_kernel(anyflash::Args)", 4400, [0, 1, 0, 0, 0]),
        mark,
        kernel("flash_fwd(Params)", 5000, ["0", "1", "0", "1,000", "0"]),
    ]
    ours, words, theirs = gpu_profile.rows(report, ["full 512, anyflash", "full 512, FA3"])
    figures = ["89.9", "31.5", "12.2", "80", "168"]
    assert ours == ("full 512, anyflash", "attend", ["1234.5", *figures], "gmma 20 %, long_scoreboard 15 %, wait 10 %")
    assert words[:2] == ("full 512, anyflash", "words_kernel")
    assert theirs[:3] == ("full 512, FA3", "flash_fwd", ["5", *figures])
    assert theirs[3].startswith("gmma 100 %")
