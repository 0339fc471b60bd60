"""A project of a language model that is asked privately: a folder for each party; and its demo.

PROJECT/owner/    llm.toml, identity.key, certificates/; peers/ with the others' public keys, and
                  tokens of who calls
PROJECT/dealer/   the same
PROJECT/user/     llm.toml, identity.key; peers/ with the others' public keys, their authorities
                  and tokens to show
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vfl.config.toml import to_toml
from vfl.core.errors import MissingDataError, RunFolderError
from vfl.core.processes import Service
from vfl.core.storage import private_folder, write_text
from vfl.llm.file import LlmFile, LlmLimits, LlmParty, LlmTerms
from vfl.llm.parties import CALLERS, PARTIES
from vfl.llm.pretrained import TOKENIZER, names_of, require_tokenizer
from vfl.llm.product import LLM_FILE
from vfl.models.decoder import Decoder, DecoderShape, Encoder
from vfl.session.store.identity import Identity
from vfl.transport import write_trial_certificates
from vfl.transport.stream import listen


def write_llm_project(
    folder: Path,
    shape: DecoderShape,
    model: Path,
    *,
    owner: str = "127.0.0.1:9300",
    dealer: str = "127.0.0.1:9301",
    limits: LlmLimits | None = None,
    mode: str = "fast",
    integer_bits: int = 8,
    dealer_counts: bool = True,
) -> None:
    """Write all three parties' folders, with keys, certificates and tokens for a trial.

    Args:
        folder: a new folder.
        shape: of the model, which all know.
        model: the owner's folder with the weights.
        owner: host and port at which it is reached.
        dealer: likewise.
        limits: what the owner consents to.
        mode: "fast" or "thesis".
        integer_bits: of values between layers; see `vfl.llm.two_party.Form`.
        dealer_counts: whether the dealer counts what each question uses; see `LlmTerms`.

    Raises:
        RunFolderError: the folder holds something already.
        MissingDataError, DataError: the model's folder has no tokenizer, or names of no known form.
    """
    require_tokenizer(model)
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError("this folder is not empty", where=str(folder), fix="name a new one")
    terms = LlmTerms.model_validate(
        {
            "project": secrets.token_hex(16),
            "shape": asdict(shape),
            "mode": mode,
            "integer_bits": integer_bits,
            "dealer_counts": dealer_counts,
            "limits": limits or LlmLimits(),
            **names_of(model),
        }
    )
    own = {
        "owner": {"model": str(model.resolve()), "listen": owner, "dealer": dealer},
        "user": {"owner": owner, "dealer": dealer},
        "dealer": {"listen": dealer},
    }
    for name in PARTIES:
        identity = Identity.fresh()
        identity.keep_at(folder / name / "identity.key")
        for other in PARTIES:
            if other != name:
                identity.public.keep_at(folder / other / "peers" / f"{name}.pub")
        callers = CALLERS[name]
        if callers:
            host = own[name]["listen"].rpartition(":")[0].strip("[]")
            files = folder / name / "certificates"
            write_trial_certificates(files, sorted({host, "127.0.0.1", "localhost"}), [])
        for caller in callers:
            token = secrets.token_hex(32)
            write_text(folder / name / "peers" / f"{caller}.token", token)
            write_text(folder / caller / "peers" / f"{name}.token", token)
            private_folder(folder / caller / "peers")
            shutil.copy(files / "ca.pem", folder / caller / "peers" / f"{name}.pem")
        file = LlmFile.model_validate({"party": name, **own[name], "terms": terms})
        write_text(folder / name / LLM_FILE, _head(name) + to_toml(file))
    if (model / TOKENIZER).exists():
        shutil.copy(model / TOKENIZER, folder / "user" / TOKENIZER)


_COMMANDS = {"owner": "serve", "user": "ask", "dealer": "deal"}


def _head(name: str) -> str:
    command = f"vfl llm {_COMMANDS[name]}"
    return f"# The {name}'s own: {command} with this folder. [terms] are the same at all three.\n\n"


def demo_folder() -> Path:
    """Where the demo's model is kept: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vfl" / "decoder-demo"


def demo_model(given: Path | None) -> Path:
    """The folder of the model: the one that was given, or the demo's own.

    Raises:
        MissingDataError: the demo's is not trained yet.
    """
    folder = given or demo_folder()
    if given is None and not (folder / "model.safetensors").exists():
        raise MissingDataError(
            "the model of the demo is not trained yet",
            where=str(folder),
            fix="python examples/llm/train_decoder.py trains it in minutes; or give --model FOLDER",
        )
    return folder


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine at which nobody listens just now."""
    with ExitStack() as held:
        sockets = [held.enter_context(listen("127.0.0.1", 0)) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def plain_answer(model: Decoder | Encoder, prompt: list[int], count: int) -> list[Any]:
    """What plain torch answers: tokens, or a classifier's logits."""
    if isinstance(model, Decoder):
        return model.generate(prompt, count)
    with torch.no_grad():
        return model(torch.tensor([prompt]))[0].tolist()  # type: ignore[no-any-return]


def start_standing(
    project: Path,
    services: ExitStack,
    prefix: Callable[[LlmParty], Sequence[str]] = lambda party: (),
) -> None:
    """Start the model owner and the dealer of a project; they end with the services.

    Args:
        project: its folder.
        services: to end them with.
        prefix: what a party's command line begins with.
    """
    standing: list[tuple[LlmParty, str]] = [("owner", "serve"), ("dealer", "deal")]
    for name, command in standing:
        line = [*prefix(name), sys.executable, "-m", "vfl", "llm", command, str(project / name)]
        log = project / name / "log.txt"
        service = Service(f"the {name}", line, os.environ, log)
        services.callback(service.stop)
        service.wait_for("listens on", refusal="error[")
