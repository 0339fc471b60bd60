"""Training and using a network that nobody holds: one party's part, exchange by exchange.

P0 and P1 have columns and hold a share of every weight; P2 deals, and evaluates functions on
permuted values. The labels belong to one of the three, who is also disclosed the outputs. All
three make the same calls in the same order. Rows are shared and opened once, before the first
exchange; an exchange is a step of gradient descent, or the outputs of some rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vfl.core.errors import PrivateLayerError, ProtocolError, RunFolderError
from vfl.core.frame import LIMIT_BYTES
from vfl.core.seeds import Secret
from vfl.mpc.ring import ELEMENT_BYTES
from vfl.mpc.rules import HOLDERS, NAMES
from vfl.mpc.shares import Opened, SharedTensor, blank, stacked
from vfl.mpc.three_party.network import Layer, Loss, Network, share_targets, weight_shapes
from vfl.mpc.three_party.party import Party
from vfl.mpc.three_party.private_module import layers_of

#: Rows that are shared or asked at once: the bytes of their widest frame stay below it, which has
#: a limit of its own (`vfl.core.frame.LIMIT_BYTES`).
BLOCK_BYTES = 1 << 26
#: Nearer to 0 or 1 than a shared value can tell.
_LEAST = 2.0**-23
#: Counts of the index lists of one message, at most.
_LIST_HEADS = 32
_OPENINGS = ("mask", "difference", "second")

Rows = Literal["train", "validation", "test", "predict"]


class ThreePartyNetwork:
    """One party's part.

    Args:
        party: with keys agreed.
        layers: the network; a sigmoid at the end says that the loss is cross entropy.
        columns: how many of the inputs are P0's and P1's.
        label_role: who has the labels, and is disclosed the outputs.
    """

    def __init__(
        self, party: Party, layers: Sequence[Layer], columns: tuple[int, int], label_role: int
    ) -> None:
        self.party = party
        self.layers = tuple(layers)
        self._columns = columns
        self._label_role = label_role
        self._loss: Loss = "cross_entropy" if layers[-1].function == "sigmoid" else "squared"
        self._rows: dict[str, SharedTensor] = {}
        self._targets: SharedTensor | None = None
        self._network = Network(layers, {})

    @property
    def holds_shares(self) -> bool:
        """Whether this is P0 or P1."""
        return self.party.role in HOLDERS

    def share_weights(self, own: Mapping[str, Tensor] | None) -> None:
        """Begin with the sum of what both holders drew.

        Args:
            own: at a holder what `first_weights` gave; None at P2.

        Raises:
            RingRangeError: a weight does not fit; it names the layer.
        """
        halves = [
            Network.share(
                self.party, self.layers, holder, own if self.party.role == holder else None
            )
            for holder in HOLDERS
        ]
        self._network = halves[0].plus(halves[1])

    def share_rows(self, rows: Rows, count: int, own: Tensor | None, where: str) -> None:
        """Both holders' columns side by side, opened once for all the exchanges to come.

        Args:
            rows: which.
            count: how many, which all three know.
            own: a holder's columns, axes (rows, columns); None at P2.
            where: what they are, for messages and the ledger.

        Raises:
            RingRangeError: a value is too large; it is named by its owner.
        """
        blocks = []
        for start, end in row_blocks(count, self.layers[0].inputs):
            left, right = (
                self.party.share(
                    holder,
                    (end - start, self._columns[holder]),
                    own[start:end] if own is not None and self.party.role == holder else None,
                    f"{where} of P{holder}",
                    scale="the columns",
                )
                for holder in HOLDERS
            )
            blocks += self.party.open(left.beside(right), phase="setup")
        self._rows[rows] = stacked(blocks)

    def share_targets(self, count: int, own: Tensor | None) -> None:
        """The targets of the training rows.

        Args:
            count: how many rows.
            own: at the owner of the labels what `targets_of` gave; None elsewhere.

        Raises:
            RingRangeError: a target is too large.
        """
        width = self.layers[-1].outputs
        self._targets = stacked(
            [
                share_targets(
                    self.party,
                    self._label_role,
                    (end - start, width),
                    None if own is None else own[start:end],
                )
                for start, end in row_blocks(count, width)
            ]
        )

    def train_step(self, index: Tensor, learning_rate: float) -> None:
        """One step of gradient descent on some of the training rows.

        Args:
            index: positions among the training rows, int64.
            learning_rate: of the mean gradient.

        Raises:
            BadOptionError: a batch of too many rows for the rules' bits.
            RingRangeError: a value is too large; it is named by layer.
            PeerError: another party did not follow.
        """
        assert self._targets is not None, "targets are shared before the first step"
        inputs, targets = self._rows["train"].rows(index), self._targets.rows(index)
        self._network.train_step(self.party, inputs, targets, self._loss, learning_rate)

    def outputs(self, rows: Rows, index: Tensor, where: str) -> Tensor | None:
        """Outputs of some rows, axes (rows, outputs): at the owner of the labels, None elsewhere.

        Args:
            rows: of which.
            index: positions among them, int64.
            where: what is disclosed, for the ledger.

        Raises:
            RingRangeError: a value is too large; it is named by layer.
            PeerError: another party did not follow.
        """
        found = []
        widest = max(self.layers[0].inputs, *(layer.outputs for layer in self.layers))
        # A frame carries the widest layer's values, and may carry their slopes beside them.
        for start, end in row_blocks(len(index), 2 * widest):
            shared = self._rows[rows].rows(index[start:end])
            answered = self._network.infer(self.party, shared)
            found.append(self.party.reveal(answered, where, self._label_role))
        disclosed = [each for each in found if each is not None]
        if not disclosed:
            return None
        outputs = torch.cat(disclosed)
        self._network.check_outputs(self.party.rules, outputs)
        return logits_of(outputs) if self._loss == "cross_entropy" else outputs

    def weights(self) -> dict[str, Tensor]:
        """This holder's share of every weight, int64, named as in `Network.share`; empty at P2."""
        if not self.holds_shares:
            return {}
        return {name: each.share for name, each in self._network.weights.items()}

    def load_weights(self, shares: Mapping[str, Tensor]) -> None:
        """Go on from what `weights` gave; at P2 nothing is read.

        Raises:
            RunFolderError: the shares are of another network.
        """
        weights = {}
        for name, shape in weight_shapes(self.layers).items():
            share = shares.get(name) if self.holds_shares else blank(shape)
            if share is None or share.shape != shape or share.dtype != torch.int64:
                raise RunFolderError(
                    "this share is not of the network that the parties' tables ask for",
                    where=name,
                    got="nothing" if share is None else f"{tuple(share.shape)} of {share.dtype}",
                    want=f"{shape} of torch.int64",
                    fix="ask with the columns and labels that it was trained with",
                )
            weights[name] = SharedTensor(share, self.party.rules.bits)
        self._network = Network(self.layers, weights)

    def state_dict(self) -> dict[str, Any]:
        """What this party needs to go on: tensors, numbers and texts; no key and no mask to come.

        weights: the holder's shares. Plain gradient descent keeps nothing else of its own.
        openings: under which masks weights stand opened since the last evaluation; the masks
            belong to the keys of this attempt.
        operations: how many operations were counted, which is where every mask is up to.
        leakage, traffic: what was learned and sent so far, so that the accounts go on.
        """
        openings = {
            name: {"faced": each.faced} | {one: getattr(each.opened, one) for one in _OPENINGS}
            for name, each in self._network.weights.items()
            if each.opened is not None
        }
        channels = self.party.channels.items()
        return {
            "weights": self.weights(),
            "openings": openings,
            "operations": self.party.number,
            "leakage": [
                [leak.what, leak.where, leak.times, leak.elements, leak.of]
                for leak in self.party.leakage.leaks()
            ],
            "traffic": {
                peer: [dict(channel.frames), dict(channel.sent)] for peer, channel in channels
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, same_keys: bool = False) -> None:
        """Go on from `state_dict`, after rows and targets were shared anew.

        Args:
            state: of the same party.
            same_keys: the party has the keys it had then, and followed the same calls before its
                first exchange; every frame is then the one that was or would have been sent, to
                the bit. An attempt of a session has new keys, and weights are opened again: what
                it computes differs by the last bit of a truncation, as two trainings do.

        Raises:
            RunFolderError: the shares are of another network.
        """
        self.load_weights(state["weights"])
        self.party.leakage.restore(state["leakage"])
        for peer, (frames, sent) in state["traffic"].items():
            self.party.channels[peer].restore(frames, sent)
        if not same_keys:
            return
        self.party.continue_from(state["operations"])
        weights = self._network.weights
        for name, opening in state["openings"].items():
            opened = Opened(*(opening[one] for one in _OPENINGS))
            weights[name] = replace(weights[name], opened=opened, faced=opening["faced"])


def first_weights(layers: Sequence[Layer], secret: Secret) -> dict[str, Tensor]:
    """A holder's half of the first weights, float64, named as in `Network.share`.

    The sum of both is normal, of the usual scale: He et al. 2015, eq 10, before ReLU; Glorot and
    Bengio 2010 at the end. Nobody knows it: weights that P2 knew would let it undo permutations,
    and a training ends near where it began.

    Args:
        layers: of the network.
        secret: the holder's own.
    """
    found = {}
    for index, layer in enumerate(layers):
        gain = 2.0 if layer.function == "relu" else 1.0
        draw = torch.from_numpy(secret.normal((layer.inputs, layer.outputs), "weight", index))
        found[f"{index}.weight"] = draw * (gain / layer.inputs / len(HOLDERS)) ** 0.5
        if layer.bias:
            found[f"{index}.bias"] = torch.zeros(layer.outputs, dtype=torch.float64)
    return found


def whole_network(
    columns: tuple[int, int], width: int | None, top: nn.Module, classes: int
) -> list[Layer]:
    """The network that both parties' bottoms and the top amount to.

    Args:
        columns: of P0's and P1's rows.
        width: of linear bottoms whose cuts are summed, which are one linear layer of all columns;
            None where the rows themselves, side by side, are what the top gets.
        top: made of `nn.Linear` and element-wise functions, for one output of two classes.
        classes: how many the labels have, which put a sigmoid at the end; 0 for numbers.

    Raises:
        PrivateLayerError: a layer that is not computed on shares, or a function at the end.

    >>> [layer.outputs for layer in whole_network((3, 2), 4, nn.Linear(4, 1), classes=2)]
    [4, 1]
    """
    below = [] if width is None else [Layer(sum(columns), width)]
    *inner, last = [*below, *layers_of(top)]
    if last.function:
        raise PrivateLayerError(
            "the top ends in a function of its own",
            where="label.top",
            got=last.function,
            want="a linear layer, behind which the loss puts a sigmoid for classes",
            fix="leave the last function out",
        )
    return [*inner, replace(last, function="sigmoid" if classes else "")]


def require_frames(
    layers: Sequence[Layer], columns: tuple[int, int], classes: int, label_role: int
) -> None:
    """Before anything is made of sizes that others said: a layer's weights fit a frame.

    Args:
        layers: of the network.
        columns: how many P0 and P1 said they have.
        classes: how many the owner of the labels said there are.
        label_role: who that is.

    Raises:
        ProtocolError: they do not; it names what makes the layer so large.
    """
    most = LIMIT_BYTES // ELEMENT_BYTES
    for index, layer in enumerate(layers):
        if layer.inputs * layer.outputs <= most:
            continue
        said = dict[str, int]()
        if index == 0:
            said |= {f"columns of {NAMES[role]}": columns[role] for role in HOLDERS}
        else:
            said["units of a hidden layer"] = layer.inputs
        if index == len(layers) - 1:
            said[f"classes of {NAMES[label_role]}"] = classes
        else:
            hidden = "units of a hidden layer"
            said[hidden] = max(layer.outputs, said.get(hidden, 0))
        what = max(said, key=lambda name: said[name])
        raise ProtocolError(
            f"a layer has more weights than a frame carries, for {said[what]} {what}",
            where=f"layer {index}",
            got=f"{layer.inputs} x {layer.outputs} weights",
            want=f"at most {most}",
            fix="give fewer columns or narrower layers; if a party has fewer, ask it",
        )


def most_frame_bytes(layers: Sequence[Layer], rows: int) -> int:
    """No frame of an exchange, or of what is shared before the first, is larger.

    Args:
        layers: of the network.
        rows: of the largest exchange.

    >>> most_frame_bytes([Layer(5, 4, "relu"), Layer(4, 1, "sigmoid")], rows=64) == BLOCK_BYTES
    True
    """
    weights = sum((layer.inputs + 1) * layer.outputs for layer in layers)
    widest = max(layers[0].inputs, *(layer.outputs for layer in layers))
    # All weights in one message, or both operands of a product, and lists of all its indices.
    exchange = ELEMENT_BYTES * (weights + 4 * rows * widest) + _LIST_HEADS
    return max(exchange, BLOCK_BYTES, ELEMENT_BYTES * widest)


def targets_of(labels: Tensor, classes: int) -> Tensor:
    """What the outputs should be: one number of two classes, one a class of more; float64.

    >>> targets_of(torch.tensor([0, 1]), 2).tolist(), targets_of(torch.tensor([1]), 3).tolist()
    ([[0.0], [1.0]], [[0.0, 1.0, 0.0]])
    """
    if classes > 2:
        return torch.nn.functional.one_hot(labels, classes).double()
    return labels.double()[:, None]


def logits_of(outputs: Tensor) -> Tensor:
    """Logits of disclosed outputs of sigmoids; of a single one, those of its two classes.

    >>> logits_of(torch.tensor([[0.5]], dtype=torch.float64)).tolist()
    [[0.0, 0.0]]
    """
    kept = outputs.clamp(_LEAST, 1 - _LEAST)
    logits = torch.log(kept / (1 - kept))
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def row_blocks(rows: int, width: int) -> Iterable[tuple[int, int]]:
    """Runs of rows, of one size within a row, whose elements fit a frame; as few as that takes."""
    count = max(1, min(rows, math.ceil(rows * width * ELEMENT_BYTES / BLOCK_BYTES)))
    return pairwise(rows * block // count for block in range(count + 1))
