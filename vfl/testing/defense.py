"""The tests every defense passes; a plug-in author subclasses `DefenseContract`.

    class TestMine(DefenseContract):
        specs = ["mine:strength=2"]

pytest then runs each test below for each spec.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vfl.compression import INFERENCE, StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator, scoped
from vfl.defenses import Chain, Defense, LabelKind, PrivacyStatement, Side, make, uses

ROWS = 9
_FEATURE_HOOKS = ("wrap_bottom", "fit", "embedding", "local_loss", "received")
_LABEL_HOOKS = (
    "prepare", "labels", "counts", "wrap_top", "logits", "targets", "loss", "gradient",
)  # fmt: skip


class DefenseContract:
    """What holds for every defense and every chain of them.

    Attributes:
        specs: the defenses under test, at least one; include the extremes of their options.
        width: width of the cut.
        classes: columns of the top's output.
    """

    specs: ClassVar[Sequence[str]] = ()
    width: ClassVar[int] = 6
    classes: ClassVar[int] = 3

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each spec."""
        if not self.specs:
            raise ValueError(f"{type(self).__name__}.specs names no defense to test")
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs)

    def test_hooks_keep_shapes_and_types(self, spec: str) -> None:
        given, made = self._values(), self._play(self._made(spec))
        given["targets"] = given["labels"]
        for name, value in made.items():
            if name.endswith("loss"):
                assert value.shape == (), f"{name} is no scalar"
                continue
            if name == "counts":
                assert (value.shape, value.dtype) == ((ROWS,), torch.bool), "counts is no mask"
                continue
            if name == "targets" and value.is_floating_point():
                assert value.shape == (ROWS, self.classes), "targets fit neither labels nor logits"
                assert (value >= 0).all(), "a negative probability"
                assert torch.allclose(value.sum(1), torch.ones(ROWS), atol=1e-5), "no distribution"
                continue
            before = given["gradient" if name == "received" else name]
            assert value.shape == before.shape, f"{name} changed its shape"
            assert value.dtype == before.dtype, f"{name} changed its type"
        assert all(torch.isfinite(value).all() for value in made.values())

    def test_labels_stay_labels(self, spec: str) -> None:
        defense = self._made(spec)
        told = self._told(defense, self._values()["labels"])
        for labels in (told, *(self._play(defense, step)["labels"] for step in range(3))):
            assert set(labels.tolist()) <= set(range(self.classes)), "a label of no class"

    def test_what_a_hook_is_given_is_left_alone(self, spec: str) -> None:
        given, before = self._values(), self._values()
        self._play(self._made(spec), given=given)
        changed = [name for name in given if not torch.equal(given[name], before[name])]
        assert not changed, f"changed in place: {', '.join(changed)}"

    def test_what_a_party_lacks_it_still_lacks(self, spec: str) -> None:
        values = self._values()
        assert self._made(spec).batch(values["inputs"], None, _context())[1] is None
        assert self._made(spec).batch(None, values["labels"], _context())[0] is None

    def test_the_same_context_gives_the_same_result(self, spec: str) -> None:
        first, second = (self._play(self._made(spec)) for _ in range(2))
        assert first.keys() == second.keys()
        differing = [name for name in first if not torch.equal(first[name], second[name])]
        assert not differing, f"not repeatable: {', '.join(differing)}"

    def test_global_random_state_is_left_alone(self, spec: str) -> None:
        before = torch.random.get_rng_state(), random.getstate(), str(np.random.get_state())
        defense = self._made(spec)
        self._play(defense)
        self._wrapped(defense, "bottom")
        after = torch.random.get_rng_state(), random.getstate(), str(np.random.get_state())
        assert torch.equal(before[0], after[0]), "torch's global generator moved"
        assert before[1:] == after[1:], "a global generator moved"

    def test_gradients_flow_through(self, spec: str) -> None:
        defense = self._made(spec)
        for hook, name in ((defense.embedding, "cut"), (defense.logits, "logits")):
            leaf = self._values()[name].requires_grad_()
            hook(leaf * 1, _context()).square().sum().backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None, f"{name} lost its graph"
            assert torch.isfinite(leaf.grad).all(), f"{name} has a broken gradient"

    def test_wrapped_models_keep_their_shapes_and_train(self, spec: str) -> None:
        for part, outputs in (("bottom", self.width), ("top", self.classes)):
            module = self._wrapped(self._made(spec), part).train()
            trains = any(weights.requires_grad for weights in module.parameters())
            assert trains or part == "bottom", "a top that cannot train"
            with scoped(0):
                result = module(self._values()["cut"])
                if trains:
                    result.square().sum().backward()
            assert result.shape == (ROWS, outputs), f"the wrapped {part} has another shape"
            assert not trains or any(w.grad is not None for w in module.parameters())

    def test_what_it_fits_is_repeatable_and_saved(self, spec: str) -> None:
        first, second = (self._wrapped(self._made(spec), "bottom") for _ in range(2))
        with scoped(2):
            bottom = nn.Linear(self.width, self.width)
            loaded = make(spec).wrap_bottom(bottom, self.width)
        loaded.load_state_dict(first.state_dict())
        rows = self._values()["cut"]
        expected, *others = (each.eval()(rows) for each in (first, second, loaded))
        assert torch.equal(expected, others[0]), "not repeatable"
        assert torch.equal(expected, others[1]), "what it fitted is not among the weights"

    def test_what_it_takes_is_said_before_it_is_built(self, spec: str) -> None:
        """A party computes it, and runs the wrapped bottom on shapes alone, before it consents."""
        defense = make(spec)
        assert isinstance(defense.fit_epochs, int), "fit_epochs is no number of epochs"
        assert defense.fit_epochs >= 0, "fewer epochs than none"
        said = [defense.working_bytes(*sizes) for sizes in ((8, 4, 6), (16, 4, 6), (16, 8, 12))]
        assert all(isinstance(one, int) and one >= 0 for one in said), "working_bytes is no size"
        assert said == sorted(said), "working_bytes falls where more is asked"
        with torch.device("meta"), torch.no_grad():
            bottom = defense.wrap_bottom(nn.Linear(4, self.width), self.width).to("meta")
            try:
                cut = bottom.train()(torch.empty(ROWS, 4))
            except (RuntimeError, NotImplementedError) as error:
                raise AssertionError("the wrapped bottom needs more than shapes") from error
        assert cut.shape == (ROWS, self.width)

    def test_a_prediction_needs_no_secret_and_does_not_depend_on_its_batch(self, spec: str) -> None:
        defense = self._made(spec)
        self._play(defense)
        bottom = self._wrapped(defense, "bottom").eval()
        top = self._wrapped(defense, "top").eval()

        def predict(rows: Tensor) -> Tensor:
            cut = defense.embedding(bottom(rows), INFERENCE)
            return defense.logits(top(cut), INFERENCE)

        rows = self._values()["cut"]
        with torch.no_grad():
            alone = torch.cat([predict(row[None]) for row in rows])
            together = predict(rows)
        assert torch.allclose(alone, together, atol=1e-5), "a row depends on its batch"

    def test_a_query_that_is_repeated_gives_nothing_new(self, spec: str) -> None:
        query = StepContext(step=3, secret=Secret.of_simulation(0, "contract"))
        cut = self._values()["cut"]
        first, second = (self._made(spec).embedding(cut.clone(), query) for _ in range(2))
        assert torch.equal(first, second), "whoever asks often could average"

    def test_labels_that_are_numbers_are_taken_or_refused_with_a_reason(self, spec: str) -> None:
        refusal = None
        try:
            make(spec).prepare(LabelKind(classes=None))
        except SpecError as error:
            refusal = error
        assert refusal is None or refusal.fix or refusal.want, "refused without a way out"

    def test_state_survives_a_checkpoint(self, spec: str) -> None:
        defense, restored = self._made(spec), self._made(spec)
        self._told(restored, self._values()["labels"])
        for step in range(3):
            self._play(defense, step)
        state = defense.state_dict()
        assert all(isinstance(value, Tensor) for value in state.values())
        restored.load_state_dict({name: value.clone() for name, value in state.items()})
        expected, found = self._play(defense, 3), self._play(restored, 3)
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    def test_its_side_has_its_hooks(self, spec: str) -> None:
        defense = self._made(spec)
        assert defense.side in get_args(Side)
        if isinstance(defense, Chain) or defense.side == "both":
            return
        others = _LABEL_HOOKS if defense.side == "feature" else _FEATURE_HOOKS
        own = uses(defense, *others)
        assert not own, f"{', '.join(own)} never run at side '{defense.side}'"

    def test_its_promise_can_be_stated(self, spec: str) -> None:
        for promise in self._made(spec).privacy():
            assert isinstance(promise, PrivacyStatement)
            assert promise.protects in ("labels", "inputs", "model")
            assert promise.against, "against whom?"
            assert (promise.epsilon is None) == (not promise.unit), "epsilon and unit go together"
            assert promise.epsilon is None or promise.epsilon >= 0
            assert promise.delta is None or 0 <= promise.delta < 1
            assert promise.against in str(promise)

    def _made(self, spec: str) -> Defense:
        """The defense, told what labels there are."""
        defense = make(spec)
        defense.prepare(LabelKind(self.classes))
        return defense

    def _told(self, defense: Defense, labels: Tensor) -> Tensor:
        """The labels a training begins with."""
        return defense.labels(labels, Secret.of_simulation(0, "contract"))

    def _values(self) -> dict[str, Tensor]:
        """What the hooks of one round are given, by the name of the value."""
        draw = generator(0, "contract")
        return {
            "inputs": torch.randn(ROWS, 4, generator=draw),
            "labels": torch.arange(ROWS) % self.classes,
            "cut": torch.randn(ROWS, self.width, generator=draw),
            "logits": torch.randn(ROWS, self.classes, generator=draw),
            "gradient": torch.randn(ROWS, self.width, generator=draw) / ROWS,
        }

    def _play(
        self, defense: Defense, step: int = 0, given: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """One training round through every hook; what each gave, without those that gave None."""
        values, context = given or self._values(), _context(step)
        inputs, labels = values["inputs"], values["labels"]
        if step == 0:  # a training begins
            labels = self._told(defense, labels)
        counts = defense.counts(torch.arange(ROWS), epoch=1 + step)
        fed, used = defense.batch(inputs, labels, context)
        assert used is not None, "batch lost the labels"
        made, labels = {"inputs": fed, "labels": used}, used
        if counts is not None:
            made["counts"] = counts
        made["cut"] = defense.embedding(values["cut"], context)
        made["targets"] = defense.targets(labels, self.classes, context)
        made["logits"] = defense.logits(values["logits"], context)
        made["gradient"] = defense.gradient(values["gradient"], labels, context)
        made["received"] = defense.received(values["cut"], values["gradient"], context)
        made["local_loss"] = defense.local_loss(values["cut"], inputs, context)
        cuts = {"bank": values["cut"]}
        made["loss"] = defense.loss(cuts, labels, values["logits"], context)
        return {name: value for name, value in made.items() if value is not None}

    def _wrapped(self, defense: Defense, part: str) -> nn.Module:
        """A linear bottom or top of fixed weights as the defense has it before a training."""
        with scoped(1):
            if part == "bottom":
                bottom = defense.wrap_bottom(nn.Linear(self.width, self.width), self.width)
                defense.fit(bottom, self._values()["cut"], Secret.of_simulation(0, "contract"))
                return bottom
            return defense.wrap_top(nn.Linear(self.width, self.classes), self.width)


def _context(step: int = 0) -> StepContext:
    return StepContext(step, training=True, secret=Secret.of_simulation(0, "contract"))
