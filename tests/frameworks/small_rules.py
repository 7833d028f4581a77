"""Every kind of rule, for gradients by finite differences: of five queries and six keys."""

import anyflash as af


def small_rules(array, ids=None):
    """By name. array(numbers): an array of a framework's, for tables; ids: the same for documents, if others."""
    ids = ids or array
    return {
        "full": af.full(),
        "causal": af.causal(),
        "local": af.local(3, 1, True),
        "window": af.window(2, 1),
        "prefix": af.prefix(2),
        "prefix_queries": af.prefix_queries(2),
        "sink": af.sink(1),
        "documents": af.documents(ids([0, 0, 1, 1, 1]), ids([0, 0, 0, 1, 1, 1])),
        "documents_packed": af.documents_packed(array([0, 2, 5]), array([0, 3, 6])),
        "tiles": af.tiles(2, 1),
        "neighbourhood": af.neighbourhood(3, 2),
        "blocks": af.blocks(array([[True, False], [True, True], [False, True]]), 2, 3),
        "dense": af.dense(array([[(6 * i + j) % 3 > 0 for j in range(6)] for i in range(5)])),
        "tree": af.causal() & ~af.sink(1) | af.prefix(2),
    }
