"""A decoder queried by `vfl llm`, compared with plain torch and other systems.

Owner, dealer and user of vfl are processes with one thread each, connected over TLS. The parties of
other systems are also processes with one thread each, connected over plain TCP. All systems use the
same network and take turns. vfl answers one question; each other system then computes the first
token and one token from the middle of the answer. In the other systems, the attention keys and
values of earlier tokens are shared beforehand.

The first token of vfl is timed from the call on, so its time includes the stream's handshake, TLS
and new keys. The dealer of vfl deals before the call, and this time is reported separately; other
systems deal within the measured time. Each other system runs a task twice, and the second run
counts, as in `benchmarks.mpc`.

`--next-tokens` measures something else: how often the next token after a prompt equals the token of
the float64 model, and how close the logits of the two tokens are if they differ. Whole answers
would show less, because an answer continues as another text after the first different token. With
this option, the three parties are threads.
"""

from __future__ import annotations

import copy
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.emulation import Network, Wan, open_network
from benchmarks.mpc import Run, RunningSystem, System, peers, take_turns
from benchmarks.mpc_party import DecoderStep, Ready, Task
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError, ConfigError, DataError
from vfl.core.seeds import generator, use_one_thread
from vfl.llm.file import LlmParty, read_llm_file
from vfl.llm.parties import PARTIES, ROLES, User
from vfl.llm.private_decoder import PrivateDecoder, linear_layers
from vfl.llm.project import free_addresses, needed_bits, start_standing, write_llm_project
from vfl.llm.text import read_tokenizer
from vfl.llm.two_party import Form, Protect
from vfl.models.decoder import Decoder, DecoderShape, Rotation, cached
from vfl.models.pretrained import load_pretrained, save_decoder
from vfl.mpc.rules import NAMES, Mode

_MB = 1e6


class LlmRow(Settings):
    """Cost of questions to one system over one network link.

    Attributes:
        system: "vfl", "plain torch" or another system.
        line: network link, such as "80mbps,40ms", or "loopback".
        first_s, next_s: median seconds to the first token, and between two later tokens.
        offline_s, offline_mb: seconds and megabytes of dealing for one token of an answer; None if
            the measured time includes dealing.
        first_mb, next_mb: megabytes sent until the first token, and between two later tokens. For
            vfl, frames of user and owner, headers included; for other systems, all bytes at their
            interfaces, packet headers included; None if these bytes are not counted.
        messages: number of online messages for the whole answer.
        framing: fraction of a question's network bytes that are not frames; None if the network
            bytes are not counted.
        same, of: number of tokens that equal plain torch's tokens, and number of all tokens.
        error: largest error of a logit.
    """

    system: str
    line: str
    first_s: float
    next_s: float
    offline_s: float | None = None
    offline_mb: float | None = None
    first_mb: float | None = None
    next_mb: float | None = None
    messages: int | None = None
    framing: float | None = None
    same: int | None = None
    of: int | None = None
    error: float | None = None


class NextTokens(Settings):
    """The next token after each of several prompts, compared with the model in float64.

    Attributes:
        system: "vfl, fast", "vfl, thesis", or "plain torch" in float32.
        same, of: number of tokens that equal the tokens of the float64 model, and number of all
            tokens.
        error: largest error of a logit; for vfl, of the sorted logits, because their order is
            secret.
        deviation: root mean square of these errors.
        margins: for each token that differs, the difference of its logit from the best logit.
        near: fraction of the prompts whose two best logits differ by less than `error`.
    """

    system: str
    same: int
    of: int
    error: float
    deviation: float
    margins: list[float]
    near: float


class Begin(Settings):
    """First message to the user's process: its folder, addresses of other parties, what to deal.

    Attributes:
        folder, model: the user's folder, and the model's folder, whose answers in plaintext are
            compared.
        addresses: addresses at which the user reaches the owner and the dealer.
        prompt_tokens, count, questions: number of prompt tokens, of answer tokens and of questions
            for which material is dealt. Material for one answer of a single token is dealt too.
    """

    folder: str
    model: str
    addresses: dict[str, str]
    prompt_tokens: int
    count: int
    questions: int


class Question(Settings):
    """Message with the next question."""

    prompt: list[int]
    count: int


class Answer(Settings):
    """Result of a question in the user's process.

    Attributes:
        tokens: token ids of the answer.
        seconds: seconds from the call to the first token, then from each token to the next.
        error: largest error of a logit, compared with plain torch on the same tokens.
        phases: phases of `vfl.llm.parties.Reply`.
    """

    tokens: list[int]
    seconds: list[float]
    error: float
    phases: dict[str, dict[str, Any]]


def work(parent: Parent) -> None:
    """Run the user's process."""
    begin = parent.get(Begin)
    plain, file = load_pretrained(Path(begin.model)), read_llm_file(Path(begin.folder))
    assert isinstance(plain, Decoder), "tokens are counted"
    changed = file.model_copy(update=begin.addresses)
    changed._path = file._path
    user = User(changed, lambda text: None)
    user.deal(begin.prompt_tokens, 1)
    user.deal(begin.prompt_tokens, begin.count, begin.questions)
    parent.put(Ready())
    for asked in parent.each(Question):
        parent.put(_answer(user, plain, asked))


def _answer(user: User, plain: Decoder, asked: Question) -> Answer:
    scores: list[Tensor] = []
    times = [time.monotonic()]

    def pick(seen: Tensor) -> int:
        scores.append(seen.sort().values)
        return int(seen.argmax())

    def on_token(token: int) -> bool:
        times.append(time.monotonic())
        return False

    reply = user.ask(asked.prompt, asked.count, pick, on_token)
    with torch.no_grad():
        whole = plain(torch.tensor([[*asked.prompt, *reply.tokens]]))[0].double()
    wanted = whole[len(asked.prompt) - 1 : -1].sort(-1).values
    error = float((torch.stack(scores) - wanted).abs().max())
    seconds = [after - earlier for earlier, after in pairwise(times)]
    return Answer(tokens=reply.tokens, seconds=seconds, error=error, phases=reply.phases)


def bench_llm(
    model: Path | None = None,
    wan: Wan | None = None,
    questions: int = 10,
    prompt_tokens: int = 8,
    count: int = 20,
    *,
    network: str = "auto",
    peer: Sequence[str] = (),
    turns: int = 2,
    next_tokens: int = 0,
    text: Path | None = None,
    protect: Protect = "nothing",
) -> Sequence[LlmRow | NextTokens]:
    """Measure vfl llm over TLS, and other systems, on the loopback and on a given network link.

    Args:
        model: folder of a decoder; by default, a small random decoder.
        wan: the line.
        questions: number of questions to vfl.
        prompt_tokens: number of tokens of each question.
        count: number of tokens in each answer.
        network: kind of emulated network for the network link; see `benchmarks.emulation`.
        peer: another system and the Python interpreter that has it: spu=PATH or crypten=PATH.
        turns: number of questions for which the other systems compute two tokens each.
        next_tokens: number of prompts whose next tokens are compared; with it, the benchmark
            measures nothing else.
        text: file with the text from which the prompts for next tokens are cut.
        protect: values that the user does not see, see `vfl.llm.two_party.Form`.

    Raises:
        BadOptionError: next tokens are requested without a model.
        ConfigError: other systems are requested for a decoder with parts that their programs do not
            know.
    """
    use_one_thread()
    if next_tokens:
        return _next_tokens(model, text, next_tokens, prompt_tokens)
    others = [system for spec in peer for system in peers(spec)]
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="vfl-llm-")))
        if model is None:
            torch.manual_seed(0)
            model = folder / "model"
            save_decoder(model, Decoder(DecoderShape(vocabulary=512, width=64, layers=2)))
        plain = load_pretrained(model)
        assert isinstance(plain, Decoder), "tokens are counted"
        if others:
            _require_parts(plain.shape)
        prompts = torch.randint(
            plain.shape.vocabulary, (questions, prompt_tokens), generator=generator(0, "prompts")
        ).tolist()
        rows: list[LlmRow | NextTokens] = []
        for line in [None] if wan is None else [None, wan]:
            part = folder / ("loopback" if line is None else "line")
            part.mkdir()
            with open_network(NAMES, line, network) as net:
                bench = _Bench(part, model, plain, net, prompts, count, protect)
                rows += bench.measured(others, turns)
        return rows


class _Bench:
    """All systems on one network.

    Args:
        folder: folder for vfl's project, and for the arrays of other systems.
        model: folder of the weights.
        plain: the model itself, for plain torch.
        network: network that connects the parties.
        prompts: prompts of all questions.
        count: number of tokens in each answer.
        protect: values that the user does not see.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        plain: Decoder,
        network: Network,
        prompts: list[list[int]],
        count: int,
        protect: Protect,
    ) -> None:
        self._protect = protect
        self._folder, self._model, self._plain, self._network = folder, model, plain, network
        self._prompts, self._count = prompts, count
        self._line = "loopback" if network.kind == "loopback" else str(network.wan)

    def measured(self, others: Sequence[System], turns: int) -> list[LlmRow]:
        """Measure all systems, and return a row for each."""
        with ExitStack() as held:
            user = self._user(held)
            running = {
                each.name: held.enter_context(RunningSystem(each, self._network)) for each in others
            }
            runs: dict[str, tuple[list[Run], list[Run]]] = {name: ([], []) for name in running}
            first = self._ask(user, self._prompts[0], 1)[0]
            answers, carried = [], []
            for number, prompt in enumerate(self._prompts):
                answer, sent = self._ask(user, prompt, self._count)
                answers.append(answer)
                carried.append(sent)
                harness.say(f"{self._line}: question {number}, {sum(answer.seconds):.2f} s")
                if number >= turns or not running:
                    continue
                for place, taken in enumerate(self._others(running, number, prompt)):
                    for name, (run,) in taken.items():
                        runs[name][place].append(run)
                        harness.say(f"{self._line}: {name} {run.milliseconds / 1000:.2f} s")
        rows = [self._row(first, answers, carried)]
        rows += [self._other(name, *taken) for name, taken in runs.items()]
        return [*rows, self._alone()]

    def _user(self, held: ExitStack) -> BenchmarkWorker:
        """Start vfl's parties and deal the material; return the user's process."""
        network, ports = self._network, [each.rpartition(":")[2] for each in free_addresses(2)]
        standing: dict[LlmParty, str] = {"owner": ports[0], "dealer": ports[1]}
        at = {name: NAMES[ROLES[name]] for name in PARTIES}
        listening = {name: f"{network.host(at[name])}:{port}" for name, port in standing.items()}
        project = self._folder / "project"
        write_llm_project(
            project,
            self._plain.shape,
            self._model,
            owner=listening["owner"],
            dealer=listening["dealer"],
            limits={"max_tokens": len(self._prompts[0]) + self._count},
            # The comparison covers only the computation between the two parties.
            dealer_counts=False,
            protect=self._protect,
            **needed_bits(self._plain),
        )
        start_standing(project, held, lambda name: network.command(at[name]))
        worker = held.enter_context(BenchmarkWorker("llm", network.command(at["user"])))
        found = {
            name: network.reach(at["user"], at[name], int(port)) for name, port in standing.items()
        }
        begin = Begin(
            folder=str(project / "user"),
            model=str(self._model),
            addresses={name: f"{host}:{port}" for name, (host, port) in found.items()},
            prompt_tokens=len(self._prompts[0]),
            count=self._count,
            questions=len(self._prompts),
        )
        worker.put(begin)
        worker.get(Ready)
        return worker

    def _ask(self, user: BenchmarkWorker, prompt: list[int], count: int) -> tuple[Answer, int]:
        """Ask a question; return the answer and the number of sent bytes."""
        before = sum(self._network.bytes_sent().values())
        user.put(Question(prompt=prompt, count=count))
        return user.get(Answer), sum(self._network.bytes_sent().values()) - before

    def _others(
        self, running: dict[str, RunningSystem], number: int, prompt: list[int]
    ) -> list[dict[str, list[Run]]]:
        """Measure the first token, and a token in the middle, on the other systems."""
        middle = self._plain.generate(prompt, self._count)[: self._count // 2]
        found = []
        for text, past in ((prompt, 0), (prompt + middle, len(prompt) + len(middle) - 1)):
            name = f"decoder-{number}-{past}"
            path = self._folder / f"{name}.npz"
            task = decoder_task(self._plain, text, past, name, path)
            taken = take_turns(running, task, 1)
            found.append({name: [turn.whole for turn in turns] for name, turns in taken.items()})
            path.unlink()
        return found

    def _row(self, first: Answer, answers: Sequence[Answer], carried: Sequence[int]) -> LlmRow:
        same = 0
        for prompt, answer in zip(self._prompts, answers, strict=True):
            wanted = self._plain.generate(prompt, self._count)
            same += sum(one == other for one, other in zip(answer.tokens, wanted, strict=True))
        phases = answers[0].phases
        online = phases["online"]["bytes"]
        frames = online + phases["control"]["bytes"]
        rest = max(self._count - 1, 1)
        return LlmRow(
            system="vfl",
            line=self._line,
            first_s=median(each.seconds[0] for each in answers),
            next_s=median(gap for each in answers for gap in each.seconds[1:]),
            offline_s=phases["offline"]["seconds"] / self._count,
            offline_mb=phases["offline"]["bytes"] / self._count / _MB,
            first_mb=first.phases["online"]["bytes"] / _MB,
            next_mb=(online - first.phases["online"]["bytes"]) / rest / _MB,
            messages=phases["online"]["messages"],
            framing=median(carried) / frames - 1 if any(carried) else None,
            same=same,
            of=self._count * len(answers),
            error=max(each.error for each in answers),
        )

    def _other(self, name: str, firsts: Sequence[Run], nexts: Sequence[Run]) -> LlmRow:
        def mb(runs: Sequence[Run]) -> float | None:
            sent = [run.bytes_online for run in runs if run.bytes_online is not None]
            return median(sent) / _MB if sent else None

        both = [*firsts, *nexts]
        return LlmRow(
            system=name,
            line=self._line,
            first_s=median(run.milliseconds for run in firsts) / 1000,
            next_s=median(run.milliseconds for run in nexts) / 1000,
            first_mb=mb(firsts),
            next_mb=mb(nexts),
            same=len(both) - sum(run.wrong_tokens for run in both),
            of=len(both),
            error=max(run.max_error for run in both),
        )

    def _alone(self) -> LlmRow:
        """Measure plain torch in this process."""
        firsts: list[float] = []
        nexts: list[float] = []
        for prompt in self._prompts:
            step = torch.tensor([prompt])
            with torch.no_grad(), cached(self._plain):
                for taken in range(self._count):
                    with harness.measured() as cost:
                        token = int(self._plain(step)[0, -1].argmax())
                    (nexts if taken else firsts).append(cost.wall_s)
                    step = torch.tensor([[token]])
        return LlmRow(
            system="plain torch", line=self._line, first_s=median(firsts), next_s=median(nexts)
        )


def decoder_task(plain: Decoder, text: Sequence[int], past: int, name: str, path: Path) -> Task:
    """Return a task for another system: compute the token after a text.

    Args:
        plain: the model.
        text: token ids.
        past: number of first tokens whose keys and values are already shared.
        name: name of the run.
        path: path of the file for the arrays.
    """
    shape = plain.shape
    found: dict[str, Tensor] = {}
    new = torch.tensor(text[past:])
    with torch.no_grad(), cached(plain) as caches:
        if past:
            plain(torch.tensor([text[:past]]))
        for index, cache in enumerate(caches):
            if cache.keys is not None and cache.values is not None:
                found |= {f"{index}.keys": cache.keys[0], f"{index}.values": cache.values[0]}
        logits = plain(new[None])[0, -1:]
    found |= {layer: weight for layer, (weight, _) in linear_layers(plain).items()}
    found["inputs"] = F.one_hot(new, shape.vocabulary)
    found |= {"wanted.logits": logits, "wanted.token": logits.argmax(-1)}
    arrays: dict[str, Any] = {each: array.float().numpy() for each, array in found.items()}
    np.savez(path, **arrays)
    turned = Rotation.at(past, len(new), shape)
    step = DecoderStep(
        layers=shape.layers,
        heads=shape.heads,
        epsilon=shape.epsilon,
        cos=turned.cos.tolist(),
        sin=turned.sin.tolist(),
        past=past,
    )
    return Task(
        system="",
        workload=name,
        session=secrets.token_hex(16),
        rows=len(new),
        widths=(),
        training=False,
        function="",
        rate=0.0,
        arrays=str(path),
        decoder=step,
    )


def _require_parts(shape: DecoderShape) -> None:
    parts = (shape.positions, shape.norm, shape.mlp, shape.bias, shape.groups == shape.heads)
    if parts != ("rotary", "rms", "silu", False, True):
        raise ConfigError(
            "other systems' programs do not know such a decoder",
            got=repr(shape),
            want="rotary positions, RMSNorm, gated SiLU, no biases, no groups",
            fix="the demo's model: python examples/llm/train_decoder.py",
        )


def bench_next_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
) -> list[NextTokens]:
    """Compare next tokens of both modes and of plain torch, chosen greedily.

    Args:
        model: the model in float32.
        prompts: token ids.
    """
    use_one_thread()
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        plain, wanted = (
            [each(torch.tensor([prompt]))[0, -1].double() for prompt in prompts]
            for each in (model, exact)
        )
    rows = [_compared("plain torch", [int(each.argmax()) for each in plain], plain, wanted)]
    modes: tuple[Mode, ...] = ("thesis", "fast")
    bits = needed_bits(model)
    for mode in modes:
        tokens: list[int] = []
        scores: list[Tensor] = []

        def pick(seen: Tensor, scores: list[Tensor] = scores) -> int:
            scores.append(seen.sort().values)
            return int(seen.argmax())

        form = Form(mode, integer_bits=bits["integer_bits"], inner_bits=bits["inner_bits"])
        with PrivateDecoder(model, form, timeout_s=300) as hidden:
            for prompt in prompts:
                tokens += hidden.generate(prompt, 1, pick)
        ordered = [each.sort().values for each in wanted]
        rows.append(_compared(f"vfl, {mode}", tokens, scores, ordered, wanted))
        harness.say(f"{mode}: {rows[-1].same} of {rows[-1].of}")
    return rows


def _compared(
    system: str,
    tokens: Sequence[int],
    found: Sequence[Tensor],
    wanted: Sequence[Tensor],
    logits: Sequence[Tensor] | None = None,
) -> NextTokens:
    """Return the errors of the logits, and how the chosen tokens compare with the best ones."""
    errors = torch.stack(list(found)) - torch.stack(list(wanted))
    whole, error = torch.stack(list(logits or wanted)), float(errors.abs().max())
    best, second = whole.topk(2).values.unbind(1)
    chosen = whole.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    other = torch.tensor(tokens) != whole.argmax(1)
    return NextTokens(
        system=system,
        same=int((~other).sum()),
        of=len(tokens),
        error=error,
        deviation=float(errors.square().mean().sqrt()),
        margins=(best - chosen)[other].tolist(),
        near=float((best - second < error).double().mean()),
    )


def cut_prompts(text: str | None, model: Decoder, folder: Path, count: int, length: int) -> Prompts:
    """Cut prompts at random positions of a text, or draw random tokens if there is no text.

    Raises:
        DataError: the text is shorter than one prompt.
    """
    draw = generator(0, "next tokens")
    if text is None:
        found: Prompts = torch.randint(
            model.shape.vocabulary, (count, length), generator=draw
        ).tolist()
        return found
    tokens = read_tokenizer(folder).encode(text)
    if len(tokens) < length:
        raise DataError("the text is shorter than a prompt", want=f"{length} tokens at least")
    starts = torch.randint(len(tokens) - length + 1, (count,), generator=draw).tolist()
    return [tokens[start : start + length] for start in starts]


Prompts = list[list[int]]


NEXT_TOKENS = harness.table(
    ("system", "", "system"),
    ("tokens of the model in float64", "", lambda row: f"{row.same} of {row.of}"),
    ("largest error of a logit", ".1e", "error"),
    ("deviation", ".1e", "deviation"),
    ("margins where another", "", lambda row: ", ".join(f"{each:.4f}" for each in row.margins)),
    ("prompts whose two best are nearer than the largest error", ".1%", "near"),
    markdown=True,
)


def _dealt(row: LlmRow) -> str | None:
    return None if row.offline_s is None else f"{row.offline_s:.3f}, {row.offline_mb:.3f}"


ANSWERS = harness.table(
    ("line", "", "line"),
    ("system", "", "system"),
    ("first token s", ".4f", "first_s"),
    ("next token s", ".4f", "next_s"),
    ("dealing a token s, MB", "", _dealt),
    ("first token MB", ".3f", "first_mb"),
    ("next token MB", ".3f", "next_mb"),
    ("messages", "", "messages"),
    ("framing", ".2%", "framing"),
    ("tokens right", "", lambda row: None if row.of is None else f"{row.same} of {row.of}"),
    ("largest error of a score", ".1e", "error"),
    markdown=True,
)


def shown(rows: Sequence[LlmRow | NextTokens]) -> str:
    """Return the rows as a Markdown table."""
    return (NEXT_TOKENS if isinstance(rows[0], NextTokens) else ANSWERS)(rows)


def _next_tokens(
    folder: Path | None, text: Path | None, count: int, length: int
) -> list[NextTokens]:
    if folder is None:
        raise BadOptionError("the model for the next tokens is not given", want="--model FOLDER")
    plain = load_pretrained(folder)
    assert isinstance(plain, Decoder), "tokens are counted"
    words = None if text is None else text.read_text(encoding="utf-8")
    return bench_next_tokens(plain, cut_prompts(words, plain, folder, count, length))


main = harness.command(bench_llm, shown)


if __name__ == "__main__":
    main()
