"""Cost of a private decoder: functions, choice of the best score, a layer, and whole tokens.

The benchmark measures the rows of Tables 6.1 and 6.2 (thesis, 2025) and a small model. All parties
are threads of this process, with one thread each. Online bytes are the payloads between P0 and P1;
offline bytes are everything that was sent offline. Seconds are processor time: online, the sum of
P0 and P1, who work one after the other; offline, the sum of all three parties.

The time over a network link with a bandwidth and a delay is computed: processor time, plus the time
to send all bytes one after the other, plus half a round trip for each message. With `--wan` this
time is also measured: both parties wait until `benchmarks.emulation` would deliver the bytes. The
cost of a model with 6 billion weights is computed from the widest layer that was measured.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.emulation import Wan
from benchmarks.emulation.base import Egress
from vfl.config.toml import Settings
from vfl.core.frame import HEADER_BYTES, Frame, Link
from vfl.core.registry import require_choice
from vfl.core.seeds import generator, use_one_thread
from vfl.llm.as_printed import SCALE
from vfl.llm.private_decoder import _GUARD, _SUM, PrivateDecoder, PrivateLayers
from vfl.llm.two_party import Form, Growing, LocalRoles, Role, Shared
from vfl.models.decoder import Decoder, DecoderShape, KeyValues, cached
from vfl.mpc.channel import Traffic
from vfl.mpc.ring import matmul
from vfl.mpc.rules import P0, P1

#: Sizes in Table 6.2: number of tokens in the context, and number of heads of a layer by its width.
_CONTEXT, _HEADS = 32, {768: 12, 4096: 32}
_MIB = 2.0**20
#: Network link of the thesis' goals: 80 Mbit/s, and a round trip of 40 ms.
_LINE = Wan.parse("80mbps,40ms")
#: Sizes of ChatGLM-6B as the thesis states them, and the two network links used there.
_TOKENS, _LAYERS = 130_528, 28
_LINES = (Wan.parse("100mbps,20ms"), Wan.parse("1000mbps,10ms"))
_BITS, _RING, _RESULT_BITS = 30, 40, 14


def _forms() -> dict[str, Form]:
    """Return the protocol forms to measure, by name.

    Values below 2^6 between layers save two bits of every element.
    """
    # The form on floats is only measured; no command uses it.
    with warnings.catch_warnings(action="ignore"):
        floats = Form("thesis", sharing="insecure_float")
    return {
        "thesis, insecure floats": floats,
        "thesis": Form("thesis"),
        "fast": Form("fast"),
        "fast, 6 bits": Form("fast", integer_bits=6),
    }


class DecoderRow(Settings):
    """Cost of one computation of the private decoder.

    Attributes:
        what: name of the computation, such as "gelu 100000".
        mode: "thesis" or "fast"; "fast" with values below 2^6 between layers, see
            `Form.integer_bits`; or "thesis" computed with floats, see `vfl.llm.as_printed`.
        online_mib: payload between P0 and P1, in MiB.
        messages: number of sequential messages between P0 and P1.
        offline_mib: everything that all parties sent before the online phase, headers included, in
            MiB.
        offline_s: offline processor time of all three parties together, in seconds.
        cpu_s: online processor time of P0 and P1 together, in seconds, median.
        computed_wan_s: computed time over a network link, in seconds; see the module's docstring.
        wan_s: measured time over the emulated network link, in seconds, median.
        ring_s: time of P0's integer matrix products alone, in seconds.
        plain_s: time of the same computation in torch with float32, in seconds.
        error: largest difference from torch with float64; for tokens, the difference of logits.
        same: number of generated tokens that equal the tokens of plain torch.
        of: number of tokens that were compared.
    """

    what: str
    mode: str
    online_mib: float
    messages: int
    offline_mib: float
    offline_s: float
    cpu_s: float
    computed_wan_s: float
    wan_s: float | None = None
    ring_s: float | None = None
    plain_s: float | None = None
    error: float | None = None
    same: int | None = None
    of: int | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """One run of a program: the results of P0 and P1, and the costs."""

    found: list[Any]
    seconds: float
    wall_s: float
    online_bytes: int
    messages: int
    offline_bytes: int
    offline_s: float

    def row(
        self, what: str, mode: str, seconds: float, plain_s: float | None, **more: Any
    ) -> DecoderRow:
        """Return a result row with the costs of this run and the times over several runs."""
        computed = seconds + _line_s(_LINE, self.online_bytes, self.messages)
        return DecoderRow(
            what=what,
            mode=mode,
            online_mib=self.online_bytes / _MIB,
            messages=self.messages,
            offline_mib=self.offline_bytes / _MIB,
            offline_s=self.offline_s,
            cpu_s=seconds,
            computed_wan_s=computed,
            plain_s=plain_s,
            **more,
        )


def bench_decoder(
    elements: Sequence[int] = (1000, 100_000),
    widths: Sequence[int] = (768,),
    prompts: harness.OrZero = 200,
    turns: int = 5,
    wan: Wan | None = None,
    form: Sequence[harness.Whole] = (),
) -> list[DecoderRow]:
    """Measure a private decoder as in Tables 6.1 and 6.2, in all protocol forms.

    Args:
        elements: numbers of elements of functions, and numbers of scores to choose from.
        widths: widths of layers, which are measured for one token at a context of 32 tokens.
        prompts: number of prompts of the small model; for each prompt, one next token is computed;
            0 omits this measurement.
        turns: number of repetitions of each function and layer.
        wan: a network link over which the benchmark measures in addition, such as 80mbps,40ms.
        form: a protocol form to measure; may be repeated.
    """
    use_one_thread()
    rows, every = [], _forms()
    for name in form:
        require_choice("form", name, tuple(every))
    for mode, each in ((name, every[name]) for name in form or every):
        for count in elements if each.integer_bits == Form().integer_bits else ():
            harness.say(f"{mode}: {count} elements")
            rows.append(_gelu(mode, each, count, turns, wan))
            rows.append(_argmax(mode, each, count, turns, wan))
            if find_spec("tenseal") and each.sharing == "ring":
                by_bfv = replace(each, retrieval="bfv")
                rows.append(_argmax(f"{mode}, by BFV", by_bfv, count, turns, wan))
        for width in widths:
            harness.say(f"{mode}: a layer of {width}")
            rows.append(_layer(mode, each, width, turns, wan))
            if width == max(_HEADS):
                rows += _six_billion(rows[-1], each)
        if prompts:
            harness.say(f"{mode}: {prompts} prompts")
            rows.append(_tokens(mode, each, prompts, wan))
    return rows


class _Waiting:
    """A link that delivers each frame only at the time when an emulated network would."""

    def __init__(self, link: Link, mine: Egress, sent: _Dues, coming: _Dues) -> None:
        self._link, self._mine, self._sent, self._coming = link, mine, sent, coming

    def send(self, frame: Frame) -> None:
        self._sent.put(self._mine.arrival(time.perf_counter(), frame.wire_bytes))
        self._link.send(frame)

    def receive(self) -> Frame:
        frame = self._link.receive()
        time.sleep(max(0.0, self._coming.get() - time.perf_counter()))
        return frame

    def close(self) -> None:
        self._link.close()


_Dues = queue.SimpleQueue[float]


def _over(parties: LocalRoles, wan: Wan) -> None:
    """Connect P0 and P1 by an emulated network link; no message may be in transit."""
    ways: list[_Dues] = [queue.SimpleQueue(), queue.SimpleQueue()]
    for role in (P0, P1):
        channel = parties.parties[role].channels[P1 - role]
        channel.link = _Waiting(channel.link, Egress(wan), ways[role], ways[P1 - role])


def _line_s(wan: Wan, sent_bytes: int, messages: int) -> float:
    return sent_bytes * wan.seconds_a_byte + wan.one_way_s * messages


def _six_billion(layer: DecoderRow, form: Form) -> list[DecoderRow]:
    """Estimate a next token of ChatGLM-6B, context 32, as 28 times the measured layer.

    The function adds the costs of the one-hot embedding, the last norm, the output head and the
    choice of the index. The bytes of these parts are those of the model in
    `tests/llm/test_private_decoder.py`; their seconds are those of a layer, scaled by the number of
    integer products.
    """
    width = max(_HEADS)
    above = form.integer_bits + 2
    # P1 sees five bits more of the first norm than of the other norms; in thesis mode, this holds
    # in both messages.
    bits = _TOKENS * (24 + above + 14 + above + 1) + width * (11 + above + 30 + above + 5)
    messages = _LAYERS * layer.messages + 6
    if form.mode == "thesis":
        bits += width * (13 + above + 30 + above + 5) + _TOKENS * (16 + above)
        messages += 3
    sent = layer.online_mib * _MIB * _LAYERS + bits / 8
    # A layer computes 12 width^2 integer products.
    alike = _LAYERS + 2 * _TOKENS / (12 * width)
    return [
        DecoderRow(
            what=f"6 billion weights, a token over {wan}, computed",
            mode=layer.mode,
            online_mib=sent / _MIB,
            messages=messages,
            offline_mib=layer.offline_mib * alike,
            offline_s=layer.offline_s * alike,
            cpu_s=layer.cpu_s * alike,
            computed_wan_s=layer.cpu_s * alike + _line_s(wan, int(sent), messages),
        )
        for wan in _LINES
    ]


def _play(parties: LocalRoles, program: Callable[[Role], Any]) -> Played:
    offline = _sent(parties.traffic(), "offline")[0]
    with harness.measured() as dealing:
        material = parties.run(lambda party: party.prepare(program))
    offline = _sent(parties.traffic(), "offline")[0] - offline
    before = _sent(parties.traffic(), "online")
    with harness.measured() as online:
        found = parties.run(lambda party: party.answer(program, material[party.role]), (P0, P1))
    sent, frames = (b - a for a, b in zip(before, _sent(parties.traffic(), "online"), strict=True))
    return Played(
        found, online.cpu_s, online.wall_s, sent - HEADER_BYTES * frames, frames, offline,
        dealing.cpu_s,
    )  # fmt: skip


def _sent(rows: Sequence[Traffic], phase: str) -> tuple[int, int]:
    """Return the bytes and the number of frames of a phase."""
    of_phase = [row for row in rows if row.phase == phase]
    return sum(row.wire_bytes for row in of_phase), sum(row.frames for row in of_phase)


def _dealt(party: Role, values: Tensor, bits: int = _BITS, ring: int = _RING) -> Shared:
    """Return shares of values, where P1 knows its share in advance; this sends no message."""
    if party.form.sharing != "ring":
        known = SCALE * torch.randn(values.shape, generator=generator(0, "share")).double()
        return Shared(known if party.role == P1 else values - known, bits, ring)
    known = torch.arange(values.numel()).reshape(values.shape) * 0x1E3779B97F4A7C15
    exact = (values * 2.0**bits).round().long()
    return Shared(known if party.role == P1 else exact - known, bits, ring, known=True)


def _timed(
    parties: LocalRoles, turns: int, wan: Wan | None, program: Callable[[Role], Any]
) -> tuple[Played, float, float | None]:
    """Return the last run, the median processor time, and the median time over the network link."""
    played = [_play(parties, program) for _ in range(turns + 1)][1:]
    seconds = median(each.seconds for each in played)
    if wan is None:
        return played[-1], seconds, None
    _over(parties, wan)
    walls = [_play(parties, program).wall_s for _ in range(turns)]
    return played[-1], seconds, median(walls)


def _plain(turns: int, function: Callable[[], Any]) -> float:
    return median(harness.timed(function) for _ in range(turns))


def _value(halves: Sequence[Shared]) -> Tensor:
    if halves[0].share.is_floating_point():
        return halves[0].share + halves[1].share
    above = 64 - halves[0].ring
    total = ((halves[0].share + halves[1].share) << above) >> above
    return total.double() * 2.0 ** -halves[0].bits


def _gelu(mode: str, form: Form, count: int, turns: int, wan: Wan | None) -> DecoderRow:
    values = 2 * torch.randn(1, count, dtype=torch.float64)

    def program(party: Role) -> Shared:
        shared = _dealt(party, values)
        return party.apply(shared, F.gelu, _RESULT_BITS, _RING, "gelu", "elements")

    with LocalRoles(form, {}) as parties:
        played, seconds, wan_s = _timed(parties, turns, wan, program)
    error = float((_value(played.found) - F.gelu(values)).abs().max())
    plain = _plain(turns, partial(F.gelu, values.float()))
    return played.row(f"gelu {count}", mode, seconds, plain, error=error, wan_s=wan_s)


def _argmax(mode: str, form: Form, count: int, turns: int, wan: Wan | None) -> DecoderRow:
    values = 3 * torch.randn(1, count, dtype=torch.float64)

    def program(party: Role) -> list[int]:
        return party.choose(_dealt(party, values), lambda scores: int(scores.argmax()))

    with LocalRoles(form, {}) as parties:
        played, seconds, wan_s = _timed(parties, turns, wan, program)
    same = int(played.found[P1] == [int(values.argmax())])
    plain = _plain(turns, partial(torch.argmax, values.float()))
    return played.row(f"argmax {count}", mode, seconds, plain, same=same, of=1, wan_s=wan_s)


def _layer(mode: str, form: Form, width: int, turns: int, wan: Wan | None) -> DecoderRow:
    shape = DecoderShape(
        vocabulary=32, width=width, layers=1, heads=_HEADS.get(width, 8), context=_CONTEXT
    )
    torch.manual_seed(0)
    model, x = Decoder(shape).eval(), torch.randn(1, _CONTEXT, width)
    together = threading.Barrier(2)
    with LocalRoles(form, {}, timeout_s=300) as parties:
        layers = parties.run(
            lambda party: PrivateLayers.share(party, shape, model if party.role == P0 else None)
        )
        # The layer is used as the second layer, because P1 sees more bits of a value before the
        # first layer.
        layers = [
            replace(
                each,
                constants={
                    name.replace("layers.0", "layers.1"): constant
                    for name, constant in each.constants.items()
                },
            )
            for each in layers
        ]

        def program(last: int, party: Role) -> tuple[Shared, float, float]:
            """Run the step for the context, and if `last` is 1 also the step for the last token.

            Return the result, the processor time and the wall time of the last step that ran. Both
            parties begin this step together: otherwise the party that begins earlier would have
            sent something in advance.
            """
            caches, steps = (Growing(), Growing()), [(0, _CONTEXT - 1), (_CONTEXT - 1, _CONTEXT)]
            for start, end in steps[: 1 + last]:
                values = x[0, start:end].double()
                shared = _dealt(party, values, _SUM, _SUM + form.integer_bits + _GUARD)
                if start and not party.offline:
                    together.wait(timeout=300)
                with harness.measured(time.thread_time) as cost:
                    found = layers[party.role].layer(party, 1, shared, start, caches)
            return found, cost.cpu_s, cost.wall_s

        before, both = (
            [_play(parties, partial(program, last)) for _ in range(turns + 1)][1:]
            for last in (0, 1)
        )
        wan_s = None
        if wan is not None:
            _over(parties, wan)
            walls = [_play(parties, partial(program, 1)) for _ in range(turns)]
            wan_s = median(max(wall for *_, wall in each.found) for each in walls)
        names = ("attention_in", "attention_out", "mlp_in", "mlp_out")
        weights = [layers[P0].constants[f"layers.1.{name}"].weight for name in names]
        inputs = [
            torch.randint(-(2**33), 2**33, (1, len(each))) for each in weights if each is not None
        ]

        def products() -> None:
            for each, weight in zip(inputs, weights, strict=True):
                assert weight is not None, "P0 has them"
                matmul(each, weight)

        ring_s = _plain(turns, products) if form.sharing == "ring" else None
    online, messages, offline = (
        getattr(both[-1], name) - getattr(before[-1], name)
        for name in ("online_bytes", "messages", "offline_bytes")
    )
    dealt = median(each.offline_s for each in both) - median(each.offline_s for each in before)
    seconds = median(sum(took for _, took, *_ in each.found) for each in both)
    with torch.no_grad():
        layer = model.layers[0]
        exact = layer.double()(x.double())[0, -1]
        layer.float()
        cache = KeyValues()
        layer(x[:, :-1], cache)
        plain = _plain(turns, lambda: layer(x[:, -1:], KeyValues(cache.keys, cache.values)))
    error = float((_value([half for half, *_ in both[-1].found])[0] - exact).abs().max())
    played = Played([], seconds, 0.0, online, messages, offline, dealt)
    return played.row(
        f"layer {width}, a token", mode, seconds, plain, error=error, wan_s=wan_s, ring_s=ring_s
    )


def _tokens(mode: str, form: Form, prompts: int, wan: Wan | None) -> DecoderRow:
    """Measure next tokens of a small random model, and compare them with plain torch."""
    torch.manual_seed(0)
    shape = DecoderShape(vocabulary=512, width=64, layers=2, heads=4, tied=False)
    model = Decoder(shape).eval()
    texts = torch.randint(0, shape.vocabulary, (prompts, 8)).tolist()
    same, errors, times, plain_times = 0, [], [], []
    dealt: list[float] = []
    wan_s: float | None = None
    with PrivateDecoder(model, form) as hidden:
        for text in texts:
            seen: list[Tensor] = []

            def pick(scores: Tensor, seen: list[Tensor] = seen) -> int:
                seen.append(scores.sort().values)
                return int(scores.argmax())

            dealt.append(harness.timed(partial(hidden.deal, len(text), 1)))
            with harness.measured() as generating:
                (token,) = hidden.generate(text, 1, pick)
            with harness.measured() as plain, torch.no_grad(), cached(model):
                logits = model(torch.tensor([text]))[0, -1]
            times.append(generating.cpu_s)
            plain_times.append(plain.cpu_s)
            same += token == int(logits.argmax())
            errors.append(float((seen[0] - logits.double().sort().values).abs().max()))
        online, frames = _sent(hidden.traffic(), "online")
        offline, _ = _sent(hidden.traffic(), "offline")
        if wan is not None:
            hidden.deal(len(texts[0]), 1)
            _over(hidden.parties, wan)
            wan_s = harness.timed(partial(hidden.generate, texts[0], 1), time.perf_counter)
    one = Played(
        [],
        median(times),
        0.0,
        (online - HEADER_BYTES * frames) // prompts,
        frames // prompts,
        offline // prompts,
        median(dealt),
    )
    return one.row(
        "2 layers of 64, a first token of 8",
        mode,
        one.seconds,
        median(plain_times),
        error=max(errors),
        same=same,
        of=prompts,
        wan_s=wan_s,
    )


def _judged(row: DecoderRow) -> str:
    error = "" if row.error is None else f"{row.error:.1e}"
    same = "" if row.of is None else f" {row.same} of {row.of} right"
    return f"{error}{same}".strip()


TABLE = harness.table(
    ("what", "", "what"),
    ("mode", "", "mode"),
    ("online MiB", ".4f", "online_mib"),
    ("messages", "", "messages"),
    ("offline MiB", ".3f", "offline_mib"),
    ("offline s", ".4f", "offline_s"),
    ("CPU s", ".4f", "cpu_s"),
    ("ring products s", ".4f", "ring_s"),
    ("over a line s, computed", ".3f", "computed_wan_s"),
    ("measured", ".3f", "wan_s"),
    ("plain torch s", ".5f", "plain_s"),
    ("error", "", _judged),
    markdown=True,
)


main = harness.command(bench_decoder, TABLE)


if __name__ == "__main__":
    main()
