"""Where the settings of a TOML file stand, so that a later mistake can name file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.errors import UserError

_TABLE = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?")
_KEY = re.compile(r"""^\s*([A-Za-z0-9_\-."']+)\s*=""")
_OVERRIDDEN = 0


@dataclass(frozen=True)
class Places:
    """The lines of one file's settings; without a file there are none.

    Attributes:
        name: what messages call the file.
        lines: line of every table and key, 0 for one that an override changed.
    """

    name: str = ""
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, overrides: Sequence[str] = ()) -> Places:
        """The settings of a readable file, some of them overridden by ``key=value`` texts."""
        return cls.of_text(path.name, path.read_text(encoding="utf-8"), overrides)

    @classmethod
    def of_text(cls, name: str, text: str, overrides: Sequence[str] = ()) -> Places:
        """The settings in the text of a file."""
        changed = {split_key(item.partition("=")[0]): _OVERRIDDEN for item in overrides}
        return cls(name, _line_numbers(text) | changed)

    def before(self, setting: Sequence[str]) -> str:
        """``file:line: `` of a setting, of the table it is missing from, or of the file alone."""
        parts = tuple(setting)
        known = (self.lines[parts[:n]] for n in range(len(parts), 0, -1) if parts[:n] in self.lines)
        line = next(known, _OVERRIDDEN)
        if not self.name:
            return ""
        return f"{self.name}:{line}: " if line else f"{self.name}: "

    @contextmanager
    def told(self, model: Any) -> Iterator[None]:
        """Run a block; a mistake of the user's whose `where` is a setting also gets file and line.

        Args:
            model: the settings the file holds; other texts in `where` are left as they are.
        """
        try:
            yield
        except UserError as mistake:
            setting = split_key((mistake.where or "").partition(", ")[0])
            if setting[-1] in known_keys(model, setting[:-1]):
                mistake.where = f"{self.before(setting)}{mistake.where}"
            raise


def split_key(dotted: str) -> tuple[str, ...]:
    """The parts of a dotted key, without quotes and blanks."""
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def known_keys(model: Any, location: Iterable[str]) -> list[str]:
    """The settings that a model has in the table at `location`."""
    for part in location:
        found = getattr(model, "model_fields", {}).get(part)
        if found is not None:
            model = found.annotation
            arguments = getattr(model, "__args__", ())
            model = next((a for a in arguments[::-1] if hasattr(a, "model_fields")), model)
    return list(getattr(model, "model_fields", {}))


def _line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """Line of every table and key; good enough for messages, the parser is tomllib."""
    table: tuple[str, ...] = ()
    found: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = split_key(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *split_key(key[1])), number)
    return found
