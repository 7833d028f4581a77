"""The program's calls on the tile machine."""

import json

import anyflash as af
import numpy as np
from anyflash import tile_machine as tm

MACHINE = "tiles = 4\nmemory_per_tile = 262144\nclock_hz = 1e9\n"


def test_bench_gives_the_machines_time(anyflash):
    file = anyflash.folder / "small.machine"
    file.write_text(MACHINE)
    bench = ("bench", "--shape", "256", "--head-size", "16", "--heads", "2", "--rule", "causal()", "--type", "float16")
    anyflash.succeeds(*bench, "--device", "tiles", "--machine", file, "--json", anyflash.folder / "rows.json")
    rows = json.loads((anyflash.folder / "rows.json").read_text())
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        tiles = row["tiles"]
        assert row["median_seconds"] == tiles["seconds"] == tiles["cycles"] / 1e9
        assert abs(tiles["predicted_cycles"] / tiles["cycles"] - 1) < 0.05
        assert tiles["peak_bytes"] <= 262144
        assert tiles["cycles"] == sum(
            phase[kind] for phase in tiles["phases"] for kind in ("compute_cycles", "exchange_cycles", "sync_cycles")
        )


def test_run_has_the_cpus_results(anyflash):
    rng = np.random.default_rng(0)
    np.savez(
        anyflash.folder / "qkv.npz", **{name: rng.standard_normal((1, 2, 50, 8)).astype(np.float32) for name in "qkv"}
    )
    for device in ("cpu", "tiles"):
        anyflash.succeeds(
            "run",
            "--input",
            anyflash.folder / "qkv.npz",
            "--device",
            device,
            "--output",
            anyflash.folder / f"{device}.npy",
        )
    cpu, tiles = (np.load(anyflash.folder / f"{device}.npy") for device in ("cpu", "tiles"))
    np.testing.assert_allclose(tiles, cpu, atol=1e-5)


def test_check_passes(anyflash):
    anyflash.succeeds("check", "--quick", "--device", "tiles", "--rule", "causal()", "--type", "float32")


def test_explain_says_what_a_call_would_cost(anyflash):
    found = json.loads(
        anyflash.succeeds(
            "explain", "--rule", "causal()", "--shape", "4096", "--type", "float16", "--device", "tiles", "--json"
        )
    )
    assert found["tiles"]["machine"] == "ipu-mk2"
    assert found["tiles"]["peak_bytes"] <= 624 * 1024


def test_explain_counts_the_heads_of_keys(anyflash):
    """Eight query heads with one key head move fewer bytes than with eight, and as many as in a call."""
    explain = ("explain", "--shape", "512", "--type", "float16", "--device", "tiles", "--heads", "8", "--json")
    few, many = (json.loads(anyflash.succeeds(*explain, "--kv-heads", n))["tiles"] for n in ("1", "8"))
    bench = ("bench", "--shape", "512", "--type", "float16", "--device", "tiles", "--heads", "8", "--kv-heads", "1")
    anyflash.succeeds(*bench, "--rule", "full()", "--direction", "forward", "--json", anyflash.folder / "rows.json")
    (row,) = json.loads((anyflash.folder / "rows.json").read_text())
    assert few["predicted_cycles"] == row["tiles"]["predicted_cycles"] != many["predicted_cycles"]


def test_explain_knows_what_a_call_asks_for(anyflash):
    """By the options and tensors of the call; near the least budget other mappings are taken."""
    rng = np.random.default_rng(0)
    shapes = dict(q=(2, 4, 90, 16), k=(2, 2, 80, 16), v=(2, 2, 80, 24), bias=(1, 4, 90, 80), alibi=(4,), sink=(4,))
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["key_lengths"] = np.array([80, 33])
    extras = {name: tensors[name] for name in ("bias", "alibi", "sink", "key_lengths")}
    np.savez(anyflash.folder / "extras.npz", **extras)
    shape = ("--shape", "90", "--keys", "80", "--head-size", "16", "--value-size", "24", "--batch", "2", "--heads", "4")
    machine = ("--device", "tiles", "--machine", anyflash.folder / "small.machine")
    (anyflash.folder / "small.machine").write_text(MACHINE)
    explain = ("explain", *shape, "--kv-heads", "2", "--rule", "causal()", *machine, "--picture", "none", "--json")
    plain = json.loads(anyflash.succeeds(*explain))["tiles"]
    explain = (*explain, "--input", anyflash.folder / "extras.npz", "--softcap", "3", "--deterministic")
    least = json.loads(anyflash.succeeds(*explain, "--plan"))["least_bytes"]
    options = dict(alibi_slopes=extras["alibi"], **{name: extras[name] for name in ("bias", "sink", "key_lengths")})
    with tm.use(tm.read_machine(anyflash.folder / "small.machine")) as used:
        for lm in (False, True):
            asked = ("--memory-budget", str(least), *(["--lm"] if lm else []))
            found = json.loads(anyflash.succeeds(*explain, *asked))["tiles"]
            q, k, v = (tensors[name] for name in "qkv")
            bounds = dict(memory_budget=least, softcap=3.0, deterministic=True, return_lse="lm" if lm else True)
            af.attention(q, k, v, rule=af.causal(), **bounds, **options)
            assert found["cycles"] == used.report.cycles != plain["cycles"]
            assert found["peak_bytes"] == used.report.peak_bytes


def test_explain_of_a_backward_call_with_dlse_and_large_lse(anyflash):
    explain = ("explain", "--shape", "200", "--type", "float16", "--device", "tiles", "--backward", "--json")
    plain, dlse, large = (
        json.loads(anyflash.succeeds(*explain, *more))["tiles"] for more in ([], ["--dlse"], ["--large-lse"])
    )
    assert plain["cycles"] < dlse["cycles"] < large["cycles"]
    plan = json.loads(anyflash.succeeds(*explain, "--large-lse", "--plan"))
    (chosen,) = (one for one in plan["candidates"] if one["chosen"])
    np.testing.assert_allclose(chosen["total_seconds"], large["seconds"])
    line = anyflash.fails(*explain[:5], "--device", "cpu", "--large-lse")
    assert line.endswith("--large-lse: expected only with --device tiles")
    line = anyflash.fails(*explain[:5], "--device", "tiles", "--dlse")
    assert line.endswith("dlse: given to a forward call, expected a backward one")


def test_explain_draws_the_machine(anyflash):
    explain = ("explain", "--rule", "causal()", "--shape", "512", "--type", "float16", "--device", "tiles")
    anyflash.succeeds(*explain, "--picture", anyflash.folder / "tiles.svg")
    svg = (anyflash.folder / "tiles.svg").read_text()
    for words in ("Memory: ", "Phases: ", "Who sends to whom: ", "Live memory over time"):
        assert words in svg


def test_wrong_machines(anyflash):
    file = anyflash.folder / "wrong.machine"
    file.write_text(MACHINE + "workers = 0\n")
    line = anyflash.fails("bench", "--device", "tiles", "--machine", file)
    assert line.endswith("wrong.machine: workers: 0, expected 1 to 65536")
    assert anyflash.fails("bench", "--device", "tiles", "--machine", "ipu").startswith("machine: ipu, expected ")
    assert "only with --device tiles" in anyflash.fails("bench", "--device", "cpu", "--machine", "bow")
    assert "tiles" in anyflash.fails("bench", "--device", "tile")
