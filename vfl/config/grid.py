"""What `vfl compare` varies, and what `vfl grid` trains and attacks: `[compare]` and `[grid]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from vfl.config.toml import Settings, several

#: Stands in a spec for the whole number that is looked for.
WANTED = "?"
_SEEDS = (0, 1, 2)

Seed = Annotated[int, Field(ge=0, lt=2**31)]
VariantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$")]
Overrides = Annotated[tuple[str, ...], BeforeValidator(several)]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(several), Field(min_length=1)]
Specs = Annotated[tuple[str, ...], BeforeValidator(several), Field(min_length=1)]
Part = Literal["train", "validation", "test"]
LabelMeasure = Literal["accuracy", "balanced_accuracy", "auc", "average_precision", "r2"]
Baseline = Literal["scratch", "scratch_unlabelled", "raw", "pca", "random", "autoencoder"]
#: What a training can record: frames of its training rows, frames of the last queries, or every
#: bottom after each epoch.
Records = Literal["training", "queries", "snapshots"]
_UNDEFENDED = "none"
_HONEST = "none"
_BASELINES: tuple[Baseline, ...] = ("scratch", "scratch_unlabelled", "raw", "pca", "random")

#: What takes a second or so a leak draw on ten thousand rows, thesis attacks first.
LIGHT = (
    "fine_tuning",
    "logistic",
    "logistic:scaler=whiten",
    "nearest_mean:scaler=cosine",
    "fine_tuning:at=before",
    "kmeans",
)
#: What also uses the unlabelled rows, the inputs and the bottom itself.
HEAVY = (
    *LIGHT,
    "logistic:at=bottom",
    "logistic:at=before",
    "svm:scaler=whiten",
    "self_training:scaler=whiten,rounds=6",
    "self_training:at=before",
    "label_propagation",
    "label_propagation:scaler=cosine",
    "teacher_student",
    "teacher_student:student=top,rounds=1",
    "unfreeze",
    "model_completion",
    "gaussian_mixture",
)
#: Attacks that go together, by name; a grid's `attacks` may name them among its specs.
PACKS: dict[str, tuple[str, ...]] = {
    "light": LIGHT,
    "heavy": HEAVY,
    # What a feature party makes of its own cuts, beside "columns" and "members".
    "labels": LIGHT,
    # The two of the thesis (section 4.4).
    "thesis": ("fine_tuning", "kmeans"),
    # What the quick profile runs; where a cut is blurred on its way, its owner reads the bottom.
    "quick": ("fine_tuning", "logistic:scaler=whiten", "logistic:at=bottom", "kmeans"),
    # Where labels are numbers; takes the place of the four above on a regression.
    "numbers": (
        "regression",
        "regression:at=bottom",
        "regression:at=bottom,learner=kernel",
        "regression:at=bottom,learner=neighbours",
    ),
    # What a label party makes of cuts it was sent; those that no other party's columns disturb.
    "columns": ("inversion", "white_box_inversion", "unsplit", "pseudo_client", "attribute"),
    # What whoever asks for predictions finds out about training rows.
    "members": ("membership", "likelihood_ratio"),
}

#: Packs that look for classes.
_OF_CLASSES = frozenset({"light", "heavy", "labels", "thesis", "quick"})


def _no_doubles(listed: tuple[object, ...] | None) -> tuple[object, ...] | None:
    doubles = [item for item in listed or () if (listed or ()).count(item) > 1]
    if doubles:
        raise ValueError(f"{doubles[0]} stands there twice")
    return listed


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
        measure: what is compared, as the records name it after ``validation_`` and ``test_``;
            unless it is named, AUC where there are two classes or one holds more than 65 % of the
            rows, the root of the mean squared error of numbers, else accuracy.
        baseline: the codec all others are set against, repeat by repeat; the first one otherwise.
        variants: lists of overrides; every codec is trained under each.
    """

    codecs: Annotated[tuple[str, ...], BeforeValidator(several), Field(min_length=1)]
    seeds: Annotated[tuple[Seed, ...] | None, BeforeValidator(several)] = None
    folds: int | None = Field(default=None, ge=2, le=1000)
    levels: Annotated[
        tuple[Annotated[float, Field(gt=0, le=100)], ...], BeforeValidator(several)
    ] = ()
    accuracy: Annotated[tuple[float, ...], BeforeValidator(several)] = ()
    measure: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
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

    _distinct = field_validator("codecs", "seeds", "levels", "accuracy")(_no_doubles)

    @field_validator("codecs")
    @classmethod
    def _at_most_one_wanted(cls, codecs: tuple[str, ...]) -> tuple[str, ...]:
        for spec in codecs:
            if spec.count(WANTED) > 1:
                raise ValueError(f"{spec}: only one number of a spec can be looked for")
        return codecs


class GridSettings(Settings):
    """Victims, attacks and baselines; `vfl train` does not look at it.

    Attributes:
        defenses: specs; each is trained once a seed. The undefended model is trained as well, for a
            defense can only pass where an attack succeeds on that; of an empty list, alone.
        codecs: specs; each is a victim as well, undefended: what it leaves out is not told.
        models: specs of a model of its own, such as "trees:max_bin=8"; each is a victim as well, in
            the place of the experiment's.
        adversaries: specs; each defense is trained against each as well, besides honestly.
        known: training rows of each class, at most, whose labels an adversary of a feature party
            knew before the training.
        attacks: specs, or names of `PACKS`.
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
        measure: of attacks on labels, by which defenses are ranked; "auto" is AUC where there are
            two classes or one holds more than 65 % of the rows, else accuracy, and R2 where labels
            are numbers. All are kept.
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
        record: what trainings record and keep for attacks that come later, see `Records`; a victim
            is trained once more for one that reads what was not kept.
    """

    defenses: Annotated[tuple[str, ...], BeforeValidator(several)] = (_UNDEFENDED,)
    codecs: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    models: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
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
    seeds: Seeds = (0, 1, 2, 3, 4)
    party: str | None = None
    trained_by: Literal["owner", "split"] = "split"
    leaks_from: Literal["train", "validation"] = "train"
    unlabelled: Part = "test"
    measure: LabelMeasure | Literal["auto"] = "auto"
    margin: float = Field(default=0.5, gt=0, lt=100)
    known_columns: int = Field(default=200, ge=1)
    attribute: int | None = Field(default=None, ge=0)
    pictures: int = Field(default=1000, ge=0, le=1000)
    reconstructions: bool | None = None
    record: Annotated[tuple[Records, ...], BeforeValidator(several)] = ()

    @property
    def victims(self) -> tuple[str, ...]:
        """The defenses with the undefended model first, then the codecs, then other models."""
        defenses = (spec for spec in self.defenses if spec != _UNDEFENDED)
        return (_UNDEFENDED, *defenses, *self.codecs, *self.models)

    def differs(self, victim: str) -> dict[str, str]:
        """The settings in which a victim differs from the experiment."""
        if victim in self.codecs:
            return {"codec": victim, "defense": _UNDEFENDED}
        if victim in self.models:
            return {"secure": victim}
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

    def of_task(self, task: str) -> GridSettings:
        """The same where packs of attacks on classes stand for "numbers" if labels are numbers.

        >>> GridSettings(attacks=("quick", "columns")).of_task("regression").attacks
        ('numbers', 'columns')
        """
        if task != "regression":
            return self

        def fitting(listed: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys("numbers" if one in _OF_CLASSES else one for one in listed))

        met = self.baseline_attacks
        update = {"attacks": fitting(self.attacks), "baseline_attacks": met and fitting(met)}
        return self.model_copy(update=update)

    def draws_rows(self, own: bool) -> bool:
        """Whether rows may be seen on a page.

        Args:
            own: they are a party's own, and not everybody's anyway.
        """
        return not own if self.reconstructions is None else self.reconstructions

    _distinct = field_validator(
        "defenses",
        "codecs",
        "models",
        "adversaries",
        "attacks",
        "baselines",
        "leaks",
        "seeds",
        "record",
    )(_no_doubles)

    @field_validator("codecs")
    @classmethod
    def _no_plain_one(cls, listed: tuple[str, ...]) -> tuple[str, ...]:
        if _UNDEFENDED in listed:
            raise ValueError("the undefended model is a victim anyway, with the experiment's codec")
        return listed


class ValueSettings(Settings):
    """What `vfl value` trains beside each party alone, and all in one place.

    Attributes:
        codecs, defenses: specs whose price is measured, each in the split training.
        seeds: one training of each kind a seed.
        measure: what is compared, as the records name it after ``test_``; AUC unless it is named,
            or the root of the mean squared error of a regression.
    """

    codecs: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    defenses: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    seeds: Seeds = (0, 1, 2, 3, 4)
    measure: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")] | None = None

    _distinct = field_validator("codecs", "defenses", "seeds")(_no_doubles)


def unpacked(attacks: Iterable[str]) -> tuple[str, ...]:
    """Specs with packs opened, each once, in the order in which they were named.

    >>> unpacked(["thesis", "logistic", "kmeans"])
    ('fine_tuning', 'kmeans', 'logistic')
    """
    return tuple(dict.fromkeys(spec for name in attacks for spec in PACKS.get(name, (name,))))
