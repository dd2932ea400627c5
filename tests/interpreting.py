"""Triton's interpreter without what it does over and over again: half of its time, and nothing of it is seen in a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter

patch_lang = interpreter._patch_lang
get_np_dtype = interpreter._get_np_dtype
execute = interpreter.GridExecutor.__call__

visible: dict[Callable[..., Any], set[ModuleType]] = {}
"""Which of Triton's modules a function's file names."""
patched: set[ModuleType] = set()
"""Those that the launch going on has replaced the functions of."""
np_dtypes: dict[str, Any] = {}


def install() -> None:
    interpreter._patch_lang = patch_lang_once
    interpreter._get_np_dtype = known_np_dtype
    interpreter.GridExecutor.__call__ = execute_patched
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
