"""explain shows the pattern that the specification's table describes, and its figures fit the pattern."""

import anyflash as af
import numpy as np
import pytest
from cases import library_rule
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from reference_rules import visible
from strategies import ALIGNMENTS, ATOMS, Shapes, draw_atom, draw_rule

sides = {
    1: st.one_of(st.integers(0, 20), st.integers(0, 300)),
    2: st.one_of(st.integers(1, 20), st.integers(0, 12)),
    3: st.one_of(st.integers(1, 7), st.integers(0, 5)),
}


def draw_shapes(draw):
    dims = draw(st.sampled_from([1, 2, 3]))
    q_shape = tuple(draw(sides[dims]) for _ in range(dims))
    k_shape = q_shape if draw(st.booleans()) else tuple(draw(sides[dims]) for _ in range(dims))
    return Shapes(1, 1, q_shape, k_shape), draw(st.sampled_from(ALIGNMENTS))


def compare(rule, shapes, align):
    mask = visible(rule, shapes.q_shape, shapes.k_shape, align)[0][0, 0]
    explanation = af.explain(library_rule(rule), shapes.q_shape, shapes.k_shape, align)
    assert explanation.pattern.dtype == bool and explanation.pattern.shape == mask.shape
    wrong = np.argwhere(explanation.pattern != mask)
    assert not len(wrong), f"{len(wrong)} pairs, first {wrong[0]}, expected {mask[tuple(wrong[0])]}"
    assert explanation.visible_pairs == np.count_nonzero(mask)
    assert explanation.visited_pairs >= explanation.visible_pairs
    assert (explanation.queries, explanation.keys) == mask.shape
    classes = explanation.tile_classes
    assert [explanation.tiles_skipped, explanation.tiles_partial, explanation.tiles_full] == [
        np.count_nonzero(classes == c) for c in (0, 1, 2)
    ]


@pytest.mark.parametrize("atom", ATOMS)
def test_each_rule(atom):
    @examples(100)
    @given(st.data())
    def property(data):
        shapes, align = draw_shapes(data.draw)
        compare(draw_atom(data.draw, atom, shapes), shapes, align)

    property()


@examples(300)
@given(st.data())
def test_trees(data):
    shapes, align = draw_shapes(data.draw)
    compare(draw_rule(data.draw, shapes, 4), shapes, align)
