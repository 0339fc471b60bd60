"""Edits settings in a TOML file as text, so that the owner's comments and layout are kept.

Before the new text is written, it is parsed and compared with the intended settings.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from vfl.config.toml import Item, Model, check, items_of
from vfl.core.errors import ConfigError
from vfl.core.storage import write_text

_STRING_OR_COMMENT = re.compile(
    r'''""".*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|(#[^\n]*)''', re.DOTALL
)


@dataclass(frozen=True)
class Changed:
    """New text of a TOML file; parsed, the text gives the intended settings."""

    path: Path
    text: str
    checked: Any

    def write(self) -> None:
        """Write the new text to the file."""
        write_text(self.path, self.text)


@dataclass(frozen=True)
class Edit:
    """An edit of a TOML file, applied both to the text and to the settings."""

    text: Callable[[str], str]
    meant: Callable[[dict[str, Any]], object]

    def of(self, path: Path, model: type[Model]) -> Changed:
        """Apply the edit to a file's content, without writing the file.

        Raises:
            ConfigError: the new settings contradict each other, or the file has a layout that this
                class cannot edit.
        """
        before = path.read_text(encoding="utf-8-sig")
        wanted = tomllib.loads(before)
        self.meant(wanted)
        checked = check(wanted, model, where=str(path))
        after = self.text(before)
        try:
            is_meant = tomllib.loads(after) == wanted
        except tomllib.TOMLDecodeError:
            is_meant = False
        if not is_meant:
            raise ConfigError(
                "this file has a layout that this command does not edit",
                where=str(path),
                want="each table under its own header, such as [parties.NAME] for a party, and "
                "each setting only once",
                fix="change it to this layout, or make the change by hand",
            )
        return Changed(path, after, checked)


def below(text: str, table: str, new: Sequence[str]) -> str:
    """Insert a TOML table after the last table of this name; comments above the next table stay."""
    return _inserted(text, lambda item: item.key[0] == table, ["", *new])


def with_settings(text: str, table: tuple[str, ...], settings: Mapping[str, Any]) -> str:
    """Set some settings of one TOML table in a text; all other settings stay unchanged.

    The lines of a setting stay unchanged if the setting keeps its value; comments are always kept.
    """
    now: Any = tomllib.loads(text)
    for part in table:
        now = now.get(part, {})
    for key, value in settings.items():
        if key not in now:
            text = _with_new(text, table, key, value)
        elif now[key] != value:
            text = _with_changed(text, table, key, now[key], value)
    return text


def _with_changed(text: str, table: tuple[str, ...], key: str, before: Any, after: Any) -> str:
    whole = (*table, key)
    of_tables = isinstance(before, dict), isinstance(after, dict)
    # the value is not an inline table
    if of_tables == (True, True) and not _has_setting(text, whole):
        text = without_keys(text, [(*whole, name) for name in before.keys() - after.keys()])
        return with_settings(text, whole, after)
    if any(of_tables):
        return _with_new(without_keys(text, [whole]), table, key, after)
    written = tomli_w.dumps({key: after})
    return at_keys(text, whole, lambda lines: _commented(lines, written))


def _with_new(text: str, table: tuple[str, ...], key: str, value: Any) -> str:
    if isinstance(value, dict):  # the value is a separate table
        content: dict[str, Any] = {key: value}
        for part in reversed(table):
            content = {part: content}
        lines = ["", *tomli_w.dumps(content).splitlines()]
        return _inserted(text, lambda item: item.key[: len(table)] == table, lines)
    if not any(
        item.header and item.key == table for item in items_of(text.splitlines(keepends=True))
    ):
        text = f"{_ended(text)}\n[{'.'.join(table)}]\n"
    lines = tomli_w.dumps({key: value}).splitlines()
    return _inserted(text, lambda item: item.table == table, lines)


def _has_setting(text: str, key: tuple[str, ...]) -> bool:
    items = items_of(text.splitlines(keepends=True))
    return any(item.key == key and not item.header for item in items)


def _inserted(text: str, after: Callable[[Item], bool], new: Sequence[str]) -> str:
    """Insert lines after the last item for which `after` is true, or else at the text's end."""
    lines = _ended(text).splitlines(keepends=True)
    end = max((item.stop for item in items_of(lines) if after(item)), default=len(lines))
    return "".join([*lines[:end], *(f"{one}\n" for one in new), *lines[end:]])


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _commented(before: str, written: str) -> str:
    """Format a setting, and keep the comments of its previous lines."""
    before, comments = _ended(before), _comments_of(before)
    written = f"{before.partition('=')[0].rstrip()} ={written.partition('=')[2]}"
    if not comments:
        return written
    if len(comments) == before.count("\n") == written.count("\n") == 1:
        return f"{written.rstrip()}  {comments[0]}\n"
    return "".join(f"{one}\n" for one in comments) + written


def _comments_of(text: str) -> list[str]:
    """Return the comments in a setting's lines; a "#" inside a string begins no comment."""
    return [found[1].rstrip() for found in _STRING_OR_COMMENT.finditer(text) if found[1]]


def without_keys(text: str, keys: Sequence[tuple[str, ...]]) -> str:
    """Remove some tables and settings, and the comments directly above the tables' headers."""
    lines, gone = text.splitlines(keepends=True), set[int]()
    for item in items_of(lines):
        if any(item.key[: len(key)] == key for key in keys):
            gone |= {*range(item.start, item.stop)}
            above = item.start - 1
            while item.header and above >= 0 and lines[above].lstrip().startswith("#"):
                gone.add(above)
                above -= 1
            if item.header and above >= 0 and not lines[above].strip():
                gone.add(above)
    return "".join(line for at, line in enumerate(lines) if at not in gone)


def at_keys(text: str, key: tuple[str, ...], change: Callable[[str], str]) -> str:
    """Change the lines of one setting in a text."""
    lines = text.splitlines(keepends=True)
    for item in items_of(lines):
        if not item.header and item.key == key:
            changed = change("".join(lines[item.start : item.stop]))
            return "".join([*lines[: item.start], changed, *lines[item.stop :]])
    return text
