"""Read a TOML file into a checked model; all mistakes at once, each with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from vfl.errors import ConfigError, nearest

_TABLE = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?")
_KEY = re.compile(r"""^\s*([A-Za-z0-9_\-."']+)\s*=""")


class Settings(BaseModel):
    """A frozen table of settings; unknown keys are mistakes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Model = TypeVar("Model", bound=Settings)


def read_toml(path: Path, model: type[Model], overrides: Sequence[str] = ()) -> Model:
    """Read and check one file.

    Args:
        path: the file.
        model: what it must look like.
        overrides: ``key.path=value`` texts; a value is TOML, or plain text if it is none.

    Raises:
        ConfigError: the file is missing, is no TOML, or holds mistakes (all are listed).
    """
    text, content = _parse(path)
    override(content, overrides)
    # What an override says stands in no line of the file.
    lines = _line_numbers(text) | {_parts(item.partition("=")[0]): 0 for item in overrides}
    return check(content, model, where=path.name, lines=lines)


def first_keys(path: Path) -> set[str]:
    """Keys and tables at the top of a TOML file.

    Raises:
        ConfigError: the file is missing or is no TOML.
    """
    return set(_parse(path)[1])


def check(
    content: Mapping[str, Any],
    model: type[Model],
    where: str,
    lines: Mapping[tuple[str, ...], int] | None = None,
) -> Model:
    """Check settings that are already a mapping; see `read_toml`."""
    try:
        return model.model_validate(dict(content))
    except ValidationError as problem:
        mistakes = [_explain(error, model, lines or {}, where) for error in problem.errors()]
        noun = "problem" if len(mistakes) == 1 else "problems"
        raise ConfigError(
            f"{len(mistakes)} {noun} in {where}\n" + "\n".join(mistakes),
            fix="vfl check FILE" if lines else None,  # without lines there is no file
        ) from None


def override(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set ``key.path=value`` texts in a mapping, in place.

    Raises:
        ConfigError: a text of another form.
    """
    for text in overrides:
        _set(content, text)
    return content


def to_toml(settings: BaseModel, leave_out: Mapping[str, Any] | None = None) -> str:
    """A model as the text of a TOML file; settings that are not set are left out.

    Args:
        settings: the model.
        leave_out: names of more to leave out, as pydantic's `exclude` takes them.
    """
    content = settings.model_dump(mode="json", exclude_none=True, exclude=dict(leave_out or {}))
    return tomli_w.dumps(content)


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=str(path)) from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"this is not TOML: {problem}", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is no text"
        raise ConfigError(f"this file cannot be read: {reason}", where=str(path)) from None


def _explain(
    error: Any, model: type[BaseModel], lines: Mapping[tuple[str, ...], int], where: str
) -> str:
    location = tuple(str(part) for part in error["loc"] if part != "[key]")
    line = next(
        (lines[location[:n]] for n in range(len(location), 0, -1) if location[:n] in lines), 0
    )
    prefix = f"  {where}:{line}: " if line else f"  {where}: "
    dotted = ".".join(location)
    if error["type"] == "extra_forbidden":
        hint = nearest(location[-1], _known_keys(model, location[:-1]))
        return f"{prefix}no setting is called '{dotted}'" + (f"; {hint}" if hint else "")
    if error["type"] == "missing":
        return f"{prefix}'{dotted}' is missing"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{prefix}{dotted + ': ' if dotted else ''}{message}"
    if error["loc"][-1:] == ("[key]",):
        return f"{prefix}the name of {dotted}: {message[:1].lower()}{message[1:]}"
    shown = error["input"] if isinstance(error["input"], str | int | float | bool) else "a table"
    return f"{prefix}{dotted} = {shown}: {message[:1].lower()}{message[1:]}"


def _known_keys(model: Any, location: Iterable[str]) -> list[str]:
    for part in location:
        field = getattr(model, "model_fields", {}).get(part)
        if field is not None:
            model = field.annotation
            arguments = getattr(model, "__args__", ())
            model = next((a for a in arguments[::-1] if hasattr(a, "model_fields")), model)
    return list(getattr(model, "model_fields", {}))


def _line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """Line of every table and key; good enough for messages, the parser is tomllib."""
    table: tuple[str, ...] = ()
    found: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _parts(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key[1])), number)
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _set(content: dict[str, Any], assignment: str) -> None:
    dotted, equals, text = assignment.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError("an override is key.path=value", got=assignment)
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, key = _parts(dotted)
    for part in tables:
        content = content.setdefault(part, {})
        if not isinstance(content, dict):
            raise ConfigError("an override goes through something that is no table", got=assignment)
    content[key] = value
