"""attn_implementation="anyflash" in Hugging Face Transformers: the logits of "eager", for random models of small
configs."""

import copy
import logging

import anyflash.transformers
import architectures
import pytest
import torch
import transformers
from anyflash.transformers import _models
from anyflash.transformers import attention_forward as forward
from devices import DEVICE
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

SMALL = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=64,
    pad_token_id=0,
)
MODELS = {
    "bert": (BertModel, BertConfig(**SMALL, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gemma": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **SMALL,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=4,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=8,
        ),
    ),
}
if hasattr(transformers, "GptOssConfig"):  # sink logits
    experts = dict(num_key_value_heads=2, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1)
    MODELS["gpt-oss"] = (transformers.GptOssForCausalLM, transformers.GptOssConfig(**SMALL, **experts))
GENERATE = [name for name in MODELS if name != "bert"]


@pytest.fixture(params=MODELS)
def pair(request):
    return make(request.param)


def make(name):
    """The same model with eager attention and with ours."""
    kind, config = MODELS[name]
    models = []
    for implementation in ("eager", "anyflash"):
        own = copy.deepcopy(config)
        own._attn_implementation = implementation
        torch.manual_seed(0)
        models.append(kind(own).eval().to(DEVICE))
        assert models[-1].config._attn_implementation == implementation
    for parameter in models[0].parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.fixture
def calls(monkeypatch):
    """Counts what reaches anyflash."""
    seen = []
    for name in ("attention", "plain_attention"):
        real = getattr(anyflash.transformers, name)
        monkeypatch.setattr(anyflash.transformers, name, lambda *a, real=real, **o: seen.append(o) or real(*a, **o))
    return seen


IDS = torch.randint(1, 99, (2, 13), generator=torch.Generator().manual_seed(0)).to(DEVICE)
MASKS = {"none": None, "left": torch.ones_like(IDS), "right": torch.ones_like(IDS)}
MASKS["left"][0, :5] = 0
MASKS["right"][0, -5:] = 0


@pytest.mark.parametrize("padding", MASKS)
def test_logits(pair, calls, padding):
    mask = MASKS[padding]
    with torch.no_grad():
        eager, ours = (model(IDS, attention_mask=mask)[0] for model in pair)
    real = slice(None) if mask is None else mask.bool()
    assert (eager[real] - ours[real]).abs().max() <= 1e-4
    assert len(calls) == 2


@pytest.mark.parametrize("name", GENERATE)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(name, cache, calls):
    options = dict(attention_mask=MASKS["left"], max_new_tokens=12, do_sample=False)
    if cache:
        options |= dict(cache_implementation=cache, disable_compile=True)
    eager, ours = (
        model.generate(IDS, output_logits=True, return_dict_in_generate=True, **options) for model in make(name)
    )
    assert torch.equal(eager.sequences, ours.sequences)
    for one, other in zip(eager.logits, ours.logits):
        assert (one - other).abs().max() <= 1e-4
    assert len(calls) == 2 * 12


def test_gradients(pair, calls):
    for model in pair:
        model.train()
        model(IDS, attention_mask=MASKS["right"])[0][MASKS["right"].bool()].square().sum().backward()
    for (name, one), other in zip(pair[0].named_parameters(), pair[1].parameters()):
        if one.grad is None:
            assert other.grad is None, name
            continue
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-4 * float(one.grad.abs().max()) + 1e-7)
    assert calls


def test_trains():
    _, model = make("llama")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = model.train()(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_masks_of_their_own(pair):
    """Four axes, boolean or added."""
    seen = torch.ones(2, 1, 13, 13, dtype=torch.bool, device=DEVICE).tril(2)
    added = torch.zeros(seen.shape, device=DEVICE).masked_fill_(~seen, torch.finfo(torch.float32).min)
    eager, ours = pair
    with torch.no_grad():
        expected = eager(IDS, attention_mask=added)[0]
        assert (expected - ours(IDS, attention_mask=added)[0]).abs().max() <= 1e-4
        assert (expected - ours(IDS, attention_mask=seen)[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("position_bias", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_mask_and_position_bias(added, position_bias):
    """The mask may be longer than the keys."""
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64, device=DEVICE) for n in (5, 7, 7))
    mask = torch.ones(2, 1, 5, 9, dtype=torch.bool, device=DEVICE).tril(2)
    bias = torch.randn(1, 4, 5, 9, dtype=torch.float64, device=DEVICE) if position_bias else None
    given = torch.zeros(mask.shape, dtype=torch.float64, device=DEVICE).masked_fill_(~mask, -1e4) if added else mask
    out, _ = forward(torch.nn.Module(), q, k, v, given, position_bias=bias)
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k) / 8**0.5 + (0 if bias is None else bias[..., :7])
    p = scores.masked_fill(~mask[..., :7], float("-inf")).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("bhnm,bhmd->bnhd", p, v))


@pytest.mark.of_the_cpu  # on a GPU the mask is copied
def test_a_mask_that_changes_before_the_backward_pass_is_found_out():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    out, _ = forward(torch.nn.Module(), q, q, q, mask)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def training(name, implementation):
    """A model with dropout inside of attention, in training, the same weights for each implementation."""
    kind, config = MODELS[name]
    own = copy.deepcopy(config)
    own._attn_implementation, own.attention_dropout = implementation, 0.5
    torch.manual_seed(0)
    return kind(own).train().to(DEVICE)


@pytest.fixture
def warnings(caplog, monkeypatch):
    """What the logger has been told so far."""
    monkeypatch.setattr(anyflash.transformers, "_told", set())
    caplog.set_level(logging.WARNING, "anyflash.transformers")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "anyflash.transformers"]


def test_dropout_is_left_to_transformers(calls, warnings):
    model = training("llama", "anyflash")
    model(IDS)
    assert not calls
    assert warnings() == ["attention left to Transformers' sdpa: dropout is not 0"]
    model.eval()(IDS)
    assert len(calls) == 2


@pytest.mark.parametrize("name", [name for name in MODELS if name in ("gemma", "gpt-oss")])
@pytest.mark.parametrize("padding", MASKS)
def test_dropout_beside_a_soft_cap_or_sinks_is_left_to_eager(name, padding, calls, warnings):
    """The same numbers are drawn, so that the results are equal."""
    results = []
    for implementation in ("eager", "anyflash"):
        model = training(name, implementation)
        torch.manual_seed(1)
        results.append(model(IDS, attention_mask=MASKS[padding])[0])
    real = slice(None) if MASKS[padding] is None else MASKS[padding].bool()
    torch.testing.assert_close(results[1][real], results[0][real], rtol=0, atol=1e-5)
    assert not calls
    assert warnings() == ["attention left to the model's eager: dropout is not 0"]


def test_dropout_without_an_eager_function_to_take_it():
    q = torch.randn(1, 1, 3, 8, device=DEVICE)
    with pytest.raises(ValueError, match="^dropout: 0.5 with softcap, expected 0; set attention_dropout=0$"):
        forward(torch.nn.Module(), q, q, q, None, is_causal=True, dropout=0.5, softcap=2.0)


def test_weights_asked_for_are_said_to_be_missing(calls, warnings):
    _, model = make("llama")
    for _ in range(2):
        assert not model(IDS, output_attentions=True).attentions
    assert len(calls) == 4
    assert warnings() == [
        'attention weights are not returned: output_attentions=True needs attn_implementation="eager"'
    ]


def test_weights_asked_for_in_a_graph_are_said_to_be_missing(qkv, warnings):
    attend = lambda *qkv: forward(torch.nn.Module(), *qkv, None, is_causal=True, output_attentions=True)[0]
    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(*qkv), attend(*qkv))
    assert len(warnings()) == 1


def test_other_names_with_flash_are_still_flash_attention():
    from transformers.utils.generic import is_flash_attention_requested as asked

    assert asked(requested_attention_implementation="flash_attention_2")
    assert not asked(requested_attention_implementation="anyflash")


# Arguments of a call


@pytest.fixture
def qkv(numbers):
    return numbers(2, 4, 6, 8), numbers(2, 2, 6, 8), numbers(2, 2, 6, 8)


def by_hand(q, k, v, seen, sinks=None):
    """Softmax over the keys that a query sees, and one more logit if there are sinks. Queries before heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


CAUSAL = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE).tril()
MASK_FORMS = {
    "boolean": CAUSAL,
    "added": torch.zeros(CAUSAL.shape, dtype=torch.float64, device=DEVICE).masked_fill_(~CAUSAL, -1e9),
    "none": None,
}


@pytest.mark.parametrize("mask", MASK_FORMS)
def test_chosen_keys(qkv, mask):
    chosen = torch.tensor([[[0, 5, -1]] * 6, [[0, 2, 3]] * 6], dtype=torch.int32, device=DEVICE)
    seen = torch.zeros(2, 1, 6, 6, dtype=torch.bool, device=DEVICE)
    seen[0, :, :, [0, 5]] = seen[1, :, :, [0, 2, 3]] = True
    out, _ = forward(torch.nn.Module(), *qkv, MASK_FORMS[mask], indices=chosen, is_causal=True)
    torch.testing.assert_close(out, by_hand(*qkv, seen & CAUSAL))


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("mask", MASK_FORMS)
def test_chosen_blocks(qkv, mask, each):
    """Blocks of 4 keys, chosen by each head of keys, or by each head of queries."""
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 4
    blocks = torch.tensor([[0, -1], [1, 0]], device=DEVICE)[None, :, None].expand(2, 2, 6, 2)
    seen = torch.ones(2, 4, 6, 6, dtype=torch.bool, device=DEVICE)
    seen[:, :2, :, 4:] = False
    out, _ = forward(module, *qkv, MASK_FORMS[mask], block_indices=blocks.repeat_interleave(each, 1), is_causal=True)
    torch.testing.assert_close(out, by_hand(*qkv, seen & CAUSAL))


def test_sinks_for_each_query(qkv, numbers):
    sinks = numbers(2, 4, 6, 1)
    out, _ = forward(torch.nn.Module(), *qkv, CAUSAL, sinks=sinks)
    torch.testing.assert_close(out, by_hand(*qkv, CAUSAL, sinks))


def test_arguments_without_effect(qkv):
    qkv = [x[:1] for x in qkv]
    expected, _ = forward(torch.nn.Module(), *qkv, CAUSAL)
    given = dict(
        sliding_window=3,
        position_ids=torch.arange(6),
        use_cache=True,
        cu_seq_lens_q=torch.tensor([0, 6]),
        shift_labels=torch.arange(6),
        ignore_index=5,
        skip_logits=False,
    )
    out, _ = forward(torch.nn.Module(), *qkv, CAUSAL, head_mask=None, **given)
    assert torch.equal(out, expected)


PACKED = torch.block_diag(*[torch.ones(n, n, dtype=torch.bool) for n in (2, 1, 3)])[None, None].to(DEVICE)
ENDS = torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("mask", MASK_FORMS)
@pytest.mark.parametrize("given", [dict(cu_seq_lens_q=ENDS), dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)])
def test_packed_sequences(qkv, mask, given):
    """By their lengths, which a mask may leave to them."""
    qkv = [x[:1] for x in qkv]
    out, _ = forward(torch.nn.Module(), *qkv, MASK_FORMS[mask], is_causal=True, **given)
    torch.testing.assert_close(out, by_hand(*qkv, PACKED & CAUSAL))


def test_packed_training_with_windows(calls):
    """What DataCollatorWithFlattening hands over, in a model of sliding windows."""
    config = transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4)
    model = transformers.MistralForCausalLM(with_ours(config)).eval().to(DEVICE)
    apart = [IDS[:1], IDS[1:, :6]]
    ends = torch.tensor([0, 13, 19], dtype=torch.int32, device=DEVICE)
    places = torch.cat([torch.arange(ids.shape[1]) for ids in apart])[None].to(DEVICE)
    with torch.no_grad():
        expected = torch.cat([model(ids).logits for ids in apart], 1)
        found = model(
            torch.cat(apart, 1),
            position_ids=places,
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=13,
            max_length_k=13,
        ).logits
    assert (found - expected).abs().max() <= 1e-5


UNKNOWN = {
    'head_mask: an argument that "anyflash" does not know; leave it out or use attn_implementation="eager"': dict(
        head_mask=1
    ),
    "cache: a paged cache, expected one of Transformers' own kinds; use generate, not generate_batch": dict(
        cache=object()
    ),
    "cu_seq_lens_q: given with a batch of 2, expected 1; pad the sequences instead": dict(cu_seq_lens_k=ENDS[::3]),
    "cu_seq_lens_q: 1 numbers, expected sequences + 1": dict(cu_seq_lens_k=ENDS[:1], batch=1),
    "cu_seq_lens_k: expected a tensor of rank 1 of int32 or int64, the cumulative lengths": dict(cu_seq_lens_k=[0, 6]),
    "cu_seq_lens_k: 2 numbers, expected 4 as cu_seq_lens_q": dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS[::3]),
    "dropout: 0.5 with cu_seq_lens_q, expected 0; set attention_dropout=0": dict(
        cu_seq_lens_q=ENDS, dropout=0.5, batch=1
    ),
    "indices: torch.float32, expected torch.int32 or torch.int64": dict(indices=torch.ones(2, 6, 1)),
    "indices: shape (2, 5, 1), expected (2, 6, n)": dict(indices=torch.zeros(2, 5, 1).int()),
    "sinks: shape (3, 4, 6, 1), expected (2, 4, 6, 1)": dict(sinks=torch.zeros(3, 4, 6, 1)),
    "block_indices: 3 heads, expected a divisor of 4": dict(block_indices=torch.zeros(2, 3, 6, 1).int()),
    "dropout: -0.5, expected 0 to 1": dict(dropout=-0.5),
    "block_indices: Module has no indexer.block_size; pass a mask": dict(block_indices=torch.zeros(2, 2, 6, 1).int()),
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_other_arguments_are_refused(qkv, message):
    given = dict(UNKNOWN[message])
    qkv = [x[: given.pop("batch", 2)] for x in qkv]
    with pytest.raises(ValueError) as raised:
        forward(torch.nn.Module(), *qkv, None, is_causal=True, **given)
    assert str(raised.value) == message


WRONG_ENDS = {
    "cu_seq_lens_q: ends at 5, expected 6, as there are queries": ([0, 5], [0, 6]),
    "cu_seq_lens_k: ends at 7, expected 6, as there are keys": ([0, 6], [0, 7]),
    "cu_seq_lens_q: expected numbers from 0 on that do not fall": ([1, 6], None),
    "cu_seq_lens_k: ends at 4, expected 6, as there are keys": ([0, 2, 6], [0, 1, 4]),
    "cu_seq_lens_k: expected numbers from 0 on that do not fall": ([0, 2, 3, 6], [0, 4, 3, 6]),
}


@pytest.mark.of_the_cpu  # on a GPU nobody waits for the numbers
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("line", WRONG_ENDS)
def test_lengths_that_are_not_those_of_the_tokens_are_refused(qkv, line, compiled):
    def attend(q, k, v, ends):
        return forward(torch.nn.Module(), q, k, v, None, is_causal=True, cu_seq_lens_q=ends[0], cu_seq_lens_k=ends[1])

    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    ends = [None if one is None else torch.tensor(one) for one in WRONG_ENDS[line]]
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$"):
        call(*(x[:1] for x in qkv), ends)


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("ends", [[0, 13], [0, 5, 13]])
def test_packed_sequences_are_not_generated_from(ends):
    ends = torch.tensor(ends, dtype=torch.int32)
    line = "^cu_seq_lens_q: ends at 13, expected 1, as there are queries; for generate, pad the sequences instead$"
    with pytest.raises(ValueError, match=line):
        make("llama")[1].generate(IDS[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_new_tokens=2)


@pytest.mark.of_the_cpu  # on a GPU nobody waits for the numbers
def test_chosen_keys_that_do_not_exist_are_refused(qkv):
    with pytest.raises(ValueError, match="^indices: 9, expected at most 5$"):
        forward(torch.nn.Module(), *qkv, None, is_causal=True, indices=torch.full((2, 6, 1), 9))


def test_unknown_arguments_of_a_model_are_refused():
    _, model = make("llama")
    with pytest.raises(ValueError, match="^bonus: an argument that"):
        model(IDS, bonus=1)


def test_a_window_that_eager_does_not_apply():
    """OLMoE hands one over."""
    sizes = dict(**SMALL, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1)
    config = transformers.OlmoeConfig(**sizes)
    config.sliding_window = 3
    eager, ours = (
        transformers.OlmoeForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name)
        for name in ("eager", "anyflash")
    )
    ours.load_state_dict(eager.state_dict())
    with torch.no_grad():
        assert (eager.eval()(IDS.cpu()).logits - ours.eval()(IDS.cpu()).logits).abs().max() <= 1e-5


# No mask


def test_without_a_mask_the_queries_of_a_causal_module_are_the_last(qkv):
    q, k, v = qkv
    out, _ = forward(torch.nn.Module(), q[:, :, -2:], k, v, None, is_causal=True)
    torch.testing.assert_close(out, by_hand(*qkv, CAUSAL)[:, -2:])


@pytest.mark.parametrize(
    "keys, is_causal, message",
    [
        (3, True, "attention_mask: None for 6 queries and 3 keys of a causal module; pass a mask"),
        (6, None, "is_causal: not told by Module, and there is no mask; pass a mask or is_causal"),
    ],
)
def test_without_a_mask_what_is_not_known_is_refused(qkv, keys, is_causal, message):
    q, k, v = qkv
    with pytest.raises(ValueError) as raised:
        forward(torch.nn.Module(), q, k[:, :, :keys], v[:, :, :keys], None, is_causal=is_causal)
    assert str(raised.value) == message


# Models that have no attention but their own

HEADS = dict(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
ALONE = {
    "bloom": (
        transformers.BloomForCausalLM,
        transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4),
    ),
    "falcon": (transformers.FalconForCausalLM, transformers.FalconConfig(**HEADS)),
    "gpt_neo": (
        transformers.GPTNeoForCausalLM,
        transformers.GPTNeoConfig(
            vocab_size=99, hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]
        ),
    ),
    "roformer": (transformers.RoFormerModel, transformers.RoFormerConfig(**HEADS)),
    "splinter": (transformers.SplinterModel, transformers.SplinterConfig(**HEADS)),
    "sam": (
        transformers.SamVisionModel,
        transformers.SamVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
    ),
}
WAYS = {
    "a configuration": lambda kind, config: kind(with_ours(config)),
    "_from_config": lambda kind, config: kind._from_config(config, attn_implementation="anyflash"),
    "set_attn_implementation": lambda kind, config: kind(config).set_attn_implementation("anyflash"),
}


def with_ours(config):
    config._attn_implementation = "anyflash"
    return config


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALONE)
def test_models_with_an_attention_of_their_own_are_refused(name, way):
    kind, config = ALONE[name]
    with pytest.raises(ValueError) as raised:
        WAYS[way](kind, copy.deepcopy(config))
    assert str(raised.value) == (
        f'attn_implementation: "anyflash" for {kind.__name__}, which computes attention by its own code; use "eager"'
    )


def test_settings_of_the_attention_alone_are_no_part_to_name():
    """MPT's configuration has one of its attention, which no attention is chosen for."""
    config = transformers.MptConfig(vocab_size=99, d_model=32, n_heads=4, n_layers=1)
    with pytest.raises(ValueError, match='; use "eager"$'):
        transformers.MptForCausalLM._from_config(config, attn_implementation="anyflash")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("own_class", [False, True])
@pytest.mark.parametrize("name", ["bloom", "roformer"])
def test_a_name_written_into_the_configuration_afterwards_is_refused_too(name, own_class, compiled):
    """When a mask is made; a model that makes none computes what it did."""
    kind, config = ALONE[name]
    config = copy.deepcopy(config)
    config.__class__ = type("Mine", (type(config),), {"__module__": "__main__"}) if own_class else type(config)
    model = kind(config).eval()
    with_ours(model.config)
    model = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(ValueError, match='^attn_implementation: "anyflash" for .*; use "eager"$'):
        model(IDS.cpu(), attention_mask=MASKS["left"].cpu())


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("name", _models._SINCE)
def test_where_a_version_is_named_that_version_works(name):
    if tuple(map(int, _models._SINCE[name].split("."))) <= tuple(map(int, transformers.__version__.split(".")[:2])):
        _models.check(getattr(transformers, architectures.class_names(name)[0]))


def test_a_model_that_newer_versions_take_is_refused_with_the_version(monkeypatch):
    monkeypatch.setattr(_models, "_takes_others", lambda model: False)
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(ValueError) as raised:
        make("bert")
    assert str(raised.value) == (
        'attn_implementation: "anyflash" for BertModel, which computes attention by its own code in Transformers 4.57.1; '
        'use 5.0 or newer, or "eager"'
    )


@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_a_dict_that_gives_the_name_to_a_model_of_its_own_attention_is_refused(name):
    kind, config = ALONE[name]
    model = kind(copy.deepcopy(config))
    with pytest.raises(ValueError, match='^attn_implementation: "anyflash" for '):
        model.set_attn_implementation({"": "anyflash"})
    assert model.config._attn_implementation != "anyflash"


def test_classes_of_a_user_s_own_have_the_attention_of_what_they_extend(calls):
    class AttentionPooling(torch.nn.Module):
        """Transformers looks for such names."""

    mine = type("Mine", (LlamaForCausalLM,), {"__module__": "__main__", "pool": AttentionPooling})
    model = mine(with_ours(copy.deepcopy(MODELS["llama"][1]))).eval().to(DEVICE)
    with torch.no_grad():
        model(IDS)
    assert len(calls) == 2


def test_from_pretrained_refuses_too(tmp_path):
    kind, config = ALONE["bloom"]
    kind(copy.deepcopy(config)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='^attn_implementation: "anyflash" for BloomForCausalLM'):
        kind.from_pretrained(tmp_path, attn_implementation="anyflash")


def test_the_language_model_of_a_composite_one_whose_vision_has_its_own(calls):
    vision = dict(
        hidden_size=16,
        output_channels=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        mlp_dim=16,
    )
    text = dict(**SMALL, num_key_value_heads=2)
    kind = transformers.GotOcr2ForConditionalGeneration
    config = transformers.GotOcr2Config(vision_config=vision, text_config=text)
    with pytest.raises(ValueError, match='^attn_implementation: "anyflash" for GotOcr2'):
        kind(with_ours(copy.deepcopy(config)))
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval().to(DEVICE)
    ours = kind._from_config(config, attn_implementation={"text_config": "anyflash"}).eval().to(DEVICE)
    ours.load_state_dict(eager.state_dict())
    with torch.no_grad():
        assert (eager(IDS).logits - ours(IDS).logits).abs().max() <= 1e-4
    assert len(calls) == 2


def test_a_part_that_has_its_own_attention_is_named():
    vision = transformers.SamVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=dict(model_type="llama", **SMALL))
    with pytest.raises(ValueError, match='^attn_implementation: "anyflash" for SamVisionModel'):
        transformers.LlavaForConditionalGeneration(with_ours(config))
