"""Attacks by party P2, which receives the inputs of a private network's functions, permuted.

>>> import torch
>>> twice = seen_twice(torch.tensor([0.5, 3.0, -1.0]), torch.tensor([2.0, -0.25, 3.0]))
>>> twice.tolist()  # behind new dummies, the value of a row that is asked again
[1]

The attacks are pure functions of the values that P2 receives and of public facts: rules of the
computation, shapes, and the numbers of the rows in each batch. The class `Victim` runs the real
computation and records the values that P2 receives in it. Other modules score the attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment, lsq_linear
from scipy.sparse import csr_matrix
from torch import Tensor

from vfl.core.frame import Frame, Link
from vfl.defenses.dcor import distances
from vfl.mpc import Layer, Network, Party, Rules, Trio
from vfl.mpc.channel import Leak
from vfl.mpc.permuted import EXPECTED_CARRY, from_upper_bytes, function
from vfl.mpc.ring import decode
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.three_party.network import Loss


def by_rank(before: Tensor, after: Tensor, signed: bool = True) -> Tensor:
    """Return, for each row's earlier value, the position of the row among the later values.

    Args:
        before: values of the rows before the change, axes (values,).
        after: values of the same rows in another order, after small changes of the weights.
        signed: whether the observed signs are the true signs; if not, the function compares
            magnitudes only.

    >>> by_rank(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.1, 2.2, 2.9])).tolist()
    [2, 0, 1]
    """
    if not signed:
        before, after = before.abs(), after.abs()
    found = torch.empty(len(before), dtype=torch.long)
    found[before.argsort()] = after.argsort()
    return found


def recognised(before: Sequence[Tensor], after: Sequence[Tensor], signed: bool = True) -> Tensor:
    """Return, for each earlier batch, the position of the later batch with the same rows.

    The result is the assignment of earlier to later batches with the least total distance between
    their sorted values (Kuhn 1955).

    Args:
        before: values of each batch; all batches have equally many values.
        after: values of the same batches in another order, with changed weights.
        signed: see `by_rank`.

    >>> first, second = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])
    >>> recognised([first, second], [second.flip(0), first.flip(0)]).tolist()
    [1, 0]
    """
    sides = [torch.stack(list(side)) for side in (before, after)]
    one, other = ((side if signed else side.abs()).sort(1).values for side in sides)
    _, found = linear_sum_assignment(torch.cdist(one, other).numpy())
    return torch.from_numpy(found)


def labels_by_place(logits: Tensor) -> Tensor:
    """Guess whether each row has class 1, as if rows came unpermuted; bool, axes (rows,).

    >>> labels_by_place(torch.tensor([-1.5, 0.5])).tolist()
    [False, True]
    """
    return logits > 0


def labels_from_sums(batches: Sequence[Tensor], seen: Sequence[Tensor], rows: int) -> Tensor:
    """Return each row's probability of class 1, from sums over many overlapping batches.

    The order of the rows within a batch is secret. It is public which rows a batch contains. P2 can
    compute the sum of these rows' probabilities, which does not depend on their order. So every
    batch gives one linear equation in the probabilities of single rows. Least squares, with
    unknowns between 0 and 1, solves all equations together (Dinur and Nissim 2003, section 3).

    Args:
        batches: for each batch, the numbers of its rows, int64.
        seen: each batch's logits in any order, one for each row.
        rows: number of rows.

    Returns:
        Probabilities, axes (rows,).

    >>> pairs = [torch.tensor(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    >>> logits = torch.tensor([9.0, -9.0, 9.0])
    >>> labels_from_sums(pairs, [logits[pair].flip(0) for pair in pairs], 3).round().tolist()
    [1.0, 0.0, 1.0]
    """
    lengths = [len(batch) for batch in batches]
    columns = torch.cat(list(batches)).numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    system = csr_matrix((np.ones(len(columns)), columns, starts), shape=(len(lengths), rows))
    sums = np.array([float(torch.sigmoid(each.double()).sum()) for each in seen])
    found = lsq_linear(system, sums, bounds=(0, 1), max_iter=200)
    return torch.from_numpy(found.x)


def stands_out(seen: Tensor, real: int = 1) -> Tensor:
    """Return positions of the `real` values that are least likely dummies (normal draws); (real,).

    >>> stands_out(torch.tensor([0.5, -7.0, 1.0])).tolist()
    [1]
    """
    return seen.abs().topk(real).indices


def seen_twice(first: Tensor, second: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Return positions in `first` of values with (nearly) the same magnitude in `second`; (found,).

    P2 receives new dummies (random values) with every request, but the real values of a row stay
    the same. If two requests have 32 values each, all of them dummies (standard deviation 2), about
    6 in 1,000 pairs of requests contain two dummies within the tolerance.
    """
    apart = (first.abs()[:, None] - second.abs()).abs().min(1).values
    return torch.nonzero(apart <= tolerance).flatten()


def found_shares(seen: Tensor, sums: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Return, for each candidate row, the share of its values that P2 received; axes (candidates,).

    Args:
        seen: inputs of the network's first function for a batch, in secret order.
        sums: for each candidate row, the function inputs that follow from the known weights, axes
            (candidates, outputs).
        tolerance: largest difference, due to rounding, between two equal values; 4e-6 in fast mode.

    >>> found_shares(torch.tensor([3.0, 0.5, 1.0]), torch.tensor([[1.0, 3.0], [3.0, 4.0]])).tolist()
    [1.0, 0.5]
    """
    ranked = seen.sort().values
    above = torch.searchsorted(ranked, sums.contiguous()).clamp(max=len(ranked) - 1)
    near = (ranked[above] - sums).abs().minimum((ranked[(above - 1).clamp(min=0)] - sums).abs())
    return (near <= tolerance).double().mean(1)


def like_multisets(seen: Tensor, sums: Tensor) -> Tensor:
    """Return the squared distance of each candidate's sorted values to one row's sorted values.

    >>> like_multisets(torch.tensor([3.0, 1.0]), torch.tensor([[1.0, 3.0], [3.0, 4.0]])).tolist()
    [0.0, 5.0]
    """
    return (sums.sort(1).values - seen.sort().values).square().sum(1)


def solve_shuffled(
    seen: Tensor, weight: Tensor, bias: Tensor, starts: Tensor, rounds: int = 50, ridge: float = 0.0
) -> Tensor:
    """Find a row x such that the values x W + b, in some order, are nearest to the observed values.

    Each round assigns observed values to outputs by rank, and then solves least squares for x;
    rounds end when nothing changes. The function starts from several guesses and returns the best
    result (shuffled regression, Abid et al. 2017, section 3).

    Args:
        seen: observed values of one row, axes (outputs,).
        weight: the weights W, axes (columns, outputs); W needs at least as many outputs as columns,
            or else `ridge` must be above 0.
        bias: the biases b, axes (outputs,).
        starts: initial guesses of the row x, axes (starts, columns).
        rounds: largest number of rounds for each start.
        ridge: weight of |x|^2 in the least-squares problem.

    >>> weight, row = torch.eye(2), torch.tensor([5.0, 1.0])
    >>> solve_shuffled(row.flip(0), weight, torch.zeros(2), torch.tensor([[3.0, 0.0]])).tolist()
    [5.0, 1.0]
    """
    ranked = seen.sort().values
    gram = weight @ weight.T + ridge * torch.eye(len(weight), dtype=weight.dtype)
    solve = torch.linalg.solve(gram, weight)  # axes (columns, outputs)
    rows = starts
    for _ in range(rounds):
        wanted = torch.empty_like(rows @ weight)
        order = (rows @ weight + bias).argsort(1)
        wanted.scatter_(1, order, ranked.expand_as(wanted))
        moved = (wanted - bias) @ solve.T
        if torch.equal(moved, rows):
            break
        rows = moved
    fit = ((rows @ weight + bias).sort(1).values - ranked).square().sum(1)
    return rows[fit.argmin()]


def correlation(one: Tensor, other: Tensor) -> float:
    """Return the distance correlation of two samples, from 0 to 1 (root of thesis eq 5-9).

    The samples are vectors of the same rows. The centred distances make the estimator unbiased
    (Szekely and Rizzo 2014, definition 2 and eq 3.3). The biased sample statistic is near 1 for
    long independent vectors, so with few rows it would report dependence that does not exist. A
    negative estimate counts as 0.

    Args:
        one: the first vector of each row, axes (rows, ...).
        other: the second vector of each row, axes (rows, ...).

    >>> rows = torch.tensor([[0.0], [1.0], [3.0], [4.0], [8.0]])
    >>> round(correlation(rows, -2 * rows), 4)
    1.0
    """
    a, b = _centred(distances(one.double())), _centred(distances(other.double()))
    squared = (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt().clamp_min(1e-300)
    return float(squared.clamp_min(0).sqrt())


def _centred(away: Tensor) -> Tensor:
    rows = len(away)
    sums = away.sum(1)
    centred = away - (sums[:, None] + sums) / (rows - 2) + sums.sum() / ((rows - 1) * (rows - 2))
    return centred.fill_diagonal_(0)


def nearest(seen: Tensor, neighbours: int) -> Tensor:
    """Return each row's nearest other rows, nearest first; int64, axes (rows, neighbours).

    Args:
        seen: values of the rows, axes (rows, ...); the function scales each row to length 1, as in
            the thesis.
        neighbours: number of neighbours.
    """
    flat = torch.nn.functional.normalize(seen.double().flatten(1))
    away = distances(flat).fill_diagonal_(torch.inf)
    return away.topk(neighbours, largest=False).indices


def same_class(seen: Tensor, classes: Tensor, neighbours: int = 5) -> float:
    """Return the mean share of a row's nearest rows that have the row's class (thesis 5.5.4.2).

    Args:
        seen: values of the rows, axes (rows, ...); see `nearest`.
        classes: class of each row, int64, axes (rows,).
        neighbours: number of neighbours of each row.

    >>> seen = torch.tensor([[0.0, 1], [0.1, 1], [1, 0], [1, 0.1]])
    >>> same_class(seen, torch.tensor([0, 0, 1, 1]), neighbours=1)
    1.0
    """
    return float((classes[nearest(seen, neighbours)] == classes[:, None]).double().mean())


class _Tapped:
    """A connection that also stores the payloads of the frames that its party receives."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.received: list[bytes] = []

    def send(self, frame: Frame) -> None:
        self._link.send(frame)

    def receive(self) -> Frame:
        frame = self._link.receive()
        self.received.append(bytes(frame.payload))
        return frame

    def close(self) -> None:
        self._link.close()


class Victim:
    """Three parties in threads: P0 owns the inputs, P1 the weights and targets; P2 attacks.

    `Victim` is a context manager. The class records the frames that P2 receives, from the time when
    the parties have agreed on keys. From then on, P2 receives only the two permuted shares of each
    request, and adds these shares as the protocol prescribes.

    Args:
        layers: the network.
        values: the network's weights: "0.weight" of axes (inputs, outputs), "0.bias", ...
        rules: rules of the computation.
    """

    def __init__(self, layers: Sequence[Layer], values: Mapping[str, Tensor], rules: Rules) -> None:
        self.layers, self.rules = tuple(layers), rules
        self._trio = Trio(rules)
        self._networks = self._trio.run(
            lambda party: Network.share(party, layers, P1, values if party.role == P1 else None)
        )
        channels = self._trio.parties[P2].channels
        self._taps = [_Tapped(channels[holder].link) for holder in (P0, P1)]
        for holder, tap in zip((P0, P1), self._taps, strict=True):
            channels[holder].link = tap

    def infer(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs, and the values that P2 received: one tensor for each request."""

        def program(party: Party) -> Tensor | None:
            own = inputs if party.role == P0 else None
            shared = party.share(P0, inputs.shape, own, "inputs")
            outputs = self._networks[party.role].infer(party, shared)
            return party.reveal(outputs, "outputs", P0)

        outputs, seen = self._watched(program)
        assert outputs is not None, "P0 receives the outputs"
        return outputs, seen

    def train_step(
        self, inputs: Tensor, targets: Tensor, loss: Loss, learning_rate: float
    ) -> list[Tensor]:
        """Return P2's values in one training step: inputs of functions, then of derivatives.

        There is one tensor for each request. The inputs of functions are in the order of the
        layers. Only in thesis mode, the same inputs follow for the derivatives, last layer first.
        """

        def program(party: Party) -> None:
            role = party.role
            rows = party.share(P0, inputs.shape, inputs if role == P0 else None, "inputs")
            own, bits = targets if role == P1 else None, party.rules.delta_bits
            wanted = party.share(P1, targets.shape, own, "targets", bits)
            self._networks[role].train_step(party, rows, wanted, loss, learning_rate)

        return self._watched(program)[1]

    def weights(self) -> dict[str, Tensor]:
        """Return the current weights, for scoring and for attackers whose grants include them."""
        return self._trio.run(lambda party: self._networks[party.role].reveal(party, P1))[P1]

    def leaks(self) -> list[Leak]:
        """Return the leaks that all parties' ledgers record."""
        return self._trio.leaks()

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *error: object) -> None:
        self._trio.close()

    def _watched(
        self, program: Callable[[Party], Tensor | None]
    ) -> tuple[Tensor | None, list[Tensor]]:
        found = self._trio.run(program)[P0]
        pairs = list(zip(*(tap.received for tap in self._taps), strict=True))
        for tap in self._taps:
            tap.received.clear()
        return found, [self._read(first, second) for first, second in pairs]

    def _read(self, first: bytes, second: bytes) -> Tensor:
        """Return the sum of the two shares of one request, as P2 computes it."""
        if self.rules.mode == "fast":
            words = (
                from_upper_bytes(memoryview(first))
                + from_upper_bytes(memoryview(second))
                + EXPECTED_CARRY
            )
            return decode(words, 2 * self.rules.bits)
        shares = [torch.frombuffer(bytearray(each), dtype=torch.int64) for each in (first, second)]
        return decode(shares[0] + shares[1], self.rules.bits)


def drawn_weights(
    layers: Sequence[Layer], draw: torch.Generator, bits: int = 20
) -> dict[str, Tensor]:
    """Draw normal weights scaled as in He et al. 2015, eq 10, which shares represent exactly."""
    found = {}
    for index, layer in enumerate(layers):
        weight = torch.randn(layer.inputs, layer.outputs, generator=draw, dtype=torch.float64)
        found[f"{index}.weight"] = on_grid(weight * (2 / layer.inputs) ** 0.5, bits)
        if layer.bias:
            found[f"{index}.bias"] = torch.zeros(layer.outputs, dtype=torch.float64)
    return found


def on_grid(values: Tensor, bits: int = 20) -> Tensor:
    """Round to multiples of 2^-bits, which shares with `bits` fraction bits represent exactly.

    >>> on_grid(torch.tensor([0.3]), bits=2).item()
    0.25
    """
    scale: float = 2.0**bits
    return (values * scale).round() / scale


def plain_sums(
    layers: Sequence[Layer], weights: Mapping[str, Tensor], inputs: Tensor
) -> list[Tensor]:
    """Return, computed in plaintext, the inputs of each function, each of axes (rows, outputs)."""
    found, values = [], inputs
    for index, layer in enumerate(layers):
        sums = values @ weights[f"{index}.weight"]
        if layer.bias:
            sums = sums + weights[f"{index}.bias"]
        found.append(sums)
        values = function(layer.function).value(sums) if layer.function else sums
    return found


def matched_indices(seen: Tensor, sums: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Return the index of the true value with the nearest magnitude for each value, for scoring.

    Args:
        seen: observed values, axes (seen,); their signs may be random.
        sums: the true values in their original order, axes (values,), whose indices are returned.
        tolerance: largest distance to a true value; an observed value that is farther away is a
            dummy.

    Returns:
        Indices into `sums`, int64, axes (seen,); -1 for dummies.
    """
    apart, nearest = (seen.abs()[:, None] - sums.abs()).abs().min(1)
    return torch.where(apart < tolerance, nearest, -1)
