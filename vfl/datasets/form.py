"""How a data set by name is read: the few things one may ask of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vfl.errors import BadOptionError


@dataclass(frozen=True, slots=True)
class SetFormat:
    """What is made of a data set; None leaves it as it is, or takes the set's own default.

    Attributes:
        side: pictures of so many pixels in height and width.
        classes: only rows of the first so many classes of a picture set.
        length: words or items a row; longer rows are cut, shorter ones end in zeros.
        vocabulary: different numbers a word may have, padding and the unknown word included.
    """

    side: int | None = None
    classes: int | None = None
    length: int | None = None
    vocabulary: int | None = None

    def check(self, source: str, *known: str) -> None:
        """Refuse what a data set cannot do.

        Args:
            source: the data set.
            known: names of the attributes that it can follow.

        Raises:
            BadOptionError: another one is given.
        """
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        foreign = [name for name in given if name not in known]
        if foreign:
            options = ", ".join(f"data.{name}" for name in known)
            raise BadOptionError(
                f"data set '{source}' has no use for data.{foreign[0]}",
                where=f"data.{foreign[0]}",
                want=f"of these settings only {options}" if options else "none of these settings",
                fix=f"leave data.{foreign[0]} out",
            )
