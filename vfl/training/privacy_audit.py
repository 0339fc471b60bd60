"""Privacy audit: train with canary rows, each included by a coin flip, and guess the coin flips.

The auditor sees everything that a DP-SGD privacy statement covers: the noisy gradients of every
party's model, and the models. The auditor made the canaries (inserted rows), so the auditor knows
the gradient of each canary. The inner product of a canary's gradient with a noisy sum of gradients
measures how much the canary contributes to the sum. One forward pass, with weights that were moved
along the noisy sum, computes this product for all canaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from vfl.config import Experiment
from vfl.config.validate import check_one_label_party
from vfl.core.errors import PrivacyError
from vfl.core.seeds import Secret, derive, generator
from vfl.datasets import PartyData, Split
from vfl.privacy import PrivacyStatement
from vfl.privacy.audit import LowerBound, bound_of, bound_of_many
from vfl.privacy.dpsgd import PrivateHalf
from vfl.session.exchange import FeatureEnd
from vfl.training.local import LocalSession

#: Specs of bottom models that accept any number of columns.
_OF_COLUMNS = ("mlp", "periodic")
#: Value of a canary's inputs, in units of the standard deviation of training rows' inputs.
_SPREAD = 3.0
#: Length of the weights' step along a noisy gradient, relative to the norm of the weights.
_ALONG = 1e-3
#: Smallest number of canaries, or of trainings if an audit has several, for a meaningful audit.
FEWEST = 20


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Epsilon that a training claims, and the lower bound that an audit proved.

    Attributes:
        claimed: privacy statement of the training, with the claimed epsilon.
        proved: lower bound of epsilon that the audit proved.
        refuted: whether the proved lower bound is above the claimed epsilon.
    """

    claimed: PrivacyStatement
    proved: LowerBound

    @property
    def refuted(self) -> bool:
        """Return whether the audit refutes the claim, at the bound's confidence level."""
        return self.proved.epsilon > (self.claimed.epsilon or 0.0)

    def __str__(self) -> str:
        proved = self.proved
        verdict = "REFUTED" if self.refuted else "not refuted"
        return (
            f"epsilon is claimed to be at most {self.claimed.epsilon:.4g}, and is at least "
            f"{proved.epsilon:.4g} at confidence {proved.confidence:g} ({proved.method}, "
            f"{proved.canaries} canaries, {proved.right} of {proved.guesses} guesses right by "
            f"{proved.score}): {verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a record for JSON; the entry `text` is a sentence for people."""
        return {
            "claimed": self.claimed.as_dict(),
            "proved": self.proved.as_dict(),
            "refuted": self.refuted,
            "text": str(self),
        }


def audit(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    *,
    canaries: int = 200,
    confidence: float = 0.95,
    trainings: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> AuditReport:
    """Audit a training with differential privacy, in this process.

    Args:
        experiment: experiment with a [dp] table.
        data: aligned rows of every party; the canaries replace some training rows.
        canaries: number of canaries in one training; with several trainings, each training has one
            canary.
        confidence: confidence level of the lower bound, between 0 and 1.
        trainings: 1 audits with a single training (Steinke et al. 2023); a larger number audits
            with that many trainings.
        seed: seed of the canaries and of the coin flips. The noise always comes from new secrets,
            which do not depend on the seed.
        say: callback that receives one line of text per training.

    Raises:
        PrivacyError: the experiment claims no epsilon, the claim is about clients or secret-shared
            gradients, or there are too few data to prove anything.
        ConfigError: the experiment has several label parties, or a middle party.
    """
    label, dp = experiment.label.party, experiment.dp
    if dp is None or experiment.secure != "none":
        raise PrivacyError(
            "an audit needs a claimed epsilon, and gradients that are not secret-shared",
            got="no [dp]" if dp is None else f"secure = '{experiment.secure}'",
            want="[dp], with secure = 'none'",
        )
    if dp.unit == "client":
        raise PrivacyError(
            "canaries are records, but the claim is about clients",
            where="dp.unit",
            want="dp.unit = 'record'",
        )
    check_one_label_party(experiment, "an audit")
    rows, many = len(data[label].split.train), trainings > 1
    asked, each = trainings if many else canaries, 1 if many else canaries
    needed = each * (2 if dp.sampling == "shuffled" else 1)
    if asked < FEWEST or needed > rows // 2:
        raise PrivacyError(
            "there are too few canaries to prove anything, or too few rows to replace",
            got=f"{canaries} canaries, {trainings} trainings, {rows} training rows",
            want=f"{FEWEST} canaries, or trainings, and {max(2 * needed, FEWEST)} rows",
        )
    train = experiment.train.model_copy(update={"in_flight": 1})
    experiment = experiment.model_copy(update={"train": train})
    found: list[tuple[dict[str, np.ndarray], np.ndarray]] = []
    for number in range(trainings):
        coins = torch.rand(each, generator=generator(seed, "coins", number)).numpy() < 0.5
        claimed, scores = _train(experiment, data, coins, derive(seed, "canaries", number))
        found.append((scores, coins))
        say(f"training {number + 1} of {trainings}, {each} canaries")
    included = np.concatenate([one for _, one in found])
    together = {name: np.concatenate([one[name] for one, _ in found]) for name in found[0][0]}
    bound = bound_of_many if many else bound_of
    return AuditReport(claimed, bound(together, included, dp.delta, confidence))


def _train(
    experiment: Experiment, data: Mapping[str, PartyData], coins: np.ndarray, seed: int
) -> tuple[PrivacyStatement, dict[str, np.ndarray]]:
    """Train once, with canaries included by coin flips; return the scores of all canaries."""
    assert experiment.dp is not None, "checked"
    label = experiment.label.party
    split, paired = data[label].split, experiment.dp.sampling == "shuffled"
    order = torch.randperm(len(split.train), generator=generator(seed, "places")).numpy()
    # If neighbouring data sets differ by replacing a row, each coin selects one of two rows.
    places = split.train[order[: len(coins) * (2 if paired else 1)]]
    rest = split.train[order[len(places) :]]
    there = np.concatenate([coins, ~coins]) if paired else coins
    kept = Split(np.sort(np.concatenate([rest, places[there]])), split.validation, split.test)
    bottoms = {name: party.bottom for name, party in experiment.parties.items()}
    changed = {
        name: _with_canaries(own, places, kept, seed, bottoms.get(name, ""))
        for name, own in data.items()
    }
    secrets = {name: Secret.fresh() for name in changed}
    outputs = data[label].outputs
    session = LocalSession(experiment, changed, outputs=outputs, secrets=secrets)
    auditor = _Auditor(session, changed, places)
    session.run()
    (claimed,) = (one for one in session.label.privacy() if one.unit == "record")
    scores = auditor.scores()
    if paired:
        half = len(coins)
        scores = {name: values[:half] - values[half:] for name, values in scores.items()}
    return claimed, scores


def _with_canaries(
    own: PartyData, places: np.ndarray, split: Split, seed: int, bottom: str
) -> PartyData:
    """Return a party's data in which canaries have unusual inputs, and wrong labels.

    A bottom model that accepts any number of columns gets one additional column per canary. This
    column is zero in all other rows, so only the canary and the noise change the column's weights.
    """
    inputs, labels, at = own.inputs, own.labels, torch.from_numpy(places)
    draw = generator(seed, "canaries", own.name)
    if inputs is not None and bottom.partition(":")[0] in _OF_COLUMNS:
        inputs = inputs.flatten(1).clone()
        inputs[at] = 0
        columns = torch.zeros(len(inputs), len(at))
        # initial weights become smaller with the number of columns
        size = _SPREAD * (inputs.shape[1] + len(at)) ** 0.5
        columns[at, torch.arange(len(at))] = size
        inputs = torch.cat([inputs, columns], 1)
    # only for real numbers, not for tokens
    elif inputs is not None and not bool((inputs == inputs.round()).all()):
        inputs = inputs.clone()
        spread = inputs[torch.from_numpy(split.train)].std(0)
        inputs[at] = _SPREAD * spread * torch.randn(len(at), *inputs.shape[1:], generator=draw)
    if labels is not None:
        labels, classes = labels.clone(), own.outputs
        more = torch.randint(1, max(2, classes), (len(at),), generator=draw)
        labels[at] = (labels[at] + more) % max(2, classes)
    return replace(own, inputs=inputs, labels=labels, split=split)


class _Auditor:
    """Observes all noisy gradients, and adds up how strongly each canary contributes to them.

    Args:
        session: session that the auditor observes, before its `run`.
        data: data of every party, including the canaries.
        places: positions of the canaries among the rows.
    """

    def __init__(
        self, session: LocalSession, data: Mapping[str, PartyData], places: np.ndarray
    ) -> None:
        at = torch.from_numpy(places)
        self._inputs = {
            name: one.inputs[at] for name, one in data.items() if one.inputs is not None
        }
        label = session.label
        truth = data[label.data.name].labels
        assert truth is not None, "a label party has labels"
        self._label, self._truth = label, truth[at]
        ends = {client.name: client.end for client in session.clients}
        self._ends = {name: end for name, end in ends.items() if isinstance(end, FeatureEnd)}
        # For each step and party, axes (canaries,): each canary's measured contribution to the
        # noisy sum, and the contribution that the canary would have if it were included.
        self._parts: dict[str, list[Tensor]] = {}
        self._whole: dict[str, Tensor] = {}
        # The same two values for the difference of consecutive noisy sums, in which repeated noise
        # cancels.
        self._jumps: dict[str, list[Tensor]] = {}
        self._before: dict[str, list[Tensor]] = {}
        self._waiting: dict[str, Callable[[Sequence[Tensor]], None]] = {}
        _private(label).watch = self._of_label
        for name, end in self._ends.items():
            _private(end).watch = self._of_feature_party(name)

    def scores(self) -> dict[str, np.ndarray]:
        """Return scores by name, axes (canaries,); a higher score makes inclusion more likely."""
        label = self._label.data.name
        parts = {name: torch.stack(each).double() for name, each in self._parts.items()}
        senders = torch.stack([each for name, each in parts.items() if name != label]).sum(0)
        whole = torch.stack([each for name, each in self._whole.items() if name != label]).sum(0)
        everybody, together = senders + parts[label], whole + self._whole[label]
        differ = [torch.stack(each) for name, each in self._jumps.items() if name != label]
        jumps = torch.stack(differ).sum(0).double().square().sum(0)
        with torch.no_grad():
            outputs = self._forward()
        loss = cross_entropy(outputs, self._truth, reduction="none").double()
        found = {
            "its part in the sums of bottoms": senders.sum(0) / whole.clamp_min(1e-12).sqrt(),
            "its part in all sums": everybody.sum(0) / together.clamp_min(1e-12).sqrt(),
            "its part in what sums differ by": jumps,
            "its loss at the end": -loss,
        }
        return {name: values.numpy() for name, values in found.items()}

    def _forward(self) -> Tensor:
        """Return the current models' outputs for the canaries."""
        bottoms = {name: end.model["bottom"].eval() for name, end in self._ends.items()}
        return self._outputs({name: one(self._inputs[name]) for name, one in bottoms.items()})

    def _outputs(
        self, sent: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        label = self._label
        label.model.eval()
        whole = _Whole(label.model, list(label.terms.parties))
        own = self._inputs.get(label.data.name)
        named = {} if weights is None else {f"owned.{name}": one for name, one in weights.items()}
        outputs: Tensor = functional_call(whole, named, (sent, label.data.name, own))
        return outputs

    def _of_label(self, step: int, noisy: Sequence[Tensor]) -> None:
        """Score canaries by the label party's noisy sum, before feature parties' weights change."""
        label, cuts, calls = self._label, dict[str, Tensor](), {}
        for name, end in self._ends.items():
            with _private(end).recording() as calls[name]:
                cuts[name] = end.model["bottom"].eval()(self._inputs[name])
        leaves = {name: cut.detach().requires_grad_() for name, cut in cuts.items()}
        with _private(label).recording() as own_calls:
            outputs = self._outputs(leaves)
        loss = cross_entropy(outputs, self._truth, reduction="sum")
        of_outputs, *of_cuts = torch.autograd.grad(
            loss, [outputs, *leaves.values()], retain_graph=True
        )
        tell = self._teller(label.data.name, _private(label), label.model, outputs, of_outputs,
                            own_calls, lambda weights: self._outputs(leaves, weights))  # fmt: skip
        tell(noisy)
        for (name, end), of_cut in zip(self._ends.items(), of_cuts, strict=True):
            model, inputs = end.model, self._inputs[name]

            def again(
                weights: Mapping[str, Tensor], model: nn.ModuleDict = model, inputs: Tensor = inputs
            ) -> Tensor:
                own = {key.removeprefix("bottom."): one for key, one in weights.items()}
                cut: Tensor = functional_call(model["bottom"], own, (inputs,))
                return cut

            self._waiting[name] = self._teller(
                name, _private(end), model, cuts[name], of_cut, calls[name], again
            )

    def _of_feature_party(self, name: str) -> Callable[[int, Sequence[Tensor]], None]:
        def tell(step: int, noisy: Sequence[Tensor]) -> None:
            self._waiting.pop(name)(noisy)

        return tell

    def _teller(
        self,
        name: str,
        half: PrivateHalf,
        model: nn.ModuleDict,
        output: Tensor,
        grad: Tensor,
        calls: Any,
        again: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> Callable[[Sequence[Tensor]], None]:
        """Return a callback that records each canary's part of a noisy sum, in clipping norms."""
        named = {key: one for key, one in model.named_parameters() if one.requires_grad}
        weights = list(named.values())
        clipper = half.clipper
        _, norms = clipper.sums(output, grad, weights, calls)
        length, bound = norms.detach().norm(dim=0), float(clipper.norms.norm())
        expected = (length / length.clamp_min(bound)).double() ** 2
        self._whole[name] = self._whole.get(name, torch.zeros_like(expected)) + expected
        before = {key: one.detach().clone() for key, one in named.items()}
        of_output, first = grad.detach(), output.detach()
        scale = sum(float(one.square().sum()) for one in before.values()) ** 0.5

        @torch.no_grad()
        def tell(noisy: Sequence[Tensor]) -> None:
            units = clipper.norms[clipper.group_of].tolist()
            along = [one * (half.batch_size / unit) for one, unit in zip(noisy, units, strict=True)]
            last = self._before.get(name, along)
            self._before[name] = along
            differ = [one - other for one, other in zip(along, last, strict=True)]
            self._parts.setdefault(name, []).append(part_in(along))
            self._jumps.setdefault(name, []).append(part_in(differ))

        def part_in(along: Sequence[Tensor]) -> Tensor:
            """Return the inner product of `along` with each canary's own clipped gradient."""
            size = sum(float(one.square().sum()) for one in along) ** 0.5
            if not size:
                return torch.zeros_like(length)
            step = _ALONG * scale / size
            pairs = zip(before.items(), along, strict=True)
            change = (again({key: one + step * way for (key, one), way in pairs}) - first) / step
            part: Tensor = (change * of_output).sum(1) / length.clamp_min(bound)
            return part

        return tell


def _private(end: Any) -> PrivateHalf:
    half: PrivateHalf | None = end.private
    assert half is not None, "with [dp] every party trains with DP-SGD"
    return half


class _Whole(nn.Module):
    """The label party's model as a function of cuts, which can run with changed weights."""

    def __init__(self, owned: nn.ModuleDict, parties: Sequence[str]) -> None:
        super().__init__()
        self.owned, self._parties = owned, parties

    def forward(self, sent: Mapping[str, Tensor], name: str, own: Tensor | None) -> Tensor:
        """Compute outputs from cuts, and from the label party's own columns if any."""
        cuts = dict(sent)
        if own is not None:
            cuts[name] = self.owned["bottom"](own)
        merged = self.owned["merger"](*(cuts[party] for party in self._parties))
        outputs: Tensor = self.owned["top"](merged)
        return outputs
