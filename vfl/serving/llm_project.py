"""A project of a language model that is asked privately: one folder an owner of it, for a trial.

PROJECT/owner/    llm.toml, identity.key, certificates/; peers/ with the others' public keys, and
                  tokens of who calls
PROJECT/dealer/   the same
PROJECT/user/     llm.toml, identity.key; peers/ with the others' public keys, their authorities
                  and tokens to show
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import asdict
from pathlib import Path

from vfl.config.llm_file import LLM_FILE, LlmFile, LlmLimits, LlmTerms
from vfl.config.toml import to_toml
from vfl.core.errors import RunFolderError
from vfl.core.storage import private_folder, write_text
from vfl.models.decoder import DecoderShape
from vfl.serving.llm import CALLERS, PARTIES
from vfl.serving.llm_text import TOKENIZER
from vfl.session.identity import Identity
from vfl.transport import write_trial_certificates


def write_llm_project(
    folder: Path,
    shape: DecoderShape,
    model: Path,
    *,
    owner: str = "127.0.0.1:9300",
    dealer: str = "127.0.0.1:9301",
    limits: LlmLimits | None = None,
    mode: str = "fast",
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

    Raises:
        RunFolderError: the folder holds something already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError("this folder is not empty", where=str(folder), fix="name a new one")
    terms = LlmTerms.model_validate(
        {
            "project": secrets.token_hex(16),
            "shape": asdict(shape),
            "mode": mode,
            "limits": limits or LlmLimits(),
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
