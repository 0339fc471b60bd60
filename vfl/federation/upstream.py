"""All internal names of Flower that vfl uses, each with the reason why vfl uses it.

Flower's public API is `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.simulation`; other
modules of vfl import it directly. All other names in Flower may change in Flower's next release.
Such internal names are therefore listed only here; pyproject.toml limits Flower's version, and
`scripts/newest` tests vfl with Flower's newest version. If the installed Flower lacks one of these
internal names, vfl raises an error that names it before it uses the module.
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
        names: names in the module that vfl calls or replaces; an attribute of a class is written as
            Class.attribute.
        why: text that states why vfl calls or replaces the names.
    """

    module: str
    names: tuple[str, ...]
    why: str

    def load(self) -> Any:
        """Import the module, and check that all of `names` exist in it.

        Raises:
            ConfigError: the module or one of its names does not exist, so vfl cannot put its guards
                around this version of Flower.
        """
        try:
            with no_deprecations():
                module = import_module(self.module)
        except ModuleNotFoundError as problem:
            if not self.module.startswith(problem.name or "?"):
                raise  # the import failed because a package that Flower needs is missing
            missing = [problem.name or self.module]
        else:
            missing = [name for name in self.names if not _has(module, name)]
        if missing:
            raise ConfigError(
                "vfl cannot put its guards around this version of Flower",
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
    """Hide deprecation warnings of Flower and its dependencies.

    A user of vfl cannot prevent these warnings.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


# Modules of Flower's services: a Flower command starts each service, and vfl replaces the service's
# server by a guard.
SUPERLINK = Internal(
    "flwr.superlink.cli.flower_superlink",
    ("flower_superlink", "uvicorn"),
    "vfl replaces uvicorn, which would serve all APIs at one port without a guard",
)
SUPERNODE = Internal(
    "flwr.supernode.cli.flower_supernode",
    ("flower_supernode", "uvicorn"),
    "vfl replaces uvicorn for the local API as in the SuperLink",
)
SUPERNODE_LOOP = Internal(
    "flwr.supernode.start_client_internal",
    ("_push_messages", "time"),
    "vfl shortens the loop's sleep of 3 s between two messages, and a thread of vfl waits for "
    "each reply in place of the loop",
)

# Modules of the helper programs that a service starts.
SUPEREXEC = Internal(
    "flwr.supercore.cli",
    ("flower_superexec",),
    "fetches work from a service; vfl adds the service's secret",
)
EXECUTOR = Internal(
    "flwr.supercore.superexec.executor.subprocess_executor",
    ("SubprocessExecutor.reconcile", "subprocess"),
    "starts programs; vfl forks a standing worker in its place",
)
SERVERAPP = Internal("flwr.superlink.cli", ("flwr_serverapp",), "runs the label party's program")
SERVERAPP_RUN = Internal(
    "flwr.superlink.runtime.run_serverapp",
    ("flush_logs", "install_from_fab"),
    "unpacks a bundle, which vfl checks before; pauses before its end so that the SuperLink "
    "receives the last log lines, and vfl shortens the pause",
)
CLIENTAPP = Internal("flwr.supernode.cli", ("flwr_clientapp",), "runs a feature party's program")
CLIENTAPP_RUN = Internal(
    "flwr.supernode.runtime.run_clientapp",
    ("install_from_fab",),
    "unpacks a bundle; vfl checks the bundle before",
)
SIMULATION = Internal(
    "flwr.simulation.app",
    ("flwr_simulation", "install_from_fab"),
    "runs the programs of a simulation, and unpacks a bundle; vfl checks the bundle before",
)

# Modules with which vfl sends requests to a service.
HTTP_CLIENT = Internal(
    "flwr.supercore.protobuf.client",
    ("ProtobufClient.__init__",),
    "sends every request of Flower; vfl adds the secret to requests to the local service",
)
CONTROL = Internal(
    "flwr.supercore.control",
    ("ControlHttpClient.from_server_address",),
    "asks a SuperLink for its runs",
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
    "requests to a SuperLink; a guard reads the request that registers a key",
)
FLEET_MESSAGES = Internal(
    "flwr.proto.fleet_pb2",
    ("PushMessagesRequest",),
    "a guard reads the sender of a reply in this request",
)
ERRORS = Internal(
    "flwr.supercore.error",
    ("FlowerError.from_json",),
    "contains the reason why a SuperLink refused a request",
)
REGISTERED = Internal(
    "flwr.server.superlink.linkstate",
    ("LinkState.deactivate_node", "LinkState.get_node_id_by_public_key"),
    "a guard asks this object whether a key is registered, and reports a killed SuperNode to it",
)

# Modules that make the app bundle of a run, and its settings.
BUNDLE = Internal(
    "flwr.cli.build", ("build_fab_from_disk",), "packs an app bundle in the same way as flwr run"
)
FAB = Internal("flwr.supercore.fab", ("Fab",), "contains an app bundle and its digest")
MESSAGES = Internal(
    "flwr.common.serde",
    ("fab_to_proto", "user_config_to_proto"),
    "converts a bundle and its settings to fields of a StartRun request",
)
ARGUMENTS = Internal(
    "flwr.common.config",
    ("parse_config_args",),
    "parses the size (number of CPUs and nodes) of a simulation",
)
SIZES = Internal(
    "flwr.supercore.utils",
    ("simulation_config_from_json",),
    "converts this size to a field of a StartRun request",
)
TELEMETRY = Internal(
    "flwr.supercore.telemetry",
    ("FLWR_TELEMETRY_ENABLED",),
    "shows whether Flower's telemetry is enabled in this process",
)

INTERNALS = tuple(value for value in list(globals().values()) if isinstance(value, Internal))

# Headers of a SuperNode's requests: its public key, the time, and its signature of the time (in
# base64).
KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "flwr-public-key", "flwr-timestamp", "flwr-signature"

# Names of environment variables.
HOME = "FLWR_HOME"
#: Environment variables of every Flower process: no telemetry, no update check, no installation of
#: packages.
SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
#: Environment variable that sets the seconds between two requests of a program for work.
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
#: Environment variables with which Flower's SuperLink would open another port, which no guard
#: protects.
UNGUARDED = frozenset({"FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"})
