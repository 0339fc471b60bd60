"""``vfl bench fuzz``: damaged frames against everything that reads frames.

A damaged frame is refused with an error of vfl's own, or it decodes to a finite tensor of the
agreed shape. Whatever else happens, a warning included, is a failure. A case follows from its seed
and number alone, so one that failed is run again by ``--seed S --start N --cases 1``.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vfl.bench.mutate import mutated_frames
from vfl.bench.targets import Target, all_targets
from vfl.core.errors import BadOptionError, VFLError
from vfl.core.frame import from_bytes

CASES = 1_000_000
SHOWN_FAILURES = 20
PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that broke a promise.

    Attributes:
        case: its number; with the seed it repeats the case.
        target: what was read.
        what: the exception, or how the tensor differs.
    """

    case: int
    target: str
    what: str


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """What became of the cases.

    Attributes:
        seed, start, cases: which cases they were.
        seconds: how long they took.
        accepted: cases that were read in spite of the damage.
        refused: cases by error code.
        failed: cases that broke a promise.
        failures: the first of them.
    """

    seed: int
    start: int
    cases: int
    seconds: float
    accepted: int
    refused: dict[str, int]
    failed: int
    failures: tuple[Failure, ...]


def bench_fuzz(
    cases: int = CASES,
    *,
    seed: int = 0,
    start: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> FuzzResult:
    """Feed damaged frames to every reader.

    Args:
        cases: how many.
        seed: of the damage.
        start: number of the first case.
        say: told the progress every few seconds.

    Raises:
        BadOptionError: no cases, or a negative number of the first one.
    """
    if cases < 1 or start < 0:
        raise BadOptionError("nothing to fuzz", got=f"{cases} cases from {start}", want="one case")
    targets = all_targets()
    outcomes: Counter[str] = Counter()
    failures: list[Failure] = []
    began = said = time.monotonic()
    frames = [target.raw for target in targets]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for done, (case, place, raw) in enumerate(mutated_frames(frames, seed, start, cases)):
            code, what = outcome(targets[place], raw)
            outcomes[code] += 1
            if what and len(failures) < SHOWN_FAILURES:
                failures.append(Failure(case, targets[place].name, what))
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                say(f"{done + 1} of {cases} cases, {outcomes['failed']} failed")
    seconds = round(time.monotonic() - began, 3)
    accepted, failed = outcomes.pop("accepted", 0), outcomes.pop("failed", 0)
    refused = dict(sorted(outcomes.items()))
    return FuzzResult(seed, start, cases, seconds, accepted, refused, failed, tuple(failures))


def outcome(target: Target, raw: bytearray) -> tuple[str, str]:
    """What a reader makes of some bytes.

    Returns:
        "accepted", the code of the error that refused them, or "failed"; then why it failed.
    """
    try:
        tensor = target.read(from_bytes(raw, target.limit_bytes))
    except VFLError as refusal:
        return refusal.code, ""
    except Exception as error:  # any other exception is what fuzzing looks for
        return "failed", f"{type(error).__name__}: {error}"
    if tensor is None and target.shape is None:
        return "accepted", ""
    if tensor is None or tuple(tensor.shape) != target.shape:
        return "failed", "a tensor of another shape than agreed"
    if tensor.dtype != torch.float32 or not torch.isfinite(tensor).all():
        return "failed", "a tensor that is not finite float32"
    return "accepted", ""


def format_result(result: FuzzResult) -> str:
    """The result for people."""
    lines = [
        f"{result.cases} cases in {result.seconds:.1f} s",
        f"{'accepted':<10}{result.accepted:>10}",
        *(f"{code:<10}{count:>10}" for code, count in result.refused.items()),
        f"{'failed':<10}{result.failed:>10}",
    ]
    lines += [
        f"{failure.target}: {failure.what}\n"
        f"  try   vfl bench fuzz --seed {result.seed} --start {failure.case} --cases 1"
        for failure in result.failures
    ]
    return "\n".join(lines)
