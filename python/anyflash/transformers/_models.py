"""Which models support "anyflash": those whose attention goes through Transformers' AttentionInterface."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import PreTrainedModel

from ..torch._rule import constant

NAME = "anyflash"


# Versions of Transformers that the types of models were seen to work with; those before them are refused.
_VERSIONS = {
    "5.0": """albert bert bert-generation camembert data2vec-text distilbert electra ernie mobilebert olmoe phimoe qwen2_moe
        roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl""",
    "5.3": "modernbert",
    "5.16": """altclip beit chinese_clip chinese_clip_vision_model clipseg ctrl diffllama jetmoe moshi mt5 nemotron owlv2
        owlvit seamless_m4t stablelm t5 umt5 wav2vec2-conformer""",
    "5.24": "codegen gptj layoutlm",
}
_SINCE = {name: version for version, names in _VERSIONS.items() for name in names.split()}


def check(model: Any) -> None:
    """Raises ValueError with one line for a class of models that computes attention by its own code.

    Such a class reads the mask in the format of "eager", or passes on only part of its attention.
    """
    if line := _refusal(model):
        raise ValueError(line)


def _refusal(model: Any) -> str:
    """The line for such a class, else none."""
    if _takes_others(model):
        return ""
    since = _SINCE.get(getattr(model.config_class, "model_type", ""), "")
    line = f'attn_implementation: "{NAME}" for {model.__name__}, which computes attention by its own code'
    line += f" in Transformers {transformers.__version__}; use {since} or newer, or" if since else "; use"
    line += ' "eager"'
    parts = getattr(model.config_class, "sub_configs", None)
    kinds = parts.values() if isinstance(parts, dict) else ()
    if any(getattr(kind, "model_type", "") for kind in kinds):  # not settings of the attention alone, as MPT's
        line += f', or name the parts that take it in a dict, as {{"text_config": "{NAME}"}}'
    return line


@functools.lru_cache(256)
def _refusal_by_configuration(given: Any) -> str:
    """By the models of the configuration's own file: "anyflash" may have been written into a configuration behind
    Transformers' back, after its model was made."""
    kind = next((one for one in given.__mro__ if one.__module__.startswith("transformers.models.")), given)
    file = kind.__module__.replace(".configuration_", ".modeling_")
    models = [
        one
        for one in vars(sys.modules.get(file, object)).values()
        if isinstance(one, type) and issubclass(one, PreTrainedModel) and one.__module__ == file
    ]
    return _refusal(models[0]) if models and not any(map(_takes_others, models)) else ""


def check_config(config: Any) -> None:
    if config is not None and (line := _refusal_of(type(config))):
        raise ValueError(line)


@constant  # torch.compile does not trace it
def _refusal_of(kind: Any) -> str:
    return _refusal_by_configuration(kind)


def _takes_others(model: Any) -> bool:
    other = model._supports_flex_attn or model._supports_flash_attn
    if not (model._supports_sdpa or (model._supports_attention_backend and other)):
        return False
    # A user's own class counts as the model that it extends, as with "sdpa". Attention code of its own is not detected.
    extended = next(
        (one for one in model.__mro__ if one.__module__.startswith("transformers.models.") and "forward" in vars(one)),
        model,
    )
    # Older files choose a class by the implementation's name, from a table with only their own names.
    module = sys.modules.get(extended.__module__)
    tables = [value for value in vars(module or object).values() if isinstance(value, dict)]
    if any("eager" in table and NAME not in table for table in tables):
        return False
    # Transformers searches the file's text to see whether a class uses the interface, but does not know every way of
    # using it.
    return bool(extended._can_set_attn_implementation()) or _looks_up(module)


def _looks_up(module: Any) -> bool:
    try:
        return "ALL_ATTENTION_FUNCTIONS[" in inspect.getsource(module)
    except (OSError, TypeError):
        return False


def _given_to(config: Any, implementation: Any) -> Iterator[Any]:
    """The configurations, of a model and its parts, for which an argument of set_attn_implementation selects
    "anyflash"."""
    own = implementation.get("") if isinstance(implementation, dict) else implementation
    if own == NAME:
        yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        given = implementation.get(name) if isinstance(implementation, dict) else implementation
        if part is not None and given is not None:
            yield from _given_to(part, given)


def refuse_the_others() -> None:
    """Makes Transformers call `check` wherever it checks an implementation's name: when a model is made, in any way,
    and in set_attn_implementation."""
    correct: Any = PreTrainedModel.get_correct_attn_implementation
    change: Any = PreTrainedModel.set_attn_implementation

    @functools.wraps(correct)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, *rest: Any, **options: Any) -> Any:
        if requested_attention == NAME:
            check(type(self))
        return correct(self, requested_attention, *rest, **options)

    @functools.wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *rest: Any, **options: Any) -> Any:
        # Where Transformers cannot change a model, it only warns.
        configs = [id(config) for config in _given_to(self.config, attn_implementation)]
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and id(part.config) in configs:
                check(type(part))
        return change(self, attn_implementation, *rest, **options)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation


def is_no_flash_attention() -> None:
    """Transformers 5 treats every name with "flash" in it as a kernel of the flash_attn package, which reads lengths
    instead of masks. Loaded modules already hold that function by name; modules loaded later find this one."""
    from transformers.utils import generic

    name_of_it = "is_flash_attention_requested"
    asked: Any = getattr(generic, name_of_it, None)
    if asked is None:
        return

    @functools.wraps(asked)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, *rest: Any, **more: Any
    ) -> Any:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != NAME and asked(config, requested_attention_implementation, *rest, **more)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name_of_it) is asked:
            setattr(module, name_of_it, is_flash_attention_requested)
