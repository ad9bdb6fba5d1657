"""`exactrl serve`: a rollout server for runs that name it in `rollout.urls`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

EPILOG = """\
overrides are those of `exactrl train`. Give the ones of the run that will use the server: it is refused there when they differ.

example:
  exactrl serve experiment=tiny full_determinism=true --port 8001
  exactrl train experiment=tiny full_determinism=true rollout.engine=vllm_server 'rollout.urls=[http://127.0.0.1:8001]'

Whoever reaches the server's port can use it and change its weights. Keep it on this machine or in a network of your own.
"""


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `exactrl serve`."""
    parser = argparse.ArgumentParser(
        prog="exactrl serve",
        description="Start a vLLM server with the settings, the kernels and the environment of a run's rollout engine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="[EXPERIMENT.yaml] [OVERRIDE ...]", help="see below")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--config-dir", action="append", default=[], metavar="DIR", help="a folder with groups of your own; repeatable"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `exactrl serve`; this process becomes the server.

    Raises:
        UserError: something about the configuration is wrong; nothing was started.
    """
    arguments = build_parser().parse_intermixed_args(argv)

    from configs.checks import check, rollout_context
    from configs.compose import load_config
    from determinism.environment import process_env
    from rollout.servers.vllm_server import ENVIRONMENT, server_command
    from trainer.build import shared_settings
    from trainer.inputs import resolve_paths
    from workers.launch.resources import resolve_device

    config, _ = check(load_config(arguments.overrides, config_dir=arguments.config_dir))
    config = resolve_paths(config)
    device = resolve_device(config.launcher.device)
    command = server_command(
        config.model.path,
        config=config.rollout,
        max_model_len=rollout_context(config),
        tokenizer=config.model.tokenizer,
        listen={"host": arguments.host, "port": arguments.port},
        **shared_settings(config, device),
    )
    print(f"exactrl: serving {config.model.path} on http://{arguments.host}:{arguments.port}", flush=True)
    env = process_env(config.full_determinism, config.determinism.threads, device)
    os.execve(command[0], command, {**os.environ, **env, **ENVIRONMENT})
