"""Faults at a chosen place: no memory at the n-th allocation, an interrupt at the n-th line, an op that fails.

Each is a context manager that is entered around the call under test. `raised` tells afterwards whether the call came so far.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tq_hf
from tq_hf import ops, reference

PACKAGE = str(Path(tq_hf.__file__).parent)
FACTORIES = (torch.tensor, torch.as_tensor)  # which the dispatcher does not see as allocations


class OutOfMemory:
    """`torch.OutOfMemoryError` at the n-th allocation of a tensor, those inside the reference's ops included."""

    def __init__(self, n: int) -> None:
        self.left, self.raised = n, False

    def allocate(self) -> None:
        if self.left == 0 and not self.raised:
            self.raised = True
            raise torch.OutOfMemoryError("injected: no memory for a tensor")
        self.left -= 1

    def __enter__(self) -> OutOfMemory:
        self._modes = ExitStack()
        self._modes.enter_context(_Factories(self))
        self._modes.enter_context(_Dispatcher(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _Factories(TorchFunctionMode):
    def __init__(self, fault: OutOfMemory) -> None:
        super().__init__()
        self.fault = fault

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES:
            self.fault.allocate()
        return func(*args, **(kwargs or {}))


class _Dispatcher(TorchDispatchMode):
    def __init__(self, fault: OutOfMemory) -> None:
        super().__init__()
        self.fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a schema returns is an alias of an argument (a view, an update in place), a number, or new.
        if any(out.alias_info is None and str(out.type) == "Tensor" for out in func._schema.returns):
            self.fault.allocate()
        if func.namespace == "tq_hf":
            name = func._schema.name.removeprefix("tq_hf::")
            arguments = [a.name for a in func._schema.arguments]
            if "after" in arguments:
                args = args[: arguments.index("after")]
            with self:
                return getattr(reference, name)(*args)
        return func(*args, **(kwargs or {}))


class Interrupt:
    """`KeyboardInterrupt` before the n-th line that runs in tq_hf (in this thread).

    Not in finalizers: Python swallows what is raised there, whoever wrote them. A fork dropped at such a moment leaves its
    pages to the next recount.
    """

    def __init__(self, n: int) -> None:
        self.left, self.raised = n, False
        self.where = ""

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE) or _is_finalizing(frame):
            return None
        if event == "line":
            if self.left == 0:
                sys.settrace(self._before)
                self.raised, self.where = True, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self.left -= 1
        return self._trace

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()  # of a coverage run
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)


def _is_finalizing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class LaunchError(RuntimeError):
    """What a failed kernel launch is in the tests."""


class FailingOp:
    """The n-th call of any of tq_hf's ops fails, before it has done anything or after it has done everything."""

    def __init__(self, n: int, does_its_work: bool) -> None:
        self.left, self.raised, self.does_its_work = n, False, does_its_work

    def _around(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            fails = self.left == 0 and not self.raised
            self.left -= 1
            if fails:
                self.raised = True
                if self.does_its_work:
                    op(*args)
                raise LaunchError("injected: a kernel could not be launched")
            return op(*args)

        return call

    def __enter__(self) -> FailingOp:
        self._ops = {name: getattr(ops, name) for name in ("attend", "attend_and_commit", "observe", "commit", "gather")}
        for name, op in self._ops.items():
            setattr(ops, name, self._around(op))
        return self

    def __exit__(self, *error: object) -> None:
        for name, op in self._ops.items():
            setattr(ops, name, op)


ERRORS = (torch.OutOfMemoryError, KeyboardInterrupt, LaunchError)


@contextmanager
def expected(fault: Any) -> Iterator[None]:
    """Let only the injected error through, silently."""
    try:
        with fault:
            yield
    except ERRORS:
        assert fault.raised
