"""What `vfl compare` varies: the `[compare]` table of an experiment."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints, field_validator, model_validator

from vfl.config.toml import Settings, several

#: Stands in a spec for the whole number that is looked for.
WANTED = "?"
_SEEDS = (0, 1, 2)

VariantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$")]

Overrides = Annotated[tuple[str, ...], BeforeValidator(several)]


class CompareSettings(Settings):
    """What is trained beside what; `vfl train` does not look at it.

    Attributes:
        codecs: specs. In one with ``?``, such as ``topk:k=?``, it stands for the largest whole
            number whose training frame stays within a level.
        seeds: one training each; 0, 1 and 2 unless `folds` is given.
        folds: cross-validation instead of seeds: so many trainings, each with test rows of its own.
        levels: percent of dense float32 that a training frame of the cut may take; looked at for
            codecs with ``?`` only.
        accuracy: the bytes until the validation rows are that good are told; one needs no list.
        measure: what is compared, as the records name it after ``validation_`` and ``test_``.
        baseline: the codec all others are set against, repeat by repeat; the first one otherwise.
        variants: lists of overrides; every codec is trained under each.
    """

    codecs: Annotated[tuple[str, ...], BeforeValidator(several), Field(min_length=1)]
    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None, BeforeValidator(several)
    ] = None
    folds: int | None = Field(default=None, ge=2, le=1000)
    levels: Annotated[
        tuple[Annotated[float, Field(gt=0, le=100)], ...], BeforeValidator(several)
    ] = ()
    accuracy: Annotated[tuple[float, ...], BeforeValidator(several)] = ()
    measure: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")] = "accuracy"
    baseline: str | None = None
    variants: dict[VariantName, Overrides] = Field(default_factory=dict)

    @property
    def repeats(self) -> list[tuple[str, ...]]:
        """The overrides of each repeat: a seed, or a fold."""
        if self.folds is not None:
            folds = range(1, self.folds + 1)
            return [(f"data.folds={self.folds}", f"data.fold={fold}") for fold in folds]
        return [(f"seed={seed}",) for seed in self.seeds or _SEEDS]

    @property
    def reference(self) -> str:
        """The codec all others are set against."""
        return self.baseline or self.codecs[0]

    @field_validator("codecs", "seeds", "levels", "accuracy")
    @classmethod
    def _no_doubles(cls, listed: tuple[object, ...] | None) -> tuple[object, ...] | None:
        doubles = [item for item in listed or () if (listed or ()).count(item) > 1]
        if doubles:
            raise ValueError(f"{doubles[0]} stands there twice")
        return listed

    @field_validator("codecs")
    @classmethod
    def _at_most_one_wanted(cls, codecs: tuple[str, ...]) -> tuple[str, ...]:
        for spec in codecs:
            if spec.count(WANTED) > 1:
                raise ValueError(f"{spec}: only one number of a spec can be looked for")
        return codecs

    @model_validator(mode="after")
    def _consistent(self) -> CompareSettings:
        wanted = next((spec for spec in self.codecs if WANTED in spec), None)
        if wanted and not self.levels:
            raise ValueError(f"'{wanted}' needs levels, such as levels = [2.86]")
        if self.folds is not None and self.seeds is not None:
            raise ValueError("folds take the place of seeds; give one of them")
        if self.seeds == ():
            raise ValueError("seeds is empty, so nothing would be trained")
        if self.baseline is not None and self.baseline not in self.codecs:
            raise ValueError(f"baseline = '{self.baseline}' is none of codecs")
        return self
