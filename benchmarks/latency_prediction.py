"""Compare predicted times to the first token with measured ones, on a real engine: a table, and a page with a picture.

The engine serves a Llama of 84 million random weights. Answers end at lengths that nothing but the worker knows: a
sequence may not end before, and must end then. First come requests of another kind, with prompts that are twice as
long, from which the predictor learns. Then clients that always wait show what the engine can bear. Then come the
requests that are measured, in random order of arrival, at some parts of that load. The predictions are made
afterwards, from the journal of the engine: when a request is added there, a predictor sees what the manager was like
then. They are made three times: by a predictor that goes on learning, as that of a server does; by one that learns
neither step times nor lengths of answers from the measured requests, so that it is fitted to the others only; and by
one that goes on learning and knows how long each answer will become, which shows what not to know that costs. The bands
follow their outcomes in all three.

    python -m benchmarks.latency_prediction --out build/prediction
    python -m benchmarks.latency_prediction --journal build/journal    # keeps it, or predicts again if it is there
    python -m benchmarks.latency_prediction --chance    # what no prediction can know: when running answers will end

It takes under seven minutes. Run nothing else meanwhile: another program makes steps longer than they were before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from heapq import heapify, heapreplace
from html import escape
from math import exp, log10
from pathlib import Path
from statistics import NormalDist, median
from unittest.mock import patch

from msgspec import Struct

from benchmarks.progress import Progress
from benchmarks.random_llama import SMALL_SHAPE, make_random_llama
from servekit.embedded.async_llm import AsyncLLM
from servekit.embedded.sampling_params import SamplingParams
from servekit.latency.latency_predictor import LatencyPrediction, LatencyPredictor
from servekit.latency.roll_forward import RollForward
from servekit.observability.journal import replay_journal
from servekit.protocol.messages import StepPlan
from servekit.scheduler.recording import AddRecord, PlanRecord, Record, ReplayWatcher
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager

MODEL_FOLDER = Path("build/small-llama")
NUM_SLOTS = 8
MAX_TOKENS = 300  # of an answer
MAX_ROLL_STEPS = 5000
JOURNAL_BYTES = 2**40
# A journal has no names of requests. So max_tokens is MAX_TOKENS plus the kind of the request, which shows its kind.
# The kind of a measured request is its load in percent.
LEARNED, CAPACITY = 1, 2
FIRST_TOKEN_ID = 3  # those below are special


class Demand(Struct, frozen=True):
    """The lengths of requests: log-normal, with these medians."""

    prompt_tokens: int
    answer_tokens: int = 50
    spread: float = 0.6  # of the logarithm
    max_prompt_tokens: int = 250

    def lengths(self, number: int, rng: random.Random) -> list[tuple[int, int]]:
        """Return the lengths of so many prompts and answers: evenly spread quantiles, in random order.

        Their sums depend on chance less than those of random lengths. A load is to be what it is called.
        """
        factors = [exp(self.spread * NormalDist().inv_cdf((index + 0.5) / number)) for index in range(number)]
        prompts = [min(self.max_prompt_tokens, max(4, round(self.prompt_tokens * factor))) for factor in factors]
        answers = [min(MAX_TOKENS, max(2, round(self.answer_tokens * factor))) for factor in factors]
        rng.shuffle(prompts)
        rng.shuffle(answers)
        return list(zip(prompts, answers, strict=True))


OTHER, MEASURED = Demand(60), Demand(30)


class Client:
    """Sends requests to one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._rng = random.Random(0)
        self._eos_token_id = SMALL_SHAPE["eos_token_id"]

    async def ask(self, prompt_tokens: int, answer_tokens: int, kind: int) -> float:
        """Send a request, wait for its answer, and return the time to its first token."""
        prompt = [self._rng.randrange(FIRST_TOKEN_ID, SMALL_SHAPE["vocab_size"]) for _ in range(prompt_tokens)]
        params = SamplingParams(
            max_tokens=MAX_TOKENS + kind,
            min_tokens=answer_tokens - 1,
            logit_bias={str(self._eos_token_id): 100.0},
            temperature=1.0,
        )
        loop, first_token_s = asyncio.get_running_loop(), 0.0
        sent_s = loop.time()
        async for _ in self._llm.generate(prompt, params, stream=True):
            first_token_s = first_token_s or loop.time()
        return first_token_s - sent_s

    async def flood(self, demand: Demand, kind: int, num_clients: int, seconds: float, pause_s: float = 0.0) -> float:
        """Ask with clients that wait for each answer; return how many answers ended per second.

        The first third of the time does not count: slots fill then.
        """
        loop = asyncio.get_running_loop()
        began_s, ends_s = loop.time(), []
        lengths: list[tuple[int, int]] = []

        async def client() -> None:
            while loop.time() < began_s + seconds:
                if not lengths:
                    lengths.extend(demand.lengths(32, self._rng))
                await self.ask(*lengths.pop(), kind)
                ends_s.append(loop.time())
                await asyncio.sleep(pause_s * self._rng.random())

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return sum(seconds / 3 <= at_s - began_s < seconds for at_s in ends_s) / (seconds * 2 / 3)

    async def arrive(self, demand: Demand, kind: int, rate: float, seconds: float) -> None:
        """Ask at random times, `rate` times per second."""
        number = round(rate * seconds)
        at_s = sorted(self._rng.uniform(0.0, seconds) for _ in range(number))
        loop, tasks = asyncio.get_running_loop(), []
        began_s = loop.time()
        for each_s, lengths in zip(at_s, demand.lengths(number, self._rng), strict=True):
            await asyncio.sleep(max(0.0, began_s + each_s - loop.time()))
            tasks.append(asyncio.create_task(self.ask(*lengths, kind)))
        await asyncio.gather(*tasks)


async def serve(journal: Path, model: str, loads: list[float], seconds: float) -> None:
    async with AsyncLLM(
        model,
        max_num_seqs=NUM_SLOTS,
        max_model_len=1024,
        enable_prefix_caching=False,
        scheduling_policy="fcfs",
        journal=str(journal),
        journal_max_bytes=JOURNAL_BYTES,
    ) as llm:
        client = Client(llm)
        with Progress("parts", 3 + len(loads)) as progress:
            progress.begin("to learn from, a low load")
            await client.flood(OTHER, LEARNED, 2, seconds / 3, pause_s=1.0)
            progress.begin("to learn from, an overload")
            await client.flood(OTHER, LEARNED, 2 * NUM_SLOTS, seconds / 2)
            progress.begin("capacity")
            rate = await client.flood(MEASURED, CAPACITY, 2 * NUM_SLOTS, seconds * 2 / 3)
            for load in loads:
                progress.begin(f"load {load:g}, {load * rate:.2f} requests/s")
                await client.arrive(MEASURED, round(100 * load), load * rate, seconds)


class Outcome(Struct, frozen=True):
    """A predicted first token that came."""

    kind: int
    prediction: LatencyPrediction
    measured_s: float


class LengthWatcher(ReplayWatcher):
    """Notes how long answers became."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}  # by sequence id

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        for token in tokens:
            if token.finish_reason is not None:
                self.lengths[token.sequence.sequence_id] = token.sequence.num_output_tokens


class Watcher(ReplayWatcher):
    """Predicts each request of a journal when it is added, and notes when its first token came."""

    def __init__(self, learns: bool) -> None:
        """Without `learns`, neither step times nor lengths are learned from the measured requests."""
        self.predictor = LatencyPredictor()
        self.outcomes: list[Outcome] = []
        self._learns = learns
        self._open: dict[int, tuple[int, LatencyPrediction]] = {}
        self._is_idle = False  # the manager, before the sequence that is being added
        self._came_to_idle: list[Sequence] = []

    def before(self, manager: WorkloadManager, record: Record) -> None:
        """Predict what came to an idle manager: a journal dates it with the plan that followed."""
        if isinstance(record, AddRecord):
            self._is_idle = not manager.has_work
        elif isinstance(record, PlanRecord):
            for sequence in self._came_to_idle:
                self._predict(manager, sequence, record.now_s)
            self._came_to_idle.clear()

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        if kind_of(sequence) >= CAPACITY:
            self.predictor.learns = self._learns
        if self._is_idle or self._came_to_idle:
            self._came_to_idle.append(sequence)
        else:
            self._predict(manager, sequence, max(sequence.arrival_s, manager.log.now_s))

    def _predict(self, manager: WorkloadManager, sequence: Sequence, now_s: float) -> None:
        prediction = self.predictor.predict(manager, sequence.sequence_id, now_s, MAX_ROLL_STEPS)
        if prediction is not None:
            self._open[sequence.sequence_id] = kind_of(sequence), prediction

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        self.predictor.planned(manager, plan, now_s)

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        self.predictor.committed(manager, tokens, now_s)
        for token in tokens:
            found = self._open.pop(token.sequence.sequence_id, None)
            if found is not None:
                kind, prediction = found
                self.predictor.measured(prediction, now_s)
                self.outcomes.append(Outcome(kind, prediction, now_s - prediction.predicted_s))


def kind_of(sequence: Sequence) -> int:
    return sequence.sampling.max_tokens - MAX_TOKENS


class Way(Enum):
    """What a predictor knows of the measured requests."""

    LEARNING = "it goes on learning"
    FITTED = "neither step times nor lengths are learned from these requests"
    ORACLE = "it goes on learning, and knows how long each answer will become"


def predict(journal: Path, way: Way) -> tuple[dict[str, float], list[Outcome]]:
    """Return what the predictor has learned in the end, and what came of the measured requests."""
    watcher = Watcher(way is not Way.FITTED)
    with contextlib.ExitStack() as stack:
        if way is Way.ORACLE:
            known = LengthWatcher()
            replay_journal(journal, known)

            def ends(_: RollForward, sequence: Sequence) -> bool:
                return sequence.num_output_tokens + 1 >= known.lengths[sequence.sequence_id]

            stack.enter_context(patch.object(RollForward, "_ends", ends))
        result = replay_journal(journal, watcher)
    assert result.difference is None, result.difference
    return watcher.predictor.model.info(), [outcome for outcome in watcher.outcomes if outcome.kind > CAPACITY]


def error_of_chance(place: int, rng: random.Random, num_states: int = 300, num_plays: int = 60) -> float:
    """Return the median error of the best prediction of the first token of a request that is so far back in the line.

    Each state has full slots with answers that are partly made. All steps take the same time, prompts take none, and
    the distribution of lengths is known. So only chance is left: in each play, the answers get other lengths.
    """

    def length(num_made: float = 0.0) -> float:
        while (tokens := exp(MEASURED.spread * rng.gauss())) <= num_made:
            pass
        return tokens

    errors = []
    for _ in range(num_states):
        # In a slot that was always in use, an answer is met in proportion to its length, at any point of it.
        met = [rng.random() * exp(MEASURED.spread * (rng.gauss() + MEASURED.spread)) for _ in range(NUM_SLOTS)]
        plays = []
        for _ in range(num_plays):
            ends = [length(num_made) - num_made for num_made in met]
            heapify(ends)
            for _ in range(place - 1):
                heapreplace(ends, ends[0] + length())
            plays.append(ends[0])
        predicted = median(plays)
        errors += [abs(predicted / each - 1.0) for each in plays]
    return median(errors)


def as_table(outcomes: list[Outcome]) -> list[list[str]]:
    rows = [["load", "requests", "median error", "in the 80 % band", "median wait until the first token"]]
    for kind in sorted({outcome.kind for outcome in outcomes}):
        found = [outcome for outcome in outcomes if outcome.kind == kind]
        bands = [(each.prediction.first_token, each.measured_s) for each in found]
        errors = [abs(band.median_s / measured_s - 1.0) for band, measured_s in bands]
        inside = [band.low_s <= measured_s <= band.high_s for band, measured_s in bands]
        rows.append(
            [
                f"{kind / 100:g}",
                f"{len(found)}",
                f"{100 * median(errors):.1f} %",
                f"{100 * sum(inside) / len(inside):.0f} %",
                f"{1e3 * median(measured_s for _, measured_s in bands):.0f} ms",
            ]
        )
    return rows


def as_page(title: str, outcomes: list[Outcome], rows: list[list[str]]) -> str:
    """Draw measured against predicted times, both logarithmic, and the band of each prediction."""
    kinds = sorted({outcome.kind for outcome in outcomes})
    values = [value for each in outcomes for value in (each.prediction.first_token.median_s, each.measured_s)]
    low, high = log10(min(values)) - 0.1, log10(max(values)) + 0.1

    def at(seconds: float) -> float:
        return 400.0 * (log10(max(seconds, 10**low)) - low) / (high - low)

    marks = []
    for each in outcomes:
        band = each.prediction.first_token
        x = at(band.median_s)
        is_inside = band.low_s <= each.measured_s <= band.high_s
        color, y = f"hsl({220 - 70 * kinds.index(each.kind)} 65% 50%)", 400 - at(each.measured_s)
        marks.append(
            f'<g stroke="{color}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{400 - at(band.low_s):.1f}" '
            f'y2="{400 - at(band.high_s):.1f}" opacity=".25"/><circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" '
            f'fill="{color if is_inside else "none"}"/></g>'
        )
    ticks = []
    for exponent in range(-4, 4):
        for digit in (1, 3):
            seconds = digit * 10.0**exponent
            if low <= log10(seconds) <= high:
                label = f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"
                ticks.append(
                    f'<text x="{at(seconds):.1f}" y="416" text-anchor="middle">{label}</text>'
                    f'<text x="-6" y="{404 - at(seconds):.1f}" text-anchor="end">{label}</text>'
                )
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    names = " ".join(
        f'<span style="color: hsl({220 - 70 * index} 65% 50%)">● load {kind / 100:g}</span>'
        for index, kind in enumerate(kinds)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 50rem; font: 15px/1.5 system-ui, sans-serif; }}
svg {{ width: 100%; }} svg text {{ fill: currentColor; font-size: 11px; }} h1 {{ font-size: 1.25rem; }}
td {{ padding: .25rem .6rem; border-bottom: 1px solid color-mix(in srgb, currentColor 25%, transparent); }}
</style></head><body><h1>{escape(title)}</h1>
<p>Time to the first token. Across: predicted when the request was added. Up: measured. A line is the 80 % band of a
prediction; a hollow dot is outside of its band. {names}</p>
<svg viewBox="-55 -10 470 450"><path d="M0 0V400H400M0 400L400 0" fill="none" stroke="currentColor" opacity=".4"/>
{"".join(ticks)}{"".join(marks)}
<text x="400" y="432" text-anchor="end">predicted</text><text x="0" y="-2">measured</text></svg>
<table>{table}</table></body></html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER, help="where the model is kept")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.85, 1.1])
    parser.add_argument("--seconds", type=float, default=50.0, help="of each load")
    parser.add_argument("--journal", type=Path, help="keep it there; if it is there, nothing is served")
    parser.add_argument("--out", type=Path, help="folder for the page")
    parser.add_argument("--chance", action="store_true", help="show what cannot be predicted, and serve nothing")
    options = parser.parse_args()
    if options.chance:
        for place in (1, 3, 5, 10, 15, 20, 30):
            print(
                f"first token of number {place:2d} in the line: {100 * error_of_chance(place, random.Random(0)):.0f} %"
            )
        return
    with tempfile.TemporaryDirectory() as folder:
        journal = options.journal or Path(folder) / "journal"
        if not journal.exists():
            model = str(make_random_llama(options.folder, SMALL_SHAPE))
            asyncio.run(serve(journal, model, options.loads, options.seconds))
        with ProcessPoolExecutor() as processes:
            found = {way: processes.submit(predict, journal, way) for way in Way}
    for way, future in found.items():
        info, measured = future.result()
        rows = as_table(measured)
        print(f"\n{way.value}\n{info}\n")
        for row in rows:
            print("| " + " | ".join(row) + " |")
        if way is Way.LEARNING and options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / "prediction.html"
            path.write_text(as_page("Predicted and measured times to the first token", measured, rows))
            print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
