"""Which models take "anyflash": those whose attention goes through Transformers' AttentionInterface."""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers import PreTrainedModel

NAME = "anyflash"


def check(model: type) -> None:
    """Raises ValueError with one line for a class of models that has no attention but its own.

    Such a class reads the mask in the form that "eager" gets, or hands over half of what its own attention does.
    """
    if not _takes_others(model):
        raise ValueError(
            f'attn_implementation: "{NAME}" for {model.__name__}, which has no attention but its own; use "eager", for '
            f'parts of a composite model alone a dict, as attn_implementation={{"text_config": "{NAME}"}}'
        )


def _takes_others(model: Any) -> bool:
    other = model._supports_flex_attn or model._supports_flash_attn
    if not (model._supports_sdpa or (model._supports_attention_backend and other)):
        return False
    # Older files choose a class by the implementation's name, from a table that knows their own names only.
    tables = [value for value in vars(sys.modules[model.__module__]).values() if isinstance(value, dict)]
    if any("eager" in table and NAME not in table for table in tables):
        return False
    return bool(model._can_set_attn_implementation())  # False if no class of the file uses the interface


def refuse_the_others() -> None:
    """From now on Transformers asks `check` wherever it checks an implementation's name: when a model is made, whatever
    way, and in set_attn_implementation."""
    correct: Any = PreTrainedModel.get_correct_attn_implementation
    change: Any = PreTrainedModel.set_attn_implementation

    @functools.wraps(correct)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, *rest: Any, **options: Any) -> Any:
        if requested_attention == NAME:
            check(type(self))
        return correct(self, requested_attention, *rest, **options)

    @functools.wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *rest: Any, **options: Any) -> Any:
        if attn_implementation == NAME:  # Transformers only warns where it cannot change a model
            for part in self.modules():
                if isinstance(part, PreTrainedModel):
                    check(type(part))
        return change(self, attn_implementation, *rest, **options)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation


def is_no_flash_attention() -> None:
    """Transformers 5 takes every name with "flash" in it for a kernel of the flash_attn package, which reads lengths in
    place of masks. Modules that are loaded already hold the function by its name; later ones find it here."""
    from transformers.utils import generic

    name_of_it = "is_flash_attention_requested"
    asked: Any = getattr(generic, name_of_it, None)
    if asked is None:
        return

    @functools.wraps(asked)
    def is_flash_attention_requested(config: Any = None, requested_attention_implementation: str | None = None,
                                     version: Any = None) -> Any:  # fmt: skip
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != NAME and asked(config, requested_attention_implementation, version)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name_of_it) is asked:
            setattr(module, name_of_it, is_flash_attention_requested)
