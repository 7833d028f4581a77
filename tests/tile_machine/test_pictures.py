"""Pictures of reports of the tile machine."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import anyflash as af
import pytest
from anyflash import tile_machine as tm

SMALL = replace(tm.machine("ipu-mk2"), name="small", tiles=12, memory_per_tile=64 * 1024)
KINDS = ("memory", "phases", "transfers", "live")


@pytest.fixture(scope="module")
def report():
    return tm.predict((1, 2, 512, 32), rule=af.causal(), machine=SMALL, trace=True)


@pytest.mark.parametrize("kind", ["all", *KINDS])
def test_each_is_an_svg_document_inside_its_frame(report, kind):
    root = ElementTree.fromstring(report.svg(kind))
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for rectangle in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(rectangle.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x and 0 <= y and x + w <= width + 1 and y + h <= height + 1 and w >= 0 and h >= 0


def test_memory_has_a_square_for_every_tile(report):
    assert report.svg("memory").count("<rect") >= SMALL.tiles
    assert f"Fullest: tile {report.peak_tile}" in report.svg("memory")


def test_all_is_the_others(report):
    titles = ("Memory: ", "Phases: ", "Who sends to whom: ", "Live memory over time")
    for kind, title in zip(KINDS, titles):
        assert [other for other in titles if f">{other}" in report.svg(kind)] == [title]
    places = [report.svg().index(f">{title}") for title in titles]
    assert places == sorted(places)


def test_transfers_need_a_trace(report):
    without = tm.predict((1, 2, 512, 32), rule=af.causal(), machine=SMALL)
    assert "Who sends" not in without.svg() and "Who sends" in report.svg()


def test_a_wrong_name(report):
    with pytest.raises(
        ValueError, match="picture: 'memry', expected all, memory, phases, transfers or live, did you mean 'memory'"
    ):
        report.svg("memry")


def test_it_can_be_saved(report, tmp_path):
    report.save(tmp_path / "tiles.svg")
    assert (tmp_path / "tiles.svg").read_text() == report.svg()
