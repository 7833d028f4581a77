"""anyflash: exact attention, forward and backward, with memory linear in the sequence, under any mask rule.

    import anyflash as af
    out = af.attention(q, k, v, rule=af.causal() & af.local(256))

It takes arrays of NumPy, PyTorch, JAX, TensorFlow and any other library with DLPack. The result is an array of the
same library. Calls release the GIL and may be made from several threads.
"""

from ._attention import Gradients, attention, attention_backward, plan
from ._core import Plan, Rule
from ._core import version as __version__
from ._explain import Explanation, explain
from ._rules import (
    blocks,
    causal,
    dense,
    documents,
    documents_packed,
    full,
    local,
    neighbourhood,
    parse_rule,
    prefix,
    prefix_queries,
    sink,
    tiles,
    window,
)

Rule.__module__ = Plan.__module__ = __name__

__all__ = [
    "Explanation",
    "Gradients",
    "Plan",
    "Rule",
    "__version__",
    "attention",
    "attention_backward",
    "blocks",
    "causal",
    "dense",
    "documents",
    "documents_packed",
    "explain",
    "full",
    "local",
    "neighbourhood",
    "parse_rule",
    "plan",
    "prefix",
    "prefix_queries",
    "sink",
    "tiles",
    "window",
]
