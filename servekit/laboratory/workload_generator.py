"""Make the workloads of the laboratory from seeds."""

from __future__ import annotations

import random
from collections.abc import Callable

from servekit.errors import ConfigError
from servekit.laboratory.workload import LabRequest, Workload

TEXTBOOK_LENGTHS = (50,) * 7 + (500,)  # tokens of the answers in one batch of eight
SYSTEM_PROMPT_TOKENS = 64
FIRST_TOKEN_ID, LAST_TOKEN_ID = 40, 240  # of made prompts: ordinary tokens of every vocabulary


def textbook(num_requests: int, rng: random.Random, rate: float) -> Workload:
    """The example of textbooks: of each eight answers seven have 50 tokens, and one has 500. All come at once."""
    lengths = [TEXTBOOK_LENGTHS[number % 8] for number in range(num_requests)]
    prompts = [_tokens(rng, 1) for _ in lengths]
    return Workload("textbook", tuple(LabRequest(0.0, *each) for each in zip(prompts, lengths, strict=True)))


def chat(num_requests: int, rng: random.Random, rate: float) -> Workload:
    """Chat messages behind one system prompt: random arrivals, and lengths of a long-tailed distribution."""
    system_prompt = _tokens(rng, SYSTEM_PROMPT_TOKENS)
    lengths = [(_length(rng, 60, 4, 160), _length(rng, 50, 8, 200)) for _ in range(num_requests)]
    arrivals_s = _arrivals(rng, num_requests, rate)
    return Workload(
        "chat",
        tuple(
            LabRequest(at_s, system_prompt + _tokens(rng, num_prompt), num_output)
            for at_s, (num_prompt, num_output) in zip(arrivals_s, lengths, strict=True)
        ),
    )


def documents(num_requests: int, rng: random.Random, rate: float) -> Workload:
    """Chat messages, and before each eighth one a document with a short answer: long prompts delay others' tokens."""
    requests = []
    for number, at_s in enumerate(_arrivals(rng, num_requests, rate)):
        is_document = number % 8 == 0
        num_prompt = _length(rng, 350, 300, 400) if is_document else _length(rng, 40, 4, 100)
        requests.append(LabRequest(at_s, _tokens(rng, num_prompt), 16 if is_document else _length(rng, 60, 8, 100)))
    return Workload("documents", tuple(requests))


WORKLOADS: dict[str, Callable[[int, random.Random, float], Workload]] = {
    "textbook": textbook,
    "chat": chat,
    "documents": documents,
}


def make_workload(name: str, num_requests: int, seed: int, rate: float) -> Workload:
    """Make a workload from a seed. `rate` is the mean of requests per second, or infinite. Raises ConfigError."""
    if name not in WORKLOADS:
        raise ConfigError(f"--workload {name}: unknown; use one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name](num_requests, random.Random(seed), rate)


def _tokens(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens))


def _length(rng: random.Random, median: int, smallest: int, largest: int) -> int:
    return min(max(round(median * rng.lognormvariate(0.0, 0.8)), smallest), largest)


def _arrivals(rng: random.Random, num_requests: int, rate: float) -> list[float]:
    """Arrival times of a Poisson process that begins at 0."""
    arrivals_s, at_s = [], 0.0
    for _ in range(num_requests):
        arrivals_s.append(at_s)
        at_s += rng.expovariate(rate) if rate != float("inf") else 0.0
    return arrivals_s
