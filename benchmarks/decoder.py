"""Answers of a private decoder: functions, the choice of a score, one layer, whole tokens.

The rows of Tables 6.1 and 6.2 (thesis, 2025) and a small model, all parties as threads of this
process, one thread each. Bytes are payloads between P0 and P1 online, and all that was sent
offline. Seconds are of the processor, of P0 and P1 together, who take turns. Of a line with a width
and a delay the time is computed, not measured: those seconds, the bytes one after the other, and
half a round trip a message.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from vfl.config.toml import Settings
from vfl.core.frame import HEADER_BYTES
from vfl.core.seeds import use_one_thread
from vfl.models.decoder import Cache, Decoder, DecoderShape
from vfl.mpc.channel import Traffic
from vfl.mpc.private_decoder import PrivateDecoder, PrivateLayers
from vfl.mpc.rules import P0, P1, Mode
from vfl.mpc.two_party import Form, Growing, LocalRoles, Role, Shared

_MODES: tuple[Mode, ...] = ("thesis", "fast")
#: Of Table 6.2: what a token looks at, and the heads of a layer by its width.
_CONTEXT, _HEADS = 32, {768: 12, 4096: 32}
_MIB = 2.0**20
#: The line of the thesis' goals: 80 Mbit/s, 40 ms there and back.
_LINE_BYTES_S, _HOP_S = 10e6, 0.02
_BITS, _RING, _RESULT_BITS = 30, 40, 14


class DecoderRow(Settings):
    """What one thing took.

    Attributes:
        what: such as "gelu 100000".
        mode: "fast" or "thesis".
        online_mib: payload between P0 and P1.
        messages: likewise, one after the other.
        offline_mib: all that all parties sent ahead, headers included.
        cpu_s: online, the median.
        computed_wan_s: see the module.
        plain_s: the same by torch in float32.
        error: the largest difference to torch in float64; of tokens, of logits.
        same: of tokens, how many are those of plain torch.
        of: how many there were.
    """

    what: str
    mode: str
    online_mib: float
    messages: int
    offline_mib: float
    cpu_s: float
    computed_wan_s: float
    plain_s: float
    error: float | None = None
    same: int | None = None
    of: int | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """One program, played once: what P0 and P1 have, and what it took."""

    found: list[Any]
    seconds: float
    online_bytes: int
    messages: int
    offline_bytes: int

    def row(self, what: str, mode: str, seconds: float, plain_s: float, **more: Any) -> DecoderRow:
        """With the times of several."""
        computed = seconds + self.online_bytes / _LINE_BYTES_S + _HOP_S * self.messages
        return DecoderRow(
            what=what,
            mode=mode,
            online_mib=self.online_bytes / _MIB,
            messages=self.messages,
            offline_mib=self.offline_bytes / _MIB,
            cpu_s=seconds,
            computed_wan_s=computed,
            plain_s=plain_s,
            **more,
        )


def bench_decoder(
    elements: Sequence[int] = (1000, 100_000),
    widths: Sequence[int] = (768,),
    prompts: int = 200,
    turns: int = 5,
    *,
    say: Callable[[str], None] = harness.silent,
) -> list[DecoderRow]:
    """Measure all rows in both modes.

    Args:
        elements: of functions and scores.
        widths: of layers, one token at a context of 32.
        prompts: of the small model, next tokens each.
        turns: of each function and layer.
        say: told one line about each row.
    """
    use_one_thread()
    rows = []
    for mode in _MODES:
        for count in elements:
            say(f"{mode}: {count} elements")
            rows += [_gelu(mode, count, turns), _argmax(mode, count, turns)]
        for width in widths:
            say(f"{mode}: a layer of {width}")
            rows.append(_layer(mode, width, turns))
        if prompts:
            say(f"{mode}: {prompts} prompts")
            rows.append(_tokens(mode, prompts))
    return rows


def _play(parties: LocalRoles, program: Callable[[Role], Any]) -> Played:
    offline = _sent(parties.traffic(), "offline")[0]
    material = parties.run(lambda party: party.prepare(program))
    offline = _sent(parties.traffic(), "offline")[0] - offline
    before = _sent(parties.traffic(), "online")
    began = time.process_time()
    found = parties.run(lambda party: party.answer(program, material[party.role]), (P0, P1))
    seconds = time.process_time() - began
    sent, frames = (b - a for a, b in zip(before, _sent(parties.traffic(), "online"), strict=True))
    return Played(found, seconds, sent - HEADER_BYTES * frames, frames, offline)


def _sent(rows: Sequence[Traffic], phase: str) -> tuple[int, int]:
    """Bytes and frames of a phase."""
    of_phase = [row for row in rows if row.phase == phase]
    return sum(row.wire_bytes for row in of_phase), sum(row.frames for row in of_phase)


def _dealt(party: Role, values: Tensor, bits: int = _BITS) -> Shared:
    """Values as shares of which P1's is known ahead, as behind a product; nothing is sent."""
    known = torch.arange(values.numel()).reshape(values.shape) * 0x1E3779B97F4A7C15
    exact = (values * 2.0**bits).round().long()
    return Shared(known if party.role == P1 else exact - known, bits, _RING, known=True)


def _timed(turns: int, play: Callable[[], Played]) -> tuple[Played, float]:
    played = [play() for _ in range(turns + 1)][1:]
    return played[-1], median(each.seconds for each in played)


def _plain(turns: int, function: Callable[[], Any]) -> float:
    def once() -> float:
        began = time.process_time()
        function()
        return time.process_time() - began

    return median(once() for _ in range(turns))


def _value(halves: Sequence[Shared]) -> Tensor:
    above = 64 - halves[0].ring
    total = ((halves[0].share + halves[1].share) << above) >> above
    return total.double() * 2.0 ** -halves[0].bits


def _gelu(mode: Mode, count: int, turns: int) -> DecoderRow:
    values = 2 * torch.randn(1, count, dtype=torch.float64)

    def program(party: Role) -> Shared:
        shared = _dealt(party, values)
        return party.apply(shared, F.gelu, _RESULT_BITS, _RING, "gelu", "elements")

    with LocalRoles(Form(mode), {}) as parties:
        played, seconds = _timed(turns, lambda: _play(parties, program))
    error = float((_value(played.found) - F.gelu(values)).abs().max())
    plain = _plain(turns, partial(F.gelu, values.float()))
    return played.row(f"gelu {count}", mode, seconds, plain, error=error)


def _argmax(mode: Mode, count: int, turns: int) -> DecoderRow:
    values = 3 * torch.randn(1, count, dtype=torch.float64)

    def program(party: Role) -> int | None:
        return party.choose(_dealt(party, values), lambda scores: int(scores.argmax()))

    with LocalRoles(Form(mode), {}) as parties:
        played, seconds = _timed(turns, lambda: _play(parties, program))
    same = int(played.found[P1] == int(values.argmax()))
    plain = _plain(turns, partial(torch.argmax, values.float()))
    return played.row(f"argmax {count}", mode, seconds, plain, same=same, of=1)


def _layer(mode: Mode, width: int, turns: int) -> DecoderRow:
    shape = DecoderShape(
        vocabulary=32, width=width, layers=1, heads=_HEADS.get(width, 8), context=_CONTEXT
    )
    torch.manual_seed(0)
    model, x = Decoder(shape).eval(), torch.randn(1, _CONTEXT, width)
    with LocalRoles(Form(mode), {}, timeout_s=300) as parties:
        layers = parties.run(
            lambda party: PrivateLayers.share(party, shape, model if party.role == P0 else None)
        )

        def program(last: int, party: Role) -> tuple[Shared, float]:
            """All steps but the last one at once, and the last one where that is asked for."""
            caches, steps = (Growing(), Growing()), [(0, _CONTEXT - 1), (_CONTEXT - 1, _CONTEXT)]
            for start, end in steps[: 1 + last]:
                shared = _dealt(party, x[0, start:end].double())
                began = time.thread_time()
                found = layers[party.role].layer(party, 0, shared, start, caches)
            return found, time.thread_time() - began

        before, both = (
            [_play(parties, partial(program, last)) for _ in range(turns + 1)][1:]
            for last in (0, 1)
        )
    parts = [
        getattr(both[-1], name) - getattr(before[-1], name)
        for name in ("online_bytes", "messages", "offline_bytes")
    ]
    seconds = median(sum(took for _, took in each.found) for each in both)
    with torch.no_grad():
        layer = model.layers[0]
        exact = layer.double()(x.double(), 0, None)[0][0, -1]
        layer.float()
        _, kept = layer(x[:, :-1], 0, None)
        plain = _plain(turns, lambda: layer(x[:, -1:], _CONTEXT - 1, kept))
    error = float((_value([half for half, _ in both[-1].found])[0] - exact).abs().max())
    played = Played([], seconds, *parts)
    return played.row(f"layer {width}, a token", mode, seconds, plain, error=error)


def _tokens(mode: Mode, prompts: int) -> DecoderRow:
    """Next tokens of a small random model beside plain torch."""
    torch.manual_seed(0)
    shape = DecoderShape(vocabulary=512, width=64, layers=2, heads=4, tied=False)
    model = Decoder(shape).eval()
    texts = torch.randint(0, shape.vocabulary, (prompts, 8)).tolist()
    same, errors, times, plain_times = 0, [], [], []
    with PrivateDecoder(model, Form(mode)) as hidden:
        for text in texts:
            seen: list[Tensor] = []

            def pick(scores: Tensor, seen: list[Tensor] = seen) -> int:
                seen.append(scores.sort().values)
                return int(scores.argmax())

            hidden.deal(len(text), 1)
            began = time.process_time()
            (token,) = hidden.generate(text, 1, pick)
            times.append(time.process_time() - began)
            began = time.process_time()
            cache: Cache = []
            with torch.no_grad():
                logits = model(torch.tensor([text]), cache)[0, -1]
            plain_times.append(time.process_time() - began)
            same += token == int(logits.argmax())
            errors.append(float((seen[0] - logits.double().sort().values).abs().max()))
        online, frames = _sent(hidden.traffic(), "online")
        offline, _ = _sent(hidden.traffic(), "offline")
    one = Played(
        [],
        median(times),
        (online - HEADER_BYTES * frames) // prompts,
        frames // prompts,
        offline // prompts,
    )
    return one.row(
        "2 layers of 64, a first token of 8",
        mode,
        one.seconds,
        median(plain_times),
        error=max(errors),
        same=same,
        of=prompts,
    )


def format_decoder(rows: Sequence[DecoderRow]) -> str:
    """As a table of Markdown."""
    lines = [
        "| what | mode | online MiB | messages | offline MiB | CPU s | on the line s, computed | "
        "plain torch s | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        error = "" if row.error is None else f"{row.error:.1e}"
        same = "" if row.of is None else f" {row.same} of {row.of} right"
        lines.append(
            f"| {row.what} | {row.mode} | {row.online_mib:.4f} | {row.messages} | "
            f"{row.offline_mib:.3f} | {row.cpu_s:.4f} | {row.computed_wan_s:.3f} | "
            f"{row.plain_s:.5f} | {f'{error}{same}'.strip()} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    options = harness.parser("decoder", "Answers of a private decoder, Tables 6.1 and 6.2.")
    options.add_argument("--elements", type=harness.numbers, default=[1000, 100_000])
    options.add_argument("--widths", type=harness.numbers, default=[768], help="768 or 768,4096")
    options.add_argument("--prompts", type=int, default=200, help="0 leaves the model out")
    options.add_argument("--turns", type=int, default=5)

    def run(asked: Namespace) -> list[DecoderRow]:
        return bench_decoder(
            asked.elements, asked.widths, asked.prompts, asked.turns, say=harness.say
        )

    harness.run(options, run, format_decoder)


if __name__ == "__main__":
    main()
