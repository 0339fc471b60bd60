"""What `vfl grid` trains and attacks: the `[grid]` table of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from vfl.config.packs import unpacked
from vfl.config.toml import Settings, several

Specs = Annotated[tuple[str, ...], BeforeValidator(several), Field(min_length=1)]
Part = Literal["train", "validation", "test"]
Baseline = Literal["scratch", "scratch_unlabelled", "raw", "pca", "random", "autoencoder"]

_UNDEFENDED = "none"
_HONEST = "none"
_BASELINES: tuple[Baseline, ...] = ("scratch", "scratch_unlabelled", "raw", "pca", "random")


class GridSettings(Settings):
    """Victims, attacks and baselines; `vfl train` does not look at it.

    Attributes:
        defenses: specs; each is trained once a seed. The undefended model is trained as well, for a
            defense can only pass where an attack succeeds on that.
        codecs: specs; each is a victim as well, undefended: what it leaves out is not told.
        adversaries: specs; each defense is trained against each as well, besides honestly.
        known: training rows of each class, at most, whose labels an adversary of a feature party
            knew before the training.
        attacks: specs, or names of `vfl.config.packs`.
        baselines: what attacks are set against: training from scratch on the leaked rows, on
            unlabelled ones too, and the same attack on bottoms that never saw a label. All but
            "autoencoder" unless they are named: that one is trained, a minute of a small network.
        baseline_attacks: those of the attacks that label-free bottoms meet too; all of them unless
            they are named. Fewer are a lower reference, so a defense passes less easily.
        leaks: leaked labels of each class, one curve point each.
        draws: of leaked rows, for each victim anew; the same for every defense.
        seeds: one victim each.
        party: the feature party that attacks; the first one unless it is named.
        trained_by: "owner": one owner trained both halves and handed the bottom out; "split": the
            feature party trained its own.
        leaks_from, unlabelled: which rows leak, and which the attacker has without labels. The test
            rows are those that are attacked, so none of them leaks.
        margin: points of accuracy that a defense may cost.
        known_columns: rows of a feature party whose columns the label party knows as well, of the
            validation rows, at most.
        attribute: the column of the victim's, counted from 0, that attacks on an attribute look
            for, above its mean or not; the one that splits the training rows most evenly unless it
            is named.
        pictures: test rows of each defense's first victim whose angles and t-SNE are drawn; 0 draws
            none.
        reconstructions: whether pictures that attacks on inputs made are drawn beside the true
            ones; unless it is said, those of data sets by name are, and no party's own.
    """

    defenses: Specs = (_UNDEFENDED,)
    codecs: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    adversaries: Specs = (_HONEST,)
    known: int = Field(default=50, ge=1)
    attacks: Specs = ("light",)
    baselines: Annotated[tuple[Baseline, ...], BeforeValidator(several), Field(min_length=1)] = (
        _BASELINES
    )
    baseline_attacks: Specs | None = None
    leaks: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(several), Field(min_length=1)
    ] = (1, 2, 5, 10, 20, 40)
    draws: int = Field(default=5, ge=1)
    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
        BeforeValidator(several),
        Field(min_length=1),
    ] = (0, 1, 2, 3, 4)
    party: str | None = None
    trained_by: Literal["owner", "split"] = "split"
    leaks_from: Literal["train", "validation"] = "train"
    unlabelled: Part = "test"
    margin: float = Field(default=0.5, gt=0, lt=100)
    known_columns: int = Field(default=200, ge=1)
    attribute: int | None = Field(default=None, ge=0)
    pictures: int = Field(default=1000, ge=0, le=1000)
    reconstructions: bool | None = None

    @property
    def victims(self) -> tuple[str, ...]:
        """The defenses with the undefended model first, then the codecs."""
        return (_UNDEFENDED, *(spec for spec in self.defenses if spec != _UNDEFENDED), *self.codecs)

    def differs(self, victim: str) -> dict[str, str]:
        """The settings in which a victim differs from the experiment."""
        if victim in self.codecs:
            return {"codec": victim, "defense": _UNDEFENDED}
        return {"defense": victim}

    @property
    def trainings(self) -> tuple[str, ...]:
        """The adversaries with the honest training first."""
        return (_HONEST, *(spec for spec in self.adversaries if spec != _HONEST))

    @property
    def attack_specs(self) -> tuple[str, ...]:
        """The attacks one by one."""
        return unpacked(self.attacks)

    @property
    def baseline_specs(self) -> tuple[str, ...]:
        """The attacks that label-free bottoms meet, one by one."""
        return unpacked(self.attacks if self.baseline_attacks is None else self.baseline_attacks)

    def draws_rows(self, own: bool) -> bool:
        """Whether rows may be seen on a page.

        Args:
            own: they are a party's own, and not everybody's anyway.
        """
        return not own if self.reconstructions is None else self.reconstructions

    @field_validator("defenses", "codecs", "adversaries", "attacks", "baselines", "leaks", "seeds")
    @classmethod
    def _no_doubles(cls, listed: tuple[object, ...]) -> tuple[object, ...]:
        doubles = [item for item in listed if listed.count(item) > 1]
        if doubles:
            raise ValueError(f"{doubles[0]} stands there twice")
        return listed

    @model_validator(mode="after")
    def _baselines_of_attacks(self) -> GridSettings:
        others = [spec for spec in self.baseline_specs if spec not in self.attack_specs]
        if others:
            raise ValueError(f"baseline_attacks are some of the attacks, and {others[0]} is none")
        return self

    @field_validator("codecs")
    @classmethod
    def _no_plain_one(cls, listed: tuple[str, ...]) -> tuple[str, ...]:
        if _UNDEFENDED in listed:
            raise ValueError("the undefended model is a victim anyway, with the experiment's codec")
        return listed
