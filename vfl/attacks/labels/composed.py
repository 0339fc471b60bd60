"""Label-inference attacks composed of layers, scaler, learner, unlabelled rows and a teacher.

The attack's name selects the learner (classifier), which has its own default options. The other
four parts are options of every attack in this family, for example
`label_propagation:at=cut+inputs,scaler=whiten`.

    layers      at, or of      cut, bottom, learned, before, inputs, outputs, gradients,
                               accumulated; joined by +;
    scaling     scaler         none, standard, whiten, shrink, zca, cosine, batch, rank;
    learner     the name       logistic, nearest_mean, knn, label_propagation, svm, ridge,
                               discriminant, mlp, trees, fine_tuning;
    unlabelled  unlabelled     none, self_training, co_training; mixmatch of mlp;
    teacher     teacher        propagation, scratch, or any attack on labels, with / for its commas
"""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from vfl.attacks.base import LAYER_NEEDS, Attack, Layer, Scale, Scaler, features, scale_by
from vfl.attacks.labels.self_training import leaked_of_each, most_confident, taught_rows
from vfl.attacks.view import Grant, View
from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice, require_range
from vfl.defenses.components import principal

#: Function from features of rows, axes (rows, features), to scores, axes (rows, classes).
Predict = Callable[[Tensor], Tensor]
Unlabelled = Literal["none", "self_training", "co_training", "mixmatch"]
#: Teachers with a short name, and the spec of the attack that each name stands for.
TEACHERS = {"propagation": "label_propagation:at=inputs", "scratch": "scratch"}


@dataclass(frozen=True, eq=False)
class Seen:
    """Features of leaked, unlabelled and target rows by layer, and the labels of the leaked rows.

    Attributes:
        known, further, targets: for each layer, the features of the leaked, of the unlabelled and
            of the target rows, axes (rows, features). The features of unlabelled rows are computed
            when the attack first needs them.
        labels: labels of the leaked rows, int64.
        classes: number of classes.
    """

    known: Mapping[Layer, Tensor]
    further: Callable[[Layer], Tensor]
    targets: Mapping[Layer, Tensor]
    labels: Tensor
    classes: int

    @classmethod
    def of(cls, view: View, layers: Sequence[Layer]) -> Seen:
        """Read the features of all three groups of rows from a view, for some layers."""
        leaked, targets = view.leaked, view.targets
        kept: dict[Layer, Tensor] = {}

        def further(layer: Layer) -> Tensor:
            if layer not in kept:
                kept[layer] = features(view, view.unlabelled, layer)
            return kept[layer]

        known = {layer: features(view, leaked, layer) for layer in layers}
        asked = {layer: features(view, targets, layer) for layer in layers}
        return cls(known, further, asked, leaked.labels, view.classes)

    def hiding(self, hidden: Tensor, some: Tensor) -> Seen:
        """Return a smaller problem for validation, in which some leaked rows have no labels.

        Args:
            hidden: mask of the leaked rows whose labels are hidden, bool.
            some: positions of unlabelled rows to include. In the smaller problem, the hidden rows
                and then these unlabelled rows are both the targets and the unlabelled rows.
        """
        known = {layer: rows[~hidden] for layer, rows in self.known.items()}
        asked = {
            layer: torch.cat([rows[hidden], self.further(layer)[some]])
            for layer, rows in self.known.items()
        }
        return Seen(known, asked.__getitem__, asked, self.labels[~hidden], self.classes)

    def asking(self) -> Seen:
        """Return the same problem with the unlabelled rows as targets."""
        return replace(self, targets={layer: self.further(layer) for layer in self.known})


@dataclass(frozen=True, eq=False)
class Task:
    """A learner's inputs.

    Attributes:
        rows: scaled features of the labelled rows, axes (rows, features).
        labels: labels of these rows, int64, axes (rows,).
        classes: number of classes.
        weights: weight of each row, 1 or 2; None gives all rows the same weight.
        taught: whether a teacher guessed most of the labels, so that some are wrong.
        scaled: function that returns the scaled features of the unlabelled rows; None if the
            learner has no unlabelled rows.
        view: the attacker's view, which provides model architectures; None in tests.
        draw: generator from which the learner draws all random numbers; None in tests.
    """

    rows: Tensor
    labels: Tensor
    classes: int
    weights: Tensor | None = None
    taught: bool = False
    scaled: Callable[[], Tensor] | None = None
    view: View | None = None
    draw: torch.Generator | None = None

    def further(self) -> Tensor:
        """Return the scaled features of the unlabelled rows, axes (rows, features)."""
        return self.rows[:0] if self.scaled is None else self.scaled()

    def counts(self) -> Tensor:
        """Return the weight of each labelled row, axes (rows,)."""
        return torch.ones(len(self.rows)) if self.weights is None else self.weights


class Composed(Attack):
    """Base class of label-inference attacks that combine five parts.

    The attack reads layers of the victim's network and scales their outputs, which are the
    features. A learner trains on the leaked rows; if there is a teacher, it also trains on the
    teacher's guesses about the unlabelled rows. The learner can then train again, with its own most
    confident guesses as labels, or with those of a second learner that reads other layers
    (co-training, Blum and Mitchell 1998).

    Attributes:
        defaults: an attack's own defaults for the options below.
        mixes: whether the attack's learner can train by MixMatch.

    Args:
        at: the layer whose outputs are the features, or several layers joined by +; see `features`.
            If inputs are joined with other layers, principal components replace the inputs, and
            each layer is scaled to the same mean squared length.
        scaler: see `scale_by`; inputs that are joined with other layers are not scaled by it.
        unlabelled: way in which the attack uses unlabelled rows. "self_training": the most
            confident guesses become labels. "co_training": two learners exchange their guesses; one
            reads the first layer, the other one all other layers. "mixmatch": the learner trains by
            MixMatch; only for learners that are networks.
        teacher: an attack whose guesses about the unlabelled rows the learner trains on first; its
            spec, with / in place of commas. "propagation" spreads the leaked labels over a graph of
            the inputs; "scratch" trains a new model.
        rounds: number of rounds of self-training or co-training.
        share: for each class, the share of the unlabelled rows guessed to be of it on which the
            next round trains, the most confident ones first. With a teacher, this is the share of
            the teacher's guesses; later rounds then use 0.5.
        every: step between the selected rows that are used; 4 uses every fourth of them.
        mix: weight of the other layers in the squared distance, if these are joined with inputs.
        components: number of principal components that replace the inputs if these are joined with
            other layers; 0 keeps the inputs.

    Raises:
        BadOptionError: an option is out of range.
    """

    uses: ClassVar[frozenset[Grant]] = frozenset({Grant.LEAKED})
    defaults: ClassVar[dict[str, Any]] = {}
    mixes: ClassVar[bool] = False

    def __init__(
        self,
        at: str = "cut",
        scaler: Scaler = "none",
        unlabelled: Unlabelled = "none",
        teacher: str = "none",
        rounds: int = 4,
        share: float = 0.5,
        every: int = 4,
        mix: float = 0.2,
        components: int = 32,
    ) -> None:
        require_choice("scaler", scaler, get_args(Scaler))
        require_choice("unlabelled", unlabelled, get_args(Unlabelled))
        require_range("rounds", rounds, 0)
        require_range("every", every, 1)
        for option, number in (("share", share), ("mix", mix)):
            require_range(option, number, 0, 1)
        require_range("components", components, 0)
        self.layers: list[Layer] = layers_of(at)
        if unlabelled == "co_training" and len(self.layers) < 2:
            raise BadOptionError(
                "co-training needs two layers", where="option 'at'", got=at, want="cut+inputs"
            )
        if unlabelled == "mixmatch" and not self.mixes:
            raise BadOptionError(
                "this learner is no network, and only networks train by MixMatch",
                where="option 'unlabelled'",
                got=unlabelled,
                want="self_training, or the attack mlp or fine_tuning",
            )
        self.scaler: Scaler = scaler
        self.unlabelled: Unlabelled = unlabelled
        self.teacher = _teacher(teacher)
        self.rounds, self.share, self.every = rounds, share, every
        self.mix, self.components = mix, components
        self.needs = self.uses.union(*(LAYER_NEEDS[one] for one in self.layers))
        if scaler != "none" or unlabelled != "none" or len(self.layers) > 1:
            self.needs |= {Grant.UNLABELLED}
        if self.teacher is not None:
            self.needs |= self.teacher.needs | {Grant.UNLABELLED}

    def __init_subclass__(cls) -> None:
        """Collect a class's options: first its own, then common ones with the class's defaults."""
        super().__init_subclass__()
        found: dict[str, inspect.Parameter] = {}
        for one in cls.__mro__:
            if "__init__" in vars(one) and issubclass(one, Composed):
                listed = inspect.signature(vars(one)["__init__"], eval_str=True).parameters
                own = list(listed.values())[1:]
                found |= {p.name: p for p in own if p.kind is not p.VAR_KEYWORD} | found
        defaults = {name: cls.defaults.get(name, p.default) for name, p in found.items()}
        listed_all = [
            p.replace(default=defaults[name], kind=p.KEYWORD_ONLY) for name, p in found.items()
        ]
        cls.__signature__ = inspect.Signature(listed_all)  # type: ignore[attr-defined]

    @abstractmethod
    def learn(self, task: Task) -> Predict:
        """Train on the labelled rows of a task; return a function that scores other rows."""

    @property
    def all_layers(self) -> list[Layer]:
        """Return all layers that the attack or its teacher reads."""
        taught = self.teacher.all_layers if isinstance(self.teacher, Composed) else []
        return list(dict.fromkeys([*self.layers, *taught]))

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        return self.answer(Seen.of(view, self.all_layers), view, draw)

    def _learn_from(self, scores: Tensor, task: Task) -> Predict:
        """Train on the leaked rows and on those rows about which a teacher is most confident."""
        sure = most_confident(scores, self.share, leaked_of_each(task.labels, task.classes))
        rows = torch.cat([task.rows, task.further()[sure]])
        labels = torch.cat([task.labels, scores[sure].argmax(1)])
        weights = torch.ones(len(rows))
        return self.learn(replace(task, rows=rows, labels=labels, weights=weights, taught=True))

    def answer(self, seen: Seen, view: View, draw: torch.Generator) -> Tensor:
        """Return the scores of the targets, axes (targets, classes), from features that were read.

        Args:
            seen: features of all rows, for at least the layers in `all_layers`.
            view: the attacker's view. The view gives the learner the model architectures; a teacher
                that is not itself a composed attack reads all its data from the view.
            draw: generator from which all random numbers are drawn.
        """
        looks = [self.layers]
        if self.unlabelled == "co_training":
            looks = [self.layers[:1], self.layers[1:]]
        scales = [self._scale(seen, layers) for layers in looks]

        def further(number: int) -> Tensor:
            found = {layer: seen.further(layer) for layer in looks[number]}
            return scales[number](found)

        tasks = [
            Task(
                scale(seen.known), seen.labels, seen.classes,
                scaled=partial(further, number), view=view, draw=draw,
            )
            for number, scale in enumerate(scales)
        ]  # fmt: skip
        if self.teacher is None:
            found = [self.learn(task) for task in tasks]
        else:
            scores = _taught(self.teacher, seen, view, draw)
            found = [self._learn_from(scores, task) for task in tasks]
        for _ in range(self.rounds if self.unlabelled in ("self_training", "co_training") else 0):
            guesses = [one(task.further()) for one, task in zip(found, tasks, strict=True)]
            for number, task in enumerate(tasks):
                rows, labels, weights = taught_rows(
                    task.rows, task.labels, task.further(), guesses[number - 1],
                    0.5 if self.teacher is not None else self.share, self.every,
                )  # fmt: skip
                found[number] = self.learn(replace(task, rows=rows, labels=labels, weights=weights))
        answers = [one(scale(seen.targets)) for one, scale in zip(found, scales, strict=True)]
        if len(answers) == 1:
            return answers[0]
        return torch.stack([one.log_softmax(1) for one in answers]).sum(0)

    def _scale(self, seen: Seen, layers: Sequence[Layer]) -> Callable[[Any], Tensor]:
        """Return a function that maps features by layer to the learner's scaled inputs."""
        if len(layers) == 1:
            (only,) = layers
            scale: Scale = lambda rows: rows  # noqa: E731
            if self.scaler != "none":
                scale = scale_by(self.scaler, seen.further(only))
            return lambda found: scale(found[only])
        parts = []
        for layer in layers:
            rows = seen.further(layer)
            turn = self._turn(rows) if layer == "inputs" else scale_by(self.scaler, rows)
            weight = 1.0
            if "inputs" in layers:
                weight = 1 - self.mix if layer == "inputs" else self.mix / (len(layers) - 1)
            parts.append((layer, turn, alike_by(turn(rows)), weight**0.5))
        return lambda found: torch.cat(
            [weight * alike(turn(found[layer])) for layer, turn, alike, weight in parts], 1
        )

    def _turn(self, inputs: Tensor) -> Scale:
        if not self.components:
            return lambda rows: rows
        _, _, directions = principal(inputs)
        kept = directions[:, : self.components].float()
        return lambda rows: rows @ kept


def layers_of(at: str) -> list[Layer]:
    """Return the distinct layers named in a text, which joins them by +.

    >>> layers_of("cut+inputs")
    ['cut', 'inputs']

    Raises:
        BadOptionError: a layer does not exist.
    """
    found: Any = re.split(r"\+", at)
    for one in found:
        require_choice("at", one, tuple(LAYER_NEEDS))
    return list(dict.fromkeys(found))


def alike_by(reference: Tensor) -> Scale:
    """Return a function that centres rows and divides all of them by the same number.

    The number makes the mean squared length of the reference rows 1.
    """
    mean = reference.mean(0)
    length = (reference - mean).square().sum(1).mean().sqrt().clamp_min(1e-12)
    return lambda rows: (rows - mean) / length


def _teacher(spec: str) -> Attack | None:
    from vfl.attacks import make  # imported here, because `vfl.attacks` imports this module

    if spec == "none":
        return None
    made = make(TEACHERS.get(spec, spec).replace("/", ","))
    if made.goal != "labels":
        raise BadOptionError(
            "a teacher needs class scores",
            where="option 'teacher'",
            got=spec,
            want=f"an attack on labels, such as {', '.join(TEACHERS)}",
        )
    return made


def _taught(teacher: Attack, seen: Seen, view: View, draw: torch.Generator) -> Tensor:
    """Return the scores that a teacher gives the unlabelled rows."""
    if isinstance(teacher, Composed):
        return teacher.answer(seen.asking(), view, draw)
    return teacher.run(view.only(teacher.needs | {Grant.UNLABELLED}).asking(), draw)
