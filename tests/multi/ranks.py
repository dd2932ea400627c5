"""Processes that are the ranks of a group: started once, then asked to run one function after the other."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing

SECONDS = 120.0  # that a function may take, the start of the processes included


class RankError(AssertionError):
    """A rank failed, or did not answer. The ranks are gone then: others may wait for it for ever."""


class Ranks:
    """`count` ranks, as `torchrun` would start them on one machine.

        with Ranks(2, folder) as ranks:
            first, second = ranks.run(function, 1, 2)

    Args:
        folder: where they meet (a file: ports of the machine may be taken).
        backend: "gloo" on the CPU; "nccl" gives each rank a GPU.
    """

    def __init__(self, count: int, folder: Path, backend: str = "gloo") -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            mine, its = context.Pipe()
            # Not as daemons, which may have no children: lm-eval writes its tables with some. They end with their pipe.
            process = context.Process(target=_serve, args=(rank, count, str(folder / "meeting"), backend, its))
            process.start()
            its.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)`, of a module's top level, returns on each rank.

        Raises:
            RankError: it raised on a rank (with that traceback), or took too long.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            answered = wait(waiting, SECONDS)
            if not answered:
                self.end()
                raise RankError(f"{function.__name__} took more than {SECONDS:.0f} s")
            for pipe in answered:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    failed, results[rank] = True, "the process has ended"
                if failed:
                    self.end()
                    raise RankError(f"rank {rank}, {function.__name__}:\n{results[rank]}")
        return [results[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


def _serve(rank: int, count: int, meeting: str, backend: str, pipe: Connection) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the test has ended
            break
        try:
            reply = False, function(*args)
        except BaseException:
            reply = True, traceback.format_exc()
        pipe.send(reply)
    torch.distributed.destroy_process_group()
