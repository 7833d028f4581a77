"""anyflash run: the result is the textbook's, for every type, file format, layout, option and way to name a tensor."""

import zipfile

import ml_dtypes
import numpy as np
import pytest
from cli_helpers import TOLERANCE, TYPES, attention, gradients, load, normal, save

FORMATS = (".npz", ".safetensors")
Q, K, V = normal(1, 2, 4, 30, 16), normal(2, 2, 2, 40, 16), normal(3, 2, 2, 40, 24)
CAUSAL = np.arange(30)[:, None] >= np.arange(40)
CAUSAL_AT_END = np.arange(30)[:, None] + 10 >= np.arange(40)


@pytest.fixture
def qkv(tmp_path):
    save(tmp_path / "qkv.npz", {"q": Q, "k": K, "v": V})
    return tmp_path


def close(got, expected, type="float32"):
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=TOLERANCE[type])


@pytest.mark.parametrize("type", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_type_through_every_format(anyflash, tmp_path, source, target, type):
    q, k, v = (x.astype(TYPES[type]) for x in (Q, K, V))
    save(tmp_path / f"in{source}", {"q": q, "k": k, "v": v})
    anyflash.succeeds("run", "--input", f"in{source}", "--output", f"out{target}", "--lse", "--type", "bfloat16")
    result = load(tmp_path / f"out{target}", {"out"} if type == "bfloat16" else ())
    assert set(result) == {"out", "lse"}
    assert result["out"].dtype == TYPES[type] and result["lse"].dtype == (
        np.float64 if type == "float64" else np.float32
    )
    out, lse = attention(q, k, v)
    close(result["out"], out, type)
    close(result["lse"], lse, "float32" if type != "float64" else type)


@pytest.mark.parametrize("type", ["float16", "bfloat16", "float32", "float64"])
def test_npy_in_and_out(anyflash, tmp_path, type):
    for name, array in (("q", Q), ("k", K), ("v", V)):
        np.save(tmp_path / f"{name}.npy", array.astype(TYPES[type]))
    anyflash.succeeds(
        "run", "--query", "q.npy", "--key", "k.npy", "--value", "v.npy", "--output", "out.npy", "--type", "bfloat16"
    )
    out = load(tmp_path / "out.npy", {"out"} if type == "bfloat16" else ())["out"]
    assert out.shape == (2, 4, 30, 24) and out.dtype == TYPES[type]
    close(out, attention(*(x.astype(TYPES[type]) for x in (Q, K, V)))[0], type)


def test_bfloat16_as_two_byte_integers(anyflash, tmp_path):
    for name, array in (("q", Q), ("k", K), ("v", V)):
        np.save(tmp_path / f"{name}.npy", array.astype(ml_dtypes.bfloat16).view(np.uint16))
    files = ["--input", "q.npy", "--input", "k.npy", "--input", "v.npy", "--output", "out.npy"]
    assert "--type bfloat16" in anyflash.fails("run", *files)
    anyflash.succeeds("run", *files, "--type", "bfloat16")
    close(load(tmp_path / "out.npy", {"out"})["out"], attention(Q, K, V)[0], "bfloat16")


@pytest.mark.parametrize("compressed", [False, True])
def test_fortran_order_is_read_by_its_strides(anyflash, tmp_path, compressed):
    arrays = {"q": np.asfortranarray(Q), "k": K, "v": np.asfortranarray(V)}
    (np.savez_compressed if compressed else np.savez)(tmp_path / "qkv.npz", **arrays)
    anyflash.succeeds("run", "--input", "qkv.npz", "--output", "out.npy")
    close(np.load(tmp_path / "out.npy"), attention(Q, K, V)[0])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_npy(anyflash, qkv, version):
    with open(qkv / "k.npy", "wb") as file:
        np.lib.format.write_array(file, K, version=version)
    anyflash.succeeds("run", "--input", "qkv.npz", "--key", "k.npy", "--output", "out.npy")
    close(np.load(qkv / "out.npy"), attention(Q, K, V)[0])


def test_rule_and_alignment(anyflash, qkv):
    anyflash.succeeds("run", "--input", "qkv.npz", "--rule", "causal()", "--output", "a.npy")
    close(np.load(qkv / "a.npy"), attention(Q, K, V, CAUSAL)[0])
    text = anyflash.succeeds(
        "run", "--input", "qkv.npz", "--rule", "causal() & ~full() | causal()", "--align", "none_end", "-o", "b.npy"
    )
    assert "out (2, 4, 30, 24) float32" in text and "written to b.npy" in text
    close(np.load(qkv / "b.npy"), attention(Q, K, V, CAUSAL_AT_END)[0])


@pytest.mark.parametrize("layout, axes", [("bshd", (0, 2, 1, 3)), ("bhds", (0, 1, 3, 2))])
def test_layouts(anyflash, tmp_path, layout, axes):
    save(tmp_path / "in.npz", {n: x.transpose(axes) for n, x in (("q", Q), ("k", K), ("v", V))})
    anyflash.succeeds("run", "--input", "in.npz", "--layout", layout, "--output", "out.npy")
    close(np.load(tmp_path / "out.npy").transpose(np.argsort(axes)), attention(Q, K, V)[0])


def test_two_dimensions(anyflash, tmp_path):
    save(tmp_path / "in.npz", {n: normal(s, 1, 2, 5, 6, 8) for s, n in enumerate("qkv")})
    anyflash.succeeds("run", "--input", "in.npz", "--rule", "local(2)", "--output", "out.npy")
    flat = [normal(s, 1, 2, 30, 8) for s in range(3)]
    y, x = np.divmod(np.arange(30), 6)
    visible = (abs(y[:, None] - y) < 2) & (abs(x[:, None] - x) < 2)
    close(np.load(tmp_path / "out.npy").reshape(1, 2, 30, 8), attention(*flat, visible)[0])


def test_packed(anyflash, tmp_path):
    qkv, dout = normal(1, 3, 4, 20, 8), normal(2, 4, 20, 8)
    save(tmp_path / "in.npz", {"qkv": qkv, "dout": dout})
    anyflash.succeeds("run", "--input", "in.npz", "--layout", "qkv", "--output", "out.npz", "--lse", "--backward")
    result = load(tmp_path / "out.npz")
    out, lse = attention(*qkv[:, None])
    close(result["out"], out[0])
    close(result["lse"], lse[0])
    close(result["dqkv"], np.stack(gradients(dout[None], *qkv[:, None])[:3])[:, 0])


def test_variable_length(anyflash, tmp_path):
    q, k, v = (normal(s, 30, 2, 8) for s in range(3))
    cu = np.array([0, 7, 7, 30], np.int32)
    save(tmp_path / "in.npz", {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu.astype(np.int64)})
    anyflash.succeeds(
        "run", "--input", "in.npz", "--layout", "thd", "--rule", "causal()", "--output", "out.npz", "--lse"
    )
    document = np.searchsorted(cu, np.arange(30), side="right")
    visible = (document[:, None] == document) & np.tri(30, dtype=bool)
    out, lse = attention(*(x.swapaxes(0, 1)[None] for x in (q, k, v)), visible)
    result = load(tmp_path / "out.npz")
    close(result["out"], out[0].swapaxes(0, 1))
    close(result["lse"], lse[0])


def test_pages(anyflash, tmp_path):
    q = normal(1, 2, 2, 3, 8)
    pages_k, pages_v = normal(2, 5, 16, 2, 8), normal(3, 5, 16, 2, 8)
    table, lengths = np.array([[4, 0], [2, 1]], np.int32), np.array([20, 32], np.int32)
    save(tmp_path / "in.npz", {"q": q, "k": pages_k, "v": pages_v, "page_table": table, "key_lengths": lengths})
    text = anyflash.succeeds("run", "--input", "in.npz", "--output", "out.npy")
    assert "with page_table (2, 2) int32" in text
    k, v = (x[table].reshape(2, 32, 2, 8).swapaxes(1, 2) for x in (pages_k, pages_v))
    close(np.load(tmp_path / "out.npy"), attention(q, k, v, (np.arange(32) < lengths[:, None])[:, None, None])[0])
    assert "page_table" in anyflash.fails("run", "--input", "in.npz", "--backward", "--dout", "in.npz:q", "-o", "g.npz")
    assert not (tmp_path / "g.npz").exists()
    assert anyflash.succeeds("check", "--input", "in.npz").endswith("\n4 checks passed\n")  # forward alone


def test_bias_sink_and_scale_are_found_by_name_and_can_be_left_out(anyflash, qkv):
    bias, sink = normal(5, 1, 4, 30, 40), normal(6, 4)
    save(qkv / "more.safetensors", {"bias": bias, "sink": sink})
    files = ["run", "--input", "qkv.npz", "--input", "more.safetensors", "--scale", "0.5", "--output", "out.npy"]
    text = anyflash.succeeds(*files, "--without", "sink")
    assert "with bias" in text and "with sink" not in text
    close(np.load(qkv / "out.npy"), attention(Q, K, V, scale=0.5, bias=bias)[0])
    anyflash.succeeds(*files, "--without", "bias")
    s = np.concatenate([attention_scores(0.5), np.broadcast_to(sink[:, None, None], (2, 4, 30, 1))], -1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True))[..., :-1]
    close(np.load(qkv / "out.npy"), p @ np.repeat(V, 2, 1).astype(np.float64))


def attention_scores(scale):
    return scale * Q.astype(np.float64) @ np.repeat(K, 2, 1).swapaxes(-1, -2).astype(np.float64)


def test_softcap_and_alibi(anyflash, qkv):
    slopes = np.array([0.5, 0.25, 0.125, 0.0], np.float32)
    save(qkv / "alibi.npy", {"alibi": slopes})
    anyflash.succeeds("run", "--input", "qkv.npz", "--alibi", "alibi.npy", "--softcap", "1.5", "--output", "out.npy")
    s = 1.5 * np.tanh(attention_scores(0.25) / 1.5)
    s -= slopes[:, None, None] * abs(np.arange(30)[:, None] - np.arange(40))
    p = np.exp(s)
    close(np.load(qkv / "out.npy"), p / p.sum(-1, keepdims=True) @ np.repeat(V, 2, 1).astype(np.float64))


def test_mask_and_tables_of_rules(anyflash, qkv):
    rng = np.random.default_rng(7)
    mask, bitmap = rng.random((30, 40)) < 0.5, rng.random((4, 5)) < 0.5
    ids_q, ids_k = rng.integers(0, 3, 30), rng.integers(0, 3, 40)
    save(qkv / "tables.npz", {"mask": mask, "map": bitmap, "ids": ids_q, "other": ids_k, "mask8": mask.view(np.uint8)})
    blocks = np.kron(bitmap, np.ones((8, 8), bool))[:30, :40]
    same = ids_q[:, None] == ids_k
    for arguments, visible in (
        (["--mask", "tables.npz:mask"], mask),
        (["--mask", "tables.npz", "--rule", "causal()"], mask & CAUSAL),
        (["--input", "tables.npz", "--rule", "dense(mask8)"], mask),
        (["--input", "tables.npz", "--rule", "blocks(map, 8, block_k=8) | causal()"], blocks | CAUSAL),
        (["--input", "tables.npz", "--rule", "documents(ids, ids_k=other)"], same),
        (["--tensor", "a=tables.npz:ids", "--tensor", "b=tables.npz:other", "--rule", "~documents(a, b)"], ~same),
    ):
        anyflash.succeeds("run", "--input", "qkv.npz", *arguments, "--output", "out.npz", "--lse")
        result, (out, lse) = load(qkv / "out.npz"), attention(Q, K, V, visible)
        close(result["out"], out)
        close(result["lse"], lse)


def test_names_of_tensors(anyflash, tmp_path):
    save(tmp_path / "layer.safetensors", {"attn.q": Q, "attn.k": K, "attn.v": V})
    names = ["--query", "attn.q", "--key", "attn.k", "--value", "layer.safetensors:attn.v"]
    anyflash.succeeds("run", "--input", "layer.safetensors", *names, "--output", "a.npy")
    save(tmp_path / "q.npz", {"q": Q})
    save(tmp_path / "k.npz", {"k": K})
    save(tmp_path / "v.npz", {"other": V})
    names = ["--query", "q.npz", "--key", "k.npz", "--value", "v.npz:other"]
    anyflash.succeeds("run", *names, "--output", "b.npy", "--quiet")
    for name in ("a.npy", "b.npy"):
        close(np.load(tmp_path / name), attention(Q, K, V)[0])


@pytest.mark.parametrize("target", FORMATS)
def test_backward(anyflash, tmp_path, target):
    q, k, v, dout = normal(1, 1, 2, 12, 8), normal(2, 1, 2, 9, 8), normal(3, 1, 2, 9, 6), normal(4, 1, 2, 12, 6)
    bias, dlse = normal(5, 1, 2, 1, 9), normal(6, 1, 2, 12)
    save(tmp_path / "in.npz", {"q": q, "k": k, "v": v, "dout": dout, "bias": bias})
    anyflash.succeeds("run", "--input", "in.npz", "--backward", "--output", f"out{target}")
    result = load(tmp_path / f"out{target}")
    dq, dk, dv, ds = gradients(dout, q, k, v, bias=bias)
    assert set(result) == {"out", "dq", "dk", "dv", "dbias"}
    for name, expected in (("dq", dq), ("dk", dk), ("dv", dv), ("dbias", ds.sum(2, keepdims=True))):
        close(result[name], expected)
    # The gradient of lse alone: dS = P dlse.
    save(tmp_path / "lse.npz", {"dlse": dlse, "dout": np.zeros_like(dout)})
    anyflash.succeeds(
        "run",
        "--input",
        "in.npz",
        "--without",
        "bias",
        "--dout",
        "lse.npz",
        "--dlse",
        "lse.npz",
        "--backward",
        "-o",
        "l.npz",
    )
    s = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(8)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    close(load(tmp_path / "l.npz")["dq"], (p * dlse[..., None]) @ k.astype(np.float64) / np.sqrt(8))


def test_row_max_and_row_sum(anyflash, qkv):
    anyflash.succeeds("run", "--input", "qkv.npz", "--lm", "--lse", "--output", "out.npz")
    result = load(qkv / "out.npz")
    close(result["row_max"], attention_scores(0.25).max(-1))
    close(result["row_max"] + np.log(result["row_sum"]), result["lse"])


def test_nothing_to_see(anyflash, qkv):
    save(qkv / "empty.npz", {"k": K[:, :, :0], "v": V[:, :, :0], "q": Q})
    for arguments in (["--input", "qkv.npz", "--rule", "~full()"], ["--input", "empty.npz"]):
        anyflash.succeeds("run", *arguments, "--lse", "--output", "out.safetensors")
        result = load(qkv / "out.safetensors")
        assert (result["out"] == 0).all() and (result["lse"] == -np.inf).all()


def test_zero_sizes_go_through_every_format(anyflash, tmp_path):
    for batch, queries in ((0, 3), (2, 0)):
        for kind in FORMATS:
            source = tmp_path / f"in{kind}"
            save(
                source,
                {"q": normal(1, batch, 2, queries, 4), "k": normal(2, batch, 2, 5, 4), "v": normal(3, batch, 2, 5, 4)},
            )
            anyflash.succeeds("run", "--input", source, "--output", f"out{kind}")
            assert load(tmp_path / f"out{kind}")["out"].shape == (batch, 2, queries, 4)


def test_results_do_not_depend_on_threads(anyflash, qkv):
    for threads in (1, 3):
        anyflash.succeeds("run", "--input", "qkv.npz", "--threads", threads, "--output", f"{threads}.npy")
    assert (qkv / "1.npy").read_bytes() == (qkv / "3.npy").read_bytes()


def test_a_gpus_switches_change_nothing_on_the_cpu(anyflash, qkv):
    assert "--allow-tf32" in anyflash.succeeds("run", "--help")
    arguments = ("run", "--input", "qkv.npz", "--output")
    anyflash.succeeds(*arguments, "exact.npy")
    anyflash.succeeds(*arguments, "switched.npy", "--allow-tf32", "--deterministic")
    assert (qkv / "exact.npy").read_bytes() == (qkv / "switched.npy").read_bytes()


def test_output_replaces_a_file_and_leaves_no_other(anyflash, qkv):
    (qkv / "out.npz").write_text("old")
    before = set(qkv.iterdir())
    anyflash.succeeds("run", "--input", "qkv.npz", "--output", "out.npz")
    assert set(qkv.iterdir()) == before
    with zipfile.ZipFile(qkv / "out.npz") as archive:
        assert archive.testzip() is None and archive.namelist() == ["out.npy"]


def test_output_is_readable_like_any_new_file(anyflash, qkv):
    anyflash.succeeds("run", "--input", "qkv.npz", "--output", "out.npy")
    (qkv / "plain").touch()
    assert (qkv / "out.npy").stat().st_mode == (qkv / "plain").stat().st_mode
