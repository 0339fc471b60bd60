"""Settings of the studies: `[compare]` for `vfl compare`, `[grid]` for `vfl grid`, and others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from vfl.config.toml import Settings, several

#: Placeholder in a spec for the integer to be searched.
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
#: Possible records of a training: frames of its training rows, frames of the last queries, or every
#: bottom after each epoch.
Records = Literal["training", "queries", "snapshots"]
_UNDEFENDED = "none"
_HONEST = "none"
_BASELINES: tuple[Baseline, ...] = ("scratch", "scratch_unlabelled", "raw", "pca", "random")

#: Attacks that take about a second on ten thousand rows; those of the thesis come first.
LIGHT = (
    "fine_tuning",
    "logistic",
    "logistic:scaler=whiten",
    "nearest_mean:scaler=cosine",
    "fine_tuning:at=before",
    "kmeans",
)
#: Attacks that also use the unlabelled rows, the inputs and the bottom itself.
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
#: Named packs of attacks; the `attacks` of a grid may name them among its specs.
PACKS: dict[str, tuple[str, ...]] = {
    "light": LIGHT,
    "heavy": HEAVY,
    # Attacks of a feature party on labels, besides "columns" and "members".
    "labels": LIGHT,
    # The two attacks of the thesis (section 4.4).
    "thesis": ("fine_tuning", "kmeans"),
    # Attacks of the quick profile; if a cut is blurred in transit, its owner reads the bottom.
    "quick": ("fine_tuning", "logistic:scaler=whiten", "logistic:at=bottom", "kmeans"),
    # Attacks on numeric labels, which replace the four above for a regression.
    "numbers": (
        "regression",
        "regression:at=bottom",
        "regression:at=bottom,learner=kernel",
        "regression:at=bottom,learner=neighbours",
    ),
    # Attacks of a label party on received cuts that also work if other parties have columns.
    "columns": (
        "inversion",
        "white_box_inversion",
        "unsplit",
        "pseudo_client",
        "sdar",
        "fora",
        "attribute",
    ),
    # Attacks of a client that asks for predictions, on training rows.
    "members": ("membership", "likelihood_ratio"),
}

#: Packs for class labels.
_OF_CLASSES = frozenset({"light", "heavy", "labels", "thesis", "quick"})


def _no_doubles(listed: tuple[object, ...] | None) -> tuple[object, ...] | None:
    doubles = [item for item in listed or () if (listed or ()).count(item) > 1]
    if doubles:
        raise ValueError(f"{doubles[0]} is listed twice")
    return listed


class CompareSettings(Settings):
    """Settings of a comparison; `vfl train` ignores them.

    Attributes:
        codecs: specs. In one with ``?``, such as ``topk:k=?``, the placeholder is replaced by the
            largest integer whose training frame stays within a level.
        seeds: seeds of the trainings; 0, 1 and 2 unless `folds` is given.
        folds: number of folds of a cross-validation, in place of seeds: one training per fold,
            tested on the fold's rows.
        levels: allowed size of the cut's training frame, in percent of dense float32; only for
            codecs with ``?``.
        accuracy: validation accuracies for which the bytes until they are reached are reported; a
            single one needs no list.
        measure: compared metric, under its name in the records after ``validation_`` and ``test_``.
            The default is AUC for two classes or if one holds more than 65 % of the rows, RMSE for
            numbers, else accuracy.
        baseline: codec with which all others are compared, repeat by repeat; by default the first
            one.
        variants: lists of overrides; every codec is trained with each.
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
        """Overrides of each repeat: a seed, or a fold."""
        if self.folds is not None:
            folds = range(1, self.folds + 1)
            return [(f"data.folds={self.folds}", f"data.fold={fold}") for fold in folds]
        return [(f"seed={seed}",) for seed in self.seeds or _SEEDS]

    @property
    def reference(self) -> str:
        """The codec with which all others are compared."""
        return self.baseline or self.codecs[0]

    _distinct = field_validator("codecs", "seeds", "levels", "accuracy")(_no_doubles)

    @field_validator("codecs")
    @classmethod
    def _at_most_one_wanted(cls, codecs: tuple[str, ...]) -> tuple[str, ...]:
        for spec in codecs:
            if spec.count(WANTED) > 1:
                raise ValueError(f"{spec}: only one number of a spec can be searched")
        return codecs


class GridSettings(Settings):
    """Victims, attacks and baselines; `vfl train` ignores them.

    Attributes:
        defenses: specs; each is trained once for each seed. The undefended model is trained too,
            because a defense can only pass where an attack on it succeeds; with an empty list, it
            is the only one.
        codecs: specs; each is another undefended victim, because values that a codec leaves out are
            not disclosed.
        models: specs of separate models, such as "trees:max_bin=8"; each becomes a further victim
            that replaces the experiment's model.
        adversaries: specs of adversaries; each defense is trained honestly and against each of
            them.
        known: most training rows of each class whose labels an adversary of a feature party knew
            before the training.
        attacks: specs, or names of `PACKS`.
        baselines: baselines of attacks: training from scratch on the leaked rows, also with
            unlabelled ones, and the same attack on bottoms without any label. The default is all
            but "autoencoder", which takes a minute of training.
        baseline_attacks: attacks that also run on label-free bottoms; by default all. Fewer attacks
            give a lower reference, so a defense passes less easily.
        leaks: numbers of leaked labels of each class, one for each point of a curve.
        draws: number of draws of leaked rows for each victim; the draws are the same for every
            defense.
        seeds: seeds, one victim each.
        party: feature party that attacks; by default the first one.
        trained_by: "owner": one owner trained both halves and gave the bottom away; "split": the
            feature party trained the bottom itself.
        leaks_from, unlabelled: parts of the split with the leaked rows and with the attacker's
            unlabelled rows. The test rows are the targets, so none of them leaks.
        measure: metric of attacks on labels, by which defenses are ranked; "auto" is AUC for two
            classes or if one holds more than 65 % of the rows, else accuracy, and R2 for numeric
            labels. All metrics are stored.
        margin: accuracy that a defense may cost, in percentage points.
        known_columns: number of validation rows of a feature party whose columns the label party
            knows too.
        attribute: the victim's column, counted from 0, that attribute inference targets, above its
            mean or not; by default the column that splits the training rows most evenly.
        pictures: number of test rows of each defense's first victim whose angles and t-SNE are
            drawn; 0 draws none.
        reconstructions: whether pictures from attacks on inputs are drawn beside the true ones; by
            default only for data sets by name, not for a party's own data.
        record: records that trainings store for later attacks, see `Records`; a victim is trained
            again for an attack that needs a missing record.
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
        """The victims: undefended model, defenses, codecs, and other models."""
        defenses = (spec for spec in self.defenses if spec != _UNDEFENDED)
        return (_UNDEFENDED, *defenses, *self.codecs, *self.models)

    def differs(self, victim: str) -> dict[str, str]:
        """Settings in which a victim differs from the experiment."""
        if victim in self.codecs:
            return {"codec": victim, "defense": _UNDEFENDED}
        if victim in self.models:
            return {"secure": victim}
        return {"defense": victim}

    @property
    def trainings(self) -> tuple[str, ...]:
        """Adversaries, after the honest training."""
        return (_HONEST, *(spec for spec in self.adversaries if spec != _HONEST))

    @property
    def attack_specs(self) -> tuple[str, ...]:
        """The attacks as single specs."""
        return unpacked(self.attacks)

    @property
    def baseline_specs(self) -> tuple[str, ...]:
        """The attacks that also run on label-free bottoms, as single specs."""
        return unpacked(self.attacks if self.baseline_attacks is None else self.baseline_attacks)

    def of_task(self, task: str) -> GridSettings:
        """Replace packs of attacks on classes by "numbers" if labels are numbers.

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
        """Return whether rows may be shown on a page.

        Args:
            own: whether the rows are a party's own, and not public.
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
            raise ValueError("the undefended model is always a victim, with the experiment's codec")
        return listed


class ValueSettings(Settings):
    """Settings of `vfl value`, which also trains each party alone, and a pooled model.

    Attributes:
        codecs, defenses: specs whose cost is measured, each in the split training.
        seeds: seeds, with one training of each kind for each seed.
        measure: compared metric, under its name in the records after ``test_``; by default AUC, or
            RMSE for a regression.
    """

    codecs: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    defenses: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    seeds: Seeds = (0, 1, 2, 3, 4)
    measure: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")] | None = None

    _distinct = field_validator("codecs", "defenses", "seeds")(_no_doubles)


def unpacked(attacks: Iterable[str]) -> tuple[str, ...]:
    """Replace attack packs by their specs in order; remove repetitions.

    >>> unpacked(["thesis", "logistic", "kmeans"])
    ('fine_tuning', 'kmeans', 'logistic')
    """
    return tuple(dict.fromkeys(spec for name in attacks for spec in PACKS.get(name, (name,))))
