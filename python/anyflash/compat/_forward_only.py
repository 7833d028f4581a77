"""Results that record no gradient although an argument requires one: a backward call raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("anyflash", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define("forward_only(Tensor made, Tensor[] given, str line) -> Tensor", tags=_TAGS)
_library.define("refused(Tensor gradient, SymInt[] shape, str line) -> Tensor", tags=_TAGS)


def detached(*arguments: Any) -> tuple[Any, ...]:
    """The arguments without gradient recording. torch.no_grad() would stay on after an error in a compiled call."""
    return tuple([one.detach() if isinstance(one, Tensor) and one.requires_grad else one for one in arguments])


def forward_only(made: Any, line: str, *arguments: Any) -> Any:
    """A result made of the arguments, one tensor or several. It requires a gradient if one of them does, and a backward
    call raises NotImplementedError with the line."""
    given = [one for one in arguments if isinstance(one, Tensor) and one.requires_grad]
    if not given or not torch.is_grad_enabled():
        return made
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(line)
    if isinstance(made, tuple):
        return tuple([torch.ops.anyflash.forward_only(tensor, given, line) for tensor in made])
    return torch.ops.anyflash.forward_only(made, given, line)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shapes, ctx.line = [tensor.shape for tensor in inputs[1]], inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Refuses by an operator, because torch.compile also traces backward passes that are never called."""
    return None, [torch.ops.anyflash.refused(gradient, shape, ctx.line) for shape in ctx.shapes], None


def _refuse(gradient: Tensor, shape: Any, line: str) -> Tensor:
    raise NotImplementedError(line)


_library.impl("forward_only", lambda made, given, line: made.clone(), "CompositeExplicitAutograd")
_library.impl("refused", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("anyflash::forward_only", lambda made, given, line: torch.empty_like(made), lib=_library)
torch.library.register_fake("anyflash::refused", lambda gradient, shape, line: gradient.new_empty(shape), lib=_library)
torch.library.register_autograd("anyflash::forward_only", _backward, setup_context=_save, lib=_library)
