"""attn_implementation="anyflash" in Hugging Face Transformers: the logits of "eager", for random models of small
configs."""

import copy
import logging

import pytest
import torch
import transformers
from devices import DEVICE
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import anyflash.transformers

SMALL = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
             max_position_embeddings=64, pad_token_id=0)  # fmt: skip
MODELS = {
    "bert": (BertModel, BertConfig(**SMALL, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gemma": (Gemma2ForCausalLM, Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4,
                                              attn_logit_softcapping=2.0, query_pre_attn_scalar=8)),
}  # fmt: skip
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
    real = anyflash.transformers.attention
    monkeypatch.setattr(anyflash.transformers, "attention", lambda *a, **o: seen.append(o) or real(*a, **o))
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
    out, _ = anyflash.transformers.attention_forward(torch.nn.Module(), q, k, v, given, position_bias=bias)
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k) / 8**0.5 + (0 if bias is None else bias[..., :7])
    p = scores.masked_fill(~mask[..., :7], float("-inf")).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("bhnm,bhmd->bnhd", p, v))


@pytest.mark.of_the_cpu  # on a GPU the mask is copied
def test_a_mask_that_changes_before_the_backward_pass_is_found_out():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    out, _ = anyflash.transformers.attention_forward(torch.nn.Module(), q, q, q, mask)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_dropout_is_left_to_transformers(calls, caplog, monkeypatch):
    monkeypatch.setattr(anyflash.transformers, "_told", False)
    caplog.set_level(logging.WARNING, "anyflash.transformers")
    kind, config = MODELS["llama"]
    own = copy.deepcopy(config)
    own._attn_implementation, own.attention_dropout = "anyflash", 0.5
    model = kind(own).train().to(DEVICE)
    model(IDS)
    assert not calls
    assert [r.getMessage() for r in caplog.records if r.name == "anyflash.transformers"] == [
        "attention left to Transformers' sdpa: dropout is not 0"]  # fmt: skip
    model.eval()(IDS)
    assert len(calls) == 2
    kind, config = MODELS["gemma"]
    own = copy.deepcopy(config)
    own._attn_implementation, own.attention_dropout = "anyflash", 0.5
    with pytest.raises(ValueError, match="^dropout: 0.5 with a soft cap or sinks, expected 0"):
        kind(own).train().to(DEVICE)(IDS)


def test_other_names_with_flash_are_still_flash_attention():
    from transformers.utils.generic import is_flash_attention_requested as asked

    assert asked(requested_attention_implementation="flash_attention_2")
    assert not asked(requested_attention_implementation="anyflash")
