"""A torch module in, a private module out: the three parties as threads of this process.

For trying, testing and measuring. The same parties run as processes of their own by ``vfl mpc``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from vfl.errors import BadOptionError, DataError, WidthError
from vfl.mpc.convert import layers_of, weights_of, with_weights
from vfl.mpc.leakage import Leak
from vfl.mpc.network import Loss, Network, share_targets
from vfl.mpc.party import Party
from vfl.mpc.rules import P0, P1, Mode, Rules
from vfl.mpc.shares import Shared
from vfl.mpc.traffic import Traffic
from vfl.mpc.trio import Trio
from vfl.options import require_choice, require_range, require_seconds
from vfl.seeds import permutation

_Result = TypeVar("_Result")


def private(
    module: nn.Module, mode: Mode = "fast", *, rules: Rules | None = None, timeout_s: float = 30.0
) -> PrivateModule:
    """The module computed by three parties, of which none has both its inputs and its weights.

    P1 owns the weights (and the targets of a training), P0 the inputs and outputs, P2 helps. All
    are semi-honest and do not collude; P2 sees the values before every function, permuted.

    Args:
        module: an `nn.Sequential` of `nn.Linear`, element-wise functions, `nn.Flatten` and
            `nn.Dropout`, which is left out.
        mode: "fast", or "thesis" for chapter 5 as written; see `Rules`.
        rules: instead of the mode's own.
        timeout_s: how long a party waits for another; more for wide layers and many rows.

    Raises:
        PrivateLayerError: a layer of another kind; it names it and says what to use.
        BadOptionError: a wait that is none, or longer than a week.
        RingRangeError: a weight is too large.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> inputs = torch.tensor([[0.5, -1.0, 2.0]])
    >>> with private(model) as hidden:
    ...     bool((hidden(inputs) - model(inputs)).abs().max() < 2e-5)
    True
    """
    require_seconds("timeout_s", timeout_s)
    return PrivateModule(module, rules or Rules(mode), timeout_s)


class PrivateModule(nn.Module):
    """Made by `private`; also a context manager that ends the three threads."""

    def __init__(self, module: nn.Module, rules: Rules, timeout_s: float) -> None:
        super().__init__()
        self._layers = layers_of(module)
        self._template = [module]  # in a list: its weights are not this module's parameters
        terms = {"layers": [repr(layer) for layer in self._layers]}
        self._trio = Trio(rules, terms, timeout_s)
        values = weights_of(module)

        def share(party: Party) -> Network:
            own = values if party.role == P1 else None
            network = Network.share(party, self._layers, P1, own)
            network.open(party, phase="setup")
            return network

        self._networks = self._run(share)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of axes (rows, outputs) in the inputs' type, revealed to P0 alone.

        Whole numbers are answered in float32.

        Raises:
            DataError: no tensor of real numbers with rows and columns.
            WidthError: inputs of another width.
            RingRangeError: an input or an activation is too large.
        """
        flat = self._flat(inputs)

        def infer(party: Party) -> Tensor | None:
            shared = _inputs(party, flat)
            network = self._networks[party.role]
            outputs = network.infer(party, shared)
            found = party.reveal(outputs, P0, "outputs")
            if found is not None:
                network.check_outputs(party.rules, found)
            return found

        outputs = self._run(infer)[P0]
        assert outputs is not None, "P0 receives the outputs"
        return outputs.to(inputs.dtype if inputs.is_floating_point() else torch.float32)

    def fit(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        loss: Loss = "cross_entropy",
        learning_rate: float = 0.1,
        batch_rows: int = 64,
        epochs: int = 1,
        seed: int = 0,
    ) -> PrivateModule:
        """Gradient descent on shares; nobody sees a weight, a gradient or a loss.

        Args:
            inputs: axes (rows, columns), owned by P0.
            targets: axes (rows, outputs) or (rows,), owned by P1; 0 and 1 for "cross_entropy".
            loss: "cross_entropy" needs a sigmoid at the end.
            learning_rate: of the gradient averaged over a batch.
            batch_rows: rows of a step; the last of an epoch has what is left, if that is no
                single row.
            epochs: passes over the rows.
            seed: public; of the order of rows.

        Raises:
            BadOptionError: options that do not fit the module or the rows.
            DataError: no tensor of real numbers, or targets that no sigmoid reaches.
            WidthError: inputs of another width, or not one target a row.
            RingRangeError: an input, a target or an activation is too large.
        """
        flat = self._flat(inputs)
        _require_numbers("targets", targets, "(rows, outputs) or (rows,)", 1)
        require_range("epochs", epochs, 1)
        require_range("seed", seed, 0)
        if len(targets) != len(flat):
            raise WidthError(
                "every row needs its target", got=f"{len(targets)}", want=f"{len(flat)}, as rows"
            )
        wanted = targets.detach().double().reshape(len(flat), -1)
        self._check_training(loss, learning_rate, batch_rows, wanted)

        def train(party: Party) -> None:
            role = party.role
            (rows,) = party.open(_inputs(party, flat), phase="setup")
            labels = share_targets(party, P1, wanted.shape, wanted if role == P1 else None)
            network = self._networks[role]
            for batch in batches(rows, labels, batch_rows, epochs, seed):
                network.train_step(party, *batch, loss, learning_rate)

        self._run(train)
        return self

    def reveal(self) -> nn.Module:
        """A copy of the module with the weights of now, revealed to P1."""
        weights = self._run(lambda party: self._networks[party.role].reveal(party, P1))[P1]
        return with_weights(self._template[0], weights)

    def traffic(self) -> list[Traffic]:
        """Bytes between the parties since the beginning."""
        return self._trio.traffic()

    def leaks(self) -> list[Leak]:
        """What each party has seen since the beginning."""
        return self._trio.leaks()

    def close(self) -> None:
        """End the three threads."""
        self._trio.close()

    def __enter__(self) -> PrivateModule:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, program: Callable[[Party], _Result]) -> list[_Result]:
        return self._trio.run(program)

    def _flat(self, inputs: Tensor) -> Tensor:
        _require_numbers("inputs", inputs, "(rows, columns)", 2)
        flat = inputs.detach().cpu().double().flatten(1)
        if flat.shape[1] != self._layers[0].inputs:
            raise WidthError(
                "inputs of another width than the first layer's",
                got=f"{flat.shape[1]} values a row",
                want=f"{self._layers[0].inputs}",
            )
        return flat

    def _check_training(self, loss: Loss, rate: float, batch_rows: int, wanted: Tensor) -> None:
        require_choice("loss", loss, ("cross_entropy", "squared"))
        require_range("learning_rate", rate, 1e-9, 100)
        require_range("batch_rows", batch_rows, 1, len(wanted))
        last = self._layers[-1]
        if loss == "cross_entropy" and last.function != "sigmoid":
            raise BadOptionError(
                "cross entropy is computed behind a sigmoid",
                where="option 'loss'",
                got=f"a model that ends in {last.function or 'a linear layer'}",
                want="nn.Sigmoid as the last layer",
                fix='add it, or take loss="squared"',
            )
        if wanted.shape[1] != last.outputs:
            raise WidthError(
                "targets of another width than the last layer's",
                got=f"{wanted.shape[1]} values a row",
                want=f"{last.outputs}",
            )
        if loss == "cross_entropy" and not ((wanted >= 0) & (wanted <= 1)).all():
            # Divisions are set up for differences to outputs of a sigmoid, and wrap beyond them.
            raise DataError(
                "targets that no sigmoid reaches",
                where="targets",
                got="some below 0, above 1 or not finite",
                want="0 to 1",
                fix='scale them, or take loss="squared"',
            )


def _require_numbers(name: str, given: object, axes: str, least: int) -> None:
    """Refuse what is no tensor of real numbers, or has fewer axes or no row."""
    got = type(given).__name__
    if isinstance(given, Tensor):
        got = f"{given.dtype} of axes {tuple(given.shape)}"
        if given.dim() >= least and len(given) and not given.is_complex():
            return
    raise DataError(
        "no rows that can be shared",
        where=name,
        got=got,
        want=f"a tensor of real numbers, axes {axes}, at least a row",
        fix="torch.as_tensor makes one of an array; a single row is given as row[None]",
    )


def _inputs(party: Party, flat: Tensor) -> Shared:
    own = flat if party.role == P0 else None
    return party.share_bounded(P0, flat.shape, own, "inputs", "the columns")


def batches(
    rows: Shared, labels: Shared, batch_rows: int, epochs: int, seed: int
) -> Iterator[tuple[Shared, Shared]]:
    """Batches in an order that follows from the public seed; an opening stays one.

    A remainder of a single row is dropped, as `vfl train` does.
    """
    count = rows.shape[0]
    for epoch in range(epochs):
        order = torch.from_numpy(permutation(seed, count, "mpc", epoch))
        for start in range(0, count, batch_rows):
            index = order[start : start + batch_rows]
            if len(index) > 1 or len(index) == min(batch_rows, count):
                yield rows.rows(index), labels.rows(index)
