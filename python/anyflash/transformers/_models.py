"""Which models support "anyflash": those whose attention goes through Transformers' AttentionInterface."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import PreTrainedModel

NAME = "anyflash"


_SINCE = {"bert": "5.0", "modernbert": "5.3", "t5": "5.16"}  # first supported version, by the type of model


def check(model: Any) -> None:
    """Raises ValueError with one line for a class of models that computes attention by its own code.

    Such a class reads the mask in the format of "eager", or passes on only part of its attention.
    """
    if _takes_others(model):
        return
    since = _SINCE.get(getattr(model.config_class, "model_type", ""), "")
    line = f'attn_implementation: "{NAME}" for {model.__name__}, which computes attention by its own code'
    if since:
        line += f" in Transformers {transformers.__version__}; use {since} or newer"
    line += '; use "eager"'
    if getattr(model.config_class, "sub_configs", None):
        line += f', or name the parts that take it in a dict, as {{"text_config": "{NAME}"}}'
    raise ValueError(line)


@functools.lru_cache(256)
def _check_config_class(kind: Any) -> None:
    """Checks the models in the configuration's own file: "anyflash" may have been written into a configuration after
    its model was made, without Transformers' checks."""
    file = kind.__module__.replace(".configuration_", ".modeling_")
    models = [
        one
        for one in vars(sys.modules.get(file, object)).values()
        if isinstance(one, type) and issubclass(one, PreTrainedModel) and one.__module__ == file
    ]
    if models and not any(map(_takes_others, models)):
        check(models[0])


def check_config(config: Any) -> None:
    own = [one for one in type(config).__mro__ if one.__module__.startswith("transformers.models.")]
    kind: Any = own[0] if own else type(config)
    if config is not None:
        _check_config_class(kind)


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
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> Any:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != NAME and asked(config, requested_attention_implementation, version)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name_of_it) is asked:
            setattr(module, name_of_it, is_flash_attention_requested)
