"""Triton's interpreter without what it does over and over again: three quarters of its time, and no result depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter

semantic = interpreter.interpreter_semantic
patch_lang = interpreter._patch_lang
get_np_dtype = interpreter._get_np_dtype
execute = interpreter.GridExecutor.__call__
broadcast = semantic.broadcast_impl_value
with_element_ty = tl.block_type.with_element_ty
make = tl.tensor.__init__

visible: dict[Callable[..., Any], set[ModuleType]] = {}
"""Which of Triton's modules a function's file names."""
patched: set[ModuleType] = set()
"""Those that the launch going on has replaced the functions of."""
np_dtypes: dict[str, Any] = {}


def install() -> None:
    interpreter._patch_lang = patch_lang_once
    interpreter._get_np_dtype = known_np_dtype
    interpreter.GridExecutor.__call__ = execute_patched
    tl.block_type.to_ir = lambda self, builder: self  # an equal one
    tl.block_type.with_element_ty = known_block_type
    tl.tensor.__init__ = make_like_others
    semantic.broadcast_impl_value = broadcast_where_needed
    # Integers are added and multiplied in 64 bits as well, for an assertion that is left out unless in debug mode.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def execute_patched(self: Any, *arguments: Any, **options: Any) -> None:
    patched.clear()  # a launch gives the functions back at its end
    execute(self, *arguments, **options)


def patch_lang_once(fn: Callable[..., Any]) -> Any:
    """Called for every function that a kernel calls, each time, to replace all functions of `triton.language`."""
    if fn not in visible:
        visible[fn] = {lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())}
    if visible[fn] and visible[fn] <= patched:
        return NOTHING_PATCHED
    patched.update(visible[fn])
    return patch_lang(fn)


NOTHING_PATCHED = interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None


def known_np_dtype(dtype: Any) -> Any:
    """It makes a dictionary of all types, and takes one out."""
    name = dtype.scalar.name
    if name not in np_dtypes:
        np_dtypes[name] = get_np_dtype(dtype)
    return np_dtypes[name]


def known_block_type(self: Any, scalar: Any) -> Any:
    """Types are compared by what they are, and never changed."""
    known = vars(self).setdefault("known", {})
    if id(scalar) not in known:
        known[id(scalar)] = with_element_ty(self, scalar)  # which keeps `scalar`, and with it its id
    return known[id(scalar)]


def make_like_others(self: Any, handle: Any, type: Any) -> None:
    """What a tensor has beside its handle comes from its type."""
    others = vars(type).get("attributes")
    if others is None:
        make(self, handle, type)
        type.attributes = {name: value for name, value in vars(self).items() if name != "handle"}
    else:
        vars(self).update(others)
        self.handle = handle


def broadcast_where_needed(lhs: Any, rhs: Any) -> Any:
    """Most operands have one shape already, which is compared number by number."""
    blocks = lhs.type.is_block(), rhs.type.is_block()
    if not any(blocks) or (all(blocks) and lhs.handle.data.shape == rhs.handle.data.shape):
        return lhs, rhs
    return broadcast(lhs, rhs)
