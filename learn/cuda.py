"""The GPU's side of the ladder: rungs compiled by nvcc, arrays in the GPU's memory, times by CUDA events.

python learn/cuda.py FOLDER    compiles every rung and every test of device functions, for no GPU in particular
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ladder

SOURCES = ladder.FOLDER / "gpu"
# TFLOP/s of a card by NVIDIA's data sheets: float32, and float16 on tensor cores with float32 sums, without sparsity.
PEAKS = {
    "H200": (66.9, 989),
    "H100 PCIe": (51.2, 756),
    "H100": (66.9, 989),
    "A100": (19.5, 312),
    "L40S": (91.6, 362),
    "RTX 4090": (82.6, 165),
}


def compiler():
    found = os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not found:
        raise SystemExit("learn/climb: no nvcc: install the CUDA toolkit, or set CUDACXX")
    return found


def needs_hopper(source):
    return "sm_90a" in source.read_text()


def needs_cute(source):
    return "#include <cute/" in source.read_text()


def cute_headers():
    """The folder that has CuTe's and CUTLASS's headers: CUTLASS_INCLUDE, else in the package nvidia-cutlass. Or None."""
    if folder := os.environ.get("CUTLASS_INCLUDE"):
        return Path(folder)
    package = importlib.util.find_spec("cutlass_library")
    return Path(package.origin).parent / "source" / "include" if package else None


def without_cute(sources):
    """The sources, without those that need CuTe where it is not."""
    left = [source for source in sources if cute_headers() or not needs_cute(source)]
    if len(left) < len(sources):
        print("rung 15 left out: no CuTe; install nvidia-cutlass, or set CUTLASS_INCLUDE to its headers", flush=True)
    return left


def compile_one(source, folder, architecture, flags):
    """The compiler's words, if it has failed."""
    name = architecture.removeprefix("sm_")
    if needs_cute(source):  # of its many small functions --Ofast-compile inlines none: that takes three times as long
        flags = [*(flag for flag in flags if "Ofast" not in flag), "-I", cute_headers()]
    command = [
        compiler(),
        "-std=c++20",
        "-O3",
        "--use_fast_math",
        "-lineinfo",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        *flags,
    ]
    command += ["-gencode", f"arch=compute_{name},code={architecture}", "-o", folder / f"{source.stem}.so", source]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout + found.stderr if found.returncode else ""


def compile_all(sources, folder, architecture_of, flags=()):
    """{source: the compiler's words} of those that do not compile."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(sources, key=needs_cute, reverse=True)  # the one that takes longest starts first
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = pool.map(lambda source: compile_one(source, folder, architecture_of(source), flags), sources)
        return {source: words for source, words in zip(sources, said) if words}


class CudaMemory(ladder.Memory):
    """Arrays of a call are copied to the GPU when their pointer is asked for, and back by fetch."""

    def __init__(self, host):
        self.host, self.held = host, []
        for name in ("copy", "free_memory"):
            getattr(host, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t][
                : 3 if name == "copy" else 1
            ]
        host.new_memory.argtypes, host.new_memory.restype = [ctypes.c_size_t], ctypes.c_void_p
        host.milliseconds.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        host.milliseconds.restype = ctypes.c_float
        host.card.restype = ctypes.c_char_p
        host.prepare()

    def pointer(self, array):
        place = self.host.new_memory(array.nbytes)
        self.host.copy(place, array.ctypes.data, array.nbytes)
        self.held.append((place, array))
        return place

    def fetch(self):
        for place, array in self.held:
            self.host.copy(array.ctypes.data, place, array.nbytes)
        self.release()

    def release(self):
        for place, _ in self.held:
            self.host.free_memory(place)
        self.held.clear()

    def milliseconds(self, rung, arguments):
        """The mean of as many calls as take 5 ms, a hundred at most."""
        function = ctypes.cast(rung.function, ctypes.c_void_p)
        one = self.host.milliseconds(function, ctypes.byref(arguments), 1)
        calls = max(1, min(100, int(5 / max(one, 1e-3))))
        return self.host.milliseconds(function, ctypes.byref(arguments), calls) if calls > 1 else one


def open_host(folder):
    """The GPU's memory, after host.cu has been compiled for any GPU."""
    if words := compile_all([SOURCES / "host.cu"], folder, lambda source: "sm_75"):
        raise SystemExit(f"learn/climb: {next(iter(words.values()))}")
    return CudaMemory(ctypes.CDLL(str(folder / "host.so")))


def peak(card, half):
    return next((peaks[half] for name, peaks in PEAKS.items() if name in card), None)


def main():
    """For CI: everything compiles; plain rungs for sm_80, Hopper's for sm_90a. Machine code that does not run need not
    be fast."""
    begin = time.monotonic()
    sources = without_cute([path for path in sorted(SOURCES.glob("*.cu")) if "library" not in path.stem])
    quick = "--Ofast-compile" in subprocess.run([compiler(), "--help"], capture_output=True, text=True).stdout
    failed = compile_all(
        sources,
        Path(sys.argv[1]),
        lambda source: "sm_90a" if needs_hopper(source) else "sm_80",
        ["--Ofast-compile=max"] if quick else [],
    )
    for source, words in failed.items():
        print(f"{source.name} does not compile:\n{words}", file=sys.stderr)
    print(
        f"{len(sources) - len(failed)} of {len(sources)} rungs and tests compiled in {time.monotonic() - begin:.0f} s"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
