"""The demo of a language model that is asked privately: its folder, and its three processes."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from vfl.core.errors import MissingDataError
from vfl.federation.processes import Service
from vfl.transport.stream import listen


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


def start_standing(project: Path, services: ExitStack) -> None:
    """Start the model owner and the dealer of a project; they end with the services."""
    for name, command in (("owner", "serve"), ("dealer", "deal")):
        line = [sys.executable, "-m", "vfl", "llm", command, str(project / name)]
        log = project / name / "log.txt"
        service = Service(f"the {name}", line, os.environ, log)
        services.callback(service.stop)
        service.wait_for("listens on", refusal="error[")
