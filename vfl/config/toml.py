"""Read a TOML file into a checked model; all mistakes at once, each with its line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from vfl.config.places import Places, known_keys, split_key
from vfl.errors import ConfigError, nearest

#: Further mistakes of raw settings: the setting's parts, and what is wrong with it.
MoreMistakes = Callable[[Mapping[str, Any]], Iterable[tuple[tuple[str, ...], str]]]


class Settings(BaseModel):
    """A frozen table of settings; unknown keys are mistakes."""

    # Input is hidden: a message from Flower holds a token, and an error's text may be logged.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


Model = TypeVar("Model", bound=Settings)


def several(value: Any) -> Any:
    """A list of one, for a single value that needs no list; for `pydantic.BeforeValidator`."""
    return (value,) if isinstance(value, str | int | float) else value


def read_toml(
    path: Path,
    model: type[Model],
    overrides: Sequence[str] = (),
    more: MoreMistakes | None = None,
) -> Model:
    """Read and check one file.

    Args:
        path: the file.
        model: what it must look like.
        overrides: ``key.path=value`` texts; a value is TOML, or plain text if it is none.
        more: looks for further mistakes once there is one, so that all are told together.

    Raises:
        ConfigError: the file is missing, is no TOML, or holds mistakes (all are listed).
    """
    text, content = _parse(path)
    override(content, overrides)
    return check(content, model, Places.of_text(path.name, text, overrides), more)


def first_keys(path: Path) -> set[str]:
    """Keys and tables at the top of a TOML file.

    Raises:
        ConfigError: the file is missing or is no TOML.
    """
    return set(_parse(path)[1])


def check(
    content: Mapping[str, Any],
    model: type[Model],
    where: Places | str,
    more: MoreMistakes | None = None,
) -> Model:
    """Check settings that are already a mapping; see `read_toml`.

    Args:
        content: the settings.
        model: what they must look like.
        where: where they stand, or what to call the place they come from.
        more: see `read_toml`.
    """
    places = Places(where) if isinstance(where, str) else where
    try:
        return model.model_validate(dict(content))
    except ValidationError as problem:
        found = [_explain(error, model) for error in problem.errors()]
    found += more(content) if more else ()
    raise mistakes(found, places)


def mistakes(found: Sequence[tuple[tuple[str, ...], str]], places: Places) -> ConfigError:
    """One error that tells every mistake with its place.

    Args:
        found: each setting's parts, and what is wrong with it.
        places: where the settings stand.
    """
    noun = "problem" if len(found) == 1 else "problems"
    lines = [f"  {places.before(setting)}{text}" for setting, text in found]
    source = f" in {places.name}" if places.name else ""
    return ConfigError("\n".join([f"{len(found)} {noun}{source}", *lines]))


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


def _explain(error: Any, model: type[BaseModel]) -> tuple[tuple[str, ...], str]:
    """The setting a mistake is about, and what is wrong with it."""
    location = tuple(str(part) for part in error["loc"] if part != "[key]")
    dotted = ".".join(location)
    message = error["msg"].removeprefix("Value error, ")
    small = f"{message[:1].lower()}{message[1:]}"
    if error["type"] == "extra_forbidden":
        hint = nearest(location[-1], known_keys(model, location[:-1]))
        return location, f"no setting is called '{dotted}'" + (f"; {hint}" if hint else "")
    if error["type"] == "missing":
        return location, f"'{dotted}' is missing"
    if error["type"] == "value_error":
        return location, f"{dotted + ': ' if dotted else ''}{message}"
    if error["loc"][-1:] == ("[key]",):
        return location, f"the name of {dotted}: {small}"
    shown = error["input"] if isinstance(error["input"], str | int | float | bool) else "a table"
    return location, f"{dotted} = {shown}: {small}"


def _set(content: dict[str, Any], assignment: str) -> None:
    dotted, equals, text = assignment.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError("an override is key.path=value", got=assignment)
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, key = split_key(dotted)
    for part in tables:
        content = content.setdefault(part, {})
        if not isinstance(content, dict):
            raise ConfigError("an override goes through something that is no table", got=assignment)
    content[key] = value
