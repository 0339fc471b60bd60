"""Every error vfl raises on purpose, as one tree; the page behind each; and all other errors.

    VFLError                   V000  exit 1
      UserError                V001  exit 2   the user's own files or arguments; a ValueError
        ConfigError            V003  mistakes in an experiment or party file, all at once
        NonFiniteError         V005  NaN or Inf in a cut, a gradient or an attack's guess
        MissingPackageError    V006  an optional package is not installed
        RunFolderError         V007  a run folder is missing, foreign or of another version
          CheckpointError      V009  a checkpoint is missing, damaged or somebody else's
        StorageError           V008  a file of ours cannot be written
        SpecError              V100  a plug-in spec cannot be used
          UnknownNameError     V101  no plug-in of that name
          UnknownOptionError   V102  no option of that name
          BadOptionError       V103  an option's value is out of range or of another type
          WidthError           V104  a codec does not fit the width of the cut
          PrivateLayerError    V105  a module has a layer that cannot be computed on shares
          ExposedCutError      V601  a setting would expose what a secure mode hides
        DataError              V200  a table cannot be used
          MissingDataError     V201  a file or folder is not there
          MissingColumnError   V203  a column is not in the table
          SharedColumnError    V204  a column belongs to two parties
          LabelLeakError       V205  the label column is also a feature
          MisalignedError      V206  the parties' rows differ
          TooFewRowsError      V207  fewer rows than a batch or a split needs
        RingRangeError         V208  a value is too large for arithmetic on shares
        NotGrantedError        V300  an attack needs what its threat model does not grant
        RingOverflowError      V602  a value does not fit into a masked sum
      PeerError                V400  exit 3   another party, or the way to it
        MissingPartyError      V401  a party did not come in time
        DisagreementError      V402  the parties run different experiments or code
        ConsentError           V403  a session asks for more than a party allows
        AuthenticationError    V404  wrong token, node, session or certificate
        LostPeerError          V405  a party went away and did not come back
        PeerFailedError        V406  a party reported an error of its own
        ProtocolError          V407  a message out of turn
        HijackError            V408  gradients that do not come from the labels
        FrameError             V450  bytes that are not a frame we accept
          TruncatedFrameError  V451
          OversizedFrameError  V452
          CorruptFrameError    V453
          FrameVersionError    V454
      ReusedPadError         V501  exit 1   a one-time pad would protect two messages

A message says what happened, where, what was got, what was wanted and how to mend it, and ends
with the command that explains its code: every code has a page in ``explanations/``, Markdown with
a title ``# V104: what it is``, what causes it, ``## How it happens``, ``## How to mend it`` and
``## Example``. Tests hold that the example is what vfl really says.
A message never holds a cell's value, a row's id or a secret. Of an error nobody raised on purpose
only type and place are shown (`redacted_traceback`), for its text may hold data.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TextIO

from vfl.core.text import printable, printable_lines

_PAGES = Path(__file__).parent / "explanations"
_ERROR_LIMIT = 20_000  # characters of a field: a file may hold many mistakes


class VFLError(Exception):
    """A failure vfl can explain.

    Args:
        what: one sentence.
        where: file and line, party and step, or the name of the argument.
        got: what was found (names, counts and types only).
        want: what would be accepted.
        fix: what to do about it.
    """

    code: ClassVar[str] = "V000"
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: str | None = None,
        want: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.want = want
        self.fix = fix

    def __str__(self) -> str:
        record = self.record()
        return "\n".join([f"error[{self.code}]: {record['what']}", *record_lines(record)])

    def record(self) -> dict[str, str | None]:
        """The same facts for a machine, or for the other end of a stream; printable text only."""
        facts = {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "got": self.got,
            "want": self.want,
            "fix": self.fix,
        }
        return {key: text and printable_lines(text, _ERROR_LIMIT) for key, text in facts.items()}


class UserError(VFLError, ValueError):
    code = "V001"
    exit_code = 2


class ConfigError(UserError):
    code = "V003"


class NonFiniteError(UserError):
    code = "V005"


class MissingPackageError(UserError):
    code = "V006"


class RunFolderError(UserError):
    code = "V007"


class CheckpointError(RunFolderError):
    code = "V009"


class StorageError(UserError):
    code = "V008"


class SpecError(UserError):
    code = "V100"


class UnknownNameError(SpecError):
    code = "V101"


class UnknownOptionError(SpecError):
    code = "V102"


class BadOptionError(SpecError):
    code = "V103"


class WidthError(SpecError):
    code = "V104"


class PrivateLayerError(SpecError):
    code = "V105"


class DataError(UserError):
    code = "V200"


class MissingDataError(DataError):
    code = "V201"


class MissingColumnError(DataError):
    code = "V203"


class SharedColumnError(DataError):
    code = "V204"


class LabelLeakError(DataError):
    code = "V205"


class MisalignedError(DataError):
    code = "V206"


class TooFewRowsError(DataError):
    code = "V207"


class RingRangeError(UserError):
    code = "V208"


class NotGrantedError(UserError):
    code = "V300"


class PeerError(VFLError):
    code = "V400"
    exit_code = 3


class MissingPartyError(PeerError):
    code = "V401"


class DisagreementError(PeerError):
    code = "V402"


class ConsentError(PeerError):
    code = "V403"


class AuthenticationError(PeerError):
    code = "V404"


class LostPeerError(PeerError):
    code = "V405"


class PeerFailedError(PeerError):
    code = "V406"
    #: The code of the error at the other party, where it told one.
    peer_code: str | None = None


class ProtocolError(PeerError):
    code = "V407"


class HijackError(PeerError):
    code = "V408"


class FrameError(PeerError):
    code = "V450"


class TruncatedFrameError(FrameError):
    code = "V451"


class OversizedFrameError(FrameError):
    code = "V452"


class CorruptFrameError(FrameError):
    code = "V453"


class FrameVersionError(FrameError):
    code = "V454"


class ReusedPadError(VFLError):
    code = "V501"


class ExposedCutError(SpecError):
    code = "V601"


class RingOverflowError(UserError):
    code = "V602"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a typing slip most likely meant, as a hint; None when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else None


def record_lines(record: Mapping[str, Any]) -> list[str]:
    """What follows the first line of a message, from `VFLError.record` or a part of it."""
    labels = {"where": "where", "got": "got", "want": "want", "fix": "try"}
    lines = [f"  {label:<5} {record[key]}" for key, label in labels.items() if record.get(key)]
    return lines + ([f"  more  vfl explain {record['code']}"] if record.get("code") else [])


def read_record(
    record: object, where: str, shown: Callable[[str], str] = printable
) -> dict[str, str]:
    """What `VFLError.record` gave in another process, filtered: ``code``, ``what`` and what is set.

    Args:
        record: parsed JSON from outside; keys we do not know are ignored.
        where: who or which file it comes from, for the message.
        shown: the filter; a record of our own may keep its lines.

    Raises:
        ProtocolError: it is no such record.
    """
    known = ("code", "what", "where", "got", "want", "fix")
    found = {key: record.get(key) for key in known} if isinstance(record, Mapping) else {}
    texts = {key: shown(text) for key, text in found.items() if isinstance(text, str)}
    others = any(text is not None for key, text in found.items() if key not in texts)
    if others or not texts.get("what") or not re.fullmatch(r"V[0-9]{3}", texts.get("code", "")):
        raise ProtocolError(
            "an error was told in an unknown form", where=where, want="a code and texts"
        )
    return texts


def codes() -> list[str]:
    """Every code that has a page, in order."""
    return sorted(page.name.removesuffix(".md") for page in _PAGES.iterdir())


def page_of(code: str) -> str:
    """The page of one code, as Markdown.

    Raises:
        UnknownNameError: there is no such code, with the nearest one.
    """
    wanted, known = code.strip().upper(), codes()
    if wanted not in known:
        raise UnknownNameError(
            f"no error has the code '{code}'",
            want=f"{known[0]} to {known[-1]}",
            fix=nearest(wanted, known) or "vfl explain --list shows all of them",
        )
    return (_PAGES / f"{wanted}.md").read_text(encoding="utf-8")


def title_of(code: str) -> str:
    """What a code means, in one line.

    >>> title_of("V104")
    'a plug-in does not fit the width of the cut'
    """
    return page_of(code).split("\n")[0].partition(": ")[2]


def file_mistake(problem: Exception) -> UserError | None:
    """An error of the operating system as a user's mistake, if it names the file it is about.

    >>> file_mistake(FileNotFoundError(2, "No such file or directory", "rows.csv")).where
    'rows.csv'
    """
    if isinstance(problem, OSError) and problem.filename is not None:
        return UserError(str(problem.strerror), where=str(problem.filename))
    return None


def redacted_traceback(bug: BaseException) -> str:
    """A traceback with the type of an error and without its text, which VFL_DEBUG brings back."""
    if os.environ.get("VFL_DEBUG"):
        return "".join(traceback.format_exception(bug)).rstrip()
    lines = "".join(traceback.format_tb(bug.__traceback__))
    about = f"this is a bug of vfl: {type(bug).__name__}; VFL_DEBUG=1 shows its text"
    return f"{lines}{about}, which may hold data"


class RenamedWarning(FutureWarning):
    """A user's file says something by the name of an earlier version; the text has names alone."""


@contextmanager
def redacted_output() -> Iterator[None]:
    """Inside, warnings and errors that end a thread are shown by type and place, as a bug is.

    Libraries quote values in both. VFL_DEBUG brings the texts back.
    """
    if os.environ.get("VFL_DEBUG"):
        yield
        return
    hook = threading.excepthook
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.simplefilter("once", RenamedWarning)
        threading.excepthook = _show_thread_error
        try:
            yield
        finally:
            threading.excepthook = hook


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    shown = f"{filename}:{lineno}: {category.__name__}"
    if issubclass(category, RenamedWarning):
        shown = f"warning: {message}"
    print(shown, file=file or sys.stderr, flush=True)


def _show_thread_error(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        print(redacted_traceback(ended.exc_value), file=sys.stderr, flush=True)
