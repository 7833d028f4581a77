"""Wrong calls and hostile files: one line on stderr that names what is wrong, exit code 1, no output file."""

import io
import json
import os
import resource
import struct
import subprocess
import time
import zipfile

import numpy as np
import pytest
from cli_helpers import normal, save

Q = normal(1, 1, 2, 6, 8)


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "qkv.npz", {"q": Q, "k": Q, "v": Q})
    save(tmp_path / "short.npz", {"q": Q, "k": Q[:, :, :3], "v": Q})
    save(tmp_path / "narrow.npz", {"q": Q, "k": Q[..., :4], "v": Q})
    save(tmp_path / "integers.npz", {"q": Q.astype(np.int32), "k": Q, "v": Q})
    save(tmp_path / "complex.npz", {"q": Q.astype(np.complex64), "k": Q, "v": Q})
    save(
        tmp_path / "tables.npz",
        {"mask": np.ones((5, 6), bool), "ids": np.zeros(6, np.float32), "ids3": np.zeros(3, int)},
    )
    pages = {"page_table": np.zeros((1, 1), np.int32), "key_lengths": np.array([3], np.int32)}
    save(tmp_path / "pages.npz", {**pages, "k": normal(2, 1, 4, 2, 8)})
    save(tmp_path / "dlse.npz", {"dlse": normal(3, 1, 2, 6)})
    save(tmp_path / "bias.npz", {"bias": np.zeros((2, 3), np.float32)})
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "link.npz").symlink_to("qkv.npz")
    os.mkfifo(tmp_path / "pipe.npy")
    os.mkfifo(tmp_path / "pipe.png")
    return tmp_path


RUN = ["run", "--input", "qkv.npz", "--output", "out.npz"]
PAGED = ["--query", "qkv.npz:q", "--key", "pages.npz:k", "--value", "pages.npz:k", "--input", "pages.npz"]
CALLS = {  # the arguments, a part of the line
    "no command": ([], "no command; 'anyflash --help' lists them"),
    "unknown command": (["frobnicate"], "no command 'frobnicate'"),
    "misspelt command": (["exlpain"], "no command 'exlpain', did you mean 'explain'?"),
    "unknown option": (["--frobnicate"], "no option '--frobnicate'"),
    "unknown option of a command": ([*RUN, "--frobnicate"], "no option '--frobnicate'"),
    "misspelt option": (["run", "--inptu", "q.npz"], "no option '--inptu', did you mean '--input'?"),
    "misspelt option with a value": ([*RUN, "--softcpa=3"], "no option '--softcpa', did you mean '--softcap'?"),
    "one argument too many": ([*RUN, "more"], "'more': one argument too many"),
    "no output": (["run", "--input", "qkv.npz"], "--output is required"),
    "output without a value": (["run", "--input", "qkv.npz", "--output"], "--output"),
    "unknown output format": (
        [*RUN[:-1], "out.txt"],
        "out.txt: unknown extension, expected .npy, .npz or .safetensors",
    ),
    "output without a name": ([*RUN[:-1], ".npz"], ".npz: unknown extension"),
    "output in no folder": (
        [*RUN[:-1], "nowhere/out.npz"],
        "nowhere/out.npz: cannot be written: No such file or directory",
    ),
    "output is a folder": ([*RUN[:-1], "folder.npz"], "folder.npz: is a directory"),
    "output in place of a pipe": ([*RUN[:-1], "pipe.npy"], "pipe.npy: not a regular file"),
    "output in a file": ([*RUN[:-1], "qkv.npz/out.npz"], "qkv.npz/out.npz: cannot be written: Not a directory"),
    "output is the input": ([*RUN[:-1], "qkv.npz"], "--output: qkv.npz is an input file too"),
    "output is the input by a link": ([*RUN[:-1], "link.npz"], "--output: link.npz is an input file too"),
    "output is a tensor's file": (
        [*RUN[:-1], "./bias.npz", "--bias", "bias.npz:bias"],
        "--output: ./bias.npz is an input file too",
    ),
    "two tensors in .npy": ([*RUN[:-1], "out.npy", "--lse"], "out.npy: a .npy file holds one tensor"),
    "gradients in .npy": ([*RUN[:-1], "out.npy", "--backward"], "out.npy: a .npy file holds one tensor"),
    "no input": (["run", "--output", "out.npz"], "q: not given; use --input or --query"),
    "no such file": (["run", "--input", "no.npz", "--output", "out.npz"], "no.npz: No such file or directory"),
    "input is a folder": (["run", "--input", "folder.npz", "--output", "out.npz"], "folder.npz: not a regular file"),
    "input is a pipe": (["run", "--query", "pipe.npy", "--output", "out.npz"], "pipe.npy: not a regular file"),
    "unknown input format": (["run", "--input", "q.txt", "--output", "out.npz"], "q.txt: unknown extension"),
    "no such entry": ([*RUN, "--query", "qkv.npz:z"], "qkv.npz: no tensor 'z' in the file"),
    "misspelt entry": ([*RUN, "--mask", "tables.npz:maks"], "in the file, did you mean 'mask'?"),
    "misspelt table": (
        [*RUN, "--input", "tables.npz", "--rule", "documents(idz3, idz3)"],
        "name it with --tensor NAME=FILE, did you mean 'ids3'?",
    ),
    "a tensor that nothing names": (
        [*RUN, "--tensor", "sinks=tables.npz:ids3"],
        "sinks: given, expected a tensor that the command or its rule uses, did you mean 'sink'?",
    ),
    "dout of a forward call": ([*RUN, "--dout", "qkv.npz:q"], "dout: given without --backward, which uses it"),
    "dlse of a forward call": ([*RUN, "--tensor", "dlse=q"], "dlse: given without --backward, which uses it"),
    "dout of a check with pages": (
        ["check", *PAGED, "--dout", "qkv.npz:q"],
        "dout: given with page_table, which has no backward; leave it out",
    ),
    "dlse in an input file of a check with pages": (
        ["check", *PAGED, "--input", "dlse.npz"],
        "dlse: given with page_table, which has no backward; leave it out, with --without dlse if it is in an input",
    ),
    "a table that the rule explained does not name": (
        ["explain", "--shape", "4", "--tensor", "ids=tables.npz"],
        "ids: given, expected a tensor that the command or its rule uses",
    ),
    "a tensor that the call checked does not use": (
        ["check", "--input", "qkv.npz", "--tensor", "ids=tables.npz"],
        "ids: given, expected a tensor that the command or its rule uses",
    ),
    "neither file nor entry": (
        [*RUN, "--query", "z"],
        "q: 'z' is neither a .npy, .npz or .safetensors file nor in an input",
    ),
    "entry left out and given": (
        [*RUN, "--without", "bias", "--bias", "qkv.npz:q"],
        "--without: 'bias' is given by an option of its own; leave one out",
    ),
    "entry left out that is not there": ([*RUN, "--without", "ids3"], "--without: no tensor 'ids3' is given"),
    "misspelt entry left out": (
        [*RUN, "--input", "bias.npz", "--without", "bais"],
        "--without: no tensor 'bais' is given, did you mean 'bias'?",
    ),
    "entry left out": ([*RUN, "--without", "k"], "k: left out by --without, but the command needs it"),
    "no dout": ([*RUN, "--backward"], "dout: not in qkv.npz, which has q, k, v; name it with --dout"),
    "a name twice": ([*RUN, "--tensor", "q=qkv.npz", "--query", "qkv.npz"], "q: named twice"),
    "an entry in two files": ([*RUN, "--input", "short.npz"], "q: in both qkv.npz and short.npz"),
    "tensor without a name": ([*RUN, "--tensor", "=qkv.npz"], "--tensor: '=qkv.npz', expected NAME=FILE"),
    "tensor without a place": ([*RUN, "--tensor", "mask="], "mask: no file or entry is named"),
    "unknown alignment": ([*RUN, "--align", "middle"], "--align: 'middle', expected none_front"),
    "misspelt alignment": ([*RUN, "--align", "none-end"], "scale_end, did you mean 'none_end'?"),
    "unknown layout": (
        [*RUN, "--layout", "sbhd"],
        "--layout: 'sbhd', expected bhsd, bshd, bhds, qkv or thd, did you mean 'bshd'?",
    ),
    "unknown type": ([*RUN, "--type", "float8"], "--type: 'float8', expected bfloat16"),
    "scale is no number": ([*RUN, "--scale", "big"], "big"),
    "a budget of what": (
        [*RUN, "--memory-budget", "3 apples"],
        "--memory-budget: '3 apples', expected a number of bytes",
    ),
    "chunks in part": ([*RUN, "--num-chunks-q", "1.5"], "--num-chunks-q: '1.5', expected an integer"),
    "chunks that do not divide": (
        [*RUN, "--num-chunks-kv", "4"],
        "num_chunks_kv: 4, expected a divisor of 6 keys: 1, 2, 3, 6",
    ),
    "negative threads": ([*RUN, "--threads", "-1"], "--threads: "),
    "unknown rule": ([*RUN, "--rule", "casual()"], "rule: column 1: no rule 'casual', did you mean 'causal'?"),
    "unfinished rule": ([*RUN, "--rule", "causal() &"], "rule: column 11: expected a rule"),
    "rule of 100 parentheses": ([*RUN, "--rule", "(" * 100], "rule: column 65: more than 64 levels"),
    "rule with a line break": ([*RUN, "--rule", "causal()\nlocal(2)"], "rule: column 10: expected & | or the end"),
    "table that is not there": ([*RUN, "--rule", "dense(m)"], "m: not in qkv.npz, which has q, k, v"),
    "number for a table": ([*RUN, "--rule", "dense(3)"], "rule: column 7: dense: argument 'mask' takes a table's name"),
    "table for a number": (
        [*RUN, "--rule", "local(q)"],
        "rule: column 7: local: argument 'window' takes a number, found 'q'",
    ),
    "mask of another shape": ([*RUN, "--mask", "tables.npz"], "mask has 5 rows, expected 6"),
    "ids of a wrong type": (
        [*RUN, "--input", "tables.npz", "--rule", "documents(ids, ids)"],
        "documents: ids_q type float32, expected int32 or int64",
    ),
    "ids of a wrong length": (
        [*RUN, "--input", "tables.npz", "--rule", "documents(ids3, ids3)"],
        "has 3 entries, expected 6",
    ),
    "keys and values unlike": (["run", "--input", "short.npz", "--output", "out.npz"], "value: "),
    "head sizes unlike": (
        ["run", "--input", "narrow.npz", "--output", "out.npz"],
        "key: head size 4, expected 8 as in query",
    ),
    "integers": (["run", "--input", "integers.npz", "--output", "out.npz"], "query: type int32"),
    "complex numbers": (
        ["run", "--input", "complex.npz", "--output", "out.npz"],
        "element type '<c8' is not supported",
    ),
    "bias of two axes": ([*RUN, "--bias", "bias.npz"], "bias: "),
    "negative softcap": ([*RUN, "--softcap", "-1"], "softcap: "),
    "dout of another shape": ([*RUN, "--backward", "--dout", "short.npz:k"], "dout: "),
    "no shape": (["explain", "--rule", "causal()"], "--shape is required"),
    "shape of letters": (["explain", "--shape", "bxh"], "--shape: 'bxh', expected 1 to 3 sizes"),
    "shape of four sizes": (["explain", "--shape", "2x2x2x2"], "--shape: '2x2x2x2', expected 1 to 3 sizes"),
    "negative shape": (["explain", "--shape", "-4"], "-4"),
    "endless shape": (["explain", "--shape", "99999999999"], "--shape: '99999999999', expected 1 to 3 sizes"),
    "keys of other dimensions": (
        ["explain", "--shape", "4x4", "--keys", "16"],
        "--keys: 16, expected 2 sizes as in --shape",
    ),
    "unknown picture": (
        ["explain", "--shape", "4", "--picture", "rule.gif"],
        "--picture: 'rule.gif', expected a .png or .svg",
    ),
    "negative sequence": (["explain", "--shape", "-3"], "--shape: '-3', expected 1 to 3 sizes up to 2^30"),
    "picture in no folder": (["explain", "--shape", "4", "--picture", "no/rule.png"], "no/rule.png: cannot be written"),
    "picture of no pixels": (["explain", "--shape", "4", "--side", "0"], "--side: Value 0 not in range 1 to 4096"),
    "picture too large": (["explain", "--shape", "4", "--side", "4097"], "--side: Value 4097 not in range 1 to 4096"),
    "picture in place of a pipe": (
        ["explain", "--shape", "4", "--picture", "pipe.png"],
        "pipe.png: not a regular file",
    ),
    "picture and JSON": (["explain", "--shape", "4", "--picture", "-", "--json"], "--picture: - and --json"),
    "head size of 0": (["explain", "--shape", "4", "--head-size", "0"], "--head-size: "),
    "negative head size": (["explain", "--shape", "4", "--head-size", "-1"], "--head-size: "),
    "head size of values": (["explain", "--shape", "4", "--value-size", "513"], "--value-size: "),
    "a size too large": (["explain", "--shape", "1073741825"], "--shape: '1073741825', expected 1 to 3 sizes up to"),
    "keys of a size too large": (["bench", "--keys", "1073741825"], "--keys: '1073741825', expected 1 to 3 sizes"),
    "too many entries": (["explain", "--shape", "65536x32768"], "--shape: '65536x32768', expected at most 2147483647"),
    "negative seed": (["check", "--seed", "-1"], "--seed: "),
    "endless seed": (["check", "--seed", "99999999999999999999999"], "--seed: "),
    "unknown type to check": (["check", "--type", "int8"], "--type: 'int8', expected float16"),
    "unknown rule to check": (["check", "--rule", "nothing()"], "rule: column 1: no rule 'nothing'"),
    "layout of random checks": (["check", "--layout", "bshd"], "--layout: only with --input"),
    "quick check of tensors": (["check", "--quick", "--input", "qkv.npz"], "--quick: not with --input"),
    "bench of nothing": (["bench", "--heads", "0"], "--heads: "),
    "bench of no query": (["bench", "--shape", "64", "--shape", "0"], "--shape: '0' has no entry"),
    "bench of no key": (["bench", "--shape", "8x8", "--keys", "4x0"], "--keys: '4x0' has no entry"),
    "bench to no folder": (["bench", "--shape", "8", "--json", "no/b.json"], "no/b.json: cannot be written: No such"),
    "bench to a folder": (["bench", "--shape", "8", "--json", "folder.npz"], "folder.npz: is a directory"),
    "bench of an odd direction": (["bench", "--direction", "up"], "--direction: 'up', expected forward"),
    "bench of heads that do not divide": (["bench", "--shape", "8", "--kv-heads", "3"], "--kv-heads: 3, expected a"),
    "bench of head sizes of values": (["bench", "--shape", "8", "--value-size", "513"], "--value-size: "),
    "bench of keys of other dimensions": (["bench", "--shape", "4x4", "--keys", "4"], "--keys: 4, expected 2 sizes"),
    **{
        f"explain {option} without --plan": (["explain", "--shape", "64", option, "2"], f"{option}: expected only with")
        for option in ("--memory-budget", "--num-chunks-q", "--batch", "--heads", "--kv-heads", "--threads")
    },
    "explain --threads on tiles": (
        ["explain", "--shape", "64", "--plan", "--device", "tiles", "--threads", "2"],
        "--threads: expected only with --device cpu",
    ),
    **{
        f"bench {way} {option}": (["bench", way, option, *rest], f"{option}: expected without {way}")
        for way in ("--calibrate", "--predict")
        for option, *rest in (["--device", "tiles"], ["--heads", "2"])
    },
    "bench --calibrate --machine": (
        ["bench", "--device", "tiles", "--machine", "bow", "--calibrate"],
        ": expected without --calibrate",
    ),
    "unknown instruction set": (["devices", "--isa", "AVX9"], "--isa"),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_call(anyflash, folder, case):
    arguments, part = CALLS[case]
    before = sorted(folder.rglob("*"))
    assert part in anyflash.fails(*arguments)
    assert sorted(folder.rglob("*")) == before


# --- .npy


def npy(header, data=b"", version=b"\x01\x00", length=None):
    header = header.encode() if isinstance(header, str) else header
    length = len(header) if length is None else length
    return b"\x93NUMPY" + version + length.to_bytes(2 if version[0] == 1 else 4, "little") + header + data


def described(descr="<f4", order="False", shape="(1, 2, 6, 8)", rest=""):
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, {rest}}}\n"


DATA = Q.tobytes()
NPY = {  # the file, a part of the line
    "empty": (b"", "not a .npy file: 0 bytes"),
    "text": (b"1.0 2.0 3.0 4.0\n", "not a .npy file: wrong magic"),
    "version 9": (npy(described(), DATA, b"\x09\x00"), ".npy version 9, expected 1 to 3"),
    "cut in the header": (npy(described(), DATA)[:40], "header of"),
    "header longer than the file": (npy(described(), DATA, length=60000), "header of 60000 bytes, the file has"),
    "header of 4 GB": (npy(described(), DATA, b"\x02\x00", 0xFFFFFFFF), "header of 4294967295 bytes"),
    "header of 100 KB": (npy(" " * 100_000 + described(), DATA, b"\x02\x00"), "is too long"),
    "length field cut": (b"\x93NUMPY\x02\x00\x10\x00", "the file ends too early"),
    "cut in the data": (npy(described(), DATA[:-4]), "380 bytes of data, shape (1, 2, 6, 8) needs 384"),
    "data to spare": (npy(described(), DATA + b"\0"), "385 bytes of data, shape (1, 2, 6, 8) needs 384"),
    "negative size": (npy(described(shape="(1, 2, -6, 8)"), DATA), "negative size in shape"),
    "size beyond 64 bits": (npy(described(shape="(99999999999999999999,)"), DATA), "a size in shape overflows"),
    "shape that overflows": (npy(described(shape="(4294967296, 4294967296)"), DATA), "overflows"),
    "shape that overflows beside a 0": (npy(described(shape="(0, 4294967296, 4294967296)")), "overflows"),
    "shape beyond memory": (npy(described(shape="(1099511627776, 100)"), DATA), "this machine has"),
    "nine axes": (npy(described(shape="(1, 1, 1, 1, 1, 1, 1, 1, 96)"), DATA), "more than 8 axes"),
    "shape of floats": (npy(described(shape="(1.0, 2)"), DATA), "shape is not a tuple of integers"),
    "shape of names": (npy(described(shape="(a, b)"), DATA), "shape is not a tuple of integers"),
    "shape without end": (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2", DATA), "shape is not a tuple"),
    "big-endian": (npy(described(">f4"), DATA), "big-endian elements ('>f4') are not supported"),
    "objects": (npy(described("|O"), DATA), "element type '|O' is not supported"),
    "complex numbers": (npy(described("<c8"), DATA), "element type '<c8' is not supported"),
    "structures": (
        npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (96,), }\n", DATA),
        "structured element types",
    ),
    "no element type": (npy(described(""), DATA), "element type '' is not supported"),
    "no key": (npy("{'descr': '<f4', 'shape': (96,)}", DATA), "descr, fortran_order or shape is missing"),
    "unknown key": (npy(described(rest="'extra': 1"), DATA), "unexpected key"),
    "a key twice": (npy(described(rest="'descr': '<f4'"), DATA), "unexpected key"),
    "order of neither kind": (npy(described(order="Maybe"), DATA), "fortran_order is not True or False"),
    "text after the dictionary": (npy(described() + "x = 1\n", DATA), "text after the dictionary"),
    "no dictionary": (npy("print('q')", DATA), "expected {"),
    "string without end": (npy("{'descr", DATA), "a string does not end"),
    "zero bytes": (npy(b"\0" * 64, DATA), "expected {"),
    "line breaks in the type": (npy(described("<f4\n\nError: \x1b[31m"), DATA), "is not supported"),
}


@pytest.mark.parametrize("case", NPY)
def test_malformed_npy(anyflash, folder, case):
    content, part = NPY[case]
    (folder / "bad.npy").write_bytes(content)
    line = anyflash.fails("run", "--input", "qkv.npz", "--query", "bad.npy", "--output", "out.npy")
    assert line.startswith("bad.npy: ") and part in line
    assert anyflash.fails("run", "--input", "bad.npy", "--output", "out.npy") == line
    assert not list(folder.glob("out*"))


# --- .npz


def npz(entries, method=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def patched(archive, old, new):
    assert old in archive
    return archive.replace(old, new)


def spoiled(archive):
    """With other bytes in the middle of the first entry's deflated data."""
    start = 30 + len("q.npy") + 100
    return archive[:start] + b"\xff" * 40 + archive[start + 40 :]


def encrypted(archive):
    """With the flag of encryption set in both headers of the first entry."""
    content = bytearray(archive)
    content[6] |= 1
    content[archive.index(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def wrong_size(archive, size):
    """With another unpacked size in both headers of the first entry."""
    content = bytearray(archive)
    struct.pack_into("<I", content, 22, size)
    struct.pack_into("<I", content, archive.index(b"PK\x01\x02") + 24, size)
    return bytes(content)


SOUND = npy(described(), DATA)
STORED = npz({"q.npy": SOUND}, zipfile.ZIP_STORED)
BOMB = npy(described("|u1", shape="(400000000,)"))
NPZ = {
    "empty": (b"", "bad.npz: not a sound .npz file"),
    "text": (b"not a zip archive at all", "bad.npz: not a sound .npz file"),
    "cut": (npz({"q.npy": SOUND})[:-30], "bad.npz: not a sound .npz file"),
    "cut in half": (STORED[: len(STORED) // 2], "bad.npz: not a sound .npz file"),
    "no entry": (npz({}), "bad.npz: no tensor 'q' in the file"),
    "other entries": (npz({"x.npy": SOUND}), "bad.npz: no tensor 'q' in the file"),
    "entry that is no .npy": (npz({"q.npy": b"hello, world"}), "bad.npz:q: not a .npy file: wrong magic"),
    "empty entry": (npz({"q.npy": b""}), "bad.npz:q: not a .npy file: 0 bytes"),
    "entry cut": (npz({"q.npy": SOUND[:-1]}), "bad.npz:q: 383 bytes of data, shape (1, 2, 6, 8) needs 384"),
    "a bit flipped in stored data": (
        patched(STORED, DATA[:8], bytes([DATA[0] ^ 1]) + DATA[1:8]),
        "bad.npz:q: CRC error",
    ),
    "deflated data spoiled": (spoiled(npz({"q.npy": SOUND})), "bad.npz:q: CRC error"),
    "a larger size than there is": (wrong_size(npz({"q.npy": SOUND}), 5000), "bad.npz"),
    "a smaller size than there is": (wrong_size(npz({"q.npy": SOUND}), 300), "bad.npz"),
    "encrypted": (encrypted(npz({"q.npy": SOUND})), "bad.npz:q: the entry is encrypted"),
    "bzip2": (npz({"q.npy": SOUND}, zipfile.ZIP_BZIP2), "bad.npz:q: zip method 12, expected stored or deflated"),
    "lzma": (npz({"q.npy": SOUND}, zipfile.ZIP_LZMA), "bad.npz:q: zip method 14, expected stored or deflated"),
    "objects": (npz({"q.npy": npy(described("|O"), DATA)}), "bad.npz:q: element type '|O' is not supported"),
    "shape beyond memory": (npz({"q.npy": npy(described(shape="(1099511627776, 100)"), DATA)}), "this machine has"),
}


@pytest.mark.parametrize("case", NPZ)
def test_malformed_npz(anyflash, folder, case):
    content, part = NPZ[case]
    (folder / "bad.npz").write_bytes(content)
    line = anyflash.fails("run", "--input", "qkv.npz", "--query", "bad.npz:q", "--output", "out.npz")
    assert part in line
    if "not a sound" in part:
        assert part in anyflash.fails("run", "--input", "bad.npz", "--output", "out.npz")
    assert not list(folder.glob("out*"))


def test_zip_bomb(anyflash, folder):
    with zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("q.npy", "w") as entry:
            entry.write(BOMB)
            for _ in range(400):
                entry.write(b"\0" * 1_000_000)
    assert (folder / "bomb.npz").stat().st_size < 500_000
    line = anyflash.fails("run", "--input", "qkv.npz", "--query", "bomb.npz", "--output", "out.npz")
    assert "that unpack to 381.5 MiB are not read" in line


# --- .safetensors


def tensors(header, data=DATA, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes):
    return {"dtype": "F32", "shape": [1, 2, 6, 8], "data_offsets": [0, 384], **changes}


SAFETENSORS = {
    "empty": (b"", "not a .safetensors file: 0 bytes"),
    "seven bytes": (b"\0" * 7, "not a .safetensors file: 7 bytes"),
    "header longer than the file": (tensors({"q": entry()}, length=10_000), "header of 10000 bytes, the file has"),
    "header of 2^63 bytes": (tensors({"q": entry()}, length=2**63), "header of 9223372036854775808 bytes"),
    "header of 2^64 - 1 bytes": (tensors({"q": entry()}, length=2**64 - 1), "header of 18446744073709551615 bytes"),
    "no JSON": (tensors(b"hello"), "malformed header: not JSON"),
    "JSON cut": (tensors(b'{"q": {"dtype": "F32"'), "malformed header: not JSON"),
    "bytes that are no UTF-8": (tensors(b'{"\xff\xfe": 1}'), "malformed header: not JSON"),
    "a list": (tensors([1, 2]), "malformed header: not a JSON object"),
    "a number": (tensors(3), "malformed header: not a JSON object"),
    "a depth bomb of lists": (tensors(b"[" * 1_000_000), "malformed header: nested too deep"),
    "a depth bomb of objects": (tensors(b'{"a":' * 500_000), "malformed header: nested too deep"),
    "a depth bomb in an entry": (
        tensors(b'{"q": {"dtype": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
        "malformed header: nested too deep",
    ),
    "a name twice": (tensors(b'{"q": {}, "q": {}}'), "malformed header: 'q' comes twice"),
    "a key twice": (tensors(b'{"q": {"dtype": "F32", "dtype": "F64"}}'), "malformed header: 'dtype' comes twice"),
    "an entry that is a number": (
        tensors({"q": 1}),
        "bad.safetensors:q: malformed header: expected dtype, shape and data_offsets",
    ),
    "no offsets": (tensors({"q": {"dtype": "F32", "shape": [96]}}), "expected dtype, shape and data_offsets"),
    "type is a number": (tensors({"q": entry(dtype=32)}), "dtype is not a string"),
    "unknown type": (tensors({"q": entry(dtype="F31")}), "bad.safetensors:q: unknown element type 'F31'"),
    "type that is not offered": (tensors({"q": entry(dtype="U32")}), "element type 'U32' is not supported"),
    "negative size": (tensors({"q": entry(shape=[1, -2, 6, 8])}), "shape is not a list of sizes"),
    "size that is a fraction": (tensors({"q": entry(shape=[1.5])}), "shape is not a list of sizes"),
    "size beyond 63 bits": (tensors({"q": entry(shape=[2**63])}), "a size in shape overflows"),
    "size beyond 64 bits": (tensors({"q": entry(shape=[2**70])}), "shape is not a list of sizes"),
    "shape that overflows": (tensors({"q": entry(shape=[2**40, 2**40])}), "overflows"),
    "nine axes": (tensors({"q": entry(shape=[1] * 8 + [96])}), "9 axes, expected at most 8"),
    "shape unlike the data": (
        tensors({"q": entry(shape=[1, 2, 6, 9])}),
        "384 bytes of data, shape (1, 2, 6, 9) of F32 needs 432",
    ),
    "offsets beyond the file": (
        tensors({"q": entry(data_offsets=[4, 388])}),
        "data offsets 4 to 388, the file has 384",
    ),
    "offsets backwards": (tensors({"q": entry(data_offsets=[384, 0])}), "data offsets 384 to 0"),
    "negative offsets": (tensors({"q": entry(data_offsets=[-384, 0])}), "data_offsets are not two offsets"),
    "three offsets": (tensors({"q": entry(data_offsets=[0, 1, 384])}), "data_offsets are not two offsets"),
    "data cut": (tensors({"q": entry()}, DATA[:-1]), "data offsets 0 to 384, the file has 383"),
    "overlapping tensors": (
        tensors({"q": entry(), "r": entry(shape=[4], data_offsets=[380, 396])}, DATA + b"\0" * 12),
        "the data of 'q' and 'r' overlap",
    ),
    "a hole": (
        tensors({"q": entry(), "r": entry(shape=[4], data_offsets=[388, 404])}, DATA + b"\0" * 20),
        "a hole of 4 bytes in the data",
    ),
    "data behind the last": (tensors({"q": entry()}, DATA + b"\0"), "1 bytes behind the data"),
    "another entry is malformed": (
        tensors({"q": entry(), "r": {"dtype": "F32"}}),
        "bad.safetensors:r: malformed header",
    ),
    "no such entry": (tensors({"r": entry()}), "bad.safetensors: no tensor 'q' in the file"),
    "line breaks in a name": (tensors({"a\n\x1b[31mError": 1}), r":a\x0a\x1b[31mError: malformed header"),
    "a zero byte in a name": (tensors({"a\0b": 1}), r"bad.safetensors:a\x00b: malformed header: expected dtype"),
    "control characters beyond ASCII in a name": (tensors({"a\u009b\u00e9": 1}), ":a\\x9b\u00e9: malformed header"),
    "a long name": (tensors({"\u20ac" * 1000: 1}), "\u20ac ... \u20ac"),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_malformed_safetensors(anyflash, folder, case):
    content, part = SAFETENSORS[case]
    (folder / "bad.safetensors").write_bytes(content)
    line = anyflash.fails("run", "--input", "qkv.npz", "--query", "bad.safetensors:q", "--output", "out.npz")
    assert line.startswith("bad.safetensors") and part in line
    if case != "no such entry":
        assert anyflash.fails("run", "--input", "bad.safetensors", "--output", "out.npz").startswith("bad.safetensors")
    assert not list(folder.glob("out*"))


def test_a_header_of_many_tensors_takes_time_in_proportion(anyflash, folder):
    """A hundred thousand: an instant, or minutes where each is looked at for each."""
    names = json.dumps({f"t{i}": entry(dtype="U8", shape=[0], data_offsets=[0, 0]) for i in range(100_000)})
    (folder / "many.safetensors").write_bytes(tensors(names.encode(), b""))
    start = time.monotonic()
    assert "which has t0, t1, t10, " in anyflash.fails("run", "--input", "many.safetensors", "--output", "out.npz")
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_any_byte_of_a_file_may_be_wrong(anyflash, folder, suffix):
    """Every run succeeds (the byte was one of the data, or of no meaning) or fails as it should; never a crash."""
    source = folder / f"q{suffix}"
    save(source, {"q": Q[:, :, :2]})
    sound = source.read_bytes()
    rng = np.random.default_rng(3)
    for place in rng.choice(len(sound), 60, replace=False):
        content = bytearray(sound)
        content[place] ^= 1 << rng.integers(8)
        source.write_bytes(content)
        done = anyflash("run", "--input", "qkv.npz", "--query", source, "--output", "out.npz")
        if done.returncode == 0:
            (folder / "out.npz").unlink()
            continue
        assert done.returncode == 1 and done.stderr.startswith("anyflash: ") and done.stderr.count("\n") == 1, done
        assert not list(folder.glob("out*"))


def test_a_full_disk_leaves_nothing(anyflash, folder):
    """The largest file the program may write is set below the size of the result."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
    done = subprocess.run(
        [anyflash.path, "run", "--input", "qkv.npz", "--output", "out.safetensors"],
        cwd=folder,
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr == "anyflash: out.safetensors: cannot be written\n"
    assert not list(folder.glob("out*"))
