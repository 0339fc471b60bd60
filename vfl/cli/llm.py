"""``vfl llm``: a language model is asked by a user whose text its owner does not see."""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import Json, duration, emit, progress_line, say
from vfl.core.errors import ConfigError
from vfl.core.ledger import size

if TYPE_CHECKING:
    from vfl.config.llm_file import LlmFile
    from vfl.mpc.private_decoder import Pick
    from vfl.serving.llm import Reply, User

llm = typer.Typer(
    help="Ask a language model whose owner sees no text, and keeps its weights.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A party's folder, or the llm.toml in it.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)]
ModelFolder = Annotated[
    Path | None, typer.Option("--model", help="Folder with config.json and model.safetensors.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer. Repeat.")
]


@llm.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="PROJECT", help="A new folder.")],
    model: Annotated[
        Path, typer.Option("--model", help="Folder with config.json and model.safetensors.")
    ],
    owner: Annotated[
        str, typer.Option(help="Host and port of the model owner.")
    ] = "127.0.0.1:9300",
    dealer: Annotated[str, typer.Option(help="Host and port of the dealer.")] = "127.0.0.1:9301",
    max_questions: Annotated[
        int, typer.Option(help="Answered with one set of weights, ever.")
    ] = 1000,
    questions_per_hour: Annotated[int, typer.Option(help="Answered within an hour.")] = 100,
    max_tokens: Annotated[int, typer.Option(help="Of a question and its answer together.")] = 256,
    mode: Annotated[
        str, typer.Option(help="fast, or thesis for the protocols as printed.")
    ] = "fast",
) -> None:
    """Write a project: a folder each for the model owner, the user and the dealer.

    Each has its llm.toml with the terms, an identity key, and what it needs to know of the others.
    The limits are what the owner consents to. Move each folder to its party's machine.
    """
    from vfl.config.llm_file import LlmLimits
    from vfl.config.toml import check
    from vfl.models.decoder_folder import load_decoder
    from vfl.serving.llm_project import write_llm_project

    limits = check(
        {
            "max_questions": max_questions,
            "questions_per_hour": questions_per_hour,
            "max_tokens": max_tokens,
        },
        LlmLimits,
        "the limits",
    )
    shape = load_decoder(model).shape
    write_llm_project(folder, shape, model, owner=owner, dealer=dealer, limits=limits, mode=mode)
    say(f"wrote {folder}: one folder each for owner, user and dealer")
    say(f"then: vfl llm serve {folder}/owner; vfl llm deal {folder}/dealer")
    say(f'      vfl llm ask {folder}/user "a question"')


@llm.command()
def serve(folder: Folder) -> None:
    """Answer as the model owner until interrupted."""
    from vfl.core.seeds import use_one_thread
    from vfl.models.decoder_folder import load_decoder
    from vfl.serving.llm import Owner

    use_one_thread()
    file = _file(folder, "owner")
    Owner(file, load_decoder(file.beside(file.model or "model")), say).serve()


@llm.command()
def deal(
    folder: Folder,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the question.", min=1)] = 16,
    max_tokens: MaxTokens = 16,
    questions: Annotated[int, typer.Option(help="How many to deal for.", min=1)] = 1,
) -> None:
    """Deal as the dealer until interrupted; as the user, have material dealt ahead.

    With the dealer's folder the options mean nothing. With the user's, questions of exactly that
    length can be asked later without the dealer.
    """
    from vfl.core.seeds import use_one_thread
    from vfl.serving.llm import Dealer

    use_one_thread()
    file = _file(folder, "dealer", "user")
    if file.party == "dealer":
        Dealer(file, say).serve()
    with ExitStack() as held:
        user = _user(held, file)
        user.deal(prompt_tokens, max_tokens, questions)
        for kind, count in user.left().items():
            prompt, answer = kind.split("-")
            print(f"{count} questions of {prompt} tokens, answers of up to {answer}")


@llm.command()
def ask(
    folder: Folder,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The text.")],
    max_tokens: MaxTokens = 16,
    stop: Stop = None,
    temperature: Annotated[
        float, typer.Option(help="Draw tokens, the best more often below 1; 0 takes the best.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many best; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the fewest best of this probability together.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Of the draws; a fresh one unless it is given.")
    ] = None,
    json: Json = False,
) -> None:
    """Ask as the user; the answer appears token by token.

    Uses material that was dealt for a question of this length, or has it dealt now. How tokens are
    chosen stays with the user.
    """
    from vfl.core.seeds import use_one_thread

    use_one_thread()
    pick = _pick(temperature, top_k, top_p, seed)
    with ExitStack() as held:
        user = _user(held, _file(folder, "user"))
        reply, text = _asked(user, question, max_tokens, stop or [], pick, quiet=json)
    if json:
        emit({"tokens": reply.tokens, "text": text, "phases": reply.phases})
    else:
        _show(reply)


@llm.command()
def demo(
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="The text.")
    ] = "the best thing about this film is",
    model: ModelFolder = None,
    max_tokens: MaxTokens = 24,
    stop: Stop = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where to put the project; a new one under runs/ without."),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="fast, or thesis for the protocols as printed.")
    ] = "fast",
    json: Json = False,
) -> None:
    """Ask a small model on this machine, over TLS: owner, dealer and user are three processes.

    The model is one of film reviews, which examples/llm/train_decoder.py trains in minutes. Plain
    torch answers the same question beside it, and a table says what crossed the wire.
    """
    from vfl.config.llm_file import LlmLimits, read_llm_file
    from vfl.config.run_folder import new_run_name
    from vfl.core.seeds import use_one_thread
    from vfl.models.decoder_folder import load_decoder
    from vfl.serving.llm_demo import demo_model, free_addresses, start_standing
    from vfl.serving.llm_project import write_llm_project
    from vfl.serving.llm_text import read_tokenizer

    use_one_thread()
    model = demo_model(model)
    folder = folder or Path("runs") / new_run_name("llm")
    plain = load_decoder(model)
    owner, dealer = free_addresses(2)
    tokens = len(read_tokenizer(model).encode(question)) + max_tokens
    limits = LlmLimits(max_tokens=tokens)
    write_llm_project(
        folder, plain.shape, model, owner=owner, dealer=dealer, limits=limits, mode=mode
    )
    say(f"the project of the demo is {folder}")
    with ExitStack() as held:
        say("starting the model owner and the dealer (TLS, identity keys)")
        start_standing(folder, held)
        user = _user(held, read_llm_file(folder / "user"))
        reply, text = _asked(
            user, question, max_tokens, stop or [], _pick(0.0, 0, 1.0, None), quiet=json
        )
    prompt = read_tokenizer(model).encode(question)
    same = plain.generate(prompt, len(reply.tokens))
    if json:
        found = {"tokens": reply.tokens, "plain_tokens": same, "text": text}
        emit(found | {"phases": reply.phases})
        return
    _show(reply)
    equal = sum(one == other for one, other in zip(reply.tokens, same, strict=True))
    print(f"plain torch gives the same token in {equal} of {len(same)} places")


def _file(folder: Path, *parties: str) -> LlmFile:
    from vfl.config.llm_file import read_llm_file
    from vfl.core.errors import UserError

    file = read_llm_file(folder)
    if file.party not in parties:
        raise UserError(
            "this command is for another party",
            where=str(folder),
            got=f"the folder of the {file.party}",
            want=f"that of the {' or the '.join(parties)}",
        )
    return file


def _user(held: ExitStack, file: LlmFile) -> User:
    from vfl.core.storage import locked
    from vfl.serving.llm import User

    user = User(file, say)
    held.enter_context(locked(user.folder))
    return user


def _pick(temperature: float, top_k: int, top_p: float, seed: int | None) -> Pick:
    """How the user chooses a token.

    Raises:
        ConfigError: options of drawing where the best token is taken.
        BadOptionError: a number that is out of range.
    """
    from vfl.mpc.private_decoder import Sampling, greedy

    if temperature:
        return Sampling(temperature, top_k, top_p, secrets.randbits(31) if seed is None else seed)
    given = {"--top-k": top_k != 0, "--top-p": top_p != 1.0, "--seed": seed is not None}
    if lost := [name for name, is_there in given.items() if is_there]:
        raise ConfigError(
            f"{', '.join(lost)} would change nothing: the best token is taken",
            want="--temperature above 0, such as --temperature 0.8",
        )
    return greedy


def _asked(
    user: User, question: str, max_tokens: int, stop: list[str], pick: Pick, *, quiet: bool
) -> tuple[Reply, str]:
    """Ask, and print the answer as it comes."""
    from vfl.serving.llm_text import Streamed, read_tokenizer

    tokenizer = read_tokenizer(user.file.beside(user.file.tokenizer))
    prompt, streamed = tokenizer.encode(question), Streamed(tokenizer, stop)
    shown = not quiet and sys.stdout.isatty()  # where the answer is read as it grows
    began = time.monotonic()

    def told(token: int) -> bool:
        new, ended = streamed.add(token)
        if not quiet:
            print(new, end="", flush=True)
        if not shown:
            progress_line.tell(partial(_progress, streamed.count, max_tokens, began))
        return ended

    reply = user.ask(prompt, max_tokens, pick, told)
    progress_line.end()
    if not quiet:
        print(flush=True)
    return reply, streamed.text


def _progress(done: int, total: int, began: float) -> str:
    """How far an answer is."""
    a_second = done / max(time.monotonic() - began, 1e-9)
    left = duration((total - done) / a_second)
    return f"token {done} of {total} at most, {a_second:.1f} tokens/s, about {left} left"


def _show(reply: Reply) -> None:
    """What crossed the wire, phase by phase."""
    when = {
        "setup": "once for the weights",
        "offline": "before the question",
        "online": "now",
        "control": "words around it",
    }
    print(f"\n{'phase':<8} {'bytes':>10} {'messages':>9} {'seconds':>8}  when, and between whom")
    for name, row in reply.phases.items():
        if not row:
            continue
        pairs = ", ".join(f"{pair} {size(count)}" for pair, count in row["between"].items())
        figures = f"{size(row['bytes']):>10} {row['messages']:>9.0f} {row['seconds']:>8.2f}"
        print(f"{name:<8} {figures}  {when[name]}: {pairs}")
