"""Long and simultaneous questions to `vfl llm`: bytes, messages, processor time.

The three parties are threads of this process, on one core. For a first token, the parties process
the whole question; for a next token, they process one token of each text. The time over a network
link is computed. This time is the online processor time, plus the time to send all bytes one after
the other, plus half a round trip for each message. The two messages of an opening of shares travel
at the same time and count once. Speculative decoding (Leviathan et al. 2023) drafts k - 1 tokens in
a round. Such a round costs as much as the first token of a text of k tokens, plus the logits of k -
1 more tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import harness
from benchmarks.emulation import Wan
from vfl.config.toml import Settings
from vfl.core.seeds import generator, use_one_thread
from vfl.llm.private_decoder import PrivateDecoder
from vfl.llm.project import needed_bits
from vfl.llm.shared_softmax import OPENINGS
from vfl.llm.two_party import Form, Protect
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import load_pretrained

_MB = 1e6


class SizeRow(Settings):
    """Cost of a token for one kind of question.

    Attributes:
        texts: number of simultaneous questions.
        prompt_tokens: tokens of a question.
        token: kind of the token, "first" or "next".
        online_mb, messages: megabytes and messages between owner and user, headers included.
        online_s: online processor time of owner and user together, in seconds.
        offline_mb, offline_s: megabytes and seconds of dealing, of all three parties together.
        line_s: computed seconds over the network link.
        same, of: number of tokens that equal plain torch's tokens, and number of all tokens.
    """

    texts: int
    prompt_tokens: int
    token: str
    online_mb: float
    messages: int
    online_s: float
    offline_mb: float
    offline_s: float
    line_s: float
    same: int
    of: int


class _Cost(NamedTuple):
    """Cost of several tokens; see `SizeRow`."""

    online: float
    messages: int
    online_s: float
    offline: float
    offline_s: float

    def minus(self, other: _Cost) -> _Cost:
        """Return the difference from another cost."""
        return _Cost(
            self.online - other.online,
            self.messages - other.messages,
            self.online_s - other.online_s,
            self.offline - other.offline,
            self.offline_s - other.offline_s,
        )


def bench_llm_sizes(
    model: Path | None = None,
    prompts: Sequence[int] = (5, 32, 128),
    texts: Sequence[int] = (1, 4, 16),
    line: Wan | None = None,
    protect: Protect = "nothing",
) -> Sequence[SizeRow]:
    """Measure first tokens by the length of questions, and next tokens by the number of questions.

    Args:
        model: folder of a decoder; by default, a small random decoder.
        prompts: lengths of the questions for which first tokens are measured, in tokens.
        texts: numbers of simultaneous questions of 5 tokens, for which next tokens are measured.
        line: network link for the computed times; by default 80mbps,40ms.
        protect: values that the user does not see, see `Form`.
    """
    use_one_thread()
    if model is None:
        torch.manual_seed(0)
        plain = Decoder(DecoderShape(vocabulary=512, width=64, layers=2)).eval()
    else:
        found = load_pretrained(model)
        assert isinstance(found, Decoder), "tokens are counted"
        plain = found
    line = line or Wan.parse("80mbps,40ms")
    rows = []
    bits = needed_bits(plain)
    form = Form(
        integer_bits=bits["integer_bits"],
        inner_bits=bits["inner_bits"],
        protect=protect,
        score_bits=bits["score_bits"],
    )
    openings = OPENINGS * plain.shape.layers if protect == "scores" else 0
    with PrivateDecoder(plain, form, timeout_s=3600) as hidden:
        for tokens in prompts:
            cost, same = _asked(hidden, plain, 1, tokens, 1)
            rows.append(_row(line, openings, 1, tokens, "first", cost, same))
        for count in texts:
            first, _ = _asked(hidden, plain, count, 5, 1)
            both, same = _asked(hidden, plain, count, 5, 2)
            rows.append(_row(line, openings, count, 5, "next", both.minus(first), same))
    return rows


def _row(
    line: Wan, openings: int, texts: int, tokens: int, kind: str, cost: _Cost, same: int
) -> SizeRow:
    """Return the result row of a token in which `openings` pairs of messages travel at once."""
    waiting = line.one_way_s * (cost.messages - openings) + line.seconds_a_byte * cost.online
    harness.say(f"{texts} texts of {tokens} tokens: done")
    return SizeRow(
        texts=texts,
        prompt_tokens=tokens,
        token=kind,
        online_mb=cost.online / _MB,
        messages=cost.messages,
        online_s=cost.online_s,
        offline_mb=cost.offline / _MB,
        offline_s=cost.offline_s,
        line_s=cost.online_s + waiting,
        same=same,
        of=texts * (1 if kind == "first" else 2),
    )


def _asked(
    hidden: PrivateDecoder, plain: Decoder, texts: int, tokens: int, count: int
) -> tuple[_Cost, int]:
    """Deal and ask; return the cost, and the number of tokens that equal plain torch's."""
    draw = generator(0, "prompts", texts, tokens)
    prompts = torch.randint(plain.shape.vocabulary, (texts, tokens), generator=draw).tolist()

    def spent(act: Callable[[], object], phase: str) -> tuple[int, int, float]:
        before, seconds = _sent(hidden, phase), harness.timed(act)
        size, frames = (b - a for a, b in zip(before, _sent(hidden, phase), strict=True))
        return size, frames, seconds

    answers: list[list[int]] = []
    offline, _, offline_s = spent(lambda: hidden.deal(tokens, count, texts=texts), "offline")
    online, messages, online_s = spent(
        lambda: answers.extend(hidden.generate_all(prompts, count)), "online"
    )
    wanted = [plain.generate(prompt, count) for prompt in prompts]
    same = sum(
        one == other
        for answer, want in zip(answers, wanted, strict=True)
        for one, other in zip(answer, want, strict=True)
    )
    return _Cost(online, messages, online_s, offline, offline_s), same


def _sent(hidden: PrivateDecoder, phase: str) -> tuple[int, int]:
    """Return the bytes and messages of a phase so far."""
    rows = [row for row in hidden.traffic() if row.phase == phase]
    return sum(row.wire_bytes for row in rows), sum(row.frames for row in rows)


SHOWN = harness.table(
    ("texts", "", "texts"),
    ("tokens of each", "", "prompt_tokens"),
    ("token", "", "token"),
    ("online MB", ".3f", "online_mb"),
    ("messages", "", "messages"),
    ("CPU s", ".2f", "online_s"),
    ("dealing MB", ".2f", "offline_mb"),
    ("CPU s", ".2f", "offline_s"),
    ("s over the line, computed", ".2f", "line_s"),
    ("tokens right", "", lambda row: f"{row.same} of {row.of}"),
    markdown=True,
)


main = harness.command(bench_llm_sizes, SHOWN)


if __name__ == "__main__":
    main()
