"""Damaged frames against everything that reads frames: refused with a code, or read as agreed.

A damaged frame is refused with an error of vfl's own, or it decodes to a finite tensor of the
agreed shape. Whatever else happens, a warning included, is a failure.
"""

import resource
import sys
import tracemalloc
import warnings
from collections import Counter

import pytest
import torch
from frame_targets import SPECS, all_targets
from mutate import mutated_frames

from vfl.compression import CODECS
from vfl.core.errors import VFLError
from vfl.core.frame import from_bytes
from vfl.core.registry import parse

CASES = [6_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
KIBIBYTES = 1 if sys.platform.startswith("linux") else 1024  # macOS counts ru_maxrss in bytes


def outcome(target, raw):
    """What a reader makes of some bytes: a code or "accepted", or "failed" and why."""
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


def fuzz(cases):
    """How often each outcome came, and (case, target, why) of the failures."""
    targets = all_targets()
    outcomes, failures = Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frames = [target.raw for target in targets]
        for case, index, raw in mutated_frames(frames, 0, 0, cases):
            code, why = outcome(targets[index], raw)
            outcomes[code] += 1
            if why:
                failures.append((case, targets[index].name, why))
    return outcomes, failures


def test_every_codec_is_fuzzed():
    assert {parse(spec)[0] for spec in SPECS} == set(CODECS.names())


def test_an_undamaged_frame_is_accepted():
    for target in all_targets():
        assert outcome(target, bytearray(target.raw)) == ("accepted", ""), target.name


@pytest.mark.parametrize("cases", CASES)
def test_damaged_frames_are_refused_or_read_as_agreed(cases):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes, failures = fuzz(cases)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 / KIBIBYTES
    assert failures == []
    assert outcomes.total() == cases
    assert {"V005", "V407", "V451", "V452", "V453", "V454"} <= set(outcomes)
    assert outcomes["accepted"] > cases / 10
    assert grown_mib < 64


def test_no_case_allocates_what_its_bytes_ask_for():
    targets = all_targets()
    cases = list(mutated_frames([target.raw for target in targets], 5, 0, 1500))
    assert max(int.from_bytes(raw[:4], "little") for _, _, raw in cases) > 2**30
    peaks = {}
    for traced in (False, True):  # the first round imports and fills caches
        if traced:
            tracemalloc.start()
        for case, place, raw in cases:
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            outcome(targets[place], raw)
            peaks[case] = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    # No limit here exceeds 544 bytes but those of greetings; the rest is Python's own.
    assert max(peaks.values()) < 16 * 1024
