"""Parse the command line of servekit: `serve`, `doctor`, its clients and its tools; and run it."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from servekit import __version__
from servekit.batches.store import BatchStore
from servekit.config import (
    ENVIRONMENT_PREFIX,
    SECRETS,
    ServeConfig,
    Setting,
    advice,
    check_host_memory,
    ignored_variables,
    load_config,
    settings,
)
from servekit.errors import ConfigError, ServekitError
from servekit.models.model_file import ModelFile
from servekit.protocol.logging import configure_logging, logs_json, write_line
from servekit.protocol.quantization_job import GROUP_SIZE, METHODS, SCHEMES, QuantizationJob
from servekit.server.cache_directory import check_temporary_directory, use_cache_directory
from servekit.simulation.model import is_simulated


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code of the process."""
    _open_standard_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
        _report(f"unknown command {words[0]!r}; {_command_advice(words[0])}")
        return 2
    parsed, unknown = _parser().parse_known_args(words)
    arguments = vars(parsed)
    command = arguments.pop("command")
    try:
        if unknown:
            raise ConfigError(_explain_unknown(command, unknown[0]))
        return _COMMANDS[command](arguments)
    except KeyboardInterrupt:  # while modules are still being imported; later the commands handle SIGINT themselves
        return 130
    except ServekitError as error:
        _report(error.message)
        return 2 if isinstance(error, ConfigError) else 1


def _open_standard_streams() -> None:
    """Open /dev/null in the place of each closed file descriptor 0, 1 and 2, before anything else is opened.

    Otherwise a socket or a file gets the number, and text for standard error is written into it. libuv refuses to close
    these numbers, and would abort.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, and those below are open
            assert opened == number
            os.set_inheritable(number, True)  # for the child processes, as if it had been open from the start
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _report(message: str) -> None:
    if logs_json():
        logging.getLogger("servekit").critical("%s", message)
    else:
        write_line(f"servekit: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="servekit", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. Every setting can also come from the environment variable "
        "SERVEKIT_<NAME> or from a TOML file (--config).",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _add_settings(serve)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, and report what is broken or will be slow",
        description="Check this machine and the model. Report what is broken or will be slow, why, and what to do. "
        "It takes all settings of servekit serve, so write the command of the server with doctor in place of serve. "
        "Exit with 1 if something is broken.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", default=False, help="print a JSON object for programs")
    _add_settings(doctor)
    top = _client_parser(commands, "top", "watch a server's scheduler in the terminal")
    top.description = (
        "Watch a server's scheduler in the terminal. q quits, and Tab shows the next model, if there are several. If "
        "the output is not a terminal, print one frame as text."
    )
    top.add_argument("--model", metavar="NAME", help="model to show first, if the server has several")
    chat = _client_parser(commands, "chat", "talk to the model of a server in the terminal")
    chat.description = (
        "Talk to the model of a server in the terminal. If the input is not a terminal, each of its lines is a message."
    )
    chat.add_argument("--system", metavar="TEXT", default="", help="system message of the conversation")
    for name, kind, meaning in _SAMPLING:
        flag = "--" + name.replace("_", "-")
        chat.add_argument(flag, metavar=name.rpartition("_")[2].upper(), type=kind, help=meaning)
    _add_eval_parser(commands)
    _add_batch_parser(commands)
    _add_quantize_parser(commands)
    _add_convert_parser(commands)
    _add_replay_parser(commands)
    _add_explain_parser(commands)
    completion = commands.add_parser(
        "completion",
        help="print a script that completes these commands in a shell",
        description="Print a script that completes servekit's command line in a shell (docs/installation.md).",
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    _add_lab_parser(commands)
    _add_plan_parser(commands)
    return parser


def _add_replay_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="repeat the decisions of a server from its journal, or try other settings",
        description="Feed the journal of `servekit serve --journal` to a new scheduler and compare every step; exit "
        "with 1 at the first difference. With any of the settings below, simulate its requests in virtual time with "
        "these settings, and print the simulated figures next to the recorded ones.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a journal file; each file is replayed by itself")
    add("--scheduling-policy", choices=("fcfs", "priority", "shortest", "fair"), help="order of the waiting queue")
    add("--num-kv-blocks", metavar="NUM", type=_positive, help="KV blocks in the pool")
    add(
        "--block-size",
        metavar="NUM",
        type=_positive,
        help="tokens of a KV block; the pool holds as many tokens as before",
    )
    add("--max-num-seqs", metavar="NUM", type=_positive, help="maximum sequences that run at the same time")
    add("--max-num-batched-tokens", metavar="NUM", type=_positive, help="maximum tokens of one step")
    add("--max-steps-in-flight", metavar="NUM", type=_positive, help="maximum steps that are sent ahead")
    add("--itl-target-ms", metavar="MS", type=_amount, help="target inter-token latency in milliseconds; 0 for none")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="reuse KV of equal prompts")
    add("--model", metavar="SPEC", help="sim:SPEC: step times of another device (docs/simulated_model.md)")
    add("--out", metavar="DIR", type=Path, help="write replay.html, a page with charts, into this folder")
    add("--json", dest="as_json", action="store_true", help="print JSON instead of text")


def _add_explain_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="explain from a journal where the time of a sequence went",
        description="Replay the journal of `servekit serve --journal`, and split the time of one of its sequences into "
        "causes; the times of the causes sum to it (docs/explain.md). A running server answers GET "
        "/v1/requests/ID/explain.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a journal file")
    add(
        "sequence_id",
        metavar="ID",
        type=_sequence_id,
        help="the sequence's number: sequence_id of its request's explanation",
    )
    add("--json", dest="as_json", action="store_true", help="print JSON instead of text")
    add("--out", metavar="DIR", type=Path, help="write explain.html, a page with a timeline, into this folder")


def _add_plan_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="estimate the memory, speed and cost of a model on a device",
        description="Compute memory, step times, latencies, the number of replicas and the cost of a service, from a "
        "model's config.json, the data sheet of a device, and a simulation of the scheduler.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a config.json, a model's directory, or a Hugging Face id")
    add(
        "--models",
        metavar="FILE",
        help="instead of MODEL: only print on which device each model of a model file is placed",
    )
    add(
        "--device",
        metavar="NAME",
        help="h100, h200, b200, a100, l40s, l4, a10, rtx4090, mi300x, xeon-8592 or epyc-9655 (default: h100)",
    )
    add("--devices-file", metavar="FILE", type=Path, help="TOML file with devices of your own (docs/planning.md)")
    add("--weights", metavar="FORMAT", help="float32, bfloat16, fp8, int8, int4, w4a8 or nf4 (default: as stored)")
    add("--kv-cache", metavar="FORMAT", help="float32, bfloat16, int8 or fp8_e4m3 (default: bfloat16)")
    add(
        "--tensor-parallel-size",
        metavar="NUM",
        type=_positive,
        help="devices among which each replica is divided (default: 1)",
    )
    add("--prompt-tokens", metavar="NUM", type=_positive, help="mean length of prompts (default: 1000)")
    add("--output-tokens", metavar="NUM", type=_positive, help="mean length of answers (default: 200)")
    add("--max-model-len", metavar="NUM", type=_positive, help="longest sequence (default: eight times the mean)")
    add("--trace", metavar="JOURNAL", type=Path, help="draw lengths from the requests of a journal of servekit serve")
    add("--rate", metavar="NUM", type=_amount, help="requests per second of the whole service")
    add("--slo", metavar="LIMITS", help="limits for 99 %% of the requests (default: ttft:1s,tpot:50ms)")
    add("--price-per-hour", metavar="NUM", type=_amount, help="price of a device for an hour (default: one provider's)")
    add(
        "--api-price",
        metavar="NUM",
        type=_amount,
        help="price of an API for a million tokens of prompts or answers, to compare with",
    )
    add(
        "--step-times",
        metavar="SPEC",
        help="sim:SPEC: measured step times, instead of those computed from the data sheet (docs/planning.md)",
    )
    add(
        "--requests",
        metavar="NUM",
        type=_positive,
        help="requests of each simulated run (default: three for each slot)",
    )
    add("--out", metavar="DIR", type=Path, help="write plan.html, a page with charts, into this folder")
    add("--json", dest="as_json", action="store_true", help="print JSON instead of text")


def _add_lab_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "lab",
        help="compare ways of batching on one workload",
        description="Simulate one workload in virtual time with each mode of batching, and print the figures of each: "
        "one request at a time, static, dynamic, and continuous batching without and with chunked prefill. With an "
        "ABLATION, vary one setting instead: kv-cache, chunks, block-size, prefix-cache, memory or batch-size.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("ablation", nargs="?", metavar="ABLATION", help="one setting to vary, instead of comparing modes")
    add("--workload", metavar="NAME", help="textbook, chat or documents (default: chat)")
    add("--requests", metavar="NUM", type=_positive, help="requests of the workload (default: 64; for textbook 8)")
    add("--seed", metavar="NUM", type=_whole, help="seed of lengths and arrivals (default: 0)")
    add(
        "--load",
        metavar="SHARE",
        type=_share,
        help="arrival rate, as a share of the rate that continuous batching can serve (default: 0.8)",
    )
    add("--modes", metavar="NAMES", type=_names, help="modes to simulate, separated by commas (default: all)")
    add("--model", metavar="MODEL", help="sim:SPEC (docs/simulated_model.md); with --real a model (default: demo)")
    add("--real", action="store_true", help="also run each mode with a real model in a worker process")
    add("--slots", metavar="NUM", type=_positive, help="requests that run at the same time (default: 8)")
    add("--kv-tokens", metavar="NUM", type=_positive, help="tokens that the KV cache holds (default: 4096)")
    add("--max-model-len", metavar="NUM", type=_positive, help="longest sequence (default: 1024; with --real 512)")
    add("--block-size", metavar="NUM", type=_positive, help="tokens of a KV block (default: 16)")
    add(
        "--chunk-tokens",
        metavar="NUM",
        type=_positive,
        help="maximum tokens of a step with chunked prefill (default: 64)",
    )
    add(
        "--max-delay-ms",
        metavar="MS",
        type=_amount,
        help="how long dynamic batching waits for a full batch (default: 100)",
    )
    add("--paged", action=argparse.BooleanOptionalAction, help="KV memory in pages, or in one piece (default: pages)")
    add("--prefix-cache", action=argparse.BooleanOptionalAction, help="reuse KV of equal prompts (default: yes)")
    add("--out", metavar="DIR", type=Path, help="also write the timelines as a page: DIR/lab.html")
    add("--json", dest="as_json", action="store_true", help="print JSON instead of tables")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --config and a flag for each setting of the server."""
    parser.add_argument(
        "positional_models",
        nargs="*",
        metavar="MODEL",
        help=f"{settings()[0].description}; several models as NAME=MODEL, or in a file (--models)",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings; the names are those of the flags")
    for setting in settings():
        if setting.is_switch:
            parser.add_argument(setting.flag, help=_help(setting), action=argparse.BooleanOptionalAction)
            continue
        if setting.name == "lora":
            add_lora = parser.add_argument
            add_lora(setting.flag, metavar="NAME=PATH", help=_help(setting), dest=setting.name, action=_Joined)
            continue
        # The value stays a string here: `load_config` validates the values of all four sources alike.
        parser.add_argument(setting.flag, metavar=_metavar(setting), help=_help(setting), dest=setting.name)


class _Joined(argparse.Action):
    """Joins the values of a flag that is given several times, with commas."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def _add_eval_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure the quality of a server's model, or compare it with another server's",
        description="Measure perplexity and right answers of the model at --url, or of MODEL, which is then served for "
        "the evaluation. With --against or --quantization, compare it with another model, and exit with 1 if it is "
        "significantly worse by more than a limit.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="model to serve for the evaluation, as servekit serve takes it")
    add(
        "--quantization",
        metavar="KIND",
        help="serve MODEL with this quantization, and by default compare it with MODEL without quantization",
    )
    add("--url", help="address of a server with OpenAI's API, instead of MODEL")
    add("--against", metavar="URL", help="address of the server to compare with, such as one without quantization")
    add("--served-model-name", metavar="NAME", help="model at --url, if it has several (default: the first)")
    add(
        "--against-model-name",
        metavar="NAME",
        help="model at --against; without --against, a model at --url to compare with",
    )
    add(
        "--api-key",
        metavar="KEY",
        help="API key for both servers; unlike this flag, SERVEKIT_API_KEY is not visible to other users",
    )
    add(
        "--text",
        metavar="FILE",
        help="text whose perplexity to measure: UTF-8, or .jsonl with documents",
    )
    add(
        "--questions",
        metavar="FILE",
        action="append",
        help="questions as JSON lines, or demo for the demo model's; may be given several times",
    )
    add(
        "--chat",
        action="store_true",
        help="send questions as chat messages, so that the server applies its chat template",
    )
    add("--limit", metavar="NUM", type=_positive, help="use at most this many questions or documents of each file")
    add("--tokenizer", metavar="FILE", help="the model's tokenizer.json, for servers without the route /tokenize")
    add("--window", metavar="TOKENS", type=_positive, help="tokens of the text in one prompt (default: 1024)")
    add("--stride", metavar="TOKENS", type=_positive, help="tokens from window to window (default: half a window)")
    add("--concurrency", metavar="NUM", type=_positive, help="requests at the same time (default: 8)")
    add("--max-drop", metavar="SHARE", type=_share, help="tolerated drop of right answers (default: 0.01)")
    add(
        "--max-perplexity-increase",
        metavar="SHARE",
        type=_share,
        help="tolerated relative increase of perplexity (default: 0.02)",
    )
    add("--judge-url", metavar="URL", help="server whose model compares the answers of both servers in pairs")
    add("--judge-model", metavar="NAME", help="name of the judge's model")
    add(
        "--judge-api-key",
        metavar="KEY",
        help="API key for the judge; unlike this flag, SERVEKIT_JUDGE_API_KEY is not visible to other users",
    )
    add("--output", metavar="FILE", type=Path, help="also write the result, as JSON (.json) or Markdown (.md)")


def _add_batch_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Send each request of FILE to a server, and write the answers to a file. FILE has the format of "
        "OpenAI's Batch API. The server is the one at --url, or one that is started for MODEL. If the command is "
        "interrupted, run it again to continue: requests with an answer are not sent again.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help='JSON lines with "custom_id", "url" and "body"')
    add(
        "--output", metavar="FILE", type=Path, help="file of the answers (default: FILE with the ending .answers.jsonl)"
    )
    add("--url", help="address of a server with OpenAI's API (default: http://127.0.0.1:8000)")
    add(
        "--model", metavar="MODEL", help="model to serve for this command, instead of --url, as servekit serve takes it"
    )
    add(
        "--api-key",
        metavar="KEY",
        help="API key for the server; unlike this flag, SERVEKIT_API_KEY is not visible to other users",
    )
    add("--concurrency", metavar="NUM", type=_positive, help="requests at the same time (default: 16)")


def _add_quantize_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a checkpoint with quantized weights",
        description="Quantize the weights of a model and write them as a compressed-tensors checkpoint, which "
        "servekit, vLLM and transformers read.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory or Hugging Face id of the unquantized model, or demo")
    add("output", metavar="OUT", help="directory of the new checkpoint; it must not exist, or be empty")
    add("--method", choices=METHODS, required=True, help="rtn needs no calibration; gptq and awq do")
    add(
        "--scheme",
        choices=SCHEMES,
        help="bits of weights and activations: w4a16 has weights of four bits (default: w4a16)",
    )
    add(
        "--group-size",
        metavar="NUM",
        type=_positive,
        help=f"weights that share a scale (default: {GROUP_SIZE}; for eight bits a whole row)",
    )
    symmetry = parser.add_mutually_exclusive_group()
    symmetry.add_argument(
        "--symmetric", dest="is_symmetric", action="store_const", const=True, help="without zero points"
    )
    symmetry.add_argument(
        "--asymmetric",
        dest="is_symmetric",
        action="store_const",
        const=False,
        help="with zero points (the default for w4a16)",
    )
    add("--calibration", metavar="FILE", help='calibration texts: one on each line, or .jsonl with "text"')
    add("--num-samples", metavar="NUM", type=_positive, help="number of samples of the texts (default: 128)")
    add("--max-length", metavar="TOKENS", type=_positive, help="tokens of a sample (default: 512)")
    add("--seed", metavar="NUM", type=_whole, help="seed of the order of the texts (default: 0)")
    add(
        "--dampening",
        metavar="SHARE",
        type=_share,
        help="share of the mean diagonal of GPTQ's matrix that is added to the diagonal (default: 0.01)",
    )
    add(
        "--activation-order",
        action=argparse.BooleanOptionalAction,
        help="let GPTQ round the columns of the largest inputs first (default: yes)",
    )


def _add_convert_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a model with pickled weights (pytorch_model.bin) as safetensors",
        description="Write a model with pickled weights (pytorch_model.bin) as safetensors, which servekit serve "
        "reads. The process that reads the files unpickles only weights, and may neither use the network nor write to "
        "other directories.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory or Hugging Face id of the model (org/name, or org/name@revision)")
    add("output", metavar="OUT", type=Path, help="directory of the new checkpoint; it must not exist, or be empty")
    add("--revision", metavar="REVISION", help="branch, tag or commit of the model's repository; by default main")


def _positive(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {2**31 - 1}")
    return int(text)


def _whole(text: str) -> int:
    """Parse a whole number from 0 on. Raises ArgumentTypeError."""
    return 0 if text == "0" else _positive(text)


def _sequence_id(text: str) -> int:
    """Parse the number of a sequence in a journal. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the number of a sequence. A journal has no ids of requests: take sequence_id of GET "
            '/v1/requests/ID/explain, or of the answer to a request with "explain": true'
        )
    return int(text)


def _share(text: str) -> float:
    """Parse a share: 0.01 is 1 %. Raises ArgumentTypeError."""
    value = _finite(text)
    if value < 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0; 0.01 is 1 %")
    return value


def _amount(text: str) -> float:
    """Parse a number from 0 on: a price, a rate, milliseconds. Raises ArgumentTypeError."""
    value = _finite(text)
    if value < 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0")
    return value


def _finite(text: str) -> float:
    """Parse a finite number: JSON has no infinity and no NaN. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


_SAMPLING = (
    ("max_tokens", int, "maximum tokens of an answer"),
    ("temperature", _finite, "randomness of the sampling; 0 always takes the likeliest token"),
    ("top_p", _finite, "sample from the likeliest tokens whose probabilities add up to this value"),
    ("seed", int, "seed of the sampling; the same seed gives the same answer"),
)


def _client_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    """Add the parser of a command that is a client of a server: its URL and its API key."""
    parser = commands.add_parser(name, help=summary, allow_abbrev=False)
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="address of the server (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key for the server; unlike this flag, the variable SERVEKIT_API_KEY is not visible to other users",
    )
    return parser


def _metavar(setting: Setting) -> str:
    return setting.name.rpartition("_")[2].upper()


def _help(setting: Setting) -> str:
    accepts = "" if setting.is_switch else f"; {setting.accepts}"
    default = "" if setting.default is None else f" (default: {setting.default})"
    return (setting.description + accepts + default).replace("%", "%%")


def _command_advice(word: str) -> str:
    close = get_close_matches(word, _COMMANDS, n=1)
    if close:
        return f"did you mean servekit {close[0]}?"
    if "/" in word or word.endswith(".gguf") or Path(word).exists():
        return f"to serve a model: servekit serve {word}"
    return f"the commands are {', '.join(_COMMANDS)}"


def _explain_unknown(command: str, argument: str) -> str:
    if command not in ("serve", "doctor"):
        return f"unknown argument {argument!r}; see `servekit {command} --help`"
    flags = [flag for setting in settings() for flag in (setting.flag, setting.flag.replace("--", "--no-", 1))]
    return f"unknown argument {argument!r}; {advice(argument.partition('=')[0], flags)}"


def _version(arguments: dict[str, str]) -> int:
    print(__version__)
    return 0


def _top(arguments: dict[str, Any]) -> int:
    with _terminal_packages("top"):
        from servekit.terminal.top import top

    return top(arguments["url"], _api_key(arguments), arguments["model"])


def _chat(arguments: dict[str, Any]) -> int:
    with _terminal_packages("chat"):
        from servekit.terminal.chat import chat

    sampling = {name: arguments[name] for name, _, _ in _SAMPLING if arguments[name] is not None}
    return chat(arguments["url"], _api_key(arguments), arguments["system"], sampling)


def _eval(arguments: dict[str, Any]) -> int:
    output: Path | None = arguments.pop("output", None)
    if output is not None and output.suffix not in (".json", ".md"):
        raise ConfigError(f"--output {output}: the name must end in .json or .md")
    with _terminal_packages("eval"):
        from servekit.evaluation.evaluation import EvaluationSettings, evaluate
        from servekit.evaluation.report import as_json, as_markdown

    arguments["api_key"] = _api_key({"api_key": arguments.get("api_key")})
    arguments.setdefault("judge_api_key", os.environ.get(ENVIRONMENT_PREFIX + "JUDGE_API_KEY") or None)
    report = evaluate(EvaluationSettings(**arguments))
    print(as_markdown(report), end="")
    if output is not None:
        try:
            output.write_text(as_json(report) if output.suffix == ".json" else as_markdown(report))
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}") from None
    return 1 if report.losses else 0


def _batch(arguments: dict[str, Any]) -> int:
    with _terminal_packages("batch"):
        from servekit.terminal.batch import BatchSettings, answer_file

    arguments["api_key"] = _api_key({"api_key": arguments.get("api_key")})
    return answer_file(BatchSettings(**arguments))


def _quantize(arguments: dict[str, Any]) -> int:
    """Check the arguments, find the model, and become the process that quantizes it, because this one has no torch."""
    from servekit.engine.model_files import find_model
    from servekit.executor.worker_process import worker_environment

    if is_simulated(arguments["model"]):
        raise ConfigError(f"model {arguments['model']!r} is simulated and has no weights to quantize")
    job = QuantizationJob(**arguments)
    job.check()
    job = msgspec.structs.replace(job, model=str(find_model(job.model)))
    text = msgspec.json.encode(job).decode()
    # -P: a `workers` folder in the current directory must not hide ours.
    command = [sys.executable, "-P", "-m", "servekit.worker", "--quantize", text]
    sys.stdout.flush()
    os.execve(sys.executable, command, worker_environment())  # noqa: S606  # our own interpreter, without a shell


def _lab(arguments: dict[str, Any]) -> int:
    from servekit.laboratory.command import LabOptions, lab

    return lab(LabOptions(**arguments))


def _convert(arguments: dict[str, Any]) -> int:
    from servekit.engine.convert_command import convert_model

    configure_logging("info")
    convert_model(arguments["model"], arguments["output"], arguments["revision"])
    return 0


def _plan(arguments: dict[str, Any]) -> int:
    path = arguments.pop("models", None)
    if path is not None:
        as_json_object = arguments.pop("as_json", False)
        if arguments:
            raise ConfigError(f"servekit plan --models {path} takes --json, and no MODEL and no other flag")
        from servekit.models.read_file import read_model_file
        from servekit.planning.packing import describe_devices

        print(describe_devices(read_model_file(load_config({"models": path}, os.environ, None)), as_json_object))
        return 0
    if "model" not in arguments:
        raise ConfigError("servekit plan needs a MODEL, or a model file: --models FILE")
    from servekit.planning.command import PlanOptions, plan

    return plan(PlanOptions(**arguments))


def _explain(arguments: dict[str, Any]) -> int:
    from servekit.explaining.command import ExplainOptions, explain_sequence

    return explain_sequence(ExplainOptions(**arguments))


def _replay(arguments: dict[str, Any]) -> int:
    from servekit.replaying.command import ReplayOptions, replay

    return replay(ReplayOptions(**arguments))


SHELLS = ("bash", "zsh", "fish")  # that `servekit completion` knows

# What the `terminal` extra of pyproject.toml installs.
TERMINAL_PACKAGES = frozenset({"httpx2", "prompt_toolkit", "rich"})


@contextmanager
def _terminal_packages(command: str) -> Iterator[None]:
    """Explain how to install the packages of the `terminal` extra where they are missing. Raises ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in TERMINAL_PACKAGES:
            raise
        raise ConfigError(
            f"servekit {command} needs the package {error.name}, which is not installed; "
            "in the checkout of servekit run: pip install '.[terminal]'; without a checkout: pip install "
            f"{' '.join(sorted(TERMINAL_PACKAGES))}"
        ) from None


def _api_key(arguments: dict[str, str | None]) -> str | None:
    """Return the key of the command line, or the first key of SERVEKIT_API_KEY, in which a server reads several."""
    given = arguments["api_key"] or os.environ.get(ENVIRONMENT_PREFIX + "API_KEY", "")
    return given.split(",")[0].strip() or None


def _serve(arguments: dict[str, str]) -> int:
    config, model_file = _configure(arguments)
    if config.cache_dir is not None:
        use_cache_directory(config.cache_dir, os.environ)
    if config.batch_dir is not None:
        BatchStore(config.batch_dir).close()  # so that a wrong directory ends the start, before any process is started
    models = [config.model] if model_file is None else [spec.config.model for spec in model_file.models]
    if not all(map(is_simulated, models)):
        check_temporary_directory()
    # Imported here, so that `--help` and errors in flags do not wait for the import.
    if config.api_processes > 1:
        from servekit.server.engine_process import serve as serve_in_processes

        return serve_in_processes(config)
    from servekit.server.server import serve

    return serve(config, model_file)


def _doctor(arguments: dict[str, Any]) -> int:
    as_json_object = arguments.pop("json")
    config, model_file = _configure(arguments)
    if config.cache_dir is not None:
        use_cache_directory(config.cache_dir, os.environ)
    from servekit.doctor.command import doctor

    configs = [config] if model_file is None else [spec.config for spec in model_file.models]
    return max([doctor(each, as_json_object) for each in configs])


def _completion(arguments: dict[str, str]) -> int:
    from servekit.completion import completion_script

    print(completion_script(_parser(), arguments["shell"]))
    return 0


def _configure(arguments: dict[str, Any]) -> tuple[ServeConfig, ModelFile | None]:
    """Return the settings, and the models if there are several."""
    models: list[str] = arguments.pop("positional_models", [])
    for model in models:
        if model in ("true", "false") and any(isinstance(value, bool) for value in arguments.values()):
            raise ConfigError(f"{model!r} is read as MODEL, because switches take no value; use --x or --no-x")
        if "model" in arguments:
            raise ConfigError(f"the model is given twice: {model!r} and --model {arguments['model']!r}; give one")
    if len(models) == 1:
        arguments["model"] = models.pop()
    for warning in ignored_variables(os.environ):
        print(f"servekit: {warning}", file=sys.stderr)
    path = arguments.pop("config", None)
    try:
        toml = Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    config = load_config(arguments, os.environ, toml)
    model_file = _model_file(config, models, is_model_given="model" in arguments)
    if model_file is None and not is_simulated(config.model):
        check_host_memory(config, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in SECRETS:
        # The server's child processes inherit the environment, and the sandboxes run input of clients.
        os.environ.pop(ENVIRONMENT_PREFIX + name.upper(), None)
    return config, model_file


def _model_file(config: ServeConfig, models: Sequence[str], is_model_given: bool) -> ModelFile | None:
    """Return the models of --models, or those of the command line; None for one model. Raises ConfigError."""
    if config.models is None and not models:
        return None
    if config.models is not None and (models or is_model_given):
        raise ConfigError(
            f"models = {config.models!r} (--models) lists all models; add {models[0] if models else config.model!r} to "
            "the file, or leave --models out"
        )
    from servekit.models.read_file import from_command_line, read_model_file

    return from_command_line(config, models) if models else read_model_file(config)


_COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "serve": _serve,
    "doctor": _doctor,
    "top": _top,
    "chat": _chat,
    "eval": _eval,
    "batch": _batch,
    "quantize": _quantize,
    "convert": _convert,
    "replay": _replay,
    "explain": _explain,
    "lab": _lab,
    "completion": _completion,
    "plan": _plan,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
