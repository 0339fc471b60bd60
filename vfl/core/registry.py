"""Plug-ins by name, written ``name:key=value,key=value`` in Python, TOML and on the command line.

A family of plug-ins (codecs, defenses, models) is a `Registry`. Members are listed as
``module:Class`` and imported on first use, so listing names does not import torch. Packages outside
vfl add members by Python entry points. The options of a member are the arguments of its
constructor; their type annotations determine how text is converted. The constructor itself checks
conditions that a type cannot express, such as a range, with the `require` functions below. The
checks thus also hold for Python code that calls the constructor directly.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
import traceback
import typing
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar

from vfl.core.errors import (
    BadOptionError,
    RenamedWarning,
    SpecError,
    TakenNameError,
    UnknownNameError,
    UnknownOptionError,
    UserError,
    nearest,
)
from vfl.core.products import members_of

Member = TypeVar("Member")
#: Largest value of an option that is a time in seconds: one week. A longer waiting time makes no
#: sense, and a socket refuses far larger numbers.
_MOST_SECONDS = 7 * 24 * 3600.0
#: Largest value of a numeric option, unless the member itself allows more.
MOST = 1e9
#: Largest allowed factor of a loss term, or of a distance inside a loss.
MOST_WEIGHT = 1e6
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Split a spec into its name and its options; the values of the options stay texts.

    >>> parse("randtopk:k=4,alpha=0.1")
    ('randtopk', {'k': '4', 'alpha': '0.1'})

    Raises:
        SpecError: the text does not have the form of a spec, or an option occurs twice.
    """
    name, _, tail = (piece.strip() for piece in spec.partition(":"))
    options: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in tail.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or key in options:
            raise SpecError(
                "a spec is name:key=value,key=value, each key once",
                where=f"at '{part}'",
                got=spec,
                want="for example topk:k=4",
            )
        options[key] = value
    if not name:
        raise SpecError("a spec needs a name", got=repr(spec), want="name:key=value")
    return name, options


def parts(spec: str) -> list[str]:
    """Split specs joined by "+" into single specs; the plus sign in a number such as 1e+2 stays.

    >>> parts("layer_norm+noise:sigma=1e+2")
    ['layer_norm', 'noise:sigma=1e+2']
    """
    return re.split(r"\+(?=\s*[A-Za-z_])", spec)


#: All registries of plug-in families; `load_plugin` updates them when a plug-in file is loaded
#: again.
_REGISTRIES: weakref.WeakSet[Registry[Any]] = weakref.WeakSet()
#: SHA-256 of each plug-in file that this process ran, by path.
_RUN: dict[Path, bytes] = {}
#: Environment variable with the files of loaded plug-ins; child processes load them as well.
PLUGINS = "VFL_PLUGINS"


def load_plugin(path: Path) -> None:
    """Run a file that registers members, as `--plugin` does, and run it again if it has changed.

    If the file has changed, its classes replace the classes of the same names that it registered
    before, and names that the file no longer registers are removed. Existing objects keep the code
    of the former version. If the changed file raises an error, the members of its former version
    stay registered.

    Raises:
        UserError: the file does not exist, a module with the file's name is already loaded, the
            file raises an error, or the file registers a name that belongs to another member.
    """
    path, name = path.resolve(), path.stem
    former = sys.modules.get(name)
    file = getattr(former, "__file__", None)
    is_same = file is not None and Path(file).resolve() == path
    digest = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
    if is_same and _RUN.get(path, digest) == digest:
        return
    if (former is not None and not is_same) or not path.is_file():
        raise UserError(
            "no plug-in can be loaded from this file", got=str(path),
            want="a Python file whose name is not that of a loaded module",
        )  # fmt: skip
    if str(path.parent) not in sys.path:
        # So that the plug-in file can import other files in its folder
        sys.path.append(str(path.parent))
    loader = _Uncached(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    earlier = {one: one.registered_by(name) for one in _REGISTRIES}
    for registry, members in earlier.items():
        registry.replace(members, {})
    try:
        spec.loader.exec_module(module)
    except UserError:  # for example, the file registers a name that is already in use
        _restore_module(name, former, earlier)
        raise
    except Exception as error:
        _restore_module(name, former, earlier)
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            "a plug-in does not run", where=f"{last.filename}:{last.lineno}",
            got=type(error).__name__,
        ) from error  # fmt: skip
    _RUN[path] = digest
    known = loaded_plugins()
    if path not in known:
        os.environ[PLUGINS] = os.pathsep.join(map(str, [*known, path]))


def loaded_plugins() -> list[Path]:
    """Return the files of loaded plug-ins, in the order of loading."""
    return [Path(one) for one in os.environ.get(PLUGINS, "").split(os.pathsep) if one]


class _Uncached(SourceFileLoader):
    """Loader that always compiles the source.

    Python's bytecode cache misses an edit that keeps the file's length within the same second.
    """

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _restore_module(
    name: str, former: ModuleType | None, earlier: Mapping[Registry[Any], Mapping[str, Any]]
) -> None:
    """Restore a former module in `sys.modules`, and the members that this module had registered."""
    for registry, members in earlier.items():
        registry.replace(registry.registered_by(name), members)
    if former is None:
        del sys.modules[name]
    else:
        sys.modules[name] = former


def command_of(
    *words: str, settings: Sequence[str] = (), device: str = "cpu", threads: int = 1
) -> str:
    """Format a vfl command for a shell, including its settings, device, threads and plug-ins.

    >>> command_of("train", "my loans.toml", settings=["codec=topk:k=4"])
    "vfl train 'my loans.toml' -s codec=topk:k=4"
    """
    given = [word for one in settings for word in ("-s", one)]
    where = [] if device == "cpu" else ["--device", device]
    where += [] if threads == 1 else ["--threads", str(threads)]
    return shlex.join(["vfl", *words, *given, *where, *plugin_words()])


def plugin_words() -> list[str]:
    """Return the command-line options with which another vfl command loads the same plug-ins."""
    return [word for file in loaded_plugins() for word in ("--plugin", str(file))]


def named(path: str) -> Any:
    """Import the object with the path "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def imported(path: str, what: str) -> Any:
    """Import a callable that a user's own file names by a path; the import runs the user's code.

    Args:
        path: path ``package.module:name`` of a callable.
        what: description of the expected object, for error messages.

    Raises:
        SpecError: the path is malformed, its module is not found, or the named object is not
            callable.
        UnknownNameError: the module contains no such name.
    """
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise SpecError(f"this is not the path of {what}", got=path, want="package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # The user's module exists, but an import in it fails; Python's error names that import.
            raise
        raise SpecError(
            f"there is no module '{module_name}'",
            where=path,
            fix="install its package, or put its folder on PYTHONPATH",
        ) from None
    found = getattr(module, name, None)
    if found is None:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UnknownNameError(
            f"module '{module_name}' has no '{name}'", where=path, fix=nearest(name, public)
        )
    if not callable(found):
        raise SpecError(
            f"a path must name {what}", where=path, got=f"an object of type {type(found).__name__}"
        )
    return found


class Registry(Generic[Member]):
    """The members of one plug-in family, from the kernel, from products and from outside packages.

    Args:
        kind: the family's name in error messages ("codec").
        contract: base class of every member.
        members: maps a member's name to the path "module:Class".
        group: entry-point group by which outside packages add members ("vfl.codecs"); "" if no
            package may add members.
        aliases: maps the name that a paper uses for a member to the member's name in the registry.
        former_options: maps an option's name in an earlier version to its present name; the former
            name causes a warning.
        option_aliases: maps another spelling of an option to the option's name.

    Attributes:
        own: names of the members with which the registry was created; later registrations are not
            included.
    """

    def __init__(
        self,
        kind: str,
        contract: type[Member],
        members: Mapping[str, str],
        group: str = "",
        aliases: Mapping[str, str] | None = None,
        former_options: Mapping[str, str] | None = None,
        option_aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.aliases = dict(aliases or {})
        self._former_options = dict(former_options or {})
        self._option_aliases = dict(option_aliases or {})
        self.contract = contract
        self.group = group
        self._members: dict[str, str | type[Member]] = {**members, **members_of(group)}
        self._outside_read = False
        self._claimed: dict[str, str] = {}
        self.own = frozenset(self._members)
        _REGISTRIES.add(self)

    def register(self, name: str, member: type[Member]) -> None:
        """Add a member to the registry of this process only, for example in tests and notebooks.

        Packages use the entry point instead. If its module is loaded again, a class replaces its
        former version.

        Raises:
            TakenNameError: another member already has this name.
        """
        self._read_outside()
        found = self._members.get(self.aliases.get(name, name), member)
        # A package may import the class from another of its modules, and export it again.
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = getattr(sys.modules.get(module), attribute, found)
        if name in self.aliases or _path_of(found) != _path_of(member):
            raise self._taken(name, _path_of(found), _path_of(member))
        self._members[name] = member

    def registered_by(self, module: str) -> dict[str, type[Member]]:
        """Return the members that a module registered, by name, in the order of registration."""
        return {
            name: one for name, one in self._members.items()
            if not isinstance(one, str) and one.__module__ == module
        }  # fmt: skip

    def replace(self, former: Iterable[str], members: Mapping[str, type[Member]]) -> None:
        """Remove former names, and register other members, in the registry of this process only."""
        for name in former:
            self._members.pop(name, None)
        self._members.update(members)

    def names(self) -> list[str]:
        """Return all names in the registry, sorted, without aliases."""
        self._read_outside()
        return sorted(self._members)

    def member(self, name: str) -> type[Member]:
        """Return the class that is registered under a name.

        Raises:
            UnknownNameError: no member has this name; the error suggests the most similar name.
            TakenNameError: an installed package uses this name for another member.
            SpecError: the class does not derive from the family's base class.
        """
        self._read_outside()
        name = self.aliases.get(name, name)
        if name in self._claimed:
            raise self._taken(name, _path_of(self._members[name]), self._claimed[name])
        try:
            found = self._members[name]
        except KeyError:
            raise UnknownNameError(
                f"no {self.kind} is called '{name}'",
                want=", ".join(self.names()),
                fix=nearest(name, self.names()),
            ) from None
        if isinstance(found, str):
            found = self._members[name] = named(found)
        if not issubclass(found, self.contract):
            raise SpecError(
                f"{self.kind} '{name}' does not derive from {self.contract.__name__}",
                got=f"{found.__module__}.{found.__qualname__}",
            )
        return found

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the options of a member: the parameters of its constructor."""
        member: Any = self.member(name)
        return dict(_options_of(member))

    def make(self, spec: str) -> Member:
        """Build the member (plug-in object) that a spec describes.

        Raises:
            UnknownNameError, UnknownOptionError, BadOptionError, SpecError: the spec is wrong; the
                error suggests a fix.
        """
        name, values = self.read(spec)
        return self.member(name)(**values)

    def numbers(self, spec: str) -> dict[str, float]:
        """Return all numeric options of a spec as ``name.option``, default values included.

        Raises:
            UnknownNameError, UnknownOptionError, BadOptionError, SpecError: the spec is wrong; the
                error suggests a fix.
        """
        name, values = self.read(spec)
        name = self.aliases.get(name, name)
        found = {
            key: values.get(key, self.options(name)[key].default) for key in self.numeric(name)
        }
        return {f"{name}.{key}": value for key, value in found.items() if value is not None}

    def numeric(self, name: str) -> list[str]:
        """Return the names of a member's options whose values are numbers."""
        options = self.options(name).items()
        return [key for key, one in options if _required(one.annotation) in (int, float)]

    def read(self, spec: str) -> tuple[str, dict[str, Any]]:
        """Parse a spec into the member's name and the converted options that the spec sets.

        Raises:
            UnknownNameError, UnknownOptionError, BadOptionError, SpecError: the spec is wrong; the
                error suggests a fix.
        """
        name, given = parse(spec)
        known = self.options(name)
        given = {self._todays_option(key, known): text for key, text in given.items()}
        for key in given:
            if key not in known:
                raise UnknownOptionError(
                    f"{self.kind} '{name}' has no option '{key}'",
                    want=", ".join(known) or "no options",
                    fix=nearest(key, known),
                )
        missing = [k for k, p in known.items() if p.default is p.empty and k not in given]
        if missing:
            raise BadOptionError(
                f"{self.kind} '{name}' needs {', '.join(missing)}", fix=f"{name}:{missing[0]}=..."
            )
        values = {
            key: self._convert(name, key, text, known[key].annotation)
            for key, text in given.items()
        }
        return name, values

    def _todays_option(self, key: str, known: Mapping[str, Any]) -> str:
        if key not in known and (other := self._option_aliases.get(key)) in known:
            return str(other)
        new = self._former_options.get(key, key)
        if key in known or new not in known:
            return key
        message = f"option '{key}' of a {self.kind} is called '{new}' now"
        warnings.warn(message, RenamedWarning, stacklevel=3)
        return new

    def _convert(self, name: str, key: str, text: str, wanted: Any) -> Any:
        where = f"{self.kind} '{name}', option '{key}'"
        wanted = _required(wanted)
        if typing.get_origin(wanted) is typing.Literal:
            _choose(text, typing.get_args(wanted), where)
            return text
        if typing.get_origin(wanted) is tuple:
            each = typing.get_args(wanted)[0]
            return tuple(self._convert(name, key, part, each) for part in text.split("/"))
        if wanted is bool:
            if text.lower() not in _WORDS:
                raise BadOptionError(
                    "the value is neither yes nor no", where=where, got=text, want="true or false"
                )
            return _WORDS[text.lower()]
        if wanted in (int, float):
            try:
                return wanted(text)
            except ValueError:
                noun = "a whole number" if wanted is int else "a number"
                raise BadOptionError(f"not {noun}", where=where, got=text, want=noun) from None
        return text

    def _read_outside(self) -> None:
        if self._outside_read:
            return
        self._outside_read = True
        for entry in entry_points(group=self.group):
            name = self.aliases.get(entry.name, entry.name)
            found = self._members.setdefault(name, entry.value)
            if name != entry.name or _path_of(found) != entry.value:
                self._claimed[name] = entry.value

    def _taken(self, name: str, found: str, other: str) -> TakenNameError:
        return TakenNameError(
            f"two members have the {self.kind} name '{name}'",
            got=other,
            want=f"a name that no other has: '{name}' is {found}",
            fix="give the plug-in another name, or uninstall its package",
        )


@cache
def _options_of(member: type) -> Mapping[str, inspect.Parameter]:
    """Return a member's options.

    The result is cached, because a session reads the same specs in every epoch.
    """
    parameters = inspect.signature(member, eval_str=True).parameters
    return {k: p for k, p in parameters.items() if p.kind is not p.VAR_KEYWORD}


def _path_of(member: object) -> str:
    """Return the path of a member's class in the form of an entry point, "module:Class"."""
    if isinstance(member, str):
        return member
    return f"{getattr(member, '__module__', '')}:{getattr(member, '__qualname__', '')}"


def _required(wanted: Any) -> Any:
    """Return the type of an option's value that a user sets: ``int`` for ``int | None``."""
    arguments = typing.get_args(wanted)
    given = [argument for argument in arguments if argument is not type(None)]
    return given[0] if len(given) == 1 < len(arguments) else wanted


def require(option: str, given: object, want: str, holds: bool) -> None:
    """Refuse an option's value for which the condition `holds` is false.

    Raises:
        BadOptionError: the value is not accepted; the error states the accepted values.
    """
    if not holds:
        raise BadOptionError("out of range", where=f"option '{option}'", got=str(given), want=want)


def require_choice(option: str, given: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not among the choices.

    Raises:
        BadOptionError: the word is not one of the choices; the error lists the choices and suggests
            the most similar.
    """
    _choose(given, choices, f"option '{option}'")


def _choose(given: str, choices: Sequence[str], where: str) -> None:
    if given not in choices:
        raise BadOptionError(
            "no such choice",
            where=where,
            got=str(given),
            want=", ".join(choices),
            fix=nearest(str(given), choices),
        )


def require_range(option: str, given: float, least: float, most: float = MOST) -> None:
    """Refuse NaN and numbers outside [least, most]; another party may have sent the number.

    Raises:
        BadOptionError: the value is out of range; the error states the range.
    """
    require(option, shortened(given), f"{least:g} to {most:g}", least <= given <= most)


def shortened(number: float) -> str:
    """Format a number briefly for error messages, even an integer too large for a float."""
    if isinstance(number, int) and abs(number) >= 2**63:
        return "a number with more than 18 digits"
    return f"{number:g}"


def require_seconds(option: str, given: float) -> None:
    """Refuse a time that is shorter than 1 ms, longer than a week, or NaN.

    Raises:
        BadOptionError: the time is out of range; the error states the range.
    """
    require_range(option, given, 0.001, _MOST_SECONDS)
