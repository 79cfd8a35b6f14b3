"""`servekit serve | top | chat | version`: from argv to a configuration, nothing else."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    run = _COMMANDS[command := arguments.pop("command")]
    try:
        if unknown:
            raise ConfigError(_explain_unknown(command, unknown[0]))
        return run(arguments)
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
    top = _client_parser(commands, "top", "watch a server's scheduler in the terminal")
    top.description = "Watch a server's scheduler in the terminal: q leaves. In a pipe: one frame, as plain lines."
    chat = _client_parser(commands, "chat", "talk to the model of a server in the terminal")
    chat.description = "Talk to the model of a server. In a pipe: each line of the input is a message."
    chat.add_argument("--system", metavar="TEXT", default="", help="what the model is told before the conversation")
    for name, kind, words in _SAMPLING:
        chat.add_argument("--" + name.replace("_", "-"), metavar=name.rpartition("_")[2].upper(), type=kind, help=words)
    return parser


def _finite(text: str) -> float:
    """JSON has no other numbers."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return value


_SAMPLING = (
    ("max_tokens", int, "most tokens of an answer"),
    ("temperature", _finite, "0 takes the likeliest token, more draws more freely"),
    ("top_p", _finite, "draw from the likeliest tokens that make up this share"),
    ("seed", int, "makes draws repeatable"),
)


def _client_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, words: str
) -> argparse.ArgumentParser:
    """Of a command that talks to a server, wherever it runs."""
    parser = commands.add_parser(name, help=words, allow_abbrev=False)
    parser.add_argument(
        "url", nargs="?", metavar="URL", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="to show to the server; SERVEKIT_API_KEY is not seen in the list of processes"
    )
    return parser


def _metavar(setting: Setting) -> str:
    return setting.name.rpartition("_")[2].upper()


def _help(setting: Setting) -> str:
    accepts = "" if setting.is_switch else f"; {setting.accepts}"
    default = "" if setting.default is None else f" (default: {setting.default})"
    return (setting.description + accepts + default).replace("%", "%%")


def _explain_unknown(command: str, argument: str) -> str:
    if command != "serve":
        return f"unknown argument {argument!r}; servekit {command} --help lists what there is"
    flags = [flag for setting in settings() for flag in (setting.flag, setting.flag.replace("--", "--no-", 1))]
    return f"unknown argument {argument!r}; {nearest(argument.partition('=')[0], flags)}"


def _version(arguments: dict[str, str]) -> int:
    print(__version__)
    return 0


def _top(arguments: dict[str, Any]) -> int:
    from servekit.terminal.top import top

    return top(arguments["url"], _api_key(arguments))


def _chat(arguments: dict[str, Any]) -> int:
    from servekit.terminal.chat import chat

    sampling = {name: arguments[name] for name, _, _ in _SAMPLING if arguments[name] is not None}
    return chat(arguments["url"], _api_key(arguments), arguments["system"], sampling)


def _api_key(arguments: dict[str, str | None]) -> str | None:
    """The one that the command line has, or the first of those that a server would take from the same variable."""
    given = arguments["api_key"] or os.environ.get(ENVIRONMENT_PREFIX + "API_KEY", "")
    return given.split(",")[0].strip() or None


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


_COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "serve": _serve,
    "top": _top,
    "chat": _chat,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
