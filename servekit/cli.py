"""`servekit serve | version`: from argv to a configuration, nothing else."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from servekit import __version__
from servekit.config import (
    ENVIRONMENT_PREFIX,
    SECRETS,
    ServeConfig,
    Setting,
    ignored_variables,
    load_config,
    nearest,
    settings,
)
from servekit.errors import ConfigError, ServekitError
from servekit.logs import is_for_programs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the process's exit code."""
    parsed, unknown = _parser().parse_known_args(argv)
    arguments = vars(parsed)
    try:
        if unknown:
            raise ConfigError(_explain_unknown(unknown[0]))
        return _version() if arguments.pop("command") == "version" else _serve(arguments)
    except KeyboardInterrupt:  # while modules are still being imported; later on the server handles it
        return 130
    except ServekitError as error:
        _complain(error.message)
        return 2 if isinstance(error, ConfigError) else 1


def _complain(message: str) -> None:
    if is_for_programs():
        logging.getLogger("servekit").critical("%s", message)
    else:
        print(f"servekit: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="servekit", description="Serve large language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. Every flag can also be set as SERVEKIT_<NAME> or in a TOML file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    serve.add_argument("positional_model", nargs="?", metavar="MODEL", help=settings()[0].description)
    serve.add_argument("--config", metavar="FILE", help="TOML file with settings of the same names")
    for setting in settings():
        if setting.is_switch:
            serve.add_argument(setting.flag, help=_help(setting), action=argparse.BooleanOptionalAction)
            continue
        # The value stays text here: `load_config` judges it, wherever it came from.
        serve.add_argument(setting.flag, metavar=_metavar(setting), help=_help(setting), dest=setting.name)
    return parser


def _metavar(setting: Setting) -> str:
    return setting.name.rpartition("_")[2].upper()


def _help(setting: Setting) -> str:
    accepts = "" if setting.is_switch else f"; {setting.accepts}"
    default = "" if setting.default is None else f" (default: {setting.default})"
    return (setting.description + accepts + default).replace("%", "%%")


def _explain_unknown(argument: str) -> str:
    flags = [flag for setting in settings() for flag in (setting.flag, setting.flag.replace("--", "--no-", 1))]
    return f"unknown argument {argument!r}; {nearest(argument.partition('=')[0], flags)}"


def _version() -> int:
    print(__version__)
    return 0


def _serve(arguments: dict[str, str]) -> int:
    config = _configure(arguments)
    # Imported here so that `--help` and a wrong flag answer at once.
    from servekit.server import serve

    return serve(config)


def _configure(arguments: dict[str, str]) -> ServeConfig:
    if (model := arguments.pop("positional_model", None)) is not None:
        if model in ("true", "false") and any(isinstance(value, bool) for value in arguments.values()):
            raise ConfigError(f"{model!r} stands where MODEL does; switches take no value: use --x or --no-x")
        if "model" in arguments:
            raise ConfigError(f"model is given twice: {model!r} and --model {arguments['model']!r}")
        arguments["model"] = model
    for warning in ignored_variables(os.environ):
        print(f"servekit: {warning}", file=sys.stderr)
    path = arguments.pop("config", None)
    try:
        toml = Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    config = load_config(arguments, os.environ, toml)
    for name in SECRETS:
        # The processes that the server starts inherit the rest, and what clients write runs in some of them.
        os.environ.pop(ENVIRONMENT_PREFIX + name.upper(), None)
    return config


if __name__ == "__main__":
    sys.exit(main())
