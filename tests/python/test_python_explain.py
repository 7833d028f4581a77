"""af.explain: figures, pattern, pictures."""

import xml.etree.ElementTree
from collections import deque

import anyflash as af
import numpy as np
import pytest
from PIL import Image


def test_figures_of_causal():
    seen = af.explain(af.causal(), 1000)
    assert (seen.queries, seen.keys, seen.visible_pairs) == (1000, 1000, 500500)
    assert seen.visible_pairs <= seen.visited_pairs <= 1000 * 1000
    assert seen.forward_flops == 4 * 64 * 500500 and seen.backward_flops == 10 * 64 * 500500
    counts = [(seen.tile_classes == kind).sum() for kind in range(3)]
    assert counts == [seen.tiles_skipped, seen.tiles_partial, seen.tiles_full] and sum(counts) == seen.tile_classes.size
    np.testing.assert_array_equal(seen.pattern, np.tri(1000, dtype=bool))
    assert seen.pattern.dtype == np.bool_


def test_tile_classes_are_true_of_the_pattern():
    rule = af.local(40) | af.sink(3)
    seen = af.explain(rule, 700, 500, "none_end")
    rows, columns = seen.query_block[2], seen.key_block[2]
    assert seen.query_step == seen.key_step == (1, 1, 1)
    for i, j in np.ndindex(seen.tile_classes.shape):
        tile = seen.pattern[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        assert tile.all() if seen.tile_classes[i, j] == 2 else seen.tile_classes[i, j] == 1 or not tile.any()
    assert seen.pattern.sum() == seen.visible_pairs


def test_two_dimensions_and_types():
    seen = af.explain(af.neighbourhood(3), (8, 8), dtype=np.float16, d_qk=32, d_v=32)
    assert seen.visible_pairs == 64 * 9 and seen.forward_flops == 4 * 32 * 64 * 9
    assert seen.bytes == 64 * 4 * 32 * 2 + 64 * 4
    assert af.explain(af.full(), (8, 8), dtype="bfloat16", backward=True).visited_pairs == 64 * 64


@pytest.mark.parametrize("shape", [[4, 5], (4, 5), np.array([4, 5]), range(4, 6), deque([4, np.int8(5)])])
def test_shapes_are_any_sequence_of_integers(shape):
    assert str(af.explain(af.full(), shape)).startswith("full(), 4x5 queries, 4x5 keys")
    assert af.explain(af.full(), 20, shape[1]).keys == 5
    assert str(af.window(shape, 0)) == "window([4, 5], 0)"


def test_numbers_of_numpy_are_numbers():
    assert af.explain(af.full(), np.array(4), np.int16(3)).pattern.shape == (4, 3)
    assert str(af.neighbourhood(3, causal=np.array([True, False]))) == "neighbourhood(3, causal=[1, 0])"
    assert str(af.neighbourhood(np.int32(3), causal=np.True_)) == "neighbourhood(3, causal=1)"


def test_the_text_says_it_all():
    seen = af.explain(af.causal(), 64)
    assert str(seen).splitlines()[0] == "causal(), 64 queries, 64 keys, none_front"
    assert "2,080 of 4,096 (50.78%)" in str(seen)
    assert f"workspace      {seen.workspace_bytes:,} bytes, {seen.threads} threads" in str(seen)
    assert "blocks         1x1x64 queries, 1x1x64 keys" in str(seen)
    strided = af.explain(af.local(64, log2_stride=2), 4096)
    assert max(strided.key_step) == 4 and "keys" in str(strided) and " every 1x1x4 keys" in str(strided)
    assert repr(seen) == "<anyflash.Explanation of causal(), 64 queries, 64 keys, none_front>"


FULL = (0x1F, 0x4E, 0x9B)  # the colour of the densest pixels


def test_pictures(tmp_path):
    seen = af.explain(af.causal(), 128)
    grey = seen.grey(64)
    assert grey.shape == (64, 64) and grey.dtype == np.uint8
    assert (grey[np.tril_indices(64, -1)] == 255).all() and (grey[np.triu_indices(64, 1)] == 0).all()
    assert 0 < grey[0, 0] < 255
    assert len(set(map(len, seen.picture.rstrip("\n").splitlines()))) == 1
    assert xml.etree.ElementTree.fromstring(seen.svg()).tag.endswith("svg")
    assert f"{seen.queries} queries" in seen.svg() and f"{seen.keys} keys" in seen.svg()
    seen.save(tmp_path / "causal.svg")
    assert (tmp_path / "causal.svg").read_text() == seen.svg()
    seen.save(str(tmp_path / "causal.txt"))
    assert seen.picture in (tmp_path / "causal.txt").read_text()
    seen.save(tmp_path / "causal.png", side=64)
    with Image.open(tmp_path / "causal.png") as image:  # 8 x 8 of its pixels for each of the picture's
        assert (np.asarray(image) == FULL).all(-1).sum() >= 64 * (grey == 255).sum()


def test_a_thin_band_is_seen(tmp_path):
    seen = af.explain(af.local(8), (512, 512))
    assert (seen.grey(64).diagonal() > 127).all()
    seen.save(tmp_path / "local.png")
    with Image.open(tmp_path / "local.png") as image:
        pixels = np.asarray(image)
    assert pixels.shape[2] == 3 and pixels.mean() > 200  # dark on a light ground
    assert (pixels == FULL).all(-1).sum() > 512


@pytest.mark.parametrize("name", ["rule.svg", "rule.txt", "rule.png"])
def test_a_picture_that_cannot_be_written(tmp_path, name):
    (tmp_path / name).mkdir()
    for path, error in ((tmp_path / name, IsADirectoryError), (tmp_path / "no" / name, FileNotFoundError)):
        with pytest.raises(error):
            af.explain(af.full(), 4).save(path)
    assert [path.name for path in tmp_path.rglob("*")] == [name]


def test_png_without_pillow_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError) as caught:
        af.explain(af.full(), 4).save(tmp_path / "full.png")
    assert str(caught.value) == "path: .png needs Pillow (pip install pillow); .svg and .txt do not"
    assert not (tmp_path / "full.png").exists()


def test_an_ending_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match=r"expected a name that ends in \.svg, \.txt or \.png$"):
        af.explain(af.full(), 4).save(tmp_path / "full.jpg")


def test_figures_beside_the_pairs():
    seen = af.explain(af.causal(), 1000, 500)
    assert seen.visited_per_visible == seen.visited_pairs / seen.visible_pairs
    assert seen.dense_mask_bytes == 1000 * 500 and f"{500000:.4g} of a dense mask" in str(seen)
    assert seen.threads >= 1
    nothing = af.explain(~af.full(), 64)
    assert nothing.visible_pairs == nothing.visited_per_visible == 0 and "0 (0.00 a visible one)" in str(nothing)


def test_the_plan_and_the_figures_know_the_workspace():
    q = np.zeros((1, 1, 1000, 64), np.float32)
    plan = af.plan(q, q, q, rule=af.causal())
    assert plan.forward_workspace == af.explain(af.causal(), 1000, 1000).workspace_bytes > 0
    assert plan.backward_workspace == af.explain(af.causal(), 1000, 1000, backward=True).workspace_bytes > 0
