"""What the pages share: models that are loaded once, each visitor's conversation, and errors as readable lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import AutoConfig, DynamicCache, PretrainedConfig

from .. import embedded_model
from ..cache import TurboQuantCache
from ..commands import HUB_ID, Loaded, RequestError, first_line, load
from ..config import PRESETS
from ..errors import is_out_of_memory
from ..generation.conversation import Conversation, Message, context_length
from ..sizing.estimate import MemoryEstimate, estimate_memory
from .architectures import require_countable

EXACT = "bf16"  # the choice beside the presets: transformers' own cache
MAX_MODELS = 2
MAX_SESSIONS = 32
MEMORY_SHARE = 0.6  # of what is free now, for a model's weights
SHOW_SECONDS = 0.12  # between two updates of a page

Function = TypeVar("Function", bound=Callable[..., Any])


def on_gpu(function: Function) -> Function:
    """On ZeroGPU Spaces, run in a process that is lent a GPU for the call; elsewhere just the function.

    Arguments and results are pickled there, and what the function leaves in this module may be gone at the next call.
    """
    try:
        import spaces
    except ImportError:
        return function
    return spaces.GPU(duration=120)(function)


def new_cache(model: Any, preset: str) -> Any:
    """An empty cache: a preset's, or transformers' own for `EXACT`.

    Raises:
        RequestError: an unknown preset, or one that this model cannot have.
    """
    if preset == EXACT:
        return DynamicCache(config=model.config)
    try:
        return TurboQuantCache(model.config, preset)
    except ValueError as error:
        raise RequestError(first_line(error)) from error


# How a stranger's choice is loaded: no code, no pickles, and not with the owner's rights on the hub.
UNTRUSTED: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True, "token": False}


class Models:
    """Models that visitors ask for. The embedded one stays, of others the one used last.

    Args:
        device: where they run.
        loader: as `load`.
        own: the hub id or folder that whoever serves the page has chosen.
        public: visitors are strangers: no folders of this machine, and of the hub only what is `UNTRUSTED`.
        dropped: called with a model that has to go, so that nothing else keeps it.
    """

    def __init__(
        self,
        device: torch.device,
        loader: Callable[..., Loaded] = load,
        *,
        own: str = "",
        public: bool = False,
        dropped: Callable[[Loaded], None] = lambda _: None,
    ) -> None:
        self.device, self._loader, self._own, self._public, self._dropped = device, loader, own, public, dropped
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = threading.Lock()
        self._full: dict[tuple[str, str], MemoryEstimate] = {}

    def get(self, name: str) -> Loaded:
        """The model of that hub id or folder, in bfloat16; empty: the embedded one.

        Raises:
            RequestError: there is no such model, it cannot be loaded, or it is too large for this machine.
        """
        name = self._key(name)
        with self._lock:
            if name not in self._loaded:
                for other in [other for other in self._loaded if other][: len(self._loaded) - MAX_MODELS + 1]:
                    self._dropped(self._loaded.pop(other))
                self._loaded[name] = self._load(name)
            self._loaded.move_to_end(name)
            return self._loaded[name]

    def ready(self, name: str) -> Loaded | None:
        """The model of that name if it is loaded; waits for nothing."""
        return self._loaded.get(self._key(name))

    @staticmethod
    def _key(name: str) -> str:
        name = name.strip()
        return "" if name == embedded_model.NAME else name

    def at_full_context(self, loaded: Loaded, preset: str) -> MemoryEstimate | None:
        """What a cache takes when the model's context is full; None where nobody knows how long that is."""
        context = context_length(loaded.model.config)
        if context is None or preset == EXACT:
            return None
        if (loaded.name, preset) not in self._full:
            try:
                self._full[loaded.name, preset] = estimate_memory(loaded.model.config, preset, context)
            except ValueError:
                return None
        return self._full[loaded.name, preset]

    def _load(self, name: str) -> Loaded:
        try:
            trust = UNTRUSTED if self._public and name not in ("", self._own) else {}
            if trust and (Path(name).exists() or not HUB_ID.fullmatch(name)):
                raise RequestError(f"{name} is no hub id: expected one such as Qwen/Qwen3-0.6B.")
            if name:
                self._require_memory(name, trust)
            return self._loader(name or None, self.device, **trust)
        except RequestError as error:
            offer = f" Leave the field empty for {embedded_model.NAME}." if name else ""
            raise RequestError(f"{error}{offer}") from error

    def _require_memory(self, name: str, trust: dict[str, Any]) -> None:
        """Before anything large is fetched: what a model takes is known from its config."""
        if not Path(name).is_dir() and not HUB_ID.fullmatch(name):
            return  # the loader says so
        try:
            if trust:
                require_countable(PretrainedConfig.get_config_dict(name, token=False)[0])
            config = AutoConfig.from_pretrained(name, **trust)
            weights = estimate_memory(config, context=1).weight_bytes
        except (OSError, ValueError) as error:  # not the loader again, which would wait for the network as long
            raise RequestError(f"no model could be loaded from {name}: {first_line(error)}") from error
        free = free_bytes(self.device)
        if weights is not None and weights > MEMORY_SHARE * free:
            raise RequestError(
                f"{name} has {weights / 2**30:.1f} GiB of weights, too much for this machine ({free / 2**30:.1f} GiB free):"
                " choose a smaller model."
            )


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device, or in the host where that cannot be told (on ZeroGPU outside of a call). What
    torch keeps for its next tensors is free."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return int(torch.cuda.mem_get_info(device)[0]) + kept
    return int(psutil.virtual_memory().available)


@dataclass
class Session:
    """One visitor: the conversation on the model and preset that were used last, whether Stop was pressed, the chat whose
    last question waits for its turn, and whether it is over (the visitor has left, or began a new chat)."""

    stop: threading.Event
    over: bool = False
    waiting: list[Message] = field(default_factory=list)
    key: tuple[str, str] | None = None
    conversation: Conversation | None = None

    def conversation_on(self, loaded: Loaded, preset: str) -> Conversation:
        """The conversation so far, or a new one where the model or the preset is another."""
        if self.conversation is None or self.conversation.model is not loaded.model or self.key != (loaded.name, preset):
            self.conversation = None  # its memory first
            self.conversation = Conversation(loaded.model, loaded.tokenizer, new_cache(loaded.model, preset))
            self.key = (loaded.name, preset)
        return self.conversation


class Sessions:
    """Visitors by their session's id. The one seen longest ago goes when there are too many."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, session_id: str) -> Session:
        with self._lock:
            if session_id not in self._sessions:
                while len(self._sessions) >= MAX_SESSIONS:
                    self._sessions.popitem(last=False)
                self._sessions[session_id] = Session(threading.Event())
            self._sessions.move_to_end(session_id)
            return self._sessions[session_id]

    def drop(self, session_id: str) -> None:
        """The visitor has left, or begins anew."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
        if session is not None:
            session.over = True
            session.stop.set()

    def waiting(self, session_id: str) -> list[Message]:
        """The visitor's chat if its last question waits for its turn; nothing for who has left."""
        with self._lock:
            session = self._sessions.get(session_id)
            return session.waiting if session is not None else []

    def forget(self, loaded: Loaded) -> None:
        """No conversation keeps this model in memory."""
        with self._lock:
            for session in self._sessions.values():
                if session.conversation is not None and session.conversation.model is loaded.model:
                    session.conversation = None

    def __len__(self) -> int:
        return len(self._sessions)


def explain(error: BaseException) -> str:
    """One line for the page. What nobody expected goes to the log as well."""
    if isinstance(error, RequestError):
        return str(error)
    if is_out_of_memory(error):
        return "Out of memory. The cache was emptied: try a shorter text, a smaller model or a preset with fewer bits."
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {first_line(error)}"


def preset_choices() -> list[tuple[str, str]]:
    """Labels and names for a list of caches."""
    labels = {name: f"{name} · {_bits(name)}" for name in PRESETS if name != "raw"}
    return [(label, name) for name, label in labels.items()] + [(f"{EXACT} · transformers' own cache", EXACT)]


def _bits(name: str) -> str:
    preset = PRESETS[name]
    keys, values = preset.key_bits, preset.value_bits
    return f"{keys} bits" if keys == values else f"{keys}-bit keys, {values}-bit values"
