"""A party's own file for private questions to a language model: terms, addresses, model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from vfl.config.party_file import OwnFile
from vfl.config.toml import HostPort, Settings
from vfl.core.address import Address, parse_address
from vfl.core.errors import ConsentError, SpecError, VFLError
from vfl.llm.product import LLM_FILE
from vfl.llm.two_party import Form, Protect
from vfl.models.decoder import APPROXIMATIONS, BlockShape, DecoderShape, EncoderShape

LlmParty = Literal["owner", "user", "dealer"]
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Real = Annotated[float, Field(ge=0, le=1e9)]
_Seconds = Annotated[float, Field(gt=0, le=86_400)]
#: Unit of each limit, for the texts of errors.
_COUNTED = {
    "max_questions": "questions",
    "questions_per_hour": "questions within an hour",
    "max_tokens": "tokens of questions and their answers",
    "max_dealt": "questions that are dealt",
}
#: Addresses that the settings file of each role must contain.
_ADDRESSES: dict[LlmParty, tuple[str, ...]] = {
    "owner": ("listen", "dealer"),
    "user": ("owner", "dealer"),
    "dealer": ("listen",),
}


class LlmLimits(Settings):
    """Limits to which the model owner consents; it refuses a larger request.

    Attributes:
        max_questions: largest number of questions answered with one set of weights; from many
            answers, a user could compute a layer's weights.
        questions_per_hour: largest number of questions that the owner answers within an hour.
        max_tokens: largest number of tokens of a question and its answer together, summed over the
            questions of a batch.
        max_dealt: largest number of questions whose dealt material (correlated randomness) is
            stored.
    """

    max_questions: _Count = 1000
    questions_per_hour: _Count = 100
    max_tokens: _Count = 256
    max_dealt: Annotated[int, Field(ge=1, le=256)] = 64

    def require(self, **asked: int) -> None:
        """Refuse requested values that exceed the limits of the same names.

        Raises:
            ConsentError: a value exceeds its limit; the error names the first such value.
        """
        for limit, got in asked.items():
            if got > (most := getattr(self, limit)):
                raise ConsentError(
                    f"the terms allow fewer {_COUNTED[limit]}",
                    where=f"terms.limits.{limit}",
                    got=str(got),
                    want=f"at most {most}",
                    fix="request fewer, or agree with the model owner on other terms",
                )


def of_terms(terms: LlmTerms) -> Iterator[str]:
    """Yield mistakes in the model's architecture, and in the settings of the protocol."""
    try:
        _ = terms.architecture
    except (TypeError, VFLError) as problem:
        why = problem.what if isinstance(problem, VFLError) else "the file has an unknown setting"
        yield f"shape is not that of a transformer: {why}"
    if terms.first_bytes < terms.shown_bytes:
        yield f"first_bytes = {terms.first_bytes} is less than shown_bytes = {terms.shown_bytes}"
    if terms.protect != "nothing" and terms.mode != "fast":
        yield f'protect = "{terms.protect}" needs mode = "fast"'
    if terms.protect != "nothing" and terms.score_bits > terms.integer_bits:
        yield (
            f"score_bits = {terms.score_bits} is more than integer_bits = {terms.integer_bits}; "
            f"set integer_bits = {terms.score_bits}"
        )


def of_llm_file(file: LlmFile) -> Iterator[str]:
    """Yield the mistakes of a party's file that lacks an address."""
    for name in _ADDRESSES[file.party]:
        if getattr(file, name) is None:
            yield f"the file of the {file.party} has no '{name}'"


#: Settings of an architecture that computation on shares supports; all other settings must have
#: default values.
_COMPUTED = (
    "vocabulary", "width", "layers", "heads", "groups", "inner", "context", "positions", "norm",
    "mlp", "tied", "bias", "epsilon", "theta", "stretch", "stretch_low", "stretch_high", "trained",
)  # fmt: skip
_OF_ENCODERS = ("segments", "classes")


def shape_in_terms(shape: BlockShape) -> dict[str, Any]:
    """Return the model's architecture in the form that the terms contain.

    Raises:
        SpecError: computation on shares does not support this architecture; the error names the
            setting.
    """
    if not isinstance(shape, DecoderShape):
        raise _not_computed("an encoder of pictures", "a decoder or a classifier of texts")
    more: tuple[str, ...] = ()
    if isinstance(shape, EncoderShape):
        more = (*_OF_ENCODERS, *(["padding"] if shape.padding >= 0 else []))
    settings = asdict(shape)
    found = {name: settings[name] for name in _COMPUTED + more}
    default = asdict(type(shape)(**found))
    for name, value in settings.items():
        if value != default[name]:
            raise _not_computed(f"{name} = {value!r}", f"{name} = {default[name]!r}")
    if shape.mlp not in APPROXIMATIONS and shape.mlp != "silu":
        raise _not_computed(f"mlp = {shape.mlp!r}", f"{', '.join(APPROXIMATIONS)} or silu")
    if isinstance(shape, EncoderShape) and not (shape.segments and shape.classes):
        raise _not_computed("an encoder without a head or segments", "BERT for classification")
    return found


def _not_computed(got: str, want: str) -> SpecError:
    return SpecError(
        "this architecture cannot be computed on shares",
        where="the model's folder",
        got=got,
        want=want,
        fix="run `vfl model show FOLDER` to see the architecture of a model",
    )


class LlmTerms(Settings):
    """Terms (settings) that all three parties share.

    Attributes:
        project: random name, drawn when `vfl llm init` wrote the project.
        shape: architecture of the model; see `vfl.models.decoder.DecoderShape`, or `EncoderShape`
            for a classifier.
        labels: names of the classes, if the model is a classifier.
        end_tokens: tokens that end an answer.
        mode, shown_bytes, first_bytes, integer_bits, inner_bits, protect, score_bits: see
            `vfl.llm.two_party.Form`.
        dealer_counts: whether the dealer takes part at the start of every question, and counts the
            question's dealt material as used. Owner and user then cannot use material twice, even
            if the stores of both were restored from old copies. `vfl llm init` writes this setting
            as true.
        limits: limits to which the model owner consents.
    """

    held_to: ClassVar = (of_terms,)

    project: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    shape: dict[str, _Token | _Real | bool | str] = Field(max_length=64)
    labels: tuple[Annotated[str, StringConstraints(max_length=200)], ...] = Field(
        (), max_length=4096
    )
    end_tokens: tuple[_Token, ...] = Field((), max_length=64)
    mode: Literal["fast", "thesis"] = "fast"
    shown_bytes: int = Field(default=3, ge=2, le=8)
    first_bytes: int = Field(default=4, ge=2, le=8)
    integer_bits: int = Field(default=8, ge=4, le=15)
    inner_bits: int = Field(default=8, ge=4, le=15)
    protect: Protect = "nothing"
    score_bits: int = Field(default=8, ge=4, le=15)
    dealer_counts: bool = False
    limits: LlmLimits = LlmLimits()

    @property
    def architecture(self) -> DecoderShape:
        """Return the model's architecture as a checked shape."""
        kind = EncoderShape if "classes" in self.shape else DecoderShape
        shape = kind(**self.shape)  # type: ignore[arg-type]
        _ = shape_in_terms(shape)
        return shape

    @property
    def form(self) -> Form:
        """Return the form (settings) of the protocols."""
        sizes = self.shown_bytes, self.first_bytes, self.integer_bits, self.inner_bits
        return Form(self.mode, *sizes, protect=self.protect, score_bits=self.score_bits)

    def digest(self) -> str:
        """Return the SHA-256 of all terms."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class LlmFile(OwnFile):
    """Settings file of one party.

    Attributes:
        party: role of the party: owner, user or dealer.
        model: at the owner, the folder with the model's weights; the path is relative to this file.
        tokenizer: at the user, the folder that contains tokenizer.json; without it, each byte of a
            text is a token.
        listen: address at which the owner or the dealer listens.
        owner, dealer: addresses at which the other parties reach the owner and the dealer.
        store: folder for shares of weights, dealt material and records.
        patience_s: longest time in seconds to wait for one message of another party.
        rejoin_s: time in seconds within which an interrupted stream must reconnect.
    """

    held_to: ClassVar = (of_llm_file,)

    party: LlmParty
    model: str | None = None
    tokenizer: str = "."
    listen: HostPort | None = None
    owner: HostPort | None = None
    dealer: HostPort | None = None
    store: str = "store"
    patience_s: _Seconds = 60.0
    rejoin_s: _Seconds = 8.0
    terms: LlmTerms

    @property
    def store_path(self) -> Path:
        """Return the path of the party's store."""
        return self.beside(self.store)

    def address(self, name: Literal["listen", "owner", "dealer"]) -> Address:
        """Return the host and port that a setting contains."""
        return parse_address(getattr(self, name))


def read_llm_file(path: Path) -> LlmFile:
    """Read the settings file of a party, from the path of the file or of its folder.

    Raises:
        ConfigError: the file is missing, is not TOML, or has mistakes.
    """
    return LlmFile.read(path / LLM_FILE if path.is_dir() else path)
