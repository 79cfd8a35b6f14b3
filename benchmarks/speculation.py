"""Compare servers with speculative decoding to one without, by drafter, load and task.

    python -m benchmarks.speculation [--models demo 0.4b] [--drafters ngram draft auto] [--clients 1 4 8 32] [--write]
    python -m benchmarks.copying_llama FOLDER --gguf
    python -m benchmarks.speculation --models 0.4b --folder FOLDER --drafters ngram \\
        --server "llama.cpp=llama-server -m FOLDER/copying.gguf --port {port} -c 32768 -np 32" \\
        --server "llama.cpp, n-grams=llama-server … --spec-type ngram-simple"

All servers of a model run all the time, and get the same requests in turn, so a noisy machine affects all of them. Each
figure is the median of its rounds; a ratio is the median of the rounds' own ratios. There are as many rounds as fit
into `--minutes`, from 3 to `--rounds`, and one before them that does not count. Answers are compared with those of the
server without speculation. Client, servers and workers share the cores.

- The demo model answers its own questions, repeats sentences, and continues random words at temperature 2, which gives
  a text that cannot be predicted. All other answers are greedy.
- `0.4b` is benchmarks/copying_llama.py: a model of that shape whose answers are known by construction. In `copying` an
  answer is a piece of the prompt, in `editing` the same with another token at every 16th place, and with `random
  tokens` nothing of it is in the prompt. So these rows show what prompt lookup gives if it is right or wrong: the time
  of the steps is real, and how often drafts are right is given.

Tokens per step counts each sequence's own steps. Acceptance is the share of the drafts that were accepted, by their
position in the span. `--write` writes the tables into docs/speculative_decoding.md.

With `--server NAME=COMMAND`, other servers answer the requests of the second model, too. What they draft is not known
here, so their rows have no acceptance.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import datetime
import json
import os
import platform
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
from msgspec import Struct, field

from benchmarks.against_peers import started
from benchmarks.progress import Progress, tell
from loadtest.reporting.formatting import as_number, as_time
from loadtest.running.address import resolve
from loadtest.running.connection_pool import Pool
from loadtest.running.exchange import Exchange
from scripts.tables import with_table
from servekit.evaluation.evaluation import DEMO_QUESTIONS
from tests.support.server_process import serving

MAKER = "python -m benchmarks.speculation"
PAGE = Path(__file__).parents[1] / "docs" / "speculative_decoding.md"
PROMPT_TOKENS, EDIT_EVERY = 256, 16
WORDS = ("boat", "mirror", "anya", "blue", "grace", "flag", "yellow", "river", "stone", "cold", "bread", "lamp", "wolf")
OFF, MIN_ROUNDS = "off", 3

MakeBody = Callable[[random.Random], tuple[str, dict[str, Any]]]  # (route, body) of one request


class Played(Struct):
    """One round on one server."""

    tokens_per_s: float
    ttft_s: float
    tokens_per_step: float
    drafted: dict[int, float]  # by position
    accepted: dict[int, float]
    answers: list[str]


class Side(Struct):
    """A server, and what was measured of it at the present load."""

    name: str  # a value of --speculative, or the name of another server
    command: str = ""  # of another server
    url: str = ""
    fields: dict[str, Any] = field(default_factory=dict)  # of each request
    rounds: list[Played] = field(default_factory=list)


# -- tasks -------------------------------------------------------------------------------------------------------------


def demo_tasks() -> dict[str, MakeBody]:
    questions = [json.loads(line) for line in DEMO_QUESTIONS.read_text().splitlines()]

    def chat(text: str) -> tuple[str, dict[str, Any]]:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 110}

    def question(chance: random.Random) -> tuple[str, dict[str, Any]]:
        return chat(chance.choice(questions)["prompt"])

    def repeating(chance: random.Random) -> tuple[str, dict[str, Any]]:
        return chat(f'Repeat after me: "{" ".join(chance.choices(WORDS, k=12))}."')

    def random_words(chance: random.Random) -> tuple[str, dict[str, Any]]:
        """A continuation that is drawn from a flat distribution, so that it does not repeat itself."""
        text = " ".join(chance.choices(WORDS, k=32))
        fields = {"max_tokens": 64, "ignore_eos": True, "temperature": 2.0, "seed": chance.getrandbits(32)}
        return "/v1/completions", {"prompt": text, **fields}

    return {"questions": question, "repeating": repeating, "random words": random_words}


def copying_tasks(output_tokens: int) -> dict[str, MakeBody]:
    from benchmarks.copying_llama import order_of_tokens  # which imports torch

    order = order_of_tokens()

    def body(token_ids: list[int]) -> tuple[str, dict[str, Any]]:
        fields = {"prompt": token_ids, "max_tokens": output_tokens, "ignore_eos": True, "add_special_tokens": False}
        return "/v1/completions", fields

    def copying(chance: random.Random, edit_every: int = 0) -> tuple[str, dict[str, Any]]:
        start = chance.randrange(1, len(order) - PROMPT_TOKENS)
        piece = order[start : start + PROMPT_TOKENS - 1]
        if edit_every:
            piece[::edit_every] = chance.choices(order, k=len(piece[::edit_every]))
        return body([*piece, order[start - 1]])

    def editing(chance: random.Random) -> tuple[str, dict[str, Any]]:
        return copying(chance, EDIT_EVERY)

    def random_tokens(chance: random.Random) -> tuple[str, dict[str, Any]]:
        return body(chance.sample(order, PROMPT_TOKENS))

    return {"copying": copying, "editing": editing, "random tokens": random_tokens}


# -- measuring ---------------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r'servekit_spec_decode_num_(draft|accepted)_tokens_per_pos_total\{.*position="(\d+)".*\} (\S+)')


def read_counts(url: str) -> dict[str, dict[int, float]]:
    """Return the drafted and the accepted tokens by position, from /metrics."""
    counts: dict[str, dict[int, float]] = {"draft": {}, "accepted": {}}
    for line in httpx2.get(f"{url}/metrics").text.splitlines():  # another server may have none
        if (found := _SAMPLE.match(line)) is not None:
            counts[found[1]][int(found[2])] = float(found[3])
    return counts


class Answer(Exchange):
    """A streamed answer. It is read when it has ended."""

    def __init__(self, body: dict[str, Any]) -> None:
        # The first token comes alone, the others 64 at a time.
        options = {"stream": True, "stream_interval": 64, "temperature": 0.0, "stream_options": {"include_usage": True}}
        super().__init__(json.dumps(options | body).encode())
        self.has_ended = asyncio.Event()

    def on_end(self) -> None:
        self.has_ended.set()

    def read(self) -> tuple[str, int, float]:
        """Return (text, its tokens, time to the first token)."""
        assert self.outcome is None and self.status == 200, f"{self.status} {self.error} {self.received[:300]!r}"
        ttft_s, pieces, num_tokens, num_read = None, list[str](), 0, 0
        for line in self.received.splitlines(keepends=True):
            num_read += len(line)
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                if ttft_s is None and (text or choice.get("finish_reason")):
                    ttft_s = self.times_s[bisect.bisect_left(self.ends, num_read)] - self.started_s
                pieces.append(text)
        assert ttft_s is not None, "an answer without a token"
        return "".join(pieces), num_tokens, ttft_s


async def play(url: str, bodies: list[tuple[str, dict[str, Any]]], num_clients: int, fields: dict[str, Any]) -> Played:
    """Answer all requests, so many at a time. `fields` are added to each of them."""
    before, queue = read_counts(url), list(enumerate(bodies))[::-1]
    asked: list[tuple[int, Answer]] = []
    (route,) = {route for route, _ in bodies}
    # A general HTTP client takes some milliseconds of processor time for a request. The demo model takes not much more
    # for an answer. The load generator's connections take next to none.
    pool = Pool(asyncio.get_running_loop(), resolve(url), route)

    async def work() -> None:
        while queue:
            index, (_, body) = queue.pop()
            asked.append((index, answer := Answer(body | fields)))
            pool.send(answer)
            async with asyncio.timeout(600):
                await answer.has_ended.wait()

    began_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(num_clients)))
    took_s = time.perf_counter() - began_s
    await pool.close()
    answers = {index: answer.read() for index, answer in asked}
    now = read_counts(url)
    drafted, accepted = (
        {position: value - before[kind].get(position, 0.0) for position, value in now[kind].items()}
        for kind in ("draft", "accepted")
    )
    num_tokens = sum(tokens for _, tokens, _ in answers.values())
    return Played(
        num_tokens / took_s,
        statistics.median(ttft_s for *_, ttft_s in answers.values()),
        num_tokens / max(1.0, num_tokens - sum(accepted.values())),
        drafted,
        accepted,
        [answers[index][0] for index in sorted(answers)],
    )


def row(task: str, num_clients: int, side: Side, off: Side) -> str:
    pairs = zip(side.rounds, off.rounds, strict=True)
    ratio = statistics.median(own.tokens_per_s / plain.tokens_per_s for own, plain in pairs)
    drafted, accepted = (
        [sum(getattr(each, kind)[position] for each in side.rounds) for position in sorted(side.rounds[0].drafted)]
        for kind in ("drafted", "accepted")
    )
    by_position = " ".join(f"{100 * a / d:.0f}" if d else "-" for a, d in zip(accepted, drafted, strict=True))
    cells = [
        task,
        str(num_clients),
        side.name if side.command else f"`{side.name}`",
        as_number(statistics.median(each.tokens_per_s for each in side.rounds)),
        f"{ratio:.2f}",
        "" if side.command else f"{statistics.median(each.tokens_per_step for each in side.rounds):.2f}",
        by_position,
        as_time(statistics.median(each.ttft_s for each in side.rounds)),
    ]
    return f"| {' | '.join(cells)} |"


def measure(model: str, folder: Path, deadline_s: float, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a model's table, if possible before `deadline_s`."""
    if model == "demo":
        flags, tasks, name = ["--model", "demo", "--dtype", "float32"], demo_tasks(), "the demo model in float32"
    else:
        from benchmarks.copying_llama import make_copying_llama

        tell("making the model of 0.4 billion weights")
        flags = ["--model", str(make_copying_llama(folder)), "--dtype", "bfloat16", "--max-model-len", "1024"]
        tasks, name = (
            copying_tasks(arguments.output_tokens),
            "a Llama of 0.4 billion weights in bfloat16 whose answers are made to copy",
        )
    if arguments.tasks:
        tasks = {task: make for task, make in tasks.items() if task in arguments.tasks}
    sides = [Side(drafter) for drafter in (OFF, *arguments.drafters)]
    if model != "demo":
        sides += [Side(*each.split("=", 1)) for each in arguments.server]
    num_compared, num_different = 0, dict.fromkeys(tasks, 0)
    with ExitStack() as stack:
        for number, side in enumerate(sides):
            log = folder / f"log-{model}-{number}"
            if side.command:
                side.url = stack.enter_context(started(side.command, log))
                listed = httpx2.get(f"{side.url}/v1/models")
                side.fields = {"model": listed.json()["data"][0]["id"]} if listed.status_code == 200 else {}
            else:
                server = serving(*flags, "--speculative", side.name, *arguments.serve.split(), log=log)
                side.url = stack.enter_context(server).url
        yield from (
            "",
            f"{name[0].upper()}{name[1:]}, {os.cpu_count()} cores ({platform.machine()}), medians of {MIN_ROUNDS} to "
            f"{arguments.rounds} rounds, on {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}.",
            "",
            "| task | clients | drafter | tokens/s | ratio to off | tokens per step | accepted by position, % | TTFT |",
            "|---|---:|---|---:|---:|---:|---|---:|",
        )
        cells = [(task, num_clients) for task in tasks for num_clients in arguments.clients]
        with Progress("loads", len(cells)) as progress:
            for index, (task, num_clients) in enumerate(cells):
                began_s = time.monotonic()
                end_s = began_s + (deadline_s - began_s) / (len(cells) - index)
                progress.begin(f"{task}, {num_clients} clients")
                num_requests = max(arguments.min_requests, num_clients * arguments.requests_per_client)
                for number in range(-1, arguments.rounds):  # the first one is a warm-up
                    # A round takes about as long as the ones before it.
                    next_s = time.monotonic() + (time.monotonic() - began_s) / max(1, number + 1)
                    if number >= MIN_ROUNDS and next_s > end_s:
                        break
                    chance = random.Random(f"{task} {num_clients} {number}")
                    bodies = [tasks[task](chance) for _ in range(num_requests)]
                    first = number % len(sides)
                    for side in sides[first:] + sides[:first]:
                        side.rounds.append(asyncio.run(play(side.url, bodies, num_clients, side.fields)))
                for side in sides:
                    del side.rounds[0]
                    for own, plain in zip(side.rounds, sides[0].rounds, strict=True):
                        num_compared += len(own.answers) * (side is not sides[0])
                        num_different[task] += sum(a != b for a, b in zip(own.answers, plain.answers, strict=True))
                    yield row(task, num_clients, side, sides[0])
                for side in sides:
                    side.rounds.clear()
        by_task = ", ".join(f"{number} of `{task}`" for task, number in num_different.items() if number)
        yield from ("", f"Of {num_compared:,} answers, {by_task or 'none'} differ from the one without speculation.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=["demo", "0.4b"], default=["demo", "0.4b"])
    parser.add_argument("--drafters", nargs="+", default=["ngram", "auto"], help="values of --speculative")
    parser.add_argument("--tasks", nargs="+", help="only these")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=9, help="at most")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all tables")
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=4, help="of a round")
    parser.add_argument("--output-tokens", type=int, default=128, help="of an answer of the second model")
    parser.add_argument("--serve", default="", help="further flags of servekit serve, separated by spaces")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="another server, {port}")
    parser.add_argument("--folder", type=Path, help="where the model of 0.4 billion weights is kept")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/speculative_decoding.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        end_s = time.monotonic() + 60 * arguments.minutes
        for number, model in enumerate(arguments.models):
            lines, now_s = [], time.monotonic()
            deadline_s = now_s + (end_s - now_s) / (len(arguments.models) - number)
            for line in measure(model, folder, deadline_s, arguments):
                lines.append(line)
                tell(line)
            if arguments.write:
                PAGE.write_text(with_table(PAGE.read_text(), f"speculation {model}", iter([*lines, ""]), MAKER))


if __name__ == "__main__":
    main()
