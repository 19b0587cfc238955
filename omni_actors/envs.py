"""Every environment variable that omni_actors reads, in one place, with the flags of the same values.

Each is read when it is needed, never at import, so that tests and launchers can set it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # NVIDIA's: a process's part of a GPU, given to it before it starts


class Variable(NamedTuple):
    """One environment variable that the package reads."""

    name: str
    config_key: str  # the configuration value that it sets, "" for none
    help: str

    @property
    def flag(self) -> str:
        """The flag of `omni-actors launch` for the same value, "" for none."""
        own = self.name.removeprefix("OMNI_ACTORS_")
        return f"--{own.lower().replace('_', '-')}" if self.config_key and own != self.name else ""


VARIABLES = (
    Variable("OMNI_ACTORS_MODEL", "model", "checkpoint folder or hub name"),
    Variable("OMNI_ACTORS_RUN_DIR", "coordinator.run_dir", "folder for sockets and logs"),
    Variable("OMNI_ACTORS_LISTEN", "coordinator.listen", "client endpoint: 'ipc', or tcp://ADDRESS:PORT"),
    Variable("OMNI_ACTORS_KEYS", "coordinator.keys_dir", "folder of CURVE keys, from omni-actors keys"),
    Variable("OMNI_ACTORS_STARTUP_TIMEOUT", "coordinator.startup_timeout", "seconds until every stage must be ready"),
    Variable("OMNI_ACTORS_MPS", "mps", "auto or off: CUDA MPS where replicas share a GPU"),
    Variable("OMNI_ACTORS_MAX_IN_FLIGHT", "coordinator.max_in_flight", "requests admitted at once"),
    Variable("OMNI_ACTORS_TOOL_CALL_PARSER", "tool_call_parser", "vLLM's name of the parser for tool calls"),
    Variable(
        "OMNI_ACTORS_TOOL_CHAT_TEMPLATE", "tool_chat_template", "file with the chat template of prompts with tools"
    ),
    Variable("OMNI_ACTORS_NNODES", "cluster.nnodes", "hosts that the pipeline is spread over"),
    Variable("OMNI_ACTORS_NODE_RANK", "cluster.node_rank", "rank of this host, from 0"),
    Variable("OMNI_ACTORS_MASTER_ADDR", "cluster.master_addr", "host name or address of node 0"),
    Variable("OMNI_ACTORS_MASTER_PORT", "cluster.master_port", "port of the coordinator on node 0, for other nodes"),
    Variable("OMNI_ACTORS_NODE_ADDR", "cluster.node_addr", "address at which the others reach this host"),
    Variable("OMNI_ACTORS_ALLOW_IMPORTS", "", "comma-separated prefixes from which the YAML may name your own classes"),
    Variable("OMNI_ACTORS_LOG_LEVEL", "", "debug, info, warning or error"),
    Variable("OMNI_ACTORS_ENDPOINT", "", "endpoint to which the commands connect, such as omni-actors ctl"),
    Variable("OTEL_EXPORTER_OTLP_ENDPOINT", "coordinator.otlp_endpoint", "OpenTelemetry collector for spans"),
    Variable("OTEL_EXPORTER_OTLP_PROTOCOL", "coordinator.otlp_protocol", "http/protobuf or grpc"),
    Variable("OMNI_ACTORS_API_KEY", "", "key that HTTP requests must carry; required to listen off loopback"),
    Variable("OMNI_ACTORS_MEDIA_HOSTS", "", "comma-separated hosts from which the HTTP server may fetch media"),
)

# From a launcher to processes of its own, not for users: the descriptor of a pipe (`omni_actors.host.processes`).
STOP_TIME = "OMNI_ACTORS_STOP_TIME"


def config_overrides(environ: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Return the configuration values that the environment sets: key -> (value, variable name)."""
    environ = os.environ if environ is None else environ
    return {
        variable.config_key: (environ[variable.name], variable.name)
        for variable in VARIABLES
        if variable.config_key and environ.get(variable.name)
    }


def allowed_import_prefixes() -> tuple[str, ...]:
    """Module prefixes, besides our own, from which a pipeline may name classes."""
    value = os.environ.get("OMNI_ACTORS_ALLOW_IMPORTS", "")
    return tuple(prefix.strip() for prefix in value.split(",") if prefix.strip())


def log_level() -> str:
    """Name of the level for all of the package's loggers, in capitals."""
    return os.environ.get("OMNI_ACTORS_LOG_LEVEL", "info").upper()


def endpoint() -> str | None:
    """The endpoint to which commands connect; `None` if the environment names none."""
    return os.environ.get("OMNI_ACTORS_ENDPOINT", "").strip() or None


def api_key() -> str | None:
    """The key that HTTP requests must carry; `None` for no check."""
    return os.environ.get("OMNI_ACTORS_API_KEY", "").strip() or None


def keys_dir() -> str | None:
    """The key folder, for programs that do not read a pipeline's YAML; `None` for no keys."""
    return os.environ.get("OMNI_ACTORS_KEYS", "").strip() or None


def media_hosts() -> tuple[str, ...]:
    """Hosts from which the HTTP server may fetch media."""
    value = os.environ.get("OMNI_ACTORS_MEDIA_HOSTS", "")
    return tuple(host.strip().lower() for host in value.split(",") if host.strip())
