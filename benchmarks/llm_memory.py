"""Memory and processor time of `vfl llm`, by process and phase, for a decoder of any size.

Owner, dealer and user are commands with one thread each, connected over TLS on the loopback
interface. A peak is the largest resident set of a process in a phase. This peak includes the Python
interpreter, torch, and pages of mapped files (the model owner's weights), which the operating
system reclaims when memory is short. The first dealing also shares the weights; an answer reads the
shares from the disk, so that no process keeps a copy in memory. In one phase, one command of the
user asks a question while another command deals, so owner and dealer serve both commands.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from benchmarks import harness
from vfl.config.toml import Settings
from vfl.core.seeds import use_one_thread
from vfl.core.storage import Seal, read_sealed_json
from vfl.llm.parties import PARTIES
from vfl.llm.project import (
    free_addresses,
    needed_bits,
    private_model,
    start_standing,
    write_llm_project,
)
from vfl.llm.text import read_tokenizer
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import save_decoder

_POLL_S = 0.02
#: Name of the user's second process, which runs the command for dealing.
SECOND = "user, dealing"


class MemoryRow(Settings):
    """Memory and CPU time of one phase.

    Attributes:
        phase: name of the phase: "sharing and dealing a token", "dealing", "asking beside a
            dealing", "asking".
        weights: number of weights of the model.
        peak_bytes: peak memory of each party's process; "user, dealing" is the user's second
            process.
        cpu_s: CPU time of each process.
        sent: sent bytes of the shared weights, divided by the bytes of the weights in float32; only
            for the first phase.
        same, of: number of tokens that equal plain torch's tokens, and number of all tokens; only
            for phases in which the user asks.
    """

    phase: str
    weights: int
    peak_bytes: dict[str, int]
    cpu_s: dict[str, float]
    sent: float | None = None
    same: int | None = None
    of: int | None = None

    def each(self, party: str) -> float:
        """Return the peak bytes of a party's process per weight of the model."""
        return self.peak_bytes[party] / self.weights

    @property
    def together(self) -> float:
        """Peak bytes per weight, summed over all processes."""
        return sum(self.peak_bytes.values()) / self.weights


def bench_llm_memory(
    model: Path | None = None,
    question: str = "The capital of France is",
    count: int = 24,
    layers: int = 22,
) -> Sequence[MemoryRow]:
    """Measure memory peaks and CPU time of a question's phases; compare its tokens with torch.

    Args:
        model: folder of a decoder; by default, a random decoder with the shape of TinyLlama-1.1B.
        question: text of the question, which is asked once.
        count: number of tokens in the answer.
        layers: number of layers of the random decoder; with 22 layers it has 1.1 billion weights.
    """
    use_one_thread()
    with ExitStack() as held:
        place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="vfl-llm-")))
        folder = place / "project"
        if model is None:
            model = place / "model"
            save_decoder(model, _random(layers))
        plain = private_model(model)
        assert isinstance(plain, Decoder), "tokens are counted"
        prompt = read_tokenizer(model).encode(question)
        wanted = plain.generate(prompt, count)
        weights = sum(each.numel() for each in plain.parameters())
        owner, dealer = free_addresses(2)
        write_llm_project(
            folder,
            plain.shape,
            model,
            owner=owner,
            dealer=dealer,
            limits={"max_tokens": len(prompt) + count},
            **needed_bits(plain),
        )
        del plain  # free this model's memory, because the parties need the memory
        measured = _Measured(folder, weights, start_standing(folder, held))
        deal = ("deal", "--prompt-tokens", str(len(prompt)), "--max-tokens")
        ask = ("ask", question, "--max-tokens", str(count), "--json")
        rows = [measured.phase("sharing and dealing a token", user=(*deal, "1"))]
        record = folder / "user" / "store" / "setup.json"
        facts = read_sealed_json(record, Seal("setup", "user", None))
        rows[0] = rows[0].model_copy(update={"sent": facts["spent"]["bytes"] / (4 * weights)})
        rows.append(measured.phase("dealing", user=(*deal, str(count))))
        both = {"user": ask, SECOND: (*deal, str(count))}
        for name, commands in (("asking beside a dealing", both), ("asking", {"user": ask})):
            row = measured.phase(name, **commands)
            found = json.loads(measured.said)["tokens"]
            same = sum(one == other for one, other in zip(found, wanted, strict=True))
            rows.append(row.model_copy(update={"same": same, "of": count}))
        return rows


def _random(layers: int) -> Decoder:
    torch.manual_seed(0)
    shape = DecoderShape(
        vocabulary=32_000,
        width=2048,
        layers=layers,
        heads=32,
        groups=4,
        inner=5632,
        context=2048,
        positions="rotary",
        norm="rms",
        mlp="silu",
        bias=False,
        tied=False,
    )
    return Decoder(shape).eval()


class _Measured:
    """The user's commands, measured while the owner's and the dealer's processes run.

    Args:
        folder: folder of the project.
        weights: number of the model's weights.
        standing: process ids of owner and dealer.
    """

    said = ""

    def __init__(self, folder: Path, weights: int, standing: Mapping[str, int]) -> None:
        self._folder, self._weights, self._standing = folder, weights, standing

    def phase(self, name: str, **commands: Sequence[str]) -> MemoryRow:
        """Run commands of the user simultaneously; the first command's output becomes `said`."""
        before = {party: harness.cpu_s(pid) for party, pid in self._standing.items()}
        for pid in self._standing.values():
            harness.forget_peak(pid)
        line = [sys.executable, "-m", "vfl", "llm"]
        with tempfile.TemporaryFile("w+") as out:
            running: dict[str, subprocess.Popen[bytes]] = {}
            for who, (command, *arguments) in commands.items():
                to = subprocess.DEVNULL if running else out
                whole = [*line, command, str(self._folder / "user"), *arguments]
                running[who] = subprocess.Popen(whole, stdout=to, stderr=subprocess.DEVNULL)
            peaks, cpu = dict.fromkeys(running, 0), dict.fromkeys(running, 0.0)
            while alive := [who for who, each in running.items() if each.poll() is None]:
                for who in alive:
                    pid = running[who].pid
                    with suppress(ProcessLookupError):
                        peaks[who] = max(peaks[who], harness.resident_bytes("VmHWM", pid))
                    cpu[who] = max(cpu[who], harness.cpu_s(pid))
                time.sleep(_POLL_S)
            out.seek(0)
            self.said = out.read()
        assert not any(each.returncode for each in running.values()), "the command says why"
        for party, pid in self._standing.items():
            cpu[party] = harness.cpu_s(pid) - before[party]
            peaks[party] = harness.resident_bytes("VmHWM", pid)
        harness.say(f"{name}: done")
        return MemoryRow(phase=name, weights=self._weights, peak_bytes=peaks, cpu_s=cpu)


SHOWN = harness.table(
    ("phase", "", "phase"),
    ("owner, bytes a weight", ".1f", lambda row: row.each("owner")),
    ("dealer", ".1f", lambda row: row.each("dealer")),
    ("user", ".1f", lambda row: row.each("user")),
    (
        "user, dealing",
        ".1f",
        lambda row: row.each(SECOND) if SECOND in row.peak_bytes else None,
    ),
    ("together", ".1f", "together"),
    (
        "CPU s: owner, user, dealer",
        "",
        lambda row: ", ".join(f"{row.cpu_s[p]:.1f}" for p in PARTIES),
    ),
    ("sent, of the weights' bytes", ".2f", "sent"),
    (
        "tokens of plain torch",
        "",
        lambda row: None if row.of is None else f"{row.same} of {row.of}",
    ),
    markdown=True,
)


main = harness.command(bench_llm_memory, SHOWN)


if __name__ == "__main__":
    main()
