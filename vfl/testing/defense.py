"""Tests that every defense must pass; an author of a plug-in subclasses `DefenseContract`.

    class TestMine(DefenseContract):
        specs = ["mine:strength=2"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from vfl.compression import INFERENCE, StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator, scoped
from vfl.defenses import Chain, Defense, LabelKind, PrivacyStatement, Side, make, uses
from vfl.privacy.statement import ADVERSARIES, RELATIONS, SPANS, UNITS
from vfl.testing.base import Contract, global_states, require_still

ROWS = 9
_MOST_WORDS, _LENGTH = 30, 5
_FEATURE_HOOKS = ("wrap_bottom", "fit", "embedding", "local_loss", "restorer", "received")
_LABEL_HOOKS = (
    "prepare", "labels", "counts", "merged", "wrap_top", "logits", "targets", "loss", "gradient",
)  # fmt: skip


class DefenseContract(Contract):
    """Properties of every defense, and of every chain of defenses.

    Attributes:
        specs: specs of the defenses under test, at least one; include the extreme values of their
            options.
        width: width of the cut.
        parties: number of parties whose cuts, of equal width, form a merged cut; it divides
            `width`.
        classes: number of columns of the top model's output.
    """

    family = "defense"
    width: ClassVar[int] = 6
    parties: ClassVar[int] = 3
    classes: ClassVar[int] = 3

    def test_hooks_keep_shapes_and_are_reproducible(self, spec: str) -> None:
        """Require stable shapes and types, unchanged inputs, and repeatable results."""
        given, before, states = self._values(), self._values(), global_states()
        defense = self._made(spec)
        made = self._play(defense, given=given)
        self._wrapped(defense, "bottom")
        require_still(states)
        changed = [name for name in given if not torch.equal(given[name], before[name])]
        assert not changed, f"changed in place: {', '.join(changed)}"
        self._require_form(made)

        again = self._made(spec)
        told = self._begun_with(self._made(spec), given["labels"])
        second = self._play(again)
        assert made.keys() == second.keys()
        differing = [name for name in made if not torch.equal(made[name], second[name])]
        assert not differing, f"not repeatable: {', '.join(differing)}"
        for labels in (told, *(self._play(again, step)["labels"] for step in (1, 2))):
            assert set(labels.tolist()) <= set(range(self.classes)), "a label of no class"

        assert self._made(spec).batch(given["inputs"], None, _context())[1] is None, "new labels"
        assert self._made(spec).batch(None, given["labels"], _context())[0] is None, "new inputs"

    def _require_form(self, made: dict[str, Tensor]) -> None:
        given = self._values()
        given["targets"] = given["labels"]
        for name, value in made.items():
            assert torch.isfinite(value).all(), f"{name} is not finite"
            if name.endswith("loss"):
                assert value.shape == (), f"{name} is no scalar"
            elif name == "counts":
                assert (value.shape, value.dtype) == ((ROWS,), torch.bool), "counts is no mask"
            elif name == "targets" and value.is_floating_point():
                assert value.shape == (ROWS, self.classes), (
                    "the targets fit neither labels nor logits"
                )
                assert (value >= 0).all(), "a negative probability"
                assert torch.allclose(value.sum(1), torch.ones(ROWS), atol=1e-5), "no distribution"
            else:
                before = given["gradient" if name == "received" else name]
                assert value.shape == before.shape, f"{name} changed its shape"
                assert value.dtype == before.dtype, f"{name} changed its type"
        assert set(made["labels"].tolist()) <= set(range(self.classes)), (
            "the defense returned a label of no class"
        )

    def test_gradients_flow_through(self, spec: str) -> None:
        defense = self._made(spec)
        for hook, name in ((defense.embedding, "cut"), (defense.logits, "logits")):
            leaf = self._values()[name].requires_grad_()
            hook(leaf * 1, _context()).square().sum().backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None, f"{name} lost its graph"
            assert torch.isfinite(leaf.grad).all(), f"{name} has a broken gradient"

    def test_wrapped_models_train_and_save_fitted_weights(self, spec: str) -> None:
        for part, outputs in (("bottom", self.width), ("top", self.classes)):
            module = self._wrapped(self._made(spec), part).train()
            trains = any(weights.requires_grad for weights in module.parameters())
            assert trains or part == "bottom", "a top cannot be trained"
            with scoped(0):
                fed = self._fed(make(spec)) if part == "bottom" else self._values()["cut"]
                result = module(fed)
                if trains:
                    result.square().sum().backward()
            assert result.shape == (ROWS, outputs), f"the wrapped {part}'s output has another shape"
            assert not trains or any(w.grad is not None for w in module.parameters())
        first, second = (self._wrapped(self._made(spec), "bottom") for _ in range(2))
        with scoped(2):
            other = make(spec)
            loaded = other.wrap_bottom(self._bottom(other), self.width)
        loaded.load_state_dict(first.state_dict())
        expected, *others = (each.eval()(self._fed(other)) for each in (first, second, loaded))
        assert torch.equal(expected, others[0]), "the fit of the defense cannot be repeated"
        assert torch.equal(expected, others[1]), "the fitted values are not part of the weights"

    def test_restorer_keeps_shapes_and_trains(self, spec: str) -> None:
        with scoped(0):
            layers = make(spec).restorer(self.width, self.classes)
            if layers is None:
                return
            for axes in ((ROWS,), (ROWS, 3)):
                back = torch.randn(*axes, self.classes).requires_grad_()
                cut, noise = torch.randn(2, *axes, self.width)
                repaired = layers(back, cut, cut + noise)
                assert repaired.shape == back.shape, "a hook returned values of another shape"
                assert torch.isfinite(repaired).all(), "a hook returned values that are not finite"
                repaired.square().sum().backward()
                assert back.grad is not None, "a hook returned values without a gradient graph"
        assert any(one.grad is not None for one in layers.parameters()), "layers that cannot train"

    def test_cost_is_known_from_shapes_alone(self, spec: str) -> None:
        """Test that shapes alone determine a defense's cost, so that a party may refuse it."""
        defense = make(spec)
        assert isinstance(defense.fit_epochs, int), "fit_epochs is not a number of epochs"
        assert defense.fit_epochs >= 0, "fit_epochs is negative"
        said = [defense.working_bytes(*sizes) for sizes in ((8, 4, 6), (16, 4, 6), (16, 8, 12))]
        assert all(isinstance(one, int) and one >= 0 for one in said), "working_bytes is not a size"
        assert said == sorted(said), "working_bytes becomes smaller for more rows"
        with torch.device("meta"), torch.no_grad():
            bottom = defense.wrap_bottom(self._bottom(defense), self.width).to("meta")
            try:
                cut = bottom.train()(torch.empty_like(self._fed(defense), device="meta"))
            except (RuntimeError, NotImplementedError) as error:
                raise AssertionError(
                    "`wrap_bottom` needs more than the shapes of the weights"
                ) from error
        assert cut.shape == (ROWS, self.width)

    def test_prediction_is_deterministic_and_independent_of_its_batch(self, spec: str) -> None:
        query = StepContext(step=3, secret=Secret.of_simulation(0, "contract"))
        rows = self._values()["cut"]
        first, second = (self._made(spec).embedding(rows.clone(), query) for _ in range(2))
        assert torch.equal(first, second), (
            "a client could average the defense's noise over repeated requests"
        )
        defense = self._made(spec)
        fed = self._fed(defense)
        self._play(defense)
        bottom = self._wrapped(defense, "bottom").eval()
        top = self._wrapped(defense, "top").eval()

        def predict(rows: Tensor) -> Tensor:
            cut = defense.embedding(bottom(rows), INFERENCE)
            return defense.logits(top(cut), INFERENCE)

        with torch.no_grad():
            alone = torch.cat([predict(row[None]) for row in fed])
            together = predict(fed)
        assert torch.allclose(alone, together, atol=1e-5), (
            "a row's prediction depends on the other rows of its batch"
        )

    def test_state_survives_a_checkpoint(self, spec: str) -> None:
        defense, restored = self._made(spec), self._made(spec)
        self._begun_with(restored, self._values()["labels"])
        for step in range(3):
            self._play(defense, step)
        state = defense.state_dict()
        assert all(isinstance(value, Tensor) for value in state.values())
        restored.load_state_dict({name: value.clone() for name, value in state.items()})
        expected, found = self._play(defense, 3), self._play(restored, 3)
        assert all(torch.equal(expected[name], found[name]) for name in expected), "not restored"

    def test_side_promises_and_refusals_are_declared(self, spec: str) -> None:
        defense = self._made(spec)
        assert defense.side in get_args(Side)
        if not isinstance(defense, Chain) and defense.side != "both":
            others = _LABEL_HOOKS if defense.side == "feature" else _FEATURE_HOOKS
            own = uses(defense, *others)
            assert not own, f"{', '.join(own)} never run at side '{defense.side}'"
        for promise in defense.privacy():
            assert isinstance(promise, PrivacyStatement)
            assert promise.protects in ("labels", "inputs", "records", "model")
            assert promise.against, "against whom?"
            has_epsilon = promise.epsilon is not None
            for what in (promise.unit, promise.relation, promise.accountant):
                assert bool(what) == has_epsilon, (
                    "a privacy statement needs both an epsilon and its unit, or neither"
                )
            assert promise.unit in UNITS
            assert promise.relation in RELATIONS
            assert promise.adversary in ADVERSARIES
            assert promise.per in SPANS
            assert promise.epsilon is None or promise.epsilon >= 0
            assert promise.delta is None or 0 <= promise.delta < 1
            assert promise.against in str(promise)
        refusal = None
        try:
            make(spec).prepare(LabelKind(classes=None))
        except SpecError as error:
            refusal = error
        assert refusal is None or refusal.fix or refusal.want, (
            "an error that rejects the defense suggests no fix"
        )

    def _bottom(self, defense: Defense) -> nn.Module:
        """Return an untrained bottom model; a defense of words gets a model that embeds words."""
        if defense.of_words:
            return nn.Sequential(_Words(_MOST_WORDS, 2), nn.Linear(2 * _LENGTH, self.width))
        return nn.Linear(self.width, self.width)

    def _fed(self, defense: Defense) -> Tensor:
        """Return inputs for the bottom model of a defense, axes (rows, columns)."""
        if defense.of_words:
            draw = generator(0, "contract words")
            return torch.randint(_MOST_WORDS, (ROWS, _LENGTH), generator=draw).float()
        return self._values()["cut"]

    def _made(self, spec: str) -> Defense:
        """Return the defense of a spec, prepared for the labels of a training."""
        defense = make(spec)
        defense.prepare(LabelKind(self.classes))
        return defense

    def _begun_with(self, defense: Defense, labels: Tensor) -> Tensor:
        """Return the labels that a training with this defense uses at its beginning."""
        return defense.labels(labels, Secret.of_simulation(0, "contract"))

    def _values(self) -> dict[str, Tensor]:
        """Return the values that a training round passes to the hooks, by name."""
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
        """Run one training round through every hook; return each result that is not None."""
        values, context = given or self._values(), _context(step)
        inputs, labels = values["inputs"], values["labels"]
        if step == 0:  # these hooks run at the beginning of a training
            labels = self._begun_with(defense, labels)
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
        """Return a linear bottom or top model with fixed weights, wrapped by the defense."""
        with scoped(1):
            if part == "bottom":
                bottom = defense.wrap_bottom(self._bottom(defense), self.width)
                defense.fit(bottom, self._fed(defense), Secret.of_simulation(0, "contract"))
                return bottom
            defense.merged([self.width // self.parties] * self.parties)
            return defense.wrap_top(nn.Linear(self.width, self.classes), self.width)


class _Words(nn.Module):
    """Model that concatenates the embedding vectors of a row's integers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)

    def forward(self, rows: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(rows.long())
        return vectors.flatten(1)


def _context(step: int = 0) -> StepContext:
    return StepContext(step, training=True, secret=Secret.of_simulation(0, "contract"))
