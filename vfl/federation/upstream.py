"""All internal names of Flower that vfl uses, with the reasons.

Flower's public API is `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.simulation`; other
modules of vfl import it directly. All other names of Flower may change in its next release. Such
names are therefore listed only here; pyproject.toml limits Flower's version, and `scripts/newest`
tests vfl with the newest version. If the installed Flower lacks one of these names, vfl ends with
an error before it listens or runs anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from vfl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Internal:
    """A module of Flower that is not part of its public API.

    Attributes:
        module: full name of the module.
        names: names in the module that vfl calls or replaces; for an attribute of a class, the
            class and the attribute with a dot between them.
        why: text that states why vfl calls or replaces these names.
    """

    module: str
    names: tuple[str, ...]
    why: str

    def load(self) -> Any:
        """Import the module, and check that all the names exist in it.

        Raises:
            ConfigError: the module or one of its names does not exist, so vfl cannot guard this
                version of Flower.
        """
        try:
            with no_deprecations():
                module = import_module(self.module)
        except ModuleNotFoundError as problem:
            if not self.module.startswith(problem.name or "?"):
                raise  # a package that Flower needs is missing
            missing = [problem.name or self.module]
        else:
            missing = [name for name in self.names if not _has(module, name)]
        if missing:
            raise ConfigError(
                "this version of Flower is not one vfl can guard",
                where=self.module,
                got=f"no {', '.join(missing)}",
                fix="install the version that vfl asks for: pip install 'vfl' again",
            )
        return module


def _has(module: Any, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True


@contextmanager
def no_deprecations() -> Iterator[None]:
    """Hide deprecation warnings of Flower and its dependencies; users cannot avoid them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


# Modules of services: a command of Flower starts each service, and vfl puts a guard in place of
# Flower's server.
SUPERLINK = Internal(
    "flwr.superlink.cli.flower_superlink",
    ("flower_superlink", "uvicorn"),
    "uvicorn, replaced, would serve all APIs at one port without a guard",
)
SUPERNODE = Internal(
    "flwr.supernode.cli.flower_supernode",
    ("flower_supernode", "uvicorn"),
    "replaced for the local API in the same way",
)
SUPERNODE_LOOP = Internal(
    "flwr.supernode.start_client_internal",
    ("_push_messages", "time"),
    "its sleep of 3 s between two messages, shortened; it waits for the reply to each, replaced by "
    "a thread that replies",
)

# Modules of the programs that a service starts.
SUPEREXEC = Internal(
    "flwr.supercore.cli", ("flower_superexec",), "takes work from a service, with its secret"
)
EXECUTOR = Internal(
    "flwr.supercore.superexec.executor.subprocess_executor",
    ("SubprocessExecutor.reconcile", "subprocess"),
    "starts programs, replaced by forks of a standing worker",
)
SERVERAPP = Internal("flwr.superlink.cli", ("flwr_serverapp",), "runs the label party's program")
SERVERAPP_RUN = Internal(
    "flwr.superlink.runtime.run_serverapp",
    ("flush_logs", "install_from_fab"),
    "unpacks a bundle, replaced by a check before it; waits long for its last lines",
)
CLIENTAPP = Internal("flwr.supernode.cli", ("flwr_clientapp",), "runs a feature party's program")
CLIENTAPP_RUN = Internal(
    "flwr.supernode.runtime.run_clientapp",
    ("install_from_fab",),
    "unpacks a bundle, replaced in the same way",
)
SIMULATION = Internal(
    "flwr.simulation.app",
    ("flwr_simulation", "install_from_fab"),
    "runs the programs of a simulation, and unpacks a bundle, replaced in the same way",
)

# Modules with which vfl sends requests to a service.
HTTP_CLIENT = Internal(
    "flwr.supercore.protobuf.client",
    ("ProtobufClient.__init__",),
    "every request of Flower's, so that those to our own service carry its secret",
)
CONTROL = Internal(
    "flwr.supercore.control",
    ("ControlHttpClient.from_server_address",),
    "asks a SuperLink for runs",
)
CONTROL_MESSAGES = Internal(
    "flwr.proto.control_pb2",
    (
        "ListNodesRequest",
        "ListRunsRequest",
        "RegisterNodeRequest",
        "StartRunRequest",
        "StreamLogsRequest",
        "UnregisterNodeRequest",
    ),
    "its requests; a guard reads registrations",
)
FLEET_MESSAGES = Internal(
    "flwr.proto.fleet_pb2", ("PushMessagesRequest",), "a guard reads the sender of a reply"
)
ERRORS = Internal(
    "flwr.supercore.error", ("FlowerError.from_json",), "reasons of a SuperLink's refusal"
)
REGISTERED = Internal(
    "flwr.server.superlink.linkstate",
    ("LinkState.deactivate_node", "LinkState.get_node_id_by_public_key"),
    "a guard asks it whether a key is registered, and reports a killed SuperNode to it",
)

# Modules for the app bundle of a run, and for its settings.
BUNDLE = Internal("flwr.cli.build", ("build_fab_from_disk",), "packs a bundle as flwr run does")
FAB = Internal("flwr.supercore.fab", ("Fab",), "a bundle and its digest")
MESSAGES = Internal(
    "flwr.common.serde", ("fab_to_proto", "user_config_to_proto"), "both in the form of StartRun"
)
ARGUMENTS = Internal("flwr.common.config", ("parse_config_args",), "the size of a simulation")
SIZES = Internal(
    "flwr.supercore.utils", ("simulation_config_from_json",), "the size in the form of StartRun"
)
TELEMETRY = Internal(
    "flwr.supercore.telemetry",
    ("FLWR_TELEMETRY_ENABLED",),
    "shows whether Flower was loaded with its telemetry on",
)

INTERNALS = tuple(value for value in list(globals().values()) if isinstance(value, Internal))

# Headers of a SuperNode's requests: its public key, the time, and its signature (in base64).
KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "flwr-public-key", "flwr-timestamp", "flwr-signature"

# Names of environment variables.
HOME = "FLWR_HOME"
#: Environment of every Flower process: no telemetry, no update check, no installation of packages.
SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
#: Environment variable with the interval between a program's requests for work, in seconds.
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
#: Options that would open another port of Flower, which no guard protects.
UNGUARDED = frozenset({"FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"})
