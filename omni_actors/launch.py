"""The launcher's command line: `omni-actors launch CONFIG` starts a pipeline and serves it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from omni_actors import __version__, config, flags, logs
from omni_actors.config import placement
from omni_actors.config.loading import as_yaml, shipped
from omni_actors.envs import VARIABLES
from omni_actors.errors import ConfigError, Fault, OmniError
from omni_actors.host.processes import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    announce_stop_time,
    process_start,
)
from omni_actors.http_server.settings import add_flags, given_flags
from omni_actors.launcher.launcher import Launcher, host_addresses
from omni_actors.launcher.one_request import answer
from omni_actors.launcher.preflight import check_engines, check_launch, pending_download
from omni_actors.logs import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 ok, 1 failure, 2 wrong usage or configuration)."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser(checks=given[:1] == ["--check"]).parse_args(given)
    try:
        logs.configure("launcher")
        loaded = config.load(options.config, overrides(options), options.gpus)
        check_launch(loaded.pipeline, options)
        if options.check:
            checked = check_engines(loaded.pipeline)  # first: what is wrong is not to stand below a long table
            print(config.describe(loaded, options.gpus), *checked, sep="\n")
            return EXIT_OK
        return asyncio.run(_run(loaded.pipeline, options))
    except ConfigError as error:
        logs.complain(f"configuration error: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt:  # before the launcher took over the signals
        return EXIT_INTERRUPTED
    except OmniError as error:
        logs.complain(f"error ({error.code.value}): {error}")
        return EXIT_FAILED


def parser(*, checks: bool = False) -> argparse.ArgumentParser:
    """Build the parser of the command line; `checks`: as that of `omni-actors check`, which takes the same flags."""
    if checks:
        usage = "omni-actors check CONFIG [--gpus N] [--set KEY=VALUE] ..."
        about = "Check all that can be known of a pipeline without starting it; print its effective configuration."
    else:
        usage = "omni-actors launch CONFIG [--http HOST:PORT] [--prompt TEXT] [--set KEY=VALUE] [--run-dir DIR] ..."
        about = "Start a pipeline of stages and serve it until Ctrl-C; with --prompt, answer once and exit."
    parser = flags.CommandParser(
        prog=" ".join(usage.split()[:2]),
        usage=usage,
        description=about,
        epilog="Values: command line > environment (OMNI_ACTORS_*) > SLURM > YAML > default; --check shows the source "
        "of each.",
    )

    def starting(text: str) -> str:
        """Help that `check` does not show: it takes the flag, and looks at nothing that it stands for."""
        return argparse.SUPPRESS if checks else text

    parser.add_argument(
        "config", help=f"the pipeline's YAML, or one that comes with the package: {', '.join(shipped())}"
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--check", action="store_true", help=starting("print the effective configuration and start nothing")
    )
    parser.add_argument(
        "--gpus", type=flags.count, metavar="N", help="check for a host with N GPUs (default: this one's)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any value of the YAML, for instance stages.talker.engine.max_num_seqs=8",
    )
    nodes = parser.add_argument_group("several hosts", "The same command on each of them; see docs/deploying.md.")
    for variable in VARIABLES:
        if variable.flag:
            group = nodes if variable.config_key.startswith("cluster.") else parser
            group.add_argument(variable.flag, help=variable.help)
    nodes.add_argument("--headless", action="store_true", help=starting("run stages only: no HTTP server, no prompt"))
    http = parser.add_argument_group("HTTP", "The key that requests must carry is in OMNI_ACTORS_API_KEY.")
    http.add_argument("--http", metavar="HOST:PORT", help="serve the OpenAI API and a web page here")
    add_flags(parser, http)
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help=starting("serve Prometheus metrics here, without the HTTP server")
    )
    parser.add_argument("--metrics-insecure", action="store_true", help=starting("let --metrics listen off loopback"))
    request = parser.add_argument_group("one request")
    request.add_argument("--prompt", type=flags.text, help=starting("answer this and exit"))
    for kind in ("audio", "image"):
        about_media = starting(f"{kind} to go with the prompt")
        request.add_argument(
            f"--{kind}", type=flags.path, action="append", default=[], metavar="FILE", help=about_media
        )
    request.add_argument("--save-audio", type=flags.path, metavar="WAV", help=starting("write the spoken answer here"))
    request.add_argument(
        "--save-image", type=flags.path, metavar="FILE", help=starting("write the picture here: .png, .jpg or .webp")
    )
    request.add_argument(
        "--modalities", type=flags.line, help=starting("comma-separated outputs (default: all that are needed)")
    )
    request.add_argument("--voice", type=flags.line, help=starting("speaker"))
    request.add_argument("--seed", type=flags.seed, help=starting("seed of sampling and of the vocoder's noise"))
    request.add_argument(
        "--timeout", type=flags.seconds, help=starting("seconds for the answer (default: coordinator.default_timeout)")
    )
    return parser


def overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return the configuration values that the command line sets: dotted key -> value."""
    found = {}
    for item in options.set:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item!r} is not of the form KEY=VALUE.")
        found[key] = value
    found |= {f"http.{name}": json.dumps(value) for name, value in given_flags(options).items()}
    for variable in VARIABLES:
        value = getattr(options, variable.flag[2:].replace("-", "_")) if variable.flag else None
        if value is not None:
            found[variable.config_key] = as_yaml(variable.config_key, value)
    return found


async def _run(pipeline: config.PipelineConfig, options: argparse.Namespace) -> int:
    announce_stop_time(pipeline.coordinator.stop_time)
    rank = pipeline.cluster.node_rank
    if rank not in placement.ranks(pipeline):
        say(f"nothing is placed on node {rank} yet; it takes replicas by `ctl scale` and of nodes that are lost")
    if placement.runs_models(pipeline, rank) and (download := await asyncio.to_thread(pending_download, pipeline)):
        say(download)
    launcher = Launcher(pipeline, await host_addresses(pipeline), process_start())
    launcher.own_process()
    try:
        await launcher.open()
        if options.metrics is not None and rank == 0:
            await launcher.start_metrics(options.metrics, options.metrics_insecure)
        if options.http is not None and rank == 0:
            await launcher.start_http(options)
        await launcher.start()
        if options.prompt is None or rank > 0:  # the same command runs on every node
            await launcher.serve()
            return EXIT_OK
        return await launcher.until_stopped(answer(launcher.endpoint, pipeline.coordinator.keys_dir, options))
    except OmniError as error:
        if error.fault is not Fault.CALLER and not isinstance(error, ConfigError):
            launcher.keep_logs()
        raise
    finally:
        await launcher.close()


if __name__ == "__main__":
    sys.exit(main())
