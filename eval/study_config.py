"""A study's config: a YAML file that names the study and changes its options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tq_hf.commands import RequestError, first_line

FOLDER = Path(__file__).parent / "studies"
Options = TypeVar("Options")
NAMES = {int: "a whole number", str: "a name"}


def find_config(name: str) -> Path:
    """A file of that path, or the one of that name in `eval/studies`.

    Raises:
        RequestError: there is neither.
    """
    shipped = FOLDER / f"{name}.yaml"
    for path in (Path(name), shipped):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
    raise RequestError(f"the config {name} does not exist: expected a YAML file, or one of {known}.")


def read_config(path: Path) -> dict[str, Any]:
    """The file's mapping.

    Raises:
        RequestError: it cannot be read, or is no mapping with string keys.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"the config {path} cannot be read: {first_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise RequestError(f"the config {path} is no mapping of options: expected lines like `study: perplexity`.")
    return found


def options_of(kind: type[Options], given: dict[str, Any], path: Path) -> Options:
    """A dataclass of options with what the config gives; its defaults say what type each has.

    Raises:
        RequestError: an unknown option, or a value of another type or out of range; one line.
    """
    defaults = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, value in given.items():
        if name not in defaults:
            raise RequestError(f"{path}: unknown option {name!r}: expected one of {', '.join(defaults)}.")
        values[name] = _converted(name, value, defaults[name], path)
    try:
        return kind(**values)
    except ValueError as error:
        raise RequestError(f"{path}: {error}") from error


def _converted(name: str, value: Any, default: Any, path: Path) -> Any:
    """The value, a list as a tuple; of the default's type, its numbers at least 1."""
    if isinstance(default, tuple):
        if not isinstance(value, list) or not value:
            raise RequestError(f"{path}: {name}: {value!r} is not allowed: expected a list.")
        return tuple(_converted(name, item, default[0], path) for item in value)
    if type(value) is not type(default):
        raise RequestError(f"{path}: {name}: {value!r} is not allowed: expected {NAMES[type(default)]}.")
    if isinstance(value, int) and value < 1:
        raise RequestError(f"{path}: {name}: {value} is not possible: expected at least 1.")
    return value
