"""Reads a TOML file into a checked model; reports all mistakes together, with file and line."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from vfl.core.address import parse_address, parse_host
from vfl.core.errors import ConfigError, RenamedWarning, UserError, nearest

#: Parts of a setting's name, and the mistake in this setting.
Mistake = tuple[tuple[str, ...], UserError]
#: Function that yields further mistakes in unchecked settings.
MoreMistakes = Callable[[Mapping[str, Any]], Iterable[Mistake]]

_HEADER = re.compile(r"^[ \t]*\[+[ \t]*([^\]\n]+?)[ \t]*\]+[ \t]*(?:#.*)?$")
_KEY = re.compile(r"^[ \t]*([A-Za-z0-9_\-.\"' ]+?)[ \t]*=")
_OVERRIDDEN = 0
#: Largest number of existing file names that an error about a missing file lists.
_FILES = 5
#: Former names of settings that files may still use, with their current names.
FORMER_NAMES = {"batch_rows": "batch_size", "max_batch_rows": "max_batch_size"}


def todays_name(key: str) -> str:
    """Return the current name of a setting; a former name causes a warning."""
    name = FORMER_NAMES.get(key, key)
    if name != key:
        warnings.warn(f"the setting '{key}' is called '{name}' now", RenamedWarning, stacklevel=3)
    return name


#: Function that yields the reasons why settings contradict each other; see `vfl.config.validate`.
Rule = Callable[[Any], Iterable[str]]


class BrokenRulesError(ValueError):
    """Error for settings that contradict each other.

    Args:
        found: each reason.
    """

    def __init__(self, found: Sequence[str]) -> None:
        super().__init__("; ".join(found))
        self.found = found


class Settings(BaseModel):
    """A frozen table of settings; unknown keys are mistakes.

    Attributes:
        held_to: rules for these settings, which `vfl.config.validate` defines.
        usual_ranges: for numbers that another party chooses: the range that a party accepts by
            default, if it is narrower than the schema's range.
        limited_by: for numbers that a setting of [consent] limits instead of a range: the name of
            that setting.
    """

    held_to: ClassVar[Sequence[Rule]] = ()
    usual_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    limited_by: ClassVar[Mapping[str, str]] = {}

    # Inputs are hidden in errors, because a message from Flower contains a token, and an error's
    # text may be logged.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _under_todays_names(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        former = {
            key: FORMER_NAMES[key]
            for key in content
            if key in FORMER_NAMES and FORMER_NAMES[key] in cls.model_fields.keys() - content.keys()
        }
        return {todays_name(key) if key in former else key: content[key] for key in content}

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        if found := [mistake for rule in self.held_to for mistake in rule(self)]:
            raise BrokenRulesError(found)
        return self


Model = TypeVar("Model", bound=Settings)


def _reached(text: str) -> str:
    address = parse_address(text)
    if address.port == 0:
        raise ValueError("other parties cannot connect to port 0; want a port of 1 or more")
    return str(address)


#: Types of settings: a host, HOST:PORT, and HOST:PORT to which other parties connect; see
#: `vfl.core.address`.
Host = Annotated[str, AfterValidator(parse_host)]
HostPort = Annotated[str, AfterValidator(lambda text: str(parse_address(text)))]
ReachedAt = Annotated[str, AfterValidator(_reached)]
#: The same types, with an empty text for "no value".
OptionalHost = Annotated[str, AfterValidator(lambda text: text and parse_host(text))]
OptionalHostPort = Annotated[str, AfterValidator(lambda text: text and str(parse_address(text)))]


def several(value: Any) -> Any:
    """Return a single text or number as a tuple of one; return other values unchanged."""
    return (value,) if isinstance(value, str | int | float) else value


def read_toml(
    path: Path,
    model: type[Model],
    overrides: Sequence[str] = (),
    more: MoreMistakes | None = None,
) -> Model:
    """Read and check a TOML file.

    Args:
        path: path of the file.
        model: model class of the settings.
        overrides: texts of the form ``key.path=value``; a value is parsed as TOML, or else it is
            plain text.
        more: function that yields further mistakes; it is called only after another mistake was
            found, so that one error reports all mistakes.

    Raises:
        ConfigError: the file is missing, is no TOML, or contains mistakes; the error lists all
            mistakes.
    """
    text, content = _parse(path)
    override(content, overrides)
    return check(content, model, Locations.of_text(path.name, text, overrides), more)


def first_keys(path: Path) -> set[str]:
    """Return the keys and tables at the top level of a TOML file.

    Raises:
        ConfigError: the file is missing or is no TOML.
    """
    return set(_parse(path)[1])


def check(
    content: Mapping[str, Any],
    model: type[Model],
    where: Locations | str,
    more: MoreMistakes | None = None,
) -> Model:
    """Check settings that are given as a mapping; see `read_toml`.

    Args:
        content: the settings.
        model: model class of the settings.
        where: line numbers of the settings, or a name for the source of the settings.
        more: see `read_toml`.

    Raises:
        ConfigError: the settings contain mistakes; the error lists all of them.
    """
    locations = Locations(where) if isinstance(where, str) else where
    try:
        return model.model_validate(dict(content))
    except ValidationError as problem:
        found = [line for error in problem.errors() for line in _explain(error, model)]
    found += [
        (setting, _line(setting, error)) for setting, error in (more(content) if more else ())
    ]
    raise _together(found, locations)


def raise_mistakes(wrong: Sequence[Mistake], locations: Locations | None = None) -> None:
    """Raise collected mistakes: a single mistake unchanged, several mistakes as one error.

    Args:
        wrong: the mistakes.
        locations: line numbers of the settings; None if the settings come from no file.

    Raises:
        UserError: there is exactly one mistake.
        ConfigError: several.
    """
    if len(wrong) > 1:
        lines = [(setting, _line(setting, error)) for setting, error in wrong]
        raise _together(lines, locations or Locations())
    for setting, error in wrong:
        if locations is not None and setting:
            name = ".".join(setting)
            here = f"{locations.before(setting)}{name}"
            error.where = f"{here}, {error.where}" if error.where not in (None, name) else here
        raise error


def mistakes_of(found: Iterable[UserError]) -> list[Mistake]:
    """Pair each error with the setting in its field `where`; None gives no setting."""
    return [(tuple(one.where.split(".")) if one.where else (), one) for one in found]


def _line(setting: Sequence[str], error: UserError) -> str:
    """Format a mistake as one line of a list."""
    what = f"{'.'.join(setting)}: {error.what}" if setting else error.what
    if isinstance(error, ConfigError) and error.got:
        what += f" (got {error.got})"
    cure = error.fix or (error.want and f"want {error.want}")
    return what + (f"; {cure}" if cure else "")


def _together(found: Sequence[tuple[tuple[str, ...], str]], locations: Locations) -> ConfigError:
    """Return one error that reports every mistake with its location."""
    noun = "problem" if len(found) == 1 else "problems"
    lines = [f"  {locations.before(setting)}{text}" for setting, text in found]
    source = f" in {locations.name}" if locations.name else ""
    return ConfigError("\n".join([f"{len(found)} {noun}{source}", *lines]))


def override(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply ``key.path=value`` texts to a mapping, in place.

    Raises:
        ConfigError: a text is not of the form ``key.path=value``, or a part of its key is no table.
    """
    for assignment in overrides:
        dotted, equals, text = assignment.partition("=")
        if not equals or not dotted.strip():
            raise ConfigError("an override is key.path=value", got=assignment)
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text
        *tables, last = split_key(dotted)
        key, table = todays_name(last), content
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError("a part of this key is not a table", got=assignment)
        table[key] = value
    return content


def to_toml(settings: BaseModel, leave_out: Mapping[str, Any] | None = None) -> str:
    """Format a model as the text of a TOML file, without unset values.

    Args:
        settings: the model.
        leave_out: names of further values to leave out, in the form of pydantic's `exclude`.
    """
    content = settings.model_dump(mode="json", exclude_none=True, exclude=dict(leave_out or {}))
    return tomli_w.dumps(content)


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            "this file does not exist", where=str(path), want="a TOML file", fix=_files_beside(path)
        ) from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"this is not TOML: {problem}", where=str(path)) from None
    except RecursionError:
        raise ConfigError(
            "this is not TOML: lists are nested too deeply", where=str(path)
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None)
        raise ConfigError(
            f"this file cannot be read: {reason or 'it is no text in UTF-8'}",
            where=str(path),
            fix=None if reason else "save the file in your editor with the encoding UTF-8",
        ) from None


def _files_beside(path: Path) -> str:
    """Return a cure for an error about a missing file: the names of files beside it."""
    if not path.parent.is_dir():
        return f"an existing folder; '{path.parent}' does not exist"
    there = sorted(one.name for one in path.parent.glob("*.toml"))
    return nearest(path.name, there) or (
        f"the folder contains: {', '.join(there[:_FILES])}"
        if there
        else "vfl init, which writes such a file"
    )


def _explain(error: Any, model: type[BaseModel]) -> list[tuple[tuple[str, ...], str]]:
    """Return each problem in a pydantic error, with the setting that it is about."""
    location = tuple(str(part) for part in error["loc"] if part != "[key]")
    broken = error.get("ctx", {}).get("error")
    if isinstance(broken, BrokenRulesError):
        before = f"{'.'.join(location)}: " if location else ""
        return [(location, f"{before}{reason}") for reason in broken.found]
    return [(location, _reason(error, model, location))]


def _reason(error: Any, model: type[BaseModel], location: tuple[str, ...]) -> str:
    dotted = ".".join(location)
    message = error["msg"].removeprefix("Value error, ")
    small = f"{message[:1].lower()}{message[1:]}"
    if error["type"] == "extra_forbidden":
        known = known_keys(model, location[:-1])
        today = FORMER_NAMES.get(location[-1])
        hint = nearest(today if today in known else location[-1], known)
        return f"no setting is called '{dotted}'" + (f"; {hint}" if hint else "")
    if error["type"] == "missing":
        return f"'{dotted}' is missing"
    if error["type"] == "value_error":
        return f"{dotted + ': ' if dotted else ''}{message}"
    if error["loc"][-1:] == ("[key]",):
        return f"the name of {dotted}: {small}"
    if error["type"] in ("dict_type", "model_type", "model_attributes_type"):
        kind = "a list" if isinstance(error["input"], list | tuple) else error["input"]
        table = f"{dotted}.NAME" if error["type"] == "dict_type" else dotted
        return f"{dotted} = {kind}: want a table, [{table}] and its lines"
    shown = _shown(error["input"])
    if error["type"] == "too_short" and not isinstance(error["input"], Mapping):
        return f"{dotted} = {shown}: want {error['ctx']['min_length']} or more"
    if error["type"] in ("tuple_type", "list_type"):
        return f"{dotted} = {shown}: want a list, [{shown!r}] of one"
    return f"{dotted} = {shown}: {small}"


def _shown(given: object) -> object:
    """Format a value for a message; of a list or table, only the type is shown."""
    if isinstance(given, str | int | float | bool):
        return given
    if isinstance(given, list | tuple):
        return "a list" if given else "[]"
    return "a table"


@dataclass(frozen=True)
class Locations:
    """Line numbers of the settings in a file; empty if there is no file.

    Attributes:
        name: name of the file for messages.
        lines: line number of every table and key; 0 for a value that an override set.
    """

    name: str = ""
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, overrides: Sequence[str] = ()) -> Locations:
        """Find the lines of the settings in a file; ``key=value`` texts override some settings."""
        return cls.of_text(path.name, path.read_text(encoding="utf-8-sig"), overrides)

    @classmethod
    def of_text(cls, name: str, text: str, overrides: Sequence[str] = ()) -> Locations:
        """Find the settings in the text of a file."""
        changed = {split_key(item.partition("=")[0]): _OVERRIDDEN for item in overrides}
        # of tables with the same name, as of [[tasks]], the first one counts
        lines = [(item.key, item.start + 1) for item in items_of(text.splitlines(keepends=True))]
        return cls(name, dict(reversed(lines)) | changed)

    def before(self, setting: Sequence[str]) -> str:
        """Return ``file:line: `` of a setting; of its table or of the file if it has no line."""
        parts = tuple(setting)
        known = (self.lines[parts[:n]] for n in range(len(parts), 0, -1) if parts[:n] in self.lines)
        line = next(known, _OVERRIDDEN)
        if not self.name:
            return ""
        return f"{self.name}:{line}: " if line else f"{self.name}: "

    @contextmanager
    def located(self, model: Any) -> Iterator[None]:
        """Run a block; if an error's `where` is a setting, add file and line to the error.

        Args:
            model: settings that the file can have; other texts in `where` stay unchanged.
        """
        try:
            yield
        except UserError as mistake:
            setting = split_key((mistake.where or "").partition(", ")[0])
            if setting[-1] in known_keys(model, setting[:-1]):
                mistake.where = f"{self.before(setting)}{mistake.where}"
            raise


def split_key(dotted: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, without quotes and blanks."""
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def known_keys(model: Any, location: Iterable[str]) -> list[str]:
    """Return the names of a model's settings in the table at `location`."""
    for part in location:
        found = getattr(model, "model_fields", {}).get(part)
        if found is not None:
            model = found.annotation
            arguments = getattr(model, "__args__", ())
            model = next((a for a in arguments[::-1] if hasattr(a, "model_fields")), model)
    return list(getattr(model, "model_fields", {}))


@dataclass(frozen=True)
class Item:
    """A table header or a setting in a TOML file: its table, full key, and line numbers."""

    table: tuple[str, ...]
    key: tuple[str, ...]
    start: int
    stop: int
    header: bool


def items_of(lines: Sequence[str]) -> Iterator[Item]:
    """Yield the headers and settings of a TOML file in order; skip comments and blank lines."""
    table, at = tuple[str, ...](), 0
    while at < len(lines):
        stop = at + 1
        if header := _HEADER.match(lines[at]):
            table = split_key(header[1])
            yield Item(table, table, at, stop, header=True)
        elif key := _KEY.match(lines[at]):
            while stop < len(lines) and not _parses("".join(lines[at:stop])):
                stop += 1
            yield Item(table, (*table, *split_key(key[1])), at, stop, header=False)
        at = stop


def _parses(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True
