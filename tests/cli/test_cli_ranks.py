"""explain --ranks: how a sequence is split over processes, and the bytes that move."""

import json

import numpy as np
import pytest


def explained(anyflash, *options):
    return json.loads(anyflash.succeeds("explain", *options, "--json"))


def test_causal_is_zigzag_and_moves_what_is_seen(anyflash):
    made = explained(
        anyflash, "--rule", "causal()", "--shape", "4096", "--ranks", "4", "--type", "bfloat16", "--heads", "2"
    )
    assert made["pieces"] == made["key_pieces"]
    assert made["pieces"] == [[[512 * r, 512], [512 * (7 - r), 512]] if r < 3 else [[1536, 1024]] for r in range(4)]
    assert made["positions"] == [1024] * 4
    key = 2 * (64 + 64) * 2  # bytes
    assert made["bytes"] == made["least"] == [512 * n * key for n in (6, 5, 4, 3)]
    assert made["over_least"] == 1 and made["gathered"] == [3072 * key] * 4
    pairs = np.array(made["visible_pairs"])
    assert made["imbalance"] == pytest.approx(1, abs=0.01) and pairs.sum() == pytest.approx(4096 * 4097 / 2, rel=0.01)


def test_of_an_image_and_other_keys(anyflash):
    made = explained(anyflash, "--rule", "local(2)", "--shape", "64x10", "--ranks", "2")
    assert made["pieces"] == [[[0, 32]], [[32, 32]]] and made["bytes"] == [10 * 128 * 4] * 2
    made = explained(
        anyflash, "--shape", "1000", "--keys", "300", "--ranks", "3", "--head-size", "8", "--value-size", "4"
    )
    assert [len(one) for one in made["key_pieces"]] == [1, 1, 1]
    assert sum(made["bytes"]) == 2 * 300 * 12 * 4


def test_text_and_tables(anyflash, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(4096) // 1500)
    lines = anyflash.succeeds("explain", "--rule", "causal()", "--shape", "4096", "--ranks", "4").splitlines()
    assert lines[3] == "moved           4718592 bytes forward, 1.000 of the least that the rule allows"
    assert lines[5].startswith("rank 0          1024 queries (0-511 3584-4095), ")
    table = f"ids={tmp_path}/ids.npy"
    assert "documents" in anyflash.succeeds(
        "explain", "--rule", "documents(ids, ids)", "--tensor", table, "--shape", "4096", "--ranks", "2"
    )


@pytest.mark.parametrize(
    "options, line",
    [
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "2", "--plan"], "--plan: not with --ranks"),
        (["--ranks", "2", "--picture", "a.svg"], "--picture: not with --ranks"),
        (["--ranks", "2", "--rule", "caus()"], "no rule 'caus'"),
    ],
)
def test_wrong_options(anyflash, options, line):
    assert line in anyflash.fails("explain", "--shape", "64", *options)
