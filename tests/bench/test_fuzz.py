from __future__ import annotations

import json
import resource
import sys
import tracemalloc
import warnings
import zlib
from collections import Counter
from itertools import islice

import pytest
import torch

from vfl.bench import fuzz
from vfl.bench.fuzz import bench_fuzz, format_result, outcome
from vfl.bench.mutate import BLOCK_CASES, mutated_frames, repair
from vfl.bench.targets import SPECS, all_targets
from vfl.compression import CODECS
from vfl.core.errors import BadOptionError
from vfl.core.frame import HEADER_BYTES, Frame, Kind, from_bytes, to_bytes
from vfl.core.registry import parse

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from vfl.cli import app

CASES = 20_000
FRAME = to_bytes(Frame(Kind.CUT, 3, bytes(range(40))))
KIBIBYTES = 1 if sys.platform.startswith("linux") else 1024  # macOS counts ru_maxrss in bytes


def test_every_codec_is_fuzzed():
    assert {parse(spec)[0] for spec in SPECS} == set(CODECS.names())


def test_an_undamaged_frame_is_accepted():
    for target in all_targets():
        assert outcome(target, bytearray(target.raw)) == ("accepted", ""), target.name


def test_targets_cover_shapes_directions_and_greetings():
    kinds = Counter(from_bytes(target.raw).kind.name for target in all_targets())
    assert set(kinds) == {"CUT", "QUERY", "GRAD", "HELLO", "WELCOME", "ERROR"}
    assert kinds["HELLO"] + kinds["WELCOME"] + kinds["ERROR"] >= kinds.total() / 10
    assert {target.shape[0] for target in all_targets() if target.shape} >= {0, 1, 5}


def test_twenty_thousand_damaged_frames():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = bench_fuzz(CASES)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 / KIBIBYTES
    assert result.failures == ()
    assert result.failed == 0
    assert result.accepted + sum(result.refused.values()) == CASES
    assert {"V005", "V407", "V451", "V452", "V453", "V454"} <= set(result.refused)
    assert result.accepted > CASES / 10
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


def test_a_case_is_the_same_wherever_a_run_starts():
    frames = [FRAME, FRAME + b"x"]
    whole = list(mutated_frames(frames, 7, 0, BLOCK_CASES + 50))
    for start in (0, 17, BLOCK_CASES - 1, BLOCK_CASES, BLOCK_CASES + 49):
        assert list(mutated_frames(frames, 7, start, 1)) == whole[start : start + 1]
    assert list(islice(mutated_frames(frames, 8, 0, 50), 50)) != whole[:50]


def kind_of_damage(raw):
    """The damage as it shows: by length, then by how many bits differ."""
    if len(raw) != len(FRAME):
        return "truncate" if len(raw) < len(FRAME) else "extend"
    payloads = zip(raw[HEADER_BYTES:], FRAME[HEADER_BYTES:], strict=True)
    return "flip" if sum((a ^ b).bit_count() for a, b in payloads) <= 4 else "replace"


def test_shares_of_the_kinds_of_damage():
    cases = 4 * BLOCK_CASES
    raws = [raw for _, _, raw in mutated_frames([FRAME], 0, 0, cases)]
    seen = Counter(map(kind_of_damage, raws))
    wanted = {"flip": 0.5, "truncate": 0.2, "extend": 0.15, "replace": 0.15}
    assert {kind: seen[kind] / cases for kind in wanted} == pytest.approx(wanted, abs=0.015)
    whole = [raw for raw in raws if len(raw) >= HEADER_BYTES]
    right = [
        raw
        for raw in whole
        if int.from_bytes(raw[:4], "little") == len(raw) - HEADER_BYTES
        and int.from_bytes(raw[12:16], "little") == zlib.crc32(raw[:12] + raw[16:])
    ]
    assert len(right) / len(whole) == pytest.approx(0.8, abs=0.02)


def test_repairing_reaches_the_decoder():
    raw = bytearray(FRAME)
    raw[20] ^= 1
    raw += b"more"
    repair(raw)
    assert bytes(from_bytes(raw).payload) == bytes(raw[HEADER_BYTES:])
    stump = bytearray(FRAME[:9])
    repair(stump)
    assert stump == FRAME[:9]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda codec, payload, rows, width: 1 / 0, "ZeroDivisionError"),
        (lambda codec, payload, rows, width: torch.zeros(rows + 1, width), "another shape"),
        (lambda codec, payload, rows, width: torch.zeros(rows, width).double(), "float32"),
        (lambda codec, payload, rows, width: warnings.warn("odd", stacklevel=1), "UserWarning"),
    ],
    ids=["exception", "shape", "type", "warning"],
)
def test_a_broken_decoder_is_found_and_the_case_repeats(monkeypatch, answer, told):
    from vfl.compression.none import Uncompressed

    real = all_targets()  # made while the decoder still works
    monkeypatch.setattr(fuzz, "all_targets", lambda: real)
    monkeypatch.setattr(
        Uncompressed,
        "decode_grad",
        lambda self, payload, saved, rows, width, moment: answer(self, payload, rows, width),
    )
    result = bench_fuzz(3000, seed=3, start=100)
    assert result.failed >= len(result.failures) > 0
    for failure in result.failures:
        assert failure.target.startswith("GRAD none")
        assert told in failure.what
    first = result.failures[0]
    again = bench_fuzz(1, seed=3, start=first.case)
    assert again.failures == (first,)
    assert f"--seed 3 --start {first.case} --cases 1" in format_result(result)


def test_nothing_to_fuzz_is_refused():
    for cases, start in ((0, 0), (1, -1)):
        with pytest.raises(BadOptionError):
            bench_fuzz(cases, start=start)


def test_progress_is_told(monkeypatch):
    monkeypatch.setattr(fuzz, "PROGRESS_S", 0.0)
    said = []
    bench_fuzz(20, say=said.append)
    assert said[-1] == "20 of 20 cases, 0 failed"


def test_the_command_prints_one_object_and_its_exit_status(monkeypatch):
    runner = CliRunner()
    asked = ["bench", "fuzz", "--cases", "500", "--seed", "2", "--start", "10"]
    done = runner.invoke(app, [*asked, "--json"])
    record = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (record["seed"], record["start"], record["cases"]) == (2, 10, 500)
    assert record["accepted"] + sum(record["refused"].values()) == 500
    assert runner.invoke(app, asked).stdout.splitlines()[-1].split() == ["failed", "0"]
    monkeypatch.setattr(fuzz, "outcome", lambda target, raw: ("failed", "planted"))
    assert runner.invoke(app, asked).exit_code == 1
