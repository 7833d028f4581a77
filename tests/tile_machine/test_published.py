"""The model of the tile machine beside what others published: a change that breaks these figures fails here."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import anyflash as af
import pytest
from anyflash import tile_machine as tm

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "bench"))

import compare
import tiles
import tiles_page
import tiles_published as published


@pytest.mark.parametrize("name, what, figure, unit, peer, source", published.CONSTANTS)
def test_closed_forms_of_the_constants(name, what, figure, unit, peer, source):
    assert figure(tm.machine(name)) == pytest.approx(peer, rel=0.05)


def test_a_machine_s_file_says_where_its_constants_are_from():
    for path in (PROJECT / "src" / "tile_machine" / "machines").glob("*.txt"):
        assert len([line for line in path.read_text().splitlines() if line.startswith("# ")]) >= 3, path


def test_a_product_is_its_closed_form():
    mk2 = tm.machine("ipu-mk2")
    assert tm.product_cycles(mk2, "float16", 96, 64, 32) == 96 * 64 * 32 / 64 + 16 * 4 * 2
    assert tm.product_cycles(mk2, "float32", 96, 60, 32) == 96 * 64 * 32 / 16 + 16 * 4 * 2
    flat = tm.machine("flatattention-32x32")
    assert tm.product_cycles(flat, "float16", 1, 1, 1) == 32 * 64 * 16 / 512 + 285


def test_engines_side_by_side_take_the_longer_time():
    flat = tm.machine("flatattention-32x32")
    beside = tm.step_cycles(flat, "float16", 128, 128, 128, 128)
    one_by_one = tm.step_cycles(replace(flat, separate_vector=False), "float16", 128, 128, 128, 128)
    assert beside.products == beside.total == one_by_one.products
    assert one_by_one.total == one_by_one.products + 128 * 128 / 64 + 4 * 128 * 128 / 64 + 128 * 128 / 64


@pytest.mark.parametrize("rows", [1024, 2048])
def test_large_products_on_a_bow(rows):
    bow = tm.machine("bow")
    cycles = tiles.phase_of_product(bow, "float16", rows, 16, 16)
    figure = 2 * rows * 16 * 16 * bow.tiles / cycles * bow.clock_hz / 1e12
    assert figure == pytest.approx(published.BOW_PRODUCT[rows], rel=0.06)


def test_chunks_of_causal_prefill_rank_as_tenstorrent_measured():
    blackhole = tm.machine("blackhole")
    shares = {}
    for chunk in published.BLACKHOLE_CAUSAL:
        cycles, products = tiles.causal_chunks(blackhole, *chunk)
        shares[chunk] = products / cycles
    (best,) = published.BLACKHOLE_CAUSAL_HIFI4
    cycles, products = tiles.causal_chunks(tiles.blackhole_hifi4(blackhole), *best)
    shares[best] = products / cycles
    theirs = published.BLACKHOLE_CAUSAL | published.BLACKHOLE_CAUSAL_HIFI4
    assert sorted(shares, key=shares.get) == sorted(theirs, key=theirs.get)


@pytest.mark.parametrize("chunk, peer", published.BLACKHOLE_MICROSECONDS.items())
def test_times_of_causal_prefill(chunk, peer):
    blackhole = tm.machine("blackhole")
    cycles, _ = tiles.causal_chunks(blackhole, *chunk)
    assert 1e6 * cycles / blackhole.clock_hz == pytest.approx(peer, rel=0.2)


@pytest.mark.parametrize("layer, share", published.FLAT.items())
def test_flat_attention(layer, share):
    d, sequence, batch, heads, side = layer
    choice = tm.Choice(grid_rows=side, grid_columns=side)
    report = tm.predict((batch, heads, sequence, d), machine="flatattention-32x32", choice=choice)
    assert (report.grid_rows, report.grid_columns) == (side, side)
    assert report.utilisation == pytest.approx(share, abs=0.05)


def test_flat_attention_s_best_is_found_by_the_planner():
    report = tm.predict((4, 32, 4096, 128), machine="flatattention-32x32")
    assert report.utilisation == pytest.approx(published.FLAT_BEST, abs=0.05)


def test_a_long_sequence_runs_in_chunks_alone():
    shape = (1, 4, 16384, 64)
    with pytest.raises(MemoryError, match=r"tile \d+, phase '.*': \d+ bytes live, expected at most 638976"):
        tm.predict(shape, rule=af.causal(), num_chunks_q=1, num_chunks_kv=1)
    report = tm.predict(shape, rule=af.causal())
    assert report.peak_bytes <= report.machine.memory_per_tile == 638976
    assert report.num_chunks_q > 1 and report.num_chunks_kv > 1


@pytest.mark.parametrize("rule", [af.full(), af.causal(), af.local(32)], ids=str)
def test_the_planner_is_near_the_best_of_all_mappings(rule):
    """Of those with chunk counts that divide, on four tiles."""
    machine = replace(tm.machine("ipu-mk2"), tiles=4, memory_per_tile=48 * 1024)
    shape = (1, 1, 128, 32)
    assert tm.predict(shape, rule=rule, machine=machine).cycles <= 1.1 * tiles.exhaustive(machine, shape, rule).cycles


def test_half_of_the_utilisation_is_the_machine_s():
    """Products are at most this share of a step on an IPU: the planner comes near."""
    mk2 = tm.machine("ipu-mk2")
    report = tm.predict((1, 4, 16384, 128), machine=mk2)
    most = tiles.ceiling(mk2, "float16", (1, 4, 16384, 128), report.multiply_adds)
    assert 0.85 * most < report.utilisation < most
    flat = tm.predict((1, 4, 16384, 128), machine="flatattention-32x32")
    assert flat.utilisation >= 0.85


def test_the_page_shows_the_record():
    rows = json.loads(tiles_page.RECORD.read_text())
    assert tiles_page.is_record(tiles_page.RECORD)
    text = tiles_page.PAGE.read_text()
    for name, block in tiles_page.blocks(rows).items():
        assert tiles_page.BLOCK[name].search(text) and block in text, name


def test_the_parts_of_the_benchmark():
    assert tuple(tiles.PARTS) == compare.TILE_PARTS == tiles_page.VALIDATION + tiles_page.PLANNER
