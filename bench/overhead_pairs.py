"""What bench/overhead times in pairs with PyTorch's own attention: usual small calls of scaled_dot_product_attention
(one head, 16 queries and keys, 16 channels, float32, one thread), and a token of a tiny Llama in Transformers."""

import time
from statistics import median
from typing import NamedTuple

ROUNDS, LOOPS, TOKENS = 31, 300, 40
PROMPT, MOST_TOKENS = 16, 64


class Row(NamedTuple):
    ours: object  # seconds of a call, measured over some
    theirs: object
    most_ratio: float  # of the medians of pairs
    most_microseconds: float | None = None


def each(call):
    """Measures a call without arguments."""

    def seconds():
        start = time.perf_counter()
        for _ in range(LOOPS):
            call()
        return (time.perf_counter() - start) / LOOPS

    return seconds


def calls():
    """{name: (a call of ours, PyTorch's)}."""
    import torch
    from anyflash.torch import _sdpa

    torch.set_num_threads(1)
    q, k, v, dout = (torch.randn(1, 1, 16, 16) for _ in range(4))
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = (torch.rand(1, 1, 16, 16) > 0.3) | torch.eye(16, dtype=torch.bool)
    of_two_axes = mask[0, 0]

    def both(call):
        return [lambda one=one: call(one) for one in (_sdpa.scaled_dot_product_attention, _sdpa._pytorch_s_own)]

    return {
        "no mask": both(lambda sdpa: sdpa(q, k, v)),
        "a boolean mask": both(lambda sdpa: sdpa(q, k, v, attn_mask=mask)),
        "a boolean mask of two axes": both(lambda sdpa: sdpa(q, k, v, attn_mask=of_two_axes)),
        "forward and backward": both(lambda sdpa: torch.autograd.grad(sdpa(*recorded), recorded, dout)),
        "forward and backward, a mask": both(
            lambda sdpa: torch.autograd.grad(sdpa(*recorded, attn_mask=mask), recorded, dout)
        ),
    }


def llama(implementation):
    import anyflash.transformers  # noqa: F401
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * MOST_TOKENS,
    )
    config._attn_implementation = implementation
    return transformers.LlamaForCausalLM(config).eval()


def tokens(model, static):
    """Measures a token behind a prompt; returns the last one's logits beside the seconds."""
    import torch
    from transformers import DynamicCache, StaticCache

    def run():
        config = model.config
        cache = StaticCache(config=config, max_cache_len=MOST_TOKENS) if static else DynamicCache(config=config)
        with torch.no_grad():
            model(torch.arange(1, 1 + PROMPT)[None], past_key_values=cache)
            token = torch.tensor([[5]])
            start = time.perf_counter()
            for _ in range(TOKENS):
                made = model(token, past_key_values=cache)
            return (time.perf_counter() - start) / TOKENS, made.logits

    return run


def rows():
    """{name: Row}."""
    limits = {
        "no mask": (2.4, 12),
        "a boolean mask": (1.9, 15),
        "a boolean mask of two axes": (1.9, 15),
        "forward and backward": (1.6, 90),
        "forward and backward, a mask": (1.9, 90),
    }
    found = {name: Row(*map(each, pair), *limits[name]) for name, pair in calls().items()}
    models = [llama(name) for name in ("anyflash", "sdpa")]
    for kind, static in (("dynamic", False), ("static", True)):
        runs = [tokens(model, static) for model in models]
        found[f"Llama's token, {kind} cache"] = Row(*[lambda run=run: run()[0] for run in runs], 1.0)
    return found


def report():
    """Prints the medians, of pairs that follow each other in alternating order; is a limit missed?"""
    missed = False
    for name, row in rows().items():
        row.ours(), row.theirs()
        pairs = []
        for i in range(ROUNDS):
            first, second = (row.ours, row.theirs)[:: -1 if i % 2 else 1]
            pair = first(), second()
            pairs.append(pair[:: -1 if i % 2 else 1])
        ours, theirs = (median(one) * 1e6 for one in zip(*pairs))
        ratio = median(a / b for a, b in pairs)
        limit = f"at most {row.most_ratio}" + (f" and {row.most_microseconds} us" if row.most_microseconds else "")
        over = ratio > row.most_ratio or (row.most_microseconds or ours) < ours
        missed |= over
        print(f"{name:32} {ours:7.2f} us, PyTorch's own {theirs:7.2f}; {ratio:.2f} of it, {limit}{', MISSED' * over}")
    return missed
