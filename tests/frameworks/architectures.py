"""Small random models of every architecture that the installed Transformers can build, for test_transformers_walk.py.

A configuration's sizes are found by the names of its arguments. Parameters are counted on the meta device before memory
is taken. What a model takes is found by trying.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

# The first pattern that the whole name of an argument matches gives its value.
SIZES: list[tuple[re.Pattern[str], float]] = [
    (re.compile(names), value)
    for names, value in [
        (r"mamba_d_ssm", 64),
        (r"(mamba_(n_heads|d_head|d_state)|linear_.*head_dim|ssm_state_size)", 8),
        (r"linear_.*heads", 4),
        (r"(mamba_)?chunk_size", 16),
        (r"(mamba|ssm|conv|linear|time)_.*", -1),  # -1: as it is
        (r"(.*_)?vocab(ulary)?_size(_.*)?", 99),
        (r"pad_token_id", 0),
        (r"rotary_dim", 4),
        (r"(.*_)?attention_window", 4),
        (r"(.*_)?(global_)?(head_dim|head_size|d_kv|kv_channels|d_head|head_width)", 8),
        (r"(.*_)?lora_rank(_.*)?", 8),
        (r"(.*_)?(num_key_value_heads?|num_kv_heads|n_head_kv|multi_query_group_num)", 2),
        (r"(.*_)?(attention_)?(heads?|n_head|n_heads)", 4),
        (
            r"(.*_)?(intermediate_(size|dim)|ffn_dim|n_inner|mlp_dim|d_ff|ffn_hidden_size|ffn_size|intermediate)(_.*)?",
            40,
        ),
        (r"(.*_)?(layers?|n_layer|n_layers|num_blocks|depth)", 2),
        (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)", 4),
        (r"(.*_)?(num_experts_per_tok(en)?|top_?k|moe_topk|moe_k|top_k_experts)", 2),
        (r"(n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace)", 1),
        (
            r"(.*_)?(hidden_(size|dim)|d_model|n_embd|embed_dim|embedding_(size|dim)|dim|d_embed|model_dim|width)(_.*)?",
            32,
        ),
        (r"(.*_)?max_(.*_)?(position_embeddings|positions|seq_len|seq_length|sequence_length)|n_positions", 64),
        (
            r"(.*_)?(sliding_window|attention_chunk_size|local_attention|window_size|sliding_window_size|context_size)",
            4,
        ),
        (r"(.*_)?image_size", 16),
        (r"(.*_)?patch_size", 4),
        (r"index_topk", 4),
        (r".*dropout(_.*)?|.*_drop|.*pdrop|layerdrop|drop_path_rate", 0.0),
    ]
]
# What some configurations ask for beyond that; the first that makes a model is taken.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"mrope": [2, 1, 1]},
    {"mrope": [2, 1, 1], "num_key_value_heads": 4},
    {"hidden_size": 48, "embed_dim": 48},
    {"hidden_size": 768},
    {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    {"mrope": [1, 1, 0]},
]
LENGTH = 13
LARGEST = 5_000_000  # parameters
KINDS = [
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "",
    "PRETRAINING",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_CLASSIFICATION",
    "CTC",
]
CLOSE = 2e-4  # of the largest value


class NotBuilt(Exception):
    """Why there is no model, or none that runs."""


def class_names(name: str) -> list[str]:
    out: list[str] = []
    for kind in KINDS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES" if kind else "MODEL_MAPPING_NAMES")
        found = mapping.get(name, [])
        out += [found] if isinstance(found, str) else list(found)
    return list(dict.fromkeys(out))


def names() -> list[str]:
    """The model types that have a model."""
    return [name for name in CONFIG_MAPPING_NAMES if class_names(name)]


def shrunk(config: Any, variant: dict[str, Any]) -> Any:
    """A small configuration made of a large one."""
    out: dict[str, Any] = {}
    special = itertools.count(60)
    parameters = inspect.signature(type(config).__init__).parameters
    for argument, given in parameters.items():
        try:
            value = getattr(config, argument, given.default)
        except AttributeError:  # differs from layer to layer
            value = given.default
        if isinstance(value, transformers.PretrainedConfig):
            out[argument] = shrunk(value, variant)
        elif argument in variant:
            out[argument] = variant[argument]
        elif isinstance(value, int) and re.fullmatch(r"(?!pad).*_token_(id|index)", argument):
            out[argument] = next(special)
        elif "mrope" in variant and argument == "rope_parameters":
            rope = {"rope_type": "default", "rope_theta": 1e4} | (value or {})
            out[argument] = rope | {"mrope_section": variant["mrope"]}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if pattern.fullmatch(argument)), -1)
            if size >= 0 and isinstance(size, float) == isinstance(value, float):
                out[argument] = min(value, size)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if kinds and "layer_types" in parameters:
        out["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        out |= {name: len(out["layer_types"]) for name in out if re.fullmatch(r"(num_hidden|num|n)_layers?", name)}
    return type(config)(**out)


def made(kind: Any, config: Any, implementation: str) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    return kind(config).eval()


def eager(name: str) -> tuple[Any, dict[str, Any] | None]:
    """A small model with eager attention and what it takes, None if that is not found."""
    why, found = "no configuration", None
    for one, variant in itertools.product(class_names(name), VARIANTS):
        try:
            kind = getattr(transformers, one)
            config = shrunk(transformers.CONFIG_MAPPING[name](), variant)
            with torch.device("meta"):
                count = sum(p.numel() for p in made(kind, config, "eager").parameters())
            if count > LARGEST:
                why = f"{count} parameters"
                continue
            torch.manual_seed(0)
            model = made(kind, config, "eager")
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        except ImportError as error:
            raise NotBuilt(str(error).strip().splitlines()[0]) from None
        except Exception as error:  # whatever is said to sizes that nobody had in mind
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        given = inputs(model)
        if given is not None:
            return model, given
        found = found or model
    if found is None:
        raise NotBuilt(why)
    return found, None


def inputs(model: Any) -> dict[str, Any] | None:
    """What the model takes, found by trying; all of two sequences."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (2, LENGTH), generator=generator)
    end = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids[:, LENGTH // 2] = end if isinstance(end, int) else 59  # where some models read a sequence's result

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    vision = getattr(model.config, "vision_config", model.config)
    channels, size = (getattr(vision, name, number) for name, number in (("num_channels", 3), ("image_size", 16)))
    channels, size = (one if isinstance(one, int) else number for one, number in ((channels, 3), (size, 16)))
    mels = getattr(model.config, "num_mel_bins", 80)
    images = {"pixel_values": numbers(2, channels, size, size)}
    videos = numbers(2, getattr(vision, "num_frames", 2), channels, size, size)
    boxes = torch.tensor([1, 2, 5, 6]).expand(2, LENGTH, 4)
    candidates = [
        {"input_ids": ids},
        {"input_ids": ids, "decoder_input_ids": ids[:, :7]},
        {"input_ids": ids, **images},
        images,
        {**images, "decoder_input_ids": ids},
        {"input_ids": ids, "bbox": boxes},
        {"pixel_values": videos},
        {"pixel_values_videos": videos},
        {"input_values": numbers(2, 2000)},
        *(
            {"input_features": x, **more}
            for x in (numbers(2, 128, mels), numbers(2, mels, 128))
            for more in ({}, {"decoder_input_ids": ids})
        ),
    ]
    for candidate in candidates:
        with contextlib.suppress(Exception):
            run(model, candidate)
            return candidate
    return None


def run(model: Any, given: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)  # some draw numbers
    with torch.no_grad():
        out = model(**given, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(out, name, None), torch.Tensor):
            return getattr(out, name)
    return next(x for x in out.to_tuple() if isinstance(x, torch.Tensor) and x.is_floating_point())


def generated(model: Any, given: dict[str, Any], **options: Any) -> torch.Tensor:
    out = model.generate(
        **given,
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    return torch.stack(out.logits, 1).masked_fill(torch.stack(out.logits, 1).isinf(), 0.0)


def cases(model: Any, given: dict[str, Any]) -> Iterator[tuple[str, Callable[[Any], torch.Tensor]]]:
    """Ways to run a model by name: each gives what must be equal."""
    yield "no mask", lambda model: run(model, given)
    if "input_ids" not in given:
        return
    for side in ("left", "right"):
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, slice(5) if side == "left" else slice(-5, None)] = 0
        padded = {**given, "attention_mask": mask}

        def real(model: Any, padded: Any = padded, mask: Any = mask) -> torch.Tensor:
            out = run(model, padded)
            return out[mask.bool()] if out.shape[:2] == mask.shape else out

        yield f"{side} padding", real
        if side == "left" and list(given) == ["input_ids"] and model.can_generate():
            yield "generation", lambda model, padded=padded: generated(model, padded)
            static = dict(cache_implementation="static", disable_compile=True)
            yield "static cache", lambda model, padded=padded: generated(model, padded, **static)


def compare(name: str, calls: list[Any]) -> tuple[str, str]:
    """("equal", which cases) or ("refused", our line) or ("not built", why); `calls` gets longer with each attention of
    ours. Raises AssertionError for what is wrong."""
    try:
        model, given = eager(name)
    except NotBuilt as error:
        return "not built", str(error)
    equal = []
    try:
        ours = made(type(model), model.config, "anyflash")
        ours.load_state_dict(model.state_dict())
        if given is None:
            return "not built", "no input found"
        for case, out in cases(model, given):
            try:
                expected = out(model)
            except Exception:  # eager does not either
                continue
            found = out(ours)
            if not are_close(found, expected) and type(model)._supports_sdpa:  # Transformers may not agree with itself
                sdpa = made(type(model), model.config, "sdpa")
                sdpa.load_state_dict(model.state_dict())
                expected = out(sdpa)
            assert are_close(found, expected), f"{name}, {case}: off by {(found - expected).abs().max()}"
            equal.append(case)
        if not calls:
            return "not built", "no attention"
    except ValueError as error:
        if "anyflash" not in traceback.extract_tb(error.__traceback__)[-1].filename.split("/"):
            raise
        return "refused", str(error)
    return "equal", ", ".join(equal)


def are_close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = float(expected.nan_to_num().abs().max())
    return ours.shape == expected.shape and torch.allclose(ours, expected, 0.0, CLOSE * largest + 1e-30, equal_nan=True)
