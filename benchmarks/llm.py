"""A decoder asked by `vfl llm`: owner and dealer as processes, the user as this one, over TLS.

First token: from the call on, so with the greeting of the stream, TLS and fresh keys. A line delays
and narrows what the user's two streams carry, and the owner's to the dealer not; its bytes are
counted beneath TLS. Everything is on one machine, one thread a process.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks import harness
from benchmarks.emulation import TcpProxy, Wan
from vfl.config.llm_file import LlmLimits, read_llm_file
from vfl.config.toml import Settings
from vfl.core.seeds import generator, use_one_thread
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import load_pretrained, save_decoder
from vfl.serving.llm import Reply, User
from vfl.serving.llm_project import free_addresses, start_standing, write_llm_project

_MB = 1e6


class LlmRow(Settings):
    """What questions took on one line.

    Attributes:
        line: such as "80mbps,40ms", or "loopback".
        first_s, next_s: seconds to the first token, and between two later ones; medians.
        offline_s: of dealing for a question.
        online_mb, offline_mb: frames of all parties, of a question.
        messages: online.
        framing: what the sockets carried of a question beyond its frames, over these.
        plain_s: plain torch's next token.
        same, of: tokens that are plain torch's, and all.
    """

    line: str
    first_s: float
    next_s: float
    offline_s: float
    online_mb: float
    offline_mb: float
    messages: int
    framing: float
    plain_s: float
    same: int
    of: int


def bench_llm(
    model: Path | None, wan: Wan | None, questions: int, prompt_tokens: int, count: int
) -> list[LlmRow]:
    """The loopback, and a line if one is given."""
    use_one_thread()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="vfl-llm-")))
        if model is None:
            torch.manual_seed(0)
            model = folder / "model"
            save_decoder(model, Decoder(DecoderShape(vocabulary=512, width=64, layers=2)))
        plain, (owner, dealer) = load_pretrained(model), free_addresses(2)
        assert isinstance(plain, Decoder), "tokens are counted"
        limits = LlmLimits(max_tokens=prompt_tokens + count)
        project = folder / "project"
        write_llm_project(project, plain.shape, model, owner=owner, dealer=dealer, limits=limits)
        start_standing(project, held)
        prompts = torch.randint(
            plain.shape.vocabulary, (questions, prompt_tokens), generator=generator(0, "prompts")
        ).tolist()
        return [
            _measured(project, plain, line, prompts, count)
            for line in ([None] if wan is None else [None, wan])
        ]


def _measured(
    project: Path, plain: Decoder, wan: Wan | None, prompts: list[list[int]], count: int
) -> LlmRow:
    file, same, firsts, gaps = read_llm_file(project / "user"), 0, [], []
    replies: list[Reply] = []
    with ExitStack() as held:
        lines = {
            peer: held.enter_context(TcpProxy(file.address(peer), wan))
            for peer in ("owner", "dealer")
        }
        changes = {peer: f"127.0.0.1:{line.port}" for peer, line in lines.items()}
        changed = file.model_copy(update=changes)
        changed._path = file._path
        user = User(changed, harness.silent)
        user.deal(len(prompts[0]), count, len(prompts))
        before = lines["owner"].sent_bytes
        for prompt in prompts:
            times = [time.monotonic()]

            def told(token: int, times: list[float] = times) -> bool:
                times.append(time.monotonic())
                return False

            replies.append(user.ask(prompt, count, on_token=told))
            firsts.append(times[1] - times[0])
            gaps += [after - earlier for earlier, after in pairwise(times[1:])]
        carried = (lines["owner"].sent_bytes - before) / len(prompts)
    began = time.monotonic()
    for prompt, reply in zip(prompts, replies, strict=True):
        wanted = plain.generate(prompt, count)
        same += sum(one == other for one, other in zip(reply.tokens, wanted, strict=True))
    plain_s = (time.monotonic() - began) / (count * len(prompts))
    phases = replies[0].phases
    frames = phases["online"]["bytes"] + phases["control"]["bytes"]
    return LlmRow(
        line="loopback" if wan is None else str(wan),
        first_s=median(firsts),
        next_s=median(gaps),
        offline_s=phases["offline"]["seconds"],
        online_mb=phases["online"]["bytes"] / _MB,
        offline_mb=phases["offline"]["bytes"] / _MB,
        messages=phases["online"]["messages"],
        framing=carried / frames - 1,
        plain_s=plain_s,
        same=same,
        of=count * len(prompts),
    )


def format_llm(rows: Sequence[LlmRow]) -> str:
    """A table."""
    lines = ["| line | first token s | next token s | dealing s | online, offline MB | messages |"]
    lines[0] += " framing | plain torch s | tokens right |"
    lines.append("| --- " * 9 + "|")
    for row in rows:
        sizes = f"{row.online_mb:.3f}, {row.offline_mb:.3f}"
        seconds = f"{row.first_s:.2f} | {row.next_s:.3f} | {row.offline_s:.2f}"
        right = f"{row.framing:.2%} | {row.plain_s:.4f} | {row.same} of {row.of}"
        lines.append(f"| {row.line} | {seconds} | {sizes} | {row.messages} | {right} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    options = harness.parser("llm", "A decoder asked by vfl llm, over TLS.", wan="")
    options.add_argument("--model", type=Path, help="folder of a decoder; a random one without")
    options.add_argument("--questions", type=int, default=10)
    options.add_argument("--prompt-tokens", type=int, default=8)
    options.add_argument("--count", type=int, default=20, help="tokens of an answer")

    def measure(asked: Namespace) -> list[LlmRow]:
        wan = Wan.parse(asked.wan) if asked.wan else None
        return bench_llm(asked.model, wan, asked.questions, asked.prompt_tokens, asked.count)

    harness.run(options, measure, format_llm)


if __name__ == "__main__":
    main()
