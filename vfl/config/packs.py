"""Attacks that go together, by name; a grid's `attacks` may name them among its specs."""

from __future__ import annotations

from collections.abc import Iterable

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
#: The two of the thesis (section 4.4).
THESIS = ("fine_tuning", "kmeans")
#: What the quick profile runs; where a cut is blurred on its way, its owner reads the bottom.
QUICK = ("fine_tuning", "logistic:scaler=whiten", "logistic:at=bottom", "kmeans")

#: What a label party makes of the cuts it was sent; those that no other party's columns disturb.
COLUMNS = ("inversion", "white_box_inversion", "unsplit", "pseudo_client", "attribute")
#: What whoever asks for predictions finds out about training rows.
MEMBERS = ("membership", "likelihood_ratio")

PACKS: dict[str, tuple[str, ...]] = {
    "light": LIGHT,
    "heavy": HEAVY,
    "thesis": THESIS,
    "quick": QUICK,
    "columns": COLUMNS,
    "members": MEMBERS,
}


def unpacked(attacks: Iterable[str]) -> tuple[str, ...]:
    """Specs with packs opened, each once, in the order in which they were named.

    >>> unpacked(["thesis", "logistic", "kmeans"])
    ('fine_tuning', 'kmeans', 'logistic')
    """
    return tuple(dict.fromkeys(spec for name in attacks for spec in PACKS.get(name, (name,))))
