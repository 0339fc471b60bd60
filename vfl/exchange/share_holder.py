"""A feature party's half where it holds a share of its first layer, whoever has the other share.

It sends its inputs masked, gets the other share masked, and answers with its share of the outputs.
It never sees an output or a gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vfl.compression import INFERENCE, Moment
from vfl.errors import ExposedCutError, ProtocolError, RunFolderError
from vfl.exchange.guards import expect
from vfl.exchange.shared_exposure import nobodys_bottom
from vfl.frame import Frame, Kind
from vfl.link import Link
from vfl.mpc.shared_layer import first_weights
from vfl.mpc.shared_traffic import COLUMNS_BYTES, LayerAxes
from vfl.seeds import Secret


@dataclass(slots=True)
class Pending:
    """An exchange under way: what came of it so far."""

    step: int
    trains: bool
    inputs: Tensor
    opened: Tensor | None = None


class ShareHolder(ABC):
    """What `FeatureHalf` is where every party holds its own bottom.

    Args:
        party: its name, for messages.
        bottom: one linear layer of the axes of the shared one; its weights are not used.
        columns: of its inputs.
        width: the agreed width of all outputs.
        link: the stream to the label party.
        secret: the party's own; its shares start from it.
    """

    in_flight = 1

    def __init__(
        self, party: str, bottom: nn.Module, columns: int, width: int, link: Link, secret: Secret
    ) -> None:
        _require_linear(bottom, party, columns, width)
        self.party = party
        self.width = width
        self.link = link
        self.columns = columns + 1
        self._own = first_weights(self.columns, width, secret, party)
        self._pending: Pending | None = None

    @property
    @abstractmethod
    def axes(self) -> LayerAxes:
        """The layers it has shares of, once an attempt has begun."""

    def introduce(self) -> None:
        """Tell how many columns this party's layer has, before anything is dealt."""
        self.link.send(Frame(Kind.PROTOCOL, 1, self.columns.to_bytes(COLUMNS_BYTES, "little")))

    def fit(self, inputs: Callable[[], Tensor]) -> None:
        """Nothing looks at the training inputs."""

    @property
    def awaiting(self) -> int:
        """Exchanges whose gradients have not been taken yet."""
        return 0 if self._pending is None or not self._pending.trains else 1

    def send_cut(self, inputs: Tensor, step: int) -> None:
        """Open a training batch of axes (rows, ...), masked; `answer` goes on.

        Raises:
            RingRangeError, NonFiniteError: inputs that cannot be encoded; nothing was sent.
            ReusedPadError: this step, or a later one, was opened in this attempt.
            ProtocolError: no keys were agreed on.
        """
        self._open(inputs, step, trains=True)

    def send_query(self, inputs: Tensor, step: int) -> None:
        """The same for rows to evaluate or predict."""
        self._open(inputs, step, trains=False)

    @abstractmethod
    def answer(self, step: int) -> None:
        """Take what was opened to this party, and send its share of the outputs.

        Raises:
            ProtocolError, FrameError, AuthenticationError: nothing was sent.
        """

    @abstractmethod
    def take_gradient(self) -> None:
        """Wait for this party's share of the gradient and move its share of the weights.

        Raises:
            ProtocolError, FrameError: the share is left as it was.
        """

    def take_receipt(self, step: int) -> bytes:
        """Wait until the label party has the query; what it says to it."""
        self._pending = None
        return bytes(expect(self.link, Kind.ACK, step, "the label party").payload)

    def query_cut(self, inputs: Tensor, moment: Moment = INFERENCE) -> Tensor:
        """Nobody has a party's cut here.

        Raises:
            ExposedCutError: always.
        """
        raise nobodys_bottom(self.party)

    def state_dict(self) -> dict[str, Tensor]:
        """Its share of its own layer."""
        return {"own": self._own}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFolderError: shares of another layer, or something else.
        """
        own = state.get("own")
        if own is None or own.shape != self._own.shape:
            raise RunFolderError(
                "these are no shares of this party's first layer",
                got="none" if own is None else f"{len(own)} columns",
                want=f"{len(self._own)} columns, as secure = 'beaver' keeps them",
            )
        self._own = own.clone()

    def training_state(self) -> dict[str, Any]:
        """What training needs to go on exactly; every exchange before it has ended."""
        return {"state": self.state_dict()}

    def load_training_state(self, saved: Mapping[str, Any], batch: Callable[[int], Tensor]) -> None:
        """Restore what `training_state` gave."""
        self._pending = None
        self.load_state_dict(saved["state"])

    @abstractmethod
    def _open(self, inputs: Tensor, step: int, trains: bool) -> None:
        """Send the inputs, masked, and remember the exchange."""


def no_keys(party: str) -> ProtocolError:
    """What is told to whoever asks a party for masked numbers before an attempt has begun."""
    return ProtocolError(
        f"party '{party}' has no keys to mask its numbers with",
        want="an agreement between the feature parties before the first exchange",
    )


def _require_linear(bottom: nn.Module, party: str, columns: int, width: int) -> None:
    """Refuse a bottom that is not one linear layer of these axes."""
    layers = [part for part in bottom.modules() if not isinstance(part, nn.Sequential | nn.Flatten)]
    want = "bottom = 'mlp:hidden=none', and depth in the top"
    if len(layers) != 1 or not isinstance(layer := layers[0], nn.Linear):
        raise ExposedCutError(
            f"the bottom of party '{party}' is more than one linear layer, which cannot be shared",
            got=", ".join(type(part).__name__ for part in layers[:4]) or "nothing",
            want=want,
        )
    axes = f"{layer.in_features} to {layer.out_features}"
    if axes != f"{columns} to {width}":
        raise ExposedCutError(
            f"the bottom of party '{party}' does not fit its columns and width",
            got=axes,
            want=f"{columns} to {width}",
        )
