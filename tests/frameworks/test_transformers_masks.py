"""The masks that Transformers makes for "anyflash": left away where that is safe, and with their rules."""

import anyflash.transformers
import pytest
import torch
import transformers
from anyflash.transformers import attention_forward, make_mask
from anyflash.transformers._masks import known
from devices import DEVICE
from transformers import masking_utils

CAUSAL = masking_utils.causal_mask_function
WINDOW = masking_utils.sliding_window_causal_mask_function(3)
CHUNKS = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long, device=DEVICE))
NEAR = masking_utils.sliding_window_bidirectional_mask_function(2)
PACKED = masking_utils.and_masks(
    CAUSAL, masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 6] * 2, device=DEVICE))
)
ONES = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
PADDED = ONES.clone()
PADDED[1, :3] = False

# Mask function, first query's place, queries, first key's place, keys.
KNOWN = {
    "window": (WINDOW, 0, 11, 0, 11),
    "window, cache": (WINDOW, 7, 4, 0, 11),
    "window, cache that has lost its first": (WINDOW, 9, 4, 6, 7),
    "window, one query": (WINDOW, 7, 1, 0, 8),
    "window, static cache": (WINDOW, 3, 4, 0, 16),
    "causal, cache": (CAUSAL, 7, 4, 0, 11),
    "causal, static cache, one query": (CAUSAL, 7, 1, 0, 16),
    "window, static cache, one query": (WINDOW, 7, 1, 0, 16),
    "window as long as what is there, one query": (WINDOW, 2, 1, 0, 16),
    "window one shorter, one query": (WINDOW, 3, 1, 0, 16),
    "causal, static cache": (CAUSAL, 0, 7, 0, 16),
    "chunks": (CHUNKS, 0, 11, 0, 11),
    "chunks, cache": (CHUNKS, 6, 5, 0, 11),
    "chunks, cache that has lost its first": (CHUNKS, 9, 4, 5, 8),
    "chunks, static cache": (CHUNKS, 3, 4, 0, 16),
    "both ways": (NEAR, 0, 11, 0, 11),
}
UNKNOWN = {
    "packed": (PACKED, 0, 11, 0, 11),
    "both ways, keys behind the last query": (NEAR, 0, 7, 0, 16),
    "both windows": (masking_utils.or_masks(WINDOW, NEAR), 0, 11, 0, 11),
    "a function of a user's": (lambda b, h, q, k: k <= q, 0, 11, 0, 11),
}


def mask_of(function, first, queries, first_key, keys, attention_mask=None, **options):
    given = dict(batch_size=2, allow_is_causal_skip=False, device=DEVICE) | options
    return make_mask(
        q_length=queries,
        kv_length=keys,
        q_offset=first,
        kv_offset=first_key,
        mask_function=function,
        attention_mask=attention_mask,
        **given,
    )


def rule_of(mask):
    """In a call of as many queries and keys as the mask has."""
    return known(mask, *(torch.empty(1, 1, length, 8) for length in mask.shape[-2:]))


def tensors(numbers, queries, keys):
    return numbers(2, 2, queries, 8), numbers(2, 2, keys, 8), numbers(2, 2, keys, 8)


def results(q, k, v, mask):
    """With the mask's rule, and with a copy of it that has none."""
    assert rule_of(mask.clone()) is None
    return [attention_forward(torch.nn.Module(), q, k, v, one)[0] for one in (mask, mask.clone())]


@pytest.mark.parametrize("padding", [None, ONES])
@pytest.mark.parametrize("name", KNOWN)
def test_a_rule_gives_what_its_mask_gives(name, padding, numbers):
    mask = mask_of(*KNOWN[name], padding)
    assert rule_of(mask) is not None
    q, k, v = tensors(numbers, KNOWN[name][2], KNOWN[name][4])
    k[:, :, rule_of(mask).keys :] = float("nan")  # of a static cache, not written
    v[:, :, rule_of(mask).keys :] = float("nan")
    if DEVICE == "cuda":  # where the mask is added, and 0 of NaN is NaN
        k, v = k.nan_to_num(), v.nan_to_num()
    by_rule, by_mask = results(q, k, v, mask)
    torch.testing.assert_close(by_rule, by_mask, rtol=0, atol=1e-14)


@pytest.mark.parametrize("padding", [None, ONES, PADDED])
@pytest.mark.parametrize("name", KNOWN | UNKNOWN)
def test_masks_are_those_of_sdpa(name, padding, monkeypatch):
    mask = mask_of(*(KNOWN | UNKNOWN)[name], padding)
    monkeypatch.setitem(globals(), "make_mask", masking_utils.sdpa_mask)
    expected = mask_of(*(KNOWN | UNKNOWN)[name], padding)
    assert mask.shape == expected.shape
    assert torch.equal(mask, expected)


SHORT = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(2),
    "bidirectional window": masking_utils.sliding_window_bidirectional_mask_function(1),
}


@pytest.mark.parametrize("length", [None, 2, 3, 5, 8])
@pytest.mark.parametrize("name", SHORT)
def test_keys_beyond_a_given_mask_are_hidden_as_by_sdpa(name, length):
    """A static cache is longer than what has been seen; a mask that does not reach its end hides the rest."""
    given = dict(batch_size=1, q_length=2, kv_length=8, mask_function=SHORT[name], allow_is_causal_skip=False)
    for offset in (0, 1, 3):
        seen = None if length is None else torch.ones(1, length, dtype=torch.bool)
        mask = make_mask(q_offset=offset, attention_mask=seen, config=None, **given)
        assert torch.equal(mask, masking_utils.sdpa_mask(q_offset=offset, attention_mask=seen, **given))


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_masks_have_no_rule(name):
    assert rule_of(mask_of(*UNKNOWN[name])) is None


@pytest.mark.parametrize("name", KNOWN)
def test_padded_masks_have_no_rule(name):
    function, first, queries, first_key, keys = KNOWN[name]
    padding = PADDED.clone()
    padding[1, first_key] = False
    assert rule_of(mask_of(*KNOWN[name], padding)) is None


@pytest.fixture
def rules(monkeypatch):
    """Of the calls that reach anyflash, as text."""
    seen = []
    attention, plain = anyflash.transformers.attention, anyflash.transformers.plain_attention

    def seen_attention(*tensors, **options):
        seen.append(str(options["rule"]))
        return attention(*tensors, **options)

    def seen_plain(q, k, v, rule, *more, **options):
        seen.append(str(rule))
        return plain(q, k, v, rule, *more, **options)

    monkeypatch.setattr(anyflash.transformers, "attention", seen_attention)
    monkeypatch.setattr(anyflash.transformers, "plain_attention", seen_plain)
    return seen


def test_a_window_is_read_from_its_rule(rules, numbers):
    results(*tensors(numbers, 11, 11), mask_of(*KNOWN["window"]))
    assert rules[0] == "window(2, 0)"
    assert "window" not in rules[1]


CHANGES = {
    "cut": lambda mask: mask[:, :, -2:],
    "combined": lambda mask: mask & True,
    "changed in place": lambda mask: mask.logical_not_(),
    "changed through a view": lambda mask: (mask[0, 0, 3].fill_(True), mask)[1],
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_mask_that_a_model_cuts_or_changes_has_no_rule(change, inference):
    with torch.inference_mode(inference):
        mask = mask_of(*KNOWN["window"], batch_size=1)
        assert rule_of(mask) is not None
        assert rule_of(CHANGES[change](mask)) is None


def test_a_rule_is_for_the_sizes_that_its_mask_is_for(numbers):
    mask, q, k = mask_of(*KNOWN["window"]), numbers(2, 2, 11, 8), numbers(2, 2, 11, 8)
    assert known(mask, q, k) is not None
    for queries, keys in ((q[:, :, 1:], k), (q, k[:, :, 1:]), (q, torch.cat([k, k], 2))):
        assert known(mask, queries, keys) is None


@pytest.mark.parametrize(
    "queries, first, keys, config, left_away",
    [
        (11, 0, 11, {}, True),
        (1, 10, 11, {}, True),
        (7, 0, 16, {}, False),  # a static cache
        (4, 7, 11, {}, False),
        (11, 0, 11, {"use_bidirectional_attention": True}, False),
    ],
)
def test_a_causal_mask_is_left_away_only_where_it_is_aligned_at_both_ends(queries, first, keys, config, left_away):
    config = transformers.LlamaConfig(**config)
    mask = mask_of(CAUSAL, first, queries, 0, keys, config=config, allow_is_causal_skip=True)
    assert (mask is None) == left_away


def test_masks_in_a_compiled_function():
    """No rule is looked for there: the mask itself is right."""

    def f(q, mask):
        return attention_forward(torch.nn.Module(), q, q, q, mask)[0]

    q, mask = torch.randn(2, 2, 11, 8, device=DEVICE), mask_of(*KNOWN["window"])
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, mask), f(q, mask))
    made = torch.compile(lambda: mask_of(*KNOWN["window"]), backend="eager")()
    assert torch.equal(made, mask)


# Whole models

IDS = torch.randint(1, 99, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.fixture
def gemma():
    """Its last two layers share keys, and see the last queries alone."""
    config = transformers.Gemma4TextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        num_kv_shared_layers=2,
        pad_token_id=0,
        vocab_size_per_layer_input=99,
        hidden_size_per_layer_input=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    config._attn_implementation = "anyflash"
    out = transformers.Gemma4ForCausalLM(config).eval().to(DEVICE)
    torch.manual_seed(0)
    for parameter in out.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return out


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("length", [3, 9])
def test_the_last_logits_are_those_of_the_whole(gemma, kept, length):
    ids = IDS[:, :length]
    with torch.no_grad():
        whole = gemma(ids).logits[:, -kept:]
        torch.testing.assert_close(gemma(ids, logits_to_keep=kept).logits, whole, rtol=0, atol=1e-5)


def test_a_static_cache_gives_the_logits_of_a_growing_one(gemma):
    options = dict(max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    growing = gemma.generate(IDS, **options)
    static = gemma.generate(IDS, cache_implementation="static", disable_compile=True, **options)
    torch.testing.assert_close(static.logits, growing.logits, rtol=0, atol=1e-5)


def test_a_window_in_pieces(rules):
    """Mistral's, with a cache: every call is by its rule, and the logits are those of "eager"."""
    small = dict(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
    )
    logits = []
    for implementation in ("eager", "anyflash"):
        config = transformers.MistralConfig(**small)
        config._attn_implementation = implementation
        torch.manual_seed(0)
        mistral = transformers.MistralForCausalLM(config).eval().to(DEVICE)
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            logits.append(
                torch.cat([mistral(IDS[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 8), (8, 9))], 1)
            )
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    assert rules == ["window(3, 0)"] * 4 + ["full()"] * 2  # the cache keeps what the last query sees
