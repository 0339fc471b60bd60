"""``vfl llm``: questions to a language model or a text classifier whose owner sees no text."""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import Json, argument, duration, emit, option, progress_line, say
from vfl.core.errors import ConfigError, VFLError
from vfl.core.traffic import size

if TYPE_CHECKING:
    from vfl.llm.file import LlmFile
    from vfl.llm.parties import Owner, Reply, User
    from vfl.llm.text import Streamed
    from vfl.llm.two_party import Pick
    from vfl.models.decoder import Decoder, Encoder

llm = typer.Typer(
    help="Ask a language model whose owner sees no text, while you see no weights.",
    no_args_is_help=True,
)

Folder = Annotated[Path, argument("A party's folder, or the llm.toml in it.", "FOLDER")]
MaxTokens = Annotated[int, option("Largest number of tokens of an answer.", min=1)]
ModelFolder = Annotated[
    Path | None,
    option("Folder of a GPT-2, LLaMA or BERT model, in Hugging Face's layout.", "--model"),
]
IntegerBits = Annotated[
    int | None,
    option(
        "Bits before the point of values between layers; by default measured on the model.",
        min=4,
        max=15,
    ),
]
InnerBits = Annotated[
    int | None,
    option("Bits before the point of values inside a layer, and of tokens' scores.", min=4, max=15),
]
Mode = Annotated[str, option("fast, or thesis for the protocols as the thesis prints them.")]
Protect = Annotated[
    str,
    option('"scores": the user does not see attention scores, permuted or not; more is dealt.'),
]
Stop = Annotated[list[str] | None, option("Text that ends the answer. Repeat.", "--stop")]


@llm.command()
def init(
    folder: Annotated[Path, argument("A new folder.", "PROJECT")],
    model: Annotated[
        Path, option("Folder of a GPT-2, LLaMA or BERT model, in Hugging Face's layout.", "--model")
    ],
    owner: Annotated[str, option("Host and port of the model owner.")] = "127.0.0.1:9300",
    dealer: Annotated[str, option("Host and port of the dealer.")] = "127.0.0.1:9301",
    max_questions: Annotated[
        int, option("Largest number of questions that one set of weights answers.")
    ] = 1000,
    questions_per_hour: Annotated[
        int, option("Largest number of questions answered within an hour.")
    ] = 100,
    max_tokens: Annotated[
        int,
        option(
            "Largest number of tokens of a question and its answer together, summed over the"
            " questions that are asked together."
        ),
    ] = 256,
    mode: Mode = "fast",
    integer_bits: IntegerBits = None,
    inner_bits: InnerBits = None,
    protect: Protect = "nothing",
    dealer_counts: Annotated[
        bool,
        option(
            "Let the dealer take part in every question, and count the question's material as"
            " used.",
            "--dealer-counts/--no-dealer-counts",
        ),
    ] = True,
) -> None:
    """Write a project: one folder each for the model owner, the user and the dealer.

    Each folder has an identity key, the public keys of the other parties and an llm.toml. This file
    contains the terms that all three parties share, and the addresses of other parties. By these
    terms, the model owner consents to answer within their limits. Move each folder to the machine
    of its party.
    """
    from vfl.llm.project import private_model, write_llm_project

    plain = private_model(model)
    write_llm_project(
        folder,
        plain.shape,
        model,
        owner=owner,
        dealer=dealer,
        limits={
            "max_questions": max_questions,
            "questions_per_hour": questions_per_hour,
            "max_tokens": max_tokens,
        },
        mode=mode,
        protect=protect,
        dealer_counts=dealer_counts,
        **_bits(plain, integer_bits, inner_bits, protect),
    )
    say(f"wrote {folder}: one folder each for owner, user and dealer")
    say(f"then: vfl llm serve {folder}/owner; vfl llm deal {folder}/dealer")
    say(f'      vfl llm ask {folder}/user "a question"')


@llm.command()
def serve(folder: Folder) -> None:
    """Answer questions as the model owner, until interrupted."""
    from vfl.core.seeds import use_one_thread

    use_one_thread()
    _owner(_file(folder, "owner")).serve()


@llm.command()
def deal(
    folder: Folder,
    prompt_tokens: Annotated[int, option("Tokens of the question.", min=1)] = 16,
    max_tokens: MaxTokens = 16,
    questions: Annotated[
        int, option("Number of questions, or of batches, for which to deal material.", min=1)
    ] = 1,
    texts: Annotated[
        int, option("Number of questions that will be asked together, as one batch.", min=1)
    ] = 1,
) -> None:
    """As the dealer, deal material until interrupted; as the user, request material in advance.

    Material is the random data that one question uses up. The options apply to the user's folder
    only: afterwards, the user can ask questions of exactly this length without waiting for the
    dealer. A classifier generates no tokens, so an answer of it has no length. While the dealer
    makes material, questions use material that it dealt earlier; a question that needs new material
    waits only until the dealing in progress ends.
    """
    from vfl.core.seeds import use_one_thread
    from vfl.llm.parties import Dealer, User

    use_one_thread()
    file = _file(folder, "dealer", "user")
    if file.party == "dealer":
        Dealer(file, say).serve()
    user = User(file, say)
    for done in range(questions):
        user.require_dealable(questions - done, texts)
        user.deal(prompt_tokens, _answered(user, max_tokens), 1, texts)
        say(f"dealt {done + 1} of {questions}")
    for kind, count in user.left().items():
        prompt, _, answer = kind.partition("-")
        answer, _, beside = answer.partition("x")
        more = f", {beside} asked together" if beside else ""
        print(f"questions of {prompt} tokens, answers of up to {answer}{more}: {count} left")


@llm.command()
def ask(
    folder: Folder,
    questions: Annotated[
        list[str] | None,
        argument(
            "The text, or several texts; - reads one from the standard input.",
            "[QUESTION...]",
        ),
    ] = None,
    file: Annotated[
        list[Path] | None,
        option("File with a question's text. Repeat.", exists=True, dir_okay=False),
    ] = None,
    max_tokens: MaxTokens = 16,
    stop: Stop = None,
    temperature: Annotated[
        float,
        option(
            "Temperature of the draws: below 1 favours likely tokens; 0 takes the likeliest token."
        ),
    ] = 0.0,
    top_k: Annotated[
        int, option("Draw only among this number of likeliest tokens; 0 means all tokens.")
    ] = 0,
    top_p: Annotated[
        float, option("Draw among the fewest likeliest tokens that together have this probability.")
    ] = 1.0,
    seed: Annotated[
        int | None, option("Seed of the random draws of tokens; by default a new random seed.")
    ] = None,
    json: Json = False,
) -> None:
    """Ask as the user; the answer appears token by token, or as the classes of a classifier.

    The command uses material (random data from the dealer) that was dealt for questions of this
    length, or requests it now. Several questions of equal length travel in common messages, and
    need no more messages than a single question. Only the user learns by which rule the tokens are
    chosen.
    """
    from vfl.core.seeds import use_one_thread
    from vfl.llm.parties import User

    use_one_thread()
    pick = _pick(temperature, top_k, top_p, seed)
    texts = _questions(questions or [], file or [])
    user = User(_file(folder, "user"), say)
    if temperature and user.classifies:
        raise ConfigError("--temperature has no effect: a classifier has no tokens")
    asked = _asked(user, texts, max_tokens, stop or [], pick, quiet=json)
    if not json:
        _show(asked)
    elif len(texts) == 1:
        emit(asked[0].as_json())
    else:
        emit({"answers": [each.as_json() for each in asked]})


@llm.command()
def restored(folder: Folder) -> None:
    """Continue with a store that was restored from an old copy, if no newer store is left.

    The command removes all dealt material, because the old copy does not record which material was
    used since; request new material. At the model owner, all questions that max_questions allows
    then count as answered with the present weights.
    """
    from vfl.llm.file import read_llm_file
    from vfl.llm.parties import Dealer, User

    file = read_llm_file(folder)
    if file.party == "owner":
        _owner(file).restored()
    else:
        (User if file.party == "user" else Dealer)(file, say).restored()
    say("no dealt material is left; the next dealing shares the weights again")


@llm.command()
def demo(
    question: Annotated[
        str, argument("The text.", "QUESTION")
    ] = "the best thing about this film is",
    model: ModelFolder = None,
    max_tokens: MaxTokens = 24,
    stop: Stop = None,
    folder: Annotated[
        Path | None, option("Folder of the project; by default a new one under runs/.", "--folder")
    ] = None,
    mode: Mode = "fast",
    integer_bits: IntegerBits = None,
    inner_bits: InnerBits = None,
    protect: Protect = "nothing",
    json: Json = False,
) -> None:
    """Ask a model on this machine, over TLS: owner, dealer and user are three processes.

    Without --model, the command uses the smallest language model that `vfl model add` has stored,
    or the model that examples/llm/train_decoder.py trains. Plain torch answers the same question
    for comparison, and a table shows the bytes that were sent over the network.
    """
    from vfl.config.run_folder import new_run_name
    from vfl.core.seeds import use_one_thread
    from vfl.llm.file import read_llm_file
    from vfl.llm.parties import User
    from vfl.llm.project import (
        demo_model,
        free_addresses,
        plain_answer,
        private_model,
        start_standing,
        write_llm_project,
    )
    from vfl.llm.text import read_tokenizer

    use_one_thread()
    model = demo_model(model)
    say(f"the model is {model}")
    folder = folder or Path("runs") / new_run_name("llm")
    plain = private_model(model)
    owner, dealer = free_addresses(2)
    prompt = read_tokenizer(model).encode(question)
    write_llm_project(
        folder,
        plain.shape,
        model,
        owner=owner,
        dealer=dealer,
        limits={"max_tokens": len(prompt) + max_tokens},
        mode=mode,
        protect=protect,
        **_bits(plain, integer_bits, inner_bits, protect),
    )
    say(f"the project of the demo is {folder}")
    with ExitStack() as held:
        say("starting the model owner and the dealer (TLS, identity keys)")
        start_standing(folder, held)
        user = User(read_llm_file(folder / "user"), say)
        pick = _pick(0.0, 0, 1.0, None)
        (asked,) = _asked(user, [question], max_tokens, stop or [], pick, quiet=json)
    same = plain_answer(plain, prompt, len(asked.tokens))
    if json:
        emit(asked.as_json() | {"plain_logits" if asked.logits else "plain_tokens": same})
        return
    _show([asked])
    if asked.logits:
        most = max(abs(one - other) for one, other in zip(asked.logits, same, strict=True))
        print(f"plain torch gives the same logits, at most {most:.1e} apart")
    else:
        equal = sum(one == other for one, other in zip(asked.tokens, same, strict=True))
        print(f"plain torch gives the same token in {equal} of {len(same)} places")


def _bits(
    model: Decoder | Encoder, integer_bits: int | None, inner_bits: int | None, protect: str
) -> dict[str, int]:
    """Return the number of bits before the binary point: the given one, or what the model needs."""
    from vfl.llm.project import needed_bits

    given = {"integer_bits": integer_bits, "inner_bits": inner_bits}
    found = {name: bits for name, bits in given.items() if bits is not None}
    if len(found) < len(given) or protect != "nothing":
        found = needed_bits(model) | found
        if protect != "nothing" and integer_bits is None:
            found["integer_bits"] = max(found["integer_bits"], found["score_bits"])
        say(f"values between layers take {found['integer_bits']} bits before the point")
    return found


def _owner(file: LlmFile) -> Owner:
    from vfl.llm.parties import Owner
    from vfl.llm.project import private_model

    folder = file.beside(file.model or "model")
    return Owner(file, lambda: private_model(folder), say)


def _file(folder: Path, *parties: str) -> LlmFile:
    from vfl.core.errors import UserError
    from vfl.llm.file import read_llm_file

    file = read_llm_file(folder)
    if file.party not in parties:
        raise UserError(
            "this command is for another party",
            where=str(folder),
            got=f"the folder of the {file.party}",
            want=f"that of the {' or the '.join(parties)}",
        )
    return file


def _questions(given: list[str], files: list[Path]) -> list[str]:
    """Return the texts of the questions, from the command line, standard input and files."""
    if given.count("-") > 1:
        raise typer.BadParameter("only one question can come from the standard input")
    texts = [sys.stdin.read().strip() if text == "-" else text for text in given]
    texts += [path.read_text(encoding="utf-8").strip() for path in files]
    if not texts:
        raise typer.BadParameter("no question: write a text, - for the standard input, or --file")
    return texts


def _answered(user: User, max_tokens: int) -> int:
    """Return the largest number of tokens that an answer may have."""
    return 1 if user.classifies else max_tokens


def _pick(temperature: float, top_k: int, top_p: float, seed: int | None) -> Pick:
    """Return the rule by which the user chooses a token.

    Raises:
        ConfigError: the options demand sampling and greedy choice at the same time.
        BadOptionError: a number is out of range.
    """
    from vfl.llm.private_decoder import Sampling, greedy

    if temperature:
        return Sampling(temperature, top_k, top_p, secrets.randbits(31) if seed is None else seed)
    given = {"--top-k": top_k != 0, "--top-p": top_p != 1.0, "--seed": seed is not None}
    if lost := [name for name, is_there in given.items() if is_there]:
        raise ConfigError(
            f"{', '.join(lost)} has no effect: the model's best token is taken",
            want="--temperature above 0, such as --temperature 0.8",
        )
    return greedy


@dataclass
class _Answer:
    """Result of one question to the model.

    Attributes:
        question: text of the question.
        text: text of the answer, or the name of the likeliest class.
        tokens: token numbers of the answer.
        logits: logits of a classifier, by class.
        labels: names of the classes.
        reply: the user's `Reply` for the whole batch that contained this question.
    """

    question: str
    text: str
    tokens: list[int]
    logits: list[float]
    labels: list[str]
    reply: Reply

    def as_json(self) -> dict[str, Any]:
        found = {"text": self.text, "phases": self.reply.phases}
        return found | (
            {"labels": self.labels, "logits": self.logits}
            if self.logits
            else {"tokens": self.tokens}
        )


def _asked(
    user: User, questions: list[str], max_tokens: int, stop: list[str], pick: Pick, *, quiet: bool
) -> list[_Answer]:
    """Ask questions; those of equal length together.

    A single answer is printed token by token.
    """
    from vfl.llm.text import Streamed, read_tokenizer

    tokenizer = read_tokenizer(user.file.beside(user.file.tokenizer))
    prompts = [tokenizer.encode(question) for question in questions]
    if user.classifies:
        return [
            _classified(user, question, prompt)
            for question, prompt in zip(questions, prompts, strict=True)
        ]
    lengths = [len(prompt) for prompt in prompts]
    # Check all questions before the command asks the first one.
    for length, texts in Counter(lengths).items():
        user.require_askable(length, max_tokens, texts)
    found: dict[int, _Answer] = {}
    try:
        for length in sorted(set(lengths)):
            own = [place for place, size in enumerate(lengths) if size == length]
            streams = [Streamed(tokenizer, stop, user.terms.end_tokens) for _ in own]
            shown = _Shown(streams, max_tokens, quiet, len(questions) == 1)
            reply = user.ask_all([prompts[place] for place in own], max_tokens, pick, shown.add)
            shown.end()
            for place, stream, tokens in zip(own, streams, reply.answers, strict=True):
                found[place] = _Answer(questions[place], stream.text, tokens, [], [], reply)
    except VFLError:
        if found and not quiet:  # the owner has already counted and answered these questions
            _show([found[place] for place in sorted(found)], several=True)
        raise
    return [found[place] for place in range(len(questions))]


def _classified(user: User, question: str, prompt: list[int]) -> _Answer:
    reply = user.ask_all([prompt])
    known = user.terms.labels
    labels = list(known) or [f"class {number}" for number in range(len(reply.logits))]
    best = max(range(len(labels)), key=reply.logits.__getitem__)
    return _Answer(question, labels[best], [], reply.logits, labels, reply)


class _Shown:
    """Shows answers while they grow: the text of a single answer, or the progress of several."""

    def __init__(self, streams: list[Streamed], most: int, quiet: bool, alone: bool) -> None:
        self._streams, self._most = streams, most
        self._text = alone and not quiet
        self._progress = not (self._text and sys.stdout.isatty())
        self._began = time.monotonic()

    def add(self, text: int, token: int) -> bool:
        """Print one more token of an answer; return whether this token ends the answer."""
        new, ended = self._streams[text].add(token)
        if self._text:
            print(new, end="", flush=True)
        if self._progress:
            done = max(stream.count for stream in self._streams)
            progress_line.tell(partial(_progress, done, self._most, self._began))
        return ended

    def end(self) -> None:
        """End the display of the answers."""
        progress_line.end()
        if self._text:
            print(self._streams[0].finish(), flush=True)


def _progress(done: int, total: int, began: float) -> str:
    """Return a line about the progress of an answer."""
    a_second = done / max(time.monotonic() - began, 1e-9)
    left = duration((total - done) / a_second)
    return f"token {done} of {total} at most, {a_second:.1f} tokens/s, about {left} left"


def _show(asked: list[_Answer], several: bool = False) -> None:
    """Print the answers that are not yet shown, then the traffic of each phase."""
    import torch

    for each in asked:
        if each.logits:
            chances = torch.tensor(each.logits).softmax(0).tolist()
            likely = sorted(zip(chances, each.labels, strict=True), reverse=True)
            print(f"{each.question}: " + ", ".join(f"{one} {chance:.3f}" for chance, one in likely))
        elif several or len(asked) > 1:
            print(f"{each.question}: {each.text}")
    when = {
        "setup": "once for the weights",
        "offline": "before the question",
        "online": "now",
        "control": "words around it",
    }
    for reply in {id(each.reply): each.reply for each in asked}.values():
        print(
            f"\n{'phase':<8} {'bytes':>10} {'messages':>9} {'seconds':>8}  when, and between whom"
        )
        for name, row in reply.phases.items():
            if not row:
                continue
            pairs = ", ".join(f"{pair} {size(count)}" for pair, count in row["between"].items())
            figures = f"{size(row['bytes']):>10} {row['messages']:>9.0f} {row['seconds']:>8.2f}"
            print(f"{name:<8} {figures}  {when[name]}: {pairs}")
