"""Training and use of a network that no single party has: one party's part in each step.

P0 and P1 have columns of the rows, and a share of every weight; P2 deals, and evaluates functions
on permuted values. One of the three parties has the labels, and also sees the network's outputs.
All three parties make the same calls of this module in the same order. Rows are shared and opened
under masks once, before the first step. An exchange (step) is either a step of gradient descent, or
computes the outputs of some rows.
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

#: Size in bytes of the blocks in which rows are shared or evaluated: the largest frame for a block
#: stays below this size, and thus below the limit of frames (`vfl.core.frame.LIMIT_BYTES`).
BLOCK_BYTES = 1 << 26
#: Outputs of a sigmoid that are nearer to 0 or 1 than this are beyond the resolution of shared
#: values.
_LEAST = 2.0**-23
#: Largest number of index lists in one message; the message contains the length of each list.
_LIST_HEADS = 32
_OPENINGS = ("mask", "difference", "second")

Rows = Literal["train", "validation", "test", "predict"]


class ThreePartyNetwork:
    """One party's part in the training and use of a shared network.

    Args:
        party: this party, which has agreed on keys with the others.
        layers: layers of the network; a sigmoid at the end means that the loss is the cross
            entropy.
        columns: number of P0's input columns, and of P1's.
        label_role: role number of the party that has the labels and sees the outputs.
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
        """Return whether this party is P0 or P1."""
        return self.party.role in HOLDERS

    def share_weights(self, own: Mapping[str, Tensor] | None) -> None:
        """Start with initial weights that are the sums of both holders' random weights.

        Args:
            own: at a holder, its random weights from `first_weights`; None at P2.

        Raises:
            RingRangeError: a weight does not fit into the ring; the error names the layer.
        """
        halves = [
            Network.share(
                self.party, self.layers, holder, own if self.party.role == holder else None
            )
            for holder in HOLDERS
        ]
        self._network = halves[0].plus(halves[1])

    def share_rows(self, rows: Rows, count: int, own: Tensor | None, where: str) -> None:
        """Share both holders' columns side by side, and open them once for all later steps.

        Args:
            rows: phase to which the rows belong.
            count: number of rows, which all three parties know.
            own: a holder's columns, axes (rows, columns); None at P2.
            where: name of the rows, for error messages and the ledger of leakage.

        Raises:
            RingRangeError: a value is too large for the ring; only its owner raises this error.
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
        """Share the targets of the training rows.

        Args:
            count: number of rows.
            own: at the owner of the labels, the targets that `targets_of` returned; None elsewhere.

        Raises:
            RingRangeError: a target is too large for the ring.
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
        """Run one step of gradient descent on some training rows.

        Args:
            index: positions of the step's rows among the training rows, int64.
            learning_rate: learning rate, by which the mean gradient is multiplied.

        Raises:
            BadOptionError: the batch has too many rows for the numbers of bits in the rules.
            RingRangeError: a value is too large for the ring; the error names the layer.
            PeerError: another party did not take part in the step.
        """
        assert self._targets is not None, "targets are shared before the first step"
        inputs, targets = self._rows["train"].rows(index), self._targets.rows(index)
        self._network.train_step(self.party, inputs, targets, self._loss, learning_rate)

    def outputs(self, rows: Rows, index: Tensor, where: str) -> Tensor | None:
        """Return the outputs for some rows, axes (rows, outputs), at the owner of the labels.

        Parties without labels receive None.

        Args:
            rows: phase to which the rows belong.
            index: positions of the rows among the rows of this phase, int64.
            where: name of the disclosed outputs in the ledger of leakage.

        Raises:
            RingRangeError: a value is too large for the ring; the error names the layer.
            PeerError: another party did not take part in the step.
        """
        found = []
        widest = max(self.layers[0].inputs, *(layer.outputs for layer in self.layers))
        # A frame contains the values of the widest layer, perhaps together with their slopes.
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
        """Return this holder's share of every weight, int64, named as in `Network.share`.

        At P2 the result is empty.
        """
        if not self.holds_shares:
            return {}
        return {name: each.share for name, each in self._network.weights.items()}

    def load_weights(self, shares: Mapping[str, Tensor]) -> None:
        """Continue with shares of weights that `weights` returned; P2 ignores them.

        Raises:
            RunFolderError: the shares belong to another network than this one.
        """
        weights = {}
        for name, shape in weight_shapes(self.layers).items():
            share = shares.get(name) if self.holds_shares else blank(shape)
            if share is None or share.shape != shape or share.dtype != torch.int64:
                raise RunFolderError(
                    "this share belongs to another network than the parties' tables require",
                    where=name,
                    got="nothing" if share is None else f"{tuple(share.shape)} of {share.dtype}",
                    want=f"{shape} of torch.int64",
                    fix="use the columns and labels of the training",
                )
            weights[name] = SharedTensor(share, self.party.rules.bits)
        self._network = Network(self.layers, weights)

    def state_dict(self) -> dict[str, Any]:
        """Return this party's state for a restart: tensors, numbers and texts.

        The state contains no key and no mask that was not used yet.

        The state has the holder's shares of the weights; plain gradient descent needs no other
        numbers. The state has the masks under which the weights are open, if an evaluation opened
        them after the last training step; these masks belong to the keys of the present attempt.
        The state has the number of operations, which determines how much of every key stream was
        used. The state has the records of learned values and of sent bytes, so that both records
        continue.
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
        """Continue from a `state_dict`, after rows and targets were shared again.

        Args:
            state: the state that this party saved.
            same_keys: whether the party has the same keys as when it saved the state, and made the
                same calls before its first step; every frame is then equal to the original frame,
                bit for bit. A new attempt of a session has new keys, and weights are opened again:
                its results differ by the last bit of a truncation, as between two trainings.

        Raises:
            RunFolderError: the shares in the state belong to another network.
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
    """Draw a holder's share of the initial weights, float64, named as in `Network.share`.

    The sum of both shares is normal, of the usual scale: the distribution is that of He et al.
    2015, eq 10, before a ReLU; in all other layers, the variance is 1 / inputs. No party knows the
    sum of both shares. If P2 knew the initial weights, it could undo permutations, because
    trained weights stay near their initial values.

    Args:
        layers: layers of the network.
        secret: the holder's own secret, from which the weights are drawn.
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
    """Return the layers of one network that is equivalent to both bottom models and the top model.

    Args:
        columns: number of columns at P0, and at P1.
        width: width of linear bottom models whose outputs are summed, which together form one
            linear layer over all columns; None if the top model receives the concatenated columns
            themselves.
        top: top model, a module of `nn.Linear` and element-wise functions; it has one output for
            two classes.
        classes: number of label classes, for which a sigmoid is added at the end; 0 if the labels
            are real numbers.

    Raises:
        PrivateLayerError: a layer cannot be computed on shares, or the top model ends in a
            function.

    >>> [layer.outputs for layer in whole_network((3, 2), 4, nn.Linear(4, 1), classes=2)]
    [4, 1]
    """
    below = [] if width is None else [Layer(sum(columns), width)]
    *inner, last = [*below, *layers_of(top)]
    if last.function:
        raise PrivateLayerError(
            "the top ends in an activation function",
            where="label.top",
            got=last.function,
            want="a linear layer; the loss adds a sigmoid for classes",
            fix="remove the last function",
        )
    return [*inner, replace(last, function="sigmoid" if classes else "")]


def require_frames(
    layers: Sequence[Layer], columns: tuple[int, int], classes: int, label_role: int
) -> None:
    """Require that the weights of each layer fit into a frame, before memory is allocated for them.

    Args:
        layers: layers of the network.
        columns: number of columns that P0 announced, and that P1 announced.
        classes: number of label classes that the owner of the labels announced.
        label_role: role number of the owner of the labels.

    Raises:
        ProtocolError: a layer does not fit into a frame; the error names the announced number that
            makes it too large.
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
            fix="use fewer columns or narrower layers; if a party really has fewer columns, ask"
            " that party about its announcement",
        )


def most_frame_bytes(layers: Sequence[Layer], rows: int) -> int:
    """Return the largest frame's size in bytes.

    The frame belongs to a step, or to the sharing of rows before it.

    Args:
        layers: layers of the network.
        rows: number of rows of the largest step.

    >>> most_frame_bytes([Layer(5, 4, "relu"), Layer(4, 1, "sigmoid")], rows=64) == BLOCK_BYTES
    True
    """
    weights = sum((layer.inputs + 1) * layer.outputs for layer in layers)
    widest = max(layers[0].inputs, *(layer.outputs for layer in layers))
    # The largest message has all weights, or it has both factors of a product and lists of all
    # their indices.
    exchange = ELEMENT_BYTES * (weights + 4 * rows * widest) + _LIST_HEADS
    return max(exchange, BLOCK_BYTES, ELEMENT_BYTES * widest)


def targets_of(labels: Tensor, classes: int) -> Tensor:
    """Return the targets, float64.

    Two classes have one number per row, more classes have one number per class.

    >>> targets_of(torch.tensor([0, 1]), 2).tolist(), targets_of(torch.tensor([1]), 3).tolist()
    ([[0.0], [1.0]], [[0.0, 1.0, 0.0]])
    """
    if classes > 2:
        return torch.nn.functional.one_hot(labels, classes).double()
    return labels.double()[:, None]


def logits_of(outputs: Tensor) -> Tensor:
    """Return the logits of sigmoid outputs; a single output gives the logits of two classes.

    >>> logits_of(torch.tensor([[0.5]], dtype=torch.float64)).tolist()
    [[0.0, 0.0]]
    """
    kept = outputs.clamp(_LEAST, 1 - _LEAST)
    logits = torch.log(kept / (1 - kept))
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def row_blocks(rows: int, width: int) -> Iterable[tuple[int, int]]:
    """Yield blocks of rows that fit into a frame; the blocks' sizes differ by at most one row."""
    count = max(1, min(rows, math.ceil(rows * width * ELEMENT_BYTES / BLOCK_BYTES)))
    return pairwise(rows * block // count for block in range(count + 1))
