"""What a feature party tells the label party when a session is over."""

from __future__ import annotations

from pydantic import Field, ValidationError

from vfl.config.experiment import PartyName
from vfl.config.toml import Settings
from vfl.errors import ProtocolError
from vfl.frame import Frame, Kind

#: Most bytes of a report on the wire.
REPORT_LIMIT_BYTES = 1024


class PartyReport(Settings):
    """A feature party's last word: the digest of its weights, never the weights."""

    party: PartyName
    weights_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    seconds: float = Field(ge=0, le=1e9)

    def frame(self) -> Frame:
        """The report as the DONE frame of its party."""
        return Frame(Kind.DONE, payload=self.model_dump_json().encode())

    @classmethod
    def of(cls, frame: Frame, party: str) -> PartyReport:
        """The report in a frame.

        Raises:
            ProtocolError: another kind of frame, of another form or under another name.
        """
        if frame.kind is not Kind.DONE:
            raise ProtocolError(
                f"a message out of turn from party '{party}'", got=frame.kind.name, want="DONE"
            )
        if len(frame.payload) > REPORT_LIMIT_BYTES:
            raise ProtocolError(
                f"party '{party}' ended in an unknown form",
                got=f"{len(frame.payload)} bytes",
                want=f"at most {REPORT_LIMIT_BYTES} bytes",
            )
        try:
            report = cls.model_validate_json(bytes(frame.payload))
        except ValidationError:
            raise ProtocolError(f"party '{party}' ended in an unknown form") from None
        if report.party != party:
            raise ProtocolError(f"party '{party}' reported under another name", got=report.party)
        return report
