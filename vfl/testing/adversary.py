"""Tests that every active adversary must pass; plug-in authors subclass `AdversaryContract`.

    class TestMine(AdversaryContract):
        specs = ["mine:share=0.5"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, optim

from vfl.attacks import Attack, Evidence, Holdings, ThreatModel, View
from vfl.attacks.active import ActiveAdversary, Backdoor, make_adversary
from vfl.attacks.cases import held
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.core.errors import NotGrantedError
from vfl.core.seeds import generator
from vfl.datasets import PartyData, Split
from vfl.session import CHECKPOINTS, Adversary, Checkpoints
from vfl.testing.attack import contents, require_form, without_the_rest
from vfl.testing.base import Contract, differing, draw_from_all, global_states, require_still
from vfl.training.local import LocalSession


class Watched(Adversary):
    """Runs another adversary, and raises `AssertionError` if that one breaks its contract.

    Args:
        adversary: the adversary to run, whose `begin` was already called.
        classes: number of classes of the labels.
    """

    def __init__(self, adversary: ActiveAdversary, classes: int) -> None:
        self.who = adversary.who
        self._played = adversary
        self._classes = classes

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        return self._alike("batch", inputs, context)

    def labels(self, labels: Tensor, context: StepContext) -> Tensor:
        found = self._alike("labels", labels, context)
        assert set(found.tolist()) <= set(range(self._classes)), (
            "the adversary returned a label of no class"
        )
        return found

    def optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        found = self._played.optimizer(optimizer)
        assert isinstance(found, optim.Optimizer), "optimizer gave none"
        return found

    def model(self, cuts_of: Callable[[Tensor], Tensor]) -> None:
        self._played.model(cuts_of)

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        return self._alike("cut", cut, context)

    def gradient(self, party: str, grad: Tensor, context: StepContext) -> Tensor:
        return self._alike("gradient", party, grad, context)

    def received(self, party: str, values: Tensor, context: StepContext) -> None:
        self._look("received", party, values, context)

    def training_state(self) -> dict[str, Any]:
        return self._played.training_state()

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        self._played.load_training_state(saved)

    def _alike(self, hook: str, *given: Any) -> Tensor:
        """Return the result of an adversary's hook, which may change only the values."""
        found, before = self._look(hook, *given)
        assert isinstance(found, Tensor), f"{hook} gave no tensor"
        assert found.shape == before.shape, f"{hook} changed its shape"
        assert found.dtype == before.dtype, f"{hook} changed its type"
        # The receiving party refuses a frame of another shape, and this refusal ends the training.
        assert torch.isfinite(found).all(), f"{hook} returned a value that is not finite"
        return found

    def _look(self, hook: str, *given: Any) -> tuple[Any, Tensor]:
        """Return the result of an adversary's hook, and the tensor that the hook received."""
        (values,) = (one for one in given if isinstance(one, Tensor))
        before = values.clone()
        found = getattr(self._played, hook)(*given)
        assert torch.equal(values, before), f"{hook} changed its inputs in place"
        return found, before


PLAYERS = {"feature party": "bank", "label party": "lender"}
#: Hooks that never run at a feature party, and hooks that never run at a label party, by party's
#: role.
_ELSEWHERE = {"feature party": ("labels", "gradient"), "label party": ("cut", "model")}


class AdversaryContract(Contract):
    """Properties of every adversary, tested in trainings of a small network.

    Attributes:
        specs: specs of the adversaries under test, at least one; each adversary must change the
            training.
        rows, classes, columns, width: numbers of rows, classes and columns, and width of the cut.
        known: number of training rows per class whose labels an adversary at a feature party knows.
    """

    family = "adversary"
    rows: ClassVar[int] = 150
    classes: ClassVar[int] = 3
    columns: ClassVar[int] = 6
    width: ClassVar[int] = 4
    known: ClassVar[int] = 10

    def test_training_is_changed_and_reproducible(self, spec: str) -> None:
        adversary = self._begun(spec)
        first = self._train(Watched(adversary, self.classes)).weights_digest()
        _require_plain("training_state", adversary.training_state())
        assert first != self._honest(), "it changes nothing"

        draw_from_all()
        view, states = (
            without_the_rest(self._view(adversary).only(adversary.holds)),
            global_states(),
        )
        evidence, again = contents(view), make_adversary(spec)
        again.begin(view, generator(0, "draw"))
        second = self._train(again).weights_digest()
        require_still(states)
        changed = differing(evidence, contents(view))
        assert not changed, f"the evidence was changed in place: {changed}"
        if first != second:
            assert first == self._train(self._begun(spec)).weights_digest(), "not repeatable"
            raise AssertionError(
                "evidence that was not granted to the adversary changes its result"
            )

    def test_resumed_training_gives_the_same_weights(self, spec: str, tmp_path: Path) -> None:
        whole = self._train(self._begun(spec), tmp_path).weights_digest()
        checkpoints = Checkpoints(tmp_path / "lender" / CHECKPOINTS, "lender", "run", "")
        assert checkpoints.committed(), "the adversary has no state from which to resume"
        rest = self._train(self._begun(spec), tmp_path).weights_digest()
        assert rest == whole, "the state of the adversary was not restored"

    def test_hooks_of_other_parties_are_not_defined(self, spec: str) -> None:
        adversary = make_adversary(spec)
        assert adversary.who in PLAYERS
        own = [
            hook
            for hook in _ELSEWHERE[adversary.who]
            if getattr(type(adversary), hook) is not getattr(Adversary, hook)
        ]
        assert not own, f"{', '.join(own)} never runs at a {adversary.who}"

    def test_every_declared_grant_is_used(self, spec: str) -> None:
        adversary = make_adversary(spec)
        for grant in adversary.holds:
            less = self._view(adversary).only(adversary.holds - {grant})
            with pytest.raises(NotGrantedError):
                adversary.begin(less, generator(0, "draw"))

    def test_trigger_marks_every_row_of_a_copy(self, spec: str) -> None:
        adversary = self._begun(spec)
        if not isinstance(adversary, Backdoor):
            return
        if adversary.learns:
            self._train(adversary)
        inputs = self._data()["bank"].inputs
        assert inputs is not None
        cuts = torch.randn(self.rows, self.width, generator=generator(0, "cuts"))
        on_inputs = _require_marks(adversary.triggered, inputs)
        on_cuts = _require_marks(adversary.triggered_cut, cuts)
        assert (on_inputs | on_cuts).all(), "a triggered row lacks the trigger"

    def test_result_has_the_form_of_its_goal(self, spec: str) -> None:
        adversary = self._begun(spec)
        if not isinstance(adversary, Attack):
            return
        bank = self._train(adversary).clients[0]
        inputs = bank.inputs
        rows = Evidence(inputs, bank.cut(torch.arange(len(inputs))))
        threat = ThreatModel(adversary.who, "inference", adversary.needs, behaviour="malicious")
        found = adversary.run(View(threat, self.classes, Holdings(rows)), generator(0, "draw"))
        require_form(found, adversary, len(inputs), self.classes, inputs.shape)

    def _begun(self, spec: str) -> ActiveAdversary:
        adversary = make_adversary(spec)
        adversary.begin(self._view(adversary).only(adversary.holds), generator(0, "draw"))
        return adversary

    def _view(self, adversary: ActiveAdversary) -> View:
        """Return all evidence that a party of the adversary's kind may hold."""
        draw = generator(0, "contract")
        return held(adversary, self._experiment(), self._data(), "bank", self.known, draw)

    def _train(self, adversary: Adversary | None, folder: Path | None = None) -> LocalSession:
        """Train against an adversary; if the folder contains an interrupted training, resume it.

        Three batches are in flight, because a feature party computes the cuts of such batches again
        after a resume.
        """
        who = getattr(adversary, "who", None)
        adversaries = {} if who is None or adversary is None else {PLAYERS[who]: adversary}
        return LocalSession(
            self._experiment(),
            self._data(),
            outputs=self.classes,
            adversaries=adversaries,
            checkpoints=folder,
        ).run()

    @classmethod
    @cache
    def _honest(cls) -> str:
        """Return a digest of the weights of a training without an adversary."""
        return cls()._train(None).weights_digest()

    def _experiment(self) -> Experiment:
        party = {"width": self.width, "bottom": "mlp:hidden=8"}
        train = {"epochs": 2, "batch_size": 10, "in_flight": 3, "checkpoint_every": 4}
        return Experiment.model_validate(
            {
                "parties": {"bank": party, "shop": party},
                "label": {"party": "lender", "top": "linear"},
                "train": train | {"learning_rate": 0.01},
            }
        )

    def _data(self) -> dict[str, PartyData]:
        """Make rows with well separated classes for two feature parties and a label party."""
        draw, rows = generator(0, "contract"), torch.randperm(self.rows, generator=generator(1))
        labels = torch.arange(self.rows) % self.classes
        split = Split(*(part.sort().values.numpy() for part in rows.tensor_split([100, 125])))
        found = {
            name: PartyData(name, self._columns(labels, draw), None, None, split, b"rows")
            for name in ("bank", "shop")
        }
        classes = tuple(range(self.classes))
        return found | {"lender": PartyData("lender", None, labels, classes, split, b"rows")}

    def _columns(self, labels: Tensor, draw: torch.Generator) -> Tensor:
        means = 2 * torch.eye(self.classes, self.columns)[labels]
        return means + torch.randn(self.rows, self.columns, generator=draw)


def _require_marks(mark: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return which rows a trigger marks, axes (rows,); check that the rows keep their shape."""
    before = values.clone()
    marked = mark(values)
    assert torch.equal(values, before), f"{mark.__name__} changed its inputs in place"
    assert (marked.shape, marked.dtype) == (before.shape, before.dtype), "rows of another form"
    assert torch.equal(mark(before), marked), "another trigger each time"
    return (marked != before).flatten(1).any(1)


def _require_plain(name: str, value: object) -> None:
    """Require that a checkpoint contains only tensors, numbers, texts, and containers of these."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            _require_plain(f"{name}[{key}]", one)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _require_plain(f"{name}[{number}]", one)
    else:
        plain = isinstance(value, Tensor | int | float | str | None)
        assert plain, f"{name} is of {type(value).__name__}, which no checkpoint can hold"
