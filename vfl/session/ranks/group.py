"""The ranks of one party: processes that divide each batch among them and have copies of one model.

    batch -> rank r's rows -> bottom -> cut -> rank r of the label party -> gradient of that cut
    gradients of the weights, summed over the ranks -> the same optimiser step at each rank

At every rank of the label party the loss is that of the whole batch: each row of rank r has the
same weight in the loss as in the whole batch. The gradients of all ranks therefore add up to the
gradient that a single rank would compute, even if the ranks have different numbers of rows.
`DistributedDataParallel` averages gradients instead, which is correct only if all ranks have equal
numbers of rows. `DistributedDataParallel` also expects a single backward pass from one loss, but a
split model has two backward passes (Li et al. 2020, PyTorch Distributed, section 3.1). This module
therefore uses only the operation on which `DistributedDataParallel` is built: an all-reduce of the
gradients in each step, with gloo, with NCCL between GPUs, or over streams between machines.

Batch normalisation computes its statistics over the rows of all ranks, in the forward and the
backward pass, like torch's `SyncBatchNorm`, which supports only GPUs. Other layers that combine
several rows would see only the rows of one rank: `fit` and `vfl.session.rules.refuse_ranks` refuse
every setting with which several ranks would train a different model from one rank.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from vfl.core.errors import LostRankError, SpecError
from vfl.core.torch_internals import OptimizerFactory, before_steps, gloo_at
from vfl.core.traffic import Ledger, Traffic
from vfl.session.schedule import Exchange

#: Address at which ranks on one machine connect to each other: only processes of this machine can
#: reach it. The reason: gloo and NCCL do not encrypt their traffic, and gloo accepts any process
#: that reaches its port; ranks on several machines use encrypted streams instead.
LOOPBACK = "127.0.0.1"
#: Layer classes that treat every row separately and draw no random numbers. Subclasses of these
#: classes are not included, because they may mix rows or draw random numbers.
ROWS_APART = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.ReLU,
    nn.LeakyReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)  # fmt: skip
#: Layer classes of the same kind that draw random numbers if their attribute `dropout` is not 0.
_WITH_DROPOUT = (nn.MultiheadAttention, nn.GRU, nn.LSTM)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class Group(Protocol):
    """Collective operations of a party's ranks; every rank has to call each operation.

    Raises:
        LostRankError: another rank has ended, or sent nothing for too long; every method may raise
            this error.
    """

    def add_up(self, values: Tensor) -> None:
        """Replace values in place by their sum over all ranks.

        The sum is equal bit for bit at each rank.
        """

    def spread(self, values: Tensor) -> None:
        """Replace values in place by the values that rank 0 passes."""

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the values that each rank passes, ordered by rank; all must have the same axes."""


class TorchGroup:
    """Collective operations between ranks on one machine, with process groups of torch.

    Args:
        party: party of the ranks, for error messages.
        group: a gloo group.
        of_weights: group for sums of tensors on GPUs, such as gradients; with GPUs, it is an NCCL
            group if NCCL is available. None uses `group`.
    """

    def __init__(self, party: str, group: Any, of_weights: Any = None) -> None:
        self._party, self._group, self._of_weights = party, group, of_weights or group

    def add_up(self, values: Tensor) -> None:
        """See `Group`."""
        group = self._of_weights if values.is_cuda else self._group
        with _named(self._party):
            group.allreduce([values]).wait()

    def spread(self, values: Tensor) -> None:
        """See `Group`."""
        with _named(self._party):
            self._group.broadcast(values, 0).wait()

    def gather(self, values: Tensor) -> list[Tensor]:
        """See `Group`."""
        found = [torch.empty_like(values) for _ in range(self._group.size())]
        with _named(self._party):
            self._group.allgather([found], [values]).wait()
        return found


class Ranks:
    """One rank (process) of a party, with its group; without arguments, the party's only rank.

    Every method except `share` and `together` is collective: all ranks of the party must call it at
    the same point.

    Args:
        party: party to which the ranks belong, for error messages.
        rank: number of this process, from 0; only rank 0 writes the party's files.
        size: number of ranks of the party.
        group: collective operations of all ranks; None for a single rank.

    Attributes:
        alone: whether this is the only rank.

    Raises:
        LostRankError: another rank has ended, or sent nothing for too long; every collective method
            may raise this error.
    """

    def __init__(
        self, party: str = "", rank: int = 0, size: int = 1, group: Group | None = None
    ) -> None:
        self.party, self.rank, self.size = party, rank, size
        self.alone = size == 1
        self._together = group

    @classmethod
    def join_group(
        cls, party: str, rank: int, size: int, store: Any, timeout_s: float, device: str = "cpu"
    ) -> Ranks:
        """Form the group of the ranks on one machine; return when all ranks have joined.

        Args:
            party: party of the ranks.
            rank: number of this process.
            size: number of ranks.
            store: torch's key-value store, through which the ranks find each other.
            timeout_s: longest time in seconds that a rank may keep the other ranks waiting.
            device: device of the models; NCCL transfers gradients between GPUs.
        """
        from torch import distributed

        # These process groups are separate from torch's default group.
        with _named(party):
            group = gloo_at(LOOPBACK, store, rank, size, timeout_s)
            of_weights = None
            if torch.device(device).type == "cuda" and distributed.is_nccl_available():
                nccl: Any = distributed.ProcessGroupNCCL
                of_weights = nccl(store, rank, size, nccl.Options())
        return cls(party, rank, size, TorchGroup(party, group, of_weights))

    def share(self, exchange: Exchange) -> Exchange:
        """Restrict an exchange to this rank's rows, about as many as at each other rank.

        >>> whole = Exchange(0, "train", 1, np.arange(5), last=True)
        >>> [Ranks("a", rank, 2).share(whole).rows.tolist() for rank in (0, 1)]
        [[0, 1, 2], [3, 4]]
        """
        if self.alone:
            return exchange
        return replace(exchange, rows=np.array_split(exchange.rows, self.size)[self.rank])

    def together(self, build: OptimizerFactory) -> OptimizerFactory:
        """Wrap an optimiser factory: its optimisers sum all ranks' gradients before a step."""
        return build if self.alone else before_steps(build, self._sum_gradients)

    def whole(self, outputs: Tensor, loss: float, rows: int) -> tuple[Tensor, float]:
        """Collect the outputs and losses that all ranks have computed for a batch.

        Args:
            outputs: outputs of this rank's rows; axes (this rank's rows, outputs).
            loss: this rank's summand of the batch's mean loss.
            rows: number of rows of the whole batch.

        Returns:
            Outputs of all rows in the batch's order, axes (rows, outputs), and the batch's mean
            loss.
        """
        if self.alone:
            return outputs, loss
        counts = [len(part) for part in np.array_split(np.arange(rows), self.size)]
        # Each rank sends one message: its first row contains the loss, and its last row may be
        # padding.
        mine = outputs.new_zeros(1 + counts[0], outputs.shape[1], device="cpu")
        mine[0], mine[1 : 1 + len(outputs)] = loss, outputs
        found = self._group.gather(mine)
        parts = [one[1 : 1 + count] for one, count in zip(found, counts, strict=True)]
        total = sum(float(one[0, 0]) for one in found)
        return torch.cat(parts).to(outputs.device), total

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks as a new tensor with the same axes."""
        summed = values.detach().clone(memory_format=torch.contiguous_format)
        self._group.add_up(summed)
        return summed

    def spread(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a state from rank 0 to every rank, and return this state at every rank.

        Args:
            state: tensors, numbers and texts in mappings and lists; the argument of other ranks is
                ignored.
        """
        if self.alone:
            return state
        content = io.BytesIO()
        if self.rank == 0:
            torch.save(dict(state), content)
        size = torch.tensor([content.tell()])
        self._group.spread(size)
        carried = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            carried.copy_(torch.frombuffer(content.getbuffer(), dtype=torch.uint8))
        self._group.spread(carried)
        if self.rank == 0:
            return state
        found: dict[str, Any] = torch.load(
            io.BytesIO(carried.numpy().tobytes()), map_location="cpu", weights_only=True
        )
        return found

    def count_at_first(self, counts: Sequence[int]) -> list[int]:
        """Sum counts over all ranks; return the sums at rank 0, and zeros at the other ranks.

        Because of the zeros, no byte is counted twice if the results of all ranks are added.
        """
        if self.alone:
            return list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        self._group.add_up(sums)
        return [int(one) for one in (sums if self.rank == 0 else torch.zeros_like(sums))]

    def merge(self, ledger: Ledger, parties: Sequence[str]) -> None:
        """Move the byte counts of all ranks to rank 0's ledger; waiting times are not moved."""
        if self.alone:
            return
        keys = list(product(parties, ("up", "down"), ("train", "evaluate", "control")))
        own = {(row.party, row.direction, row.phase): row for row in ledger.rows()}
        rows = [own.get(key, Traffic(*key)) for key in keys]
        sums = self.count_at_first(
            [count for row in rows for count in (row.frames, row.payload_bytes, row.wire_bytes)]
        )
        merged = [
            {"party": row.party, "direction": row.direction, "phase": row.phase}
            | {"frames": sums[3 * at], "payload_bytes": sums[3 * at + 1]}
            | {"wire_bytes": sums[3 * at + 2], "seconds": row.seconds}
            for at, row in enumerate(rows)
        ]
        ledger.restore([row for row in merged if row["frames"]])

    def metered(
        self, schedule: Iterable[Exchange], counted: MutableMapping[str, int]
    ) -> Iterator[Exchange]:
        """Yield the same exchanges.

        After each epoch, move the byte counts of all ranks to rank 0.
        """
        for _, exchanges in groupby(schedule, key=lambda exchange: exchange.epoch):
            yield from exchanges
            counted.update(zip(counted, self.count_at_first(list(counted.values())), strict=True))

    @property
    def _group(self) -> Group:
        assert self._together is not None, "there are several"
        return self._together

    def _sum_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Replace all gradients by their sums over the ranks, with one message per rank.

        The message also contains which weights have a gradient at this rank.
        """
        flat = [w.new_zeros(w.numel()) if w.grad is None else w.grad.reshape(-1) for w in weights]
        known = flat[0].new_tensor([float(weight.grad is not None) for weight in weights])
        message = torch.cat([*flat, known])
        self._group.add_up(message)
        *sums, known = torch.split(message, [*(len(one) for one in flat), len(known)])
        for weight, total, has in zip(weights, sums, known.tolist(), strict=True):
            weight.grad = total.view_as(weight) if has else None


ALONE = Ranks()


class _named:
    """Convert a torch error in the `with` block to the error for a lost rank.

    Torch's error would name only the network address of the rank.
    """

    def __init__(self, party: str) -> None:
        self._party = party

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise lost(self._party) from None


def lost(party: str, rank: int | None = None, how: str | None = None) -> LostRankError:
    """Make the error for a lost rank.

    Args:
        party: party of the rank.
        rank: number of the rank; None if it is unknown.
        how: text that states how the rank's process ended, for example its exit code.
    """
    return LostRankError(
        f"{'a rank' if rank is None else f'rank {rank}'} of party '{party}' was lost",
        got=how or "its connection to the other ranks broke, or it sent nothing for too long",
    )


def fit(model: nn.Module, ranks: Ranks) -> None:
    """Let batch norms use the rows of all ranks; refuse other layers that mix rows or draw numbers.

    Raises:
        SpecError: a layer of the model does not support several ranks; the error names the layer.
    """
    if ranks.alone:
        return
    for name, part in model.named_modules():
        if type(part) in BATCH_NORMS and part.track_running_stats and part.momentum is not None:
            part.forward = partial(_normalised, part, ranks)
            continue
        harmless = type(part) in (*ROWS_APART, *_WITH_DROPOUT) and not getattr(part, "dropout", 0.0)
        off = isinstance(part, nn.Dropout) and part.p == 0
        own = type(part).__module__.startswith(("vfl.models.", "vfl.compression."))
        if not (harmless or off or own):
            raise SpecError(
                f"{ranks.size} ranks would train this model differently from one rank: a "
                "layer that draws random numbers, or combines several rows of a batch, would read "
                "only one rank's rows",
                where=f"layer '{name}'",
                got=type(part).__name__,
                fix="use a model without this layer, or one rank at every party",
            )


class _Total(torch.autograd.Function):
    """Sum of a tensor over all ranks; the backward pass sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.total(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.total(grads[0]), None


def _normalised(norm: Any, ranks: Ranks, inputs: Tensor) -> Tensor:
    """Compute batch norm over the rows of all ranks (Ioffe and Szegedy 2015, algorithm 1).

    Args:
        norm: torch's batch normalisation layer, with its weights and running statistics.
        ranks: the ranks whose rows enter the statistics.
        inputs: inputs of the layer, axes (rows, channels, ...).
    """
    if not norm.training:
        means, variances = norm.running_mean, norm.running_var
        return batch_norm(inputs, means, variances, norm.weight, norm.bias, eps=norm.eps)
    axes = [axis for axis in range(inputs.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(inputs.dim())]

    def total(values: Tensor) -> Tensor:
        summed: Tensor = _Total.apply(values, ranks)  # type: ignore[no-untyped-call]
        return summed

    own = inputs.new_tensor([inputs.numel() / inputs.shape[1]])
    sums = total(torch.cat([inputs.sum(axes), own]))
    count = sums[-1]
    mean = sums[:-1] / count
    centred = inputs - mean.view(shape)
    # subtract the mean first, which avoids cancellation
    variance = total((centred**2).sum(axes)) / count
    outputs: Tensor = centred * torch.rsqrt(variance + norm.eps).view(shape)
    with torch.no_grad():
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * count / (count - 1), norm.momentum)
        norm.num_batches_tracked.add_(1)
    if norm.weight is not None:
        outputs = outputs * norm.weight.view(shape) + norm.bias.view(shape)
    return outputs
