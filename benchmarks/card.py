"""A training step of vfl on a GPU, compared with PyTorch without vfl on the GPU and on the CPU.

All parties run in this one process and use its GPU; cuts and gradients still cross the links as
bytes. The plain loop, an ordinary PyTorch training loop, also moves each batch to the GPU, as the
parties do. The variants take turns, and times are medians over the turns. Without a GPU, only the
CPU is measured.

With `--products`, the benchmark instead measures products of ring elements, and the encoding and
decoding of cuts, including transfers to and from the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.training_step import KNOWN, Setup, StepJob, in_process, monolith
from vfl import compression
from vfl.core.seeds import generator
from vfl.mpc import ring

SIZES = ("mlp_small", "mlp", "cnn", "pictures")
CODECS = ("none", "topk:k=3", "quantise:values=4")
#: Side lengths of square matrices of ring elements; numbers of rows and widths of cuts.
SIDES = (256, 512, 1024, 2048)
CUTS = ((64, 128), (256, 256), (256, 1280), (1024, 4096))
WARMUP_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """Time of a training step on one device, and the loss; with vfl or in the plain loop.

    Attributes:
        workload, batch_size, width: sizes of the network and the batch.
        codec: codec of the cut; None for the plain loop, which is PyTorch without vfl.
        device: device on which the models run.
        wall_ms: wall time per step.
        of_loop: `wall_ms` divided by the time of the plain loop on the same device.
        final_loss: mean training loss of the last epoch.
    """

    workload: str
    batch_size: int
    width: int
    codec: str | None
    device: str
    wall_ms: float
    of_loop: float
    final_loss: float


def bench_card(
    workloads: Sequence[str] = SIZES,
    steps: int | None = None,
    repeats: int = 5,
    seed: int = 0,
    products: bool = False,
    quick: bool = False,
) -> Sequence[CardRow | ProductRow]:
    """Measure a training step on a GPU and on the CPU, for every workload and codec.

    Args:
        workloads: networks.
        steps: number of timed steps in a turn.
        repeats: number of turns.
        seed: seed of rows, weights and batch order.
        products: whether to measure products of ring elements, and codecs, instead of training
            steps.
        quick: whether to only check that the benchmark runs, with few steps.
    """
    if products:
        return bench_products(3 if quick else 20)
    if quick:
        steps, repeats = 20, 1
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = []
    for name in workloads:
        workload = KNOWN[name]
        paths = [(device, codec) for device in devices for codec in (None, *CODECS)]
        took: dict[tuple[str, str | None], list[float]] = {path: [] for path in paths}
        losses = {}
        for turn in range(repeats):
            harness.say(f"{name}, turn {turn + 1} of {repeats}")
            for device, codec in paths:
                setup = Setup(
                    StepJob(
                        path="monolith" if codec is None else "inprocess",
                        workload=name,
                        seed=seed,
                        warmup_steps=WARMUP_STEPS,
                        steps=steps or workload.steps,
                        codec=codec or "none",
                    )
                )
                run = monolith if codec is None else in_process
                found = run(setup, device=device)
                took[device, codec].append(found.wall_ms)
                losses[device, codec] = found.final_loss
        for device, codec in paths:
            wall_ms = median(took[device, codec])
            rows.append(
                CardRow(
                    workload=name,
                    batch_size=workload.batch_size,
                    width=workload.width,
                    codec=codec,
                    device=device,
                    wall_ms=wall_ms,
                    of_loop=wall_ms / median(took[device, None]),
                    final_loss=losses[device, codec] or 0.0,
                )
            )
    return rows


@dataclass(frozen=True, slots=True)
class ProductRow:
    """Time of one computation on the CPU and on the GPU.

    Attributes:
        work: name of the computation.
        here_ms: time in ms on the CPU, with as many threads as torch uses.
        there_ms: time in ms on the GPU; None without a GPU.
    """

    work: str
    here_ms: float
    there_ms: float | None


def bench_products(repeats: int, seed: int = 0) -> list[ProductRow]:
    """Measure products of square matrices of ring elements, and codecs on real cuts."""
    draw, rows = generator(seed, "bench", "products"), []
    card = torch.device("cuda") if torch.cuda.is_available() else None
    for side in SIDES:
        left, right = torch.randint(-(2**63), 2**63 - 1, (2, side, side), generator=draw)

        def product(device: torch.device, left: Tensor = left, right: Tensor = right) -> None:
            ring.multiply_on(device)
            ring.matmul(left, right)

        few = min(repeats, 3)
        rows.append(_in_both(f"ring product, {side} x {side}", product, card, few))
        ring.multiply_on(torch.device("cpu"))
    for shape in CUTS:
        cut = torch.randn(*shape, generator=draw).to(card or "cpu")
        for spec in ("none", f"topk:k={shape[1] // 50}", "quantise:values=4"):

            def trip(device: torch.device, spec: str = spec, cut: Tensor = cut) -> None:
                codec = compression.make(spec)
                codec.device = device
                payload = codec.encode(cut.to(device)).payload
                decoded = codec.decode(payload, *cut.shape).cut
                decoded.to(cut.device).sum().item()

            size = f"{shape[0]} x {shape[1]}"
            rows.append(_in_both(f"{spec}, {size}", trip, card, repeats))
    return rows


def _in_both(
    work: str, call: Callable[[torch.device], None], card: torch.device | None, repeats: int
) -> ProductRow:
    took: dict[torch.device, list[float]] = {}
    for _ in range(repeats + 1):
        for device in (torch.device("cpu"), card):
            if device is not None:
                seconds = harness.timed(partial(call, device), time.perf_counter)
                took.setdefault(device, []).append(1000 * seconds)
    middle = {device: median(times[1:]) for device, times in took.items()}
    return ProductRow(work, middle[torch.device("cpu")], middle[card] if card else None)


CARDS = harness.table(
    ("network", "<11", "workload"),
    ("batch", ">5", "batch_size"),
    ("width", ">6", "width"),
    ("", "<2", lambda row: ""),
    ("device", "<7", "device"),
    ("codec", "<18", lambda row: row.codec or "loop"),
    ("ms a step", ">10.2f", "wall_ms"),
    ("of loop", ">8", lambda row: harness.times(row.of_loop)),
    ("loss", ">9.4f", "final_loss"),
)
PRODUCTS = harness.table(
    ("work", "<40", "work"),
    ("processor ms", ">13.2f", "here_ms"),
    ("card ms", ">10.2f", "there_ms"),
)


def shown(rows: Sequence[CardRow | ProductRow]) -> str:
    """Format one line per row."""
    return (PRODUCTS if isinstance(rows[0], ProductRow) else CARDS)(rows)


main = harness.command(bench_card, shown)


if __name__ == "__main__":
    main()
