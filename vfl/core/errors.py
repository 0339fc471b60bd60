"""All errors that vfl raises on purpose, as one tree of classes, and the texts that explain them.

    VFLError                   V000  exit 1
      UserError                V001  exit 2
        ConfigError            V003
        NonFiniteError         V005
        MissingPackageError    V006
        RunFolderError         V007
          CheckpointError      V009
        StorageError           V008
        SpecError              V100
          UnknownNameError     V101
          UnknownOptionError   V102
          BadOptionError       V103
          WidthError           V104
          PrivateLayerError    V105
          TakenNameError       V106
          ExposedCutError      V601
          PrivacyError         V603
        DataError              V200
          MissingDataError     V201
          MissingColumnError   V203
          SharedColumnError    V204
          LabelLeakError       V205
          MisalignedError      V206
          TooFewRowsError      V207
          TrainedRowsError     V209
        RingRangeError         V208
        NotGrantedError        V300
        RingOverflowError      V602
      PeerError                V400  exit 3
        MissingPartyError      V401
        DisagreementError      V402
        ConsentError           V403
        AuthenticationError    V404
        LostPeerError          V405
        PeerFailedError        V406
        ProtocolError          V407
        HijackError            V408
        CheatingError          V409
        LostRankError          V410
        RolledBackError        V411
        ClockError             V412
        FrameError             V450
          TruncatedFrameError  V451
          OversizedFrameError  V452
          CorruptFrameError    V453
          FrameVersionError    V454
      ReusedPadError         V501  exit 1

An error message states what happened, where it happened, what vfl found, what it expected, and how
to fix the mistake. The message's last line is the command that explains the error code. Every code
has a page in ``explanations/``: Markdown with a title ``# V104: what it is``, the cause, ``## How
it happens``, ``## How to mend it`` and, except for the base classes, ``## Example``. Tests check
that the page's example is a message that vfl really prints. An error message never contains a value
of a table's cell, a row's id or a secret. For an unexpected error, vfl shows only the error's type
and its place in the source (`redacted_traceback`), because the error's text may contain data.
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

from vfl.core.text import logged, printable, printable_lines

_PAGES = Path(__file__).parent / "explanations"
# Characters that a message shows of one field, because a file may contain many mistakes
_ERROR_LIMIT = 20_000
_FACTS = ("code", "what", "where", "got", "want", "fix")


class VFLError(Exception):
    """A failure that vfl can explain.

    Args:
        what: one sentence.
        where: place of the failure: file and line, party and step, or name of the argument.
        got: the value that was found (names, counts and types only).
        want: the values that vfl would accept.
        fix: cure.
    """

    code: ClassVar[str] = "V000"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, code: str | None = None, exit_code: int | None = None) -> None:
        """Define an error class.

        A class that omits a code or exit code inherits that of its base class.
        """
        super().__init_subclass__()
        cls.code, cls.exit_code = code or cls.code, exit_code or cls.exit_code

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
        """Return the error's fields as printable texts, for a program or another party."""
        facts = {name: getattr(self, name) for name in _FACTS}
        return {key: text and printable_lines(text, _ERROR_LIMIT) for key, text in facts.items()}


class UserError(VFLError, ValueError, code="V001", exit_code=2):
    """A mistake in the user's own files or arguments."""


class ConfigError(UserError, code="V003"):
    """Mistakes in an experiment file or party file; one error lists all of them."""


class NonFiniteError(UserError, code="V005"):
    """NaN or infinity in activations, a gradient, a loss, a value to share or an attack's guess."""


class MissingPackageError(UserError, code="V006"):
    """An optional package is not installed."""


class RunFolderError(UserError, code="V007"):
    """A run folder is missing, damaged, of another kind, or of another version."""


class CheckpointError(RunFolderError, code="V009"):
    """A checkpoint is missing, damaged, or belongs to another party or run."""


class StorageError(UserError, code="V008"):
    """vfl cannot write one of its own files."""


class SpecError(UserError, code="V100"):
    """A plug-in spec cannot be used."""


class UnknownNameError(SpecError, code="V101"):
    """No plug-in has this name."""


class UnknownOptionError(SpecError, code="V102"):
    """The plug-in's constructor has no option of this name."""


class BadOptionError(SpecError, code="V103"):
    """An option's value is out of range or has the wrong type."""


class WidthError(SpecError, code="V104"):
    """A plug-in, a model or rows have another width than the cut layer, or than a layer expects."""


class PrivateLayerError(SpecError, code="V105"):
    """A module has a layer that cannot be computed on additive shares."""


class TakenNameError(SpecError, code="V106"):
    """Two plug-ins use the same name."""


class DataError(UserError, code="V200"):
    """A data table cannot be used."""


class MissingDataError(DataError, code="V201"):
    """A file or folder does not exist."""


class MissingColumnError(DataError, code="V203"):
    """A column that a setting names is not in the table."""


class SharedColumnError(DataError, code="V204"):
    """One column of a table is assigned to two parties."""


class LabelLeakError(DataError, code="V205"):
    """The label column is also a feature column."""


class MisalignedError(DataError, code="V206"):
    """The parties' tables have different rows."""


class TooFewRowsError(DataError, code="V207"):
    """A batch, or one of the training, validation and test sets, needs more rows than there are."""


class TrainedRowsError(DataError, code="V209"):
    """vfl refuses metrics, because the run was, or may have been, trained on these rows."""


class RingRangeError(UserError, code="V208"):
    """A value is too large for the integer ring of arithmetic on additive shares."""


class NotGrantedError(UserError, code="V300"):
    """An attack uses knowledge that its threat model does not grant."""


class PeerError(VFLError, code="V400", exit_code=3):
    """Another party failed, or the connection to it broke."""


class MissingPartyError(PeerError, code="V401"):
    """A party did not connect in time."""


class DisagreementError(PeerError, code="V402"):
    """The parties run different experiment files or different versions of vfl."""


class ConsentError(PeerError, code="V403"):
    """A session requests more than a party's consent (the limits in its own file) allows."""


class AuthenticationError(PeerError, code="V404"):
    """A token, a node, a session, a signature or a certificate is not valid."""


class LostPeerError(PeerError, code="V405"):
    """A party disconnected and did not come back."""


class PeerFailedError(PeerError, code="V406"):
    """Another party reported an error from its own process."""

    #: Error code and text that the other party reported; None and an empty text if it reported
    #: none.
    peer_code: str | None = None
    peer_what: str = ""


class ProtocolError(PeerError, code="V407"):
    """A peer sent a message that the protocol does not expect at this point."""


class HijackError(PeerError, code="V408"):
    """The received gradients do not follow from the labels, unlike gradients of honest training."""


class CheatingError(PeerError, code="V409"):
    """A holder opened a share that does not match its message authentication code (MAC)."""


class LostRankError(PeerError, code="V410"):
    """One of the party's own rank processes (workers on parts of each batch) ended."""


class RolledBackError(PeerError, code="V411"):
    """A party's store of sessions and spent privacy budgets was restored from an earlier copy."""


class ClockError(PeerError, code="V412"):
    """The clocks of two machines differ by too much."""


class FrameError(PeerError, code="V450"):
    """The received bytes are not a frame that vfl accepts."""


class TruncatedFrameError(FrameError, code="V451"):
    """A frame or payload has fewer or more bytes than its header, or its content, requires."""


class OversizedFrameError(FrameError, code="V452"):
    """A message has more bytes than the agreed limit."""


class CorruptFrameError(FrameError, code="V453"):
    """The received bytes differ from the sent bytes, or are not a frame."""


class FrameVersionError(FrameError, code="V454"):
    """A frame has another version of the frame format."""


class ReusedPadError(VFLError, code="V501"):
    """The same section of a one-time pad would mask two messages."""


class ExposedCutError(SpecError, code="V601"):
    """A setting would expose data that a secure mode hides, such as a single party's cut."""


class PrivacyError(SpecError, code="V603"):
    """A statement of differential privacy would be false, or would mix units of privacy."""


class RingOverflowError(UserError, code="V602"):
    """A value does not fit into a sum of masked integers."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Suggest a very similar name, else names with this word, else the most similar; or None.

    >>> nearest("noise", ["clipped_noise", "gradient_noise", "none"])
    "did you mean 'clipped_noise' or 'gradient_noise'?"
    >>> nearest("digit", ["digit_pairs", "digits"])
    "did you mean 'digits'?"
    """
    names = list(known)
    close = (
        difflib.get_close_matches(name, names, n=1, cutoff=0.8)
        or [one for one in names if name in one.split("_")][:2]
        or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    )
    shown = " or ".join(f"'{one}'" for one in close)
    return f"did you mean {shown}?" if close else None


def record_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of an error message below its first line, from the fields of an error."""
    labels = {"where": "where", "got": "got", "want": "want", "fix": "try"}
    lines = [f"  {label:<5} {record[key]}" for key, label in labels.items() if record.get(key)]
    return lines + ([f"  more  vfl explain {record['code']}"] if record.get("code") else [])


def read_record(
    record: object, where: str, shown: Callable[[str], str] = printable
) -> dict[str, str]:
    """Check and filter another process's `VFLError.record`.

    The result keeps ``code``, ``what`` and all fields that are set.

    Args:
        record: parsed JSON from outside; unknown keys are ignored.
        where: sender or file of the record, for the error message.
        shown: filter for each text of the record; vfl's own records may keep their line breaks.

    Raises:
        ProtocolError: the record does not have the fields of a `VFLError.record`.
    """
    found = {key: record.get(key) for key in _FACTS} if isinstance(record, Mapping) else {}
    texts = {key: shown(text) for key, text in found.items() if isinstance(text, str)}
    others = any(text is not None for key, text in found.items() if key not in texts)
    if others or not texts.get("what") or not re.fullmatch(r"V[0-9]{3}", texts.get("code", "")):
        raise ProtocolError(
            "an error was reported in an unknown form", where=where, want="a code and texts"
        )
    return texts


def codes() -> list[str]:
    """Return all error codes that have a page, in ascending order."""
    return sorted(page.name.removesuffix(".md") for page in _PAGES.iterdir())


def page_of(code: str) -> str:
    """Return the page that explains a code, as Markdown.

    Raises:
        UnknownNameError: the code does not exist; the error suggests the most similar code.
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
    """Return the title of the page that explains a code.

    >>> title_of("V104")
    'a plug-in does not fit the width of the cut'
    """
    return page_of(code).split("\n")[0].partition(": ")[2]


def file_mistake(problem: Exception) -> UserError | None:
    """Convert an operating system's error that names a file to a `UserError`, others to None.

    >>> file_mistake(FileNotFoundError(2, "No such file or directory", "rows.csv")).where
    'rows.csv'
    """
    if isinstance(problem, OSError) and problem.filename is not None:
        return UserError(str(problem.strerror), where=str(problem.filename))
    return None


def redacted_traceback(bug: BaseException) -> str:
    """Format a traceback with the error's type but without its text; VFL_DEBUG=1 adds the text."""
    if os.environ.get("VFL_DEBUG"):
        return "".join(traceback.format_exception(bug)).rstrip()
    lines = "".join(traceback.format_tb(bug.__traceback__))
    about = f"this is a bug of vfl: {type(bug).__name__}; VFL_DEBUG=1 shows its text"
    return f"{lines}{about}, which may hold data"


class RenamedWarning(FutureWarning):
    """Warning that a user's file uses a former name; the warning's text contains only names."""


class InsecureWarning(UserWarning):
    """Warning that an option without any protection, meant only for measurements, is in use."""


@contextmanager
def redacted_output() -> Iterator[None]:
    """Show only the type and source line of warnings and of errors that end a thread.

    Libraries quote values in the texts of warnings and errors. If VFL_DEBUG is set, the texts of
    warnings and errors are shown.
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
    if issubclass(category, (RenamedWarning, InsecureWarning)):
        shown = f"warning: {message}"
    print(logged(shown, "warning"), file=file or sys.stderr, flush=True)


def _show_thread_error(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        shown = logged(redacted_traceback(ended.exc_value), "error")
        print(shown, file=sys.stderr, flush=True)
