"""Settings of studies: `[compare]` for `vfl compare`, `[grid]` for `vfl grid`, and others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from vfl.config.toml import Settings, several

#: Placeholder in a spec for an integer that `vfl compare` searches for.
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
#: Messages or models that a training can record for attacks: frames of its training rows, frames of
#: its last prediction queries, or every bottom model after each epoch.
Records = Literal["training", "queries", "snapshots"]
_UNDEFENDED = "none"
_HONEST = "none"
_BASELINES: tuple[Baseline, ...] = ("scratch", "scratch_unlabelled", "raw", "pca", "random")

#: Attacks that each take about a second on ten thousand rows; "fine_tuning" and "kmeans" come from
#: the thesis on split learning (2025).
LIGHT = (
    "fine_tuning",
    "logistic",
    "logistic:scaler=whiten",
    "nearest_mean:scaler=cosine",
    "fine_tuning:at=before",
    "kmeans",
)
#: Attacks of `LIGHT`, and slower attacks, most of which use unlabelled rows, inputs of the bottom
#: model or of its last layer, or the bottom model itself.
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
#: Packs of attacks by name; `attacks` in a grid may contain these names besides specs.
PACKS: dict[str, tuple[str, ...]] = {
    "light": LIGHT,
    "heavy": HEAVY,
    # Attacks on labels by a feature party; the packs "columns" and "members" contain other attacks.
    "labels": LIGHT,
    # The two attacks in section 4.4 of the thesis on split learning (2025).
    "thesis": ("fine_tuning", "kmeans"),
    # Attacks of the quick profile; some use the bottom model itself, which noise on the sent cuts
    # does not change.
    "quick": ("fine_tuning", "logistic:scaler=whiten", "logistic:at=bottom", "kmeans"),
    # Attacks on numeric labels, which replace all packs above if labels are numbers.
    "numbers": (
        "regression",
        "regression:at=bottom",
        "regression:at=bottom,learner=kernel",
        "regression:at=bottom,learner=neighbours",
    ),
    # Attacks by the label party on the inputs of received cuts; they also work if several parties
    # have columns.
    "columns": (
        "inversion",
        "white_box_inversion",
        "unsplit",
        "pseudo_client",
        "sdar",
        "fora",
        "attribute",
    ),
    # Attacks on training rows by a client that requests predictions.
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
    """Settings of a comparison of codecs; `vfl train` ignores them.

    Attributes:
        codecs: specs. In a codec with ``?``, such as ``topk:k=?``, the placeholder becomes the
            largest integer for which a training frame is not larger than an entry of `levels`.
        seeds: seeds of the trainings; by default 0, 1 and 2, unless `folds` is given.
        folds: number of folds of a cross-validation that replaces seeds: one training per fold,
            tested on the fold's rows.
        levels: allowed sizes of a training frame of the cut, in percent of the size with dense
            float32 values; only for codecs with ``?``.
        accuracy: scores on validation rows, in the metric that is compared; for each of them, the
            report shows the number of bytes that were sent until the training reached it. A single
            score needs no list.
        measure: metric by which codecs are compared, without the prefixes ``validation_`` and
            ``test_`` of the records. The default is AUC for two classes, or if one class has more
            than 65 % of the rows; RMSE for numbers; else accuracy.
        baseline: codec with which all other codecs are compared, separately for each seed or fold;
            by default the first codec.
        variants: lists of overrides (``key=value``) of the experiment; every codec is trained with
            each list.
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
        """Overrides of each repeat, which set a seed or a fold."""
        if self.folds is not None:
            folds = range(1, self.folds + 1)
            return [(f"data.folds={self.folds}", f"data.fold={fold}") for fold in folds]
        return [(f"seed={seed}",) for seed in self.seeds or _SEEDS]

    @property
    def reference(self) -> str:
        """Codec with which all other codecs are compared."""
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
    """Settings of a grid of victims (attacked models) and attacks; `vfl train` ignores them.

    Attributes:
        defenses: specs of defenses; for each defense, one victim is trained per seed. The
            undefended model is trained as well, because a defense can only pass if an attack on the
            undefended model succeeds; with an empty list, the undefended model is the only victim.
        codecs: specs of codecs; each codec adds an undefended victim, because values that a codec
            leaves out are not disclosed to an attacker.
        models: specs of other kinds of models, such as "trees:max_bin=8"; each adds a victim in
            which this model replaces the experiment's model.
        adversaries: specs of adversaries; each defense is trained once without an adversary, and
            once with each adversary.
        known: largest number of training rows per class whose labels the adversary at a feature
            party knew before the training.
        attacks: specs of attacks, or names of packs in `PACKS`.
        baselines: baselines of attacks: training from scratch on the leaked rows, with or without
            unlabelled rows, and the same attack on bottom models that were trained without labels.
            The default is all baselines but "autoencoder", which takes a minute of training.
        baseline_attacks: attacks that also run on bottom models trained without labels; by default
            all attacks. With fewer such attacks, the best baseline score is lower, and a defense,
            which must push attacks down to this score, passes less easily.
        leaks: numbers of leaked labels per class, one number for each point of the curve that shows
            an attack's score.
        draws: number of random draws of the leaked rows per victim; all defenses have the same
            draws.
        seeds: seeds; each seed gives one victim per defense.
        party: feature party that attacks, or that the label party attacks; by default the first.
        trained_by: "owner": a single owner trained the whole model and then gave the bottom model
            to the feature party; "split": the feature party trained the bottom model itself.
        leaks_from, unlabelled: splits from which the leaked rows, and the attacker's unlabelled
            rows, are drawn. The attack's targets are the test rows, so labels of test rows never
            leak.
        measure: metric of attacks on labels, by which defenses are ranked. "auto" is AUC for two
            classes, or if one class has more than 65 % of the rows; R2 for numeric labels; else
            accuracy. All metrics are stored.
        margin: largest loss of quality on test rows that a defense may cause, in percentage points.
        known_columns: number of validation rows for which the label party knows the values of an
            attacked feature party's columns; with a recorded training, number of training rows.
        attribute: column of the attacked feature party, counted from 0; attribute inference infers
            whether a row's value is above the mean; by default the column that divides the training
            rows most evenly.
        pictures: number of test rows that charts of angles and t-SNE show, for each defense's first
            victim, if labels are classes; 0 shows none.
        reconstructions: whether images from attacks on inputs are shown next to the true images; by
            default only for data sets by name, not for a party's own data.
        record: data that trainings record for later attacks, see `Records`; if an attack needs data
            that were not recorded, the victim is trained again.
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
        """The attacked models: the undefended one, then one per defense, codec and other model."""
        defenses = (spec for spec in self.defenses if spec != _UNDEFENDED)
        return (_UNDEFENDED, *defenses, *self.codecs, *self.models)

    def differs(self, victim: str) -> dict[str, str]:
        """Return the settings in which a victim's training differs from the experiment."""
        if victim in self.codecs:
            return {"codec": victim, "defense": _UNDEFENDED}
        if victim in self.models:
            return {"secure": victim}
        return {"defense": victim}

    @property
    def trainings(self) -> tuple[str, ...]:
        """The trainings of a defense: without an adversary ("none"), then with each adversary."""
        return (_HONEST, *(spec for spec in self.adversaries if spec != _HONEST))

    @property
    def attack_specs(self) -> tuple[str, ...]:
        """The grid's attacks, with names of packs replaced by the specs in these packs."""
        return unpacked(self.attacks)

    @property
    def baseline_specs(self) -> tuple[str, ...]:
        """The attacks that also run on bottoms trained without labels; packs become their specs."""
        return unpacked(self.attacks if self.baseline_attacks is None else self.baseline_attacks)

    def of_task(self, task: str) -> GridSettings:
        """Replace packs of attacks on classes by the pack "numbers" if labels are numbers.

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
        """Return whether a page may show images of rows.

        Args:
            own: whether the rows are a party's own data, and not a public data set.
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
    """Settings of `vfl value`, which trains on all columns and on each party's columns.

    Attributes:
        codecs, defenses: specs of codecs and defenses whose cost is measured, each in the split
            training.
        seeds: seeds; each seed gives one training of each kind.
        measure: metric that is compared, as it is named in the records after ``test_``; by default
            AUC, or RMSE for a regression.
    """

    codecs: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    defenses: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    seeds: Seeds = (0, 1, 2, 3, 4)
    measure: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")] | None = None

    _distinct = field_validator("codecs", "defenses", "seeds")(_no_doubles)


def unpacked(attacks: Iterable[str]) -> tuple[str, ...]:
    """Replace attack packs by the specs that they contain, in order and without repetitions.

    >>> unpacked(["thesis", "logistic", "kmeans"])
    ('fine_tuning', 'kmeans', 'logistic')
    """
    return tuple(dict.fromkeys(spec for name in attacks for spec in PACKS.get(name, (name,))))
