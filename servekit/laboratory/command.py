"""`servekit lab`: run one workload with several modes of batching, print the figures, and write the page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from tqdm import tqdm  # type: ignore[import-untyped]

from servekit.errors import ConfigError
from servekit.laboratory.ablation import ABLATIONS, knee
from servekit.laboratory.batching import MODES
from servekit.laboratory.page import Picture, as_page, write_page
from servekit.laboratory.real_run import RealRun
from servekit.laboratory.report import as_json, as_table
from servekit.laboratory.summary import Summary, summarise
from servekit.laboratory.timeline import Timeline
from servekit.laboratory.virtual_run import LabSettings, VirtualRun
from servekit.laboratory.workload import Workload
from servekit.laboratory.workload_generator import make_workload
from servekit.simulation.model import SimulatedModel, is_simulated, parse_simulated
from servekit.simulation.step_time_fit import MeasuredStep, as_spec, fit_step_times

TEXTBOOK_MODEL = "sim:step=10ms"  # 100 tokens/s for each slot, whatever the others do
DEFAULT_MODEL = "sim:h100-8b"
REAL_MODEL = "demo"
REAL_MAX_MODEL_LEN = 512  # so that a KV cache of the default size holds all slots
DEFAULT_LOAD = 0.8
DEFAULT_KV_TOKENS = 4096
TEXTBOOK_NOTE = """\
Textbooks compare 170 tokens/s of the static batch with 800, which is all slots times 100 steps/s. The same eight
requests take as long with continuous batching: nothing waits that could fill the free slots. It reaches 800 while
requests wait: see that column with --requests 256. At the end of a finite workload slots are idle in every mode."""
CALIBRATION_SEED = 1000  # of the workload to which step times are fitted: another one than the measured one
CALIBRATION_REQUESTS = 48


class LabOptions(Struct, frozen=True, kw_only=True):
    """The arguments of the command."""

    workload: str = "chat"
    requests: int | None = None  # 64; 8 of the textbook
    seed: int = 0
    load: float = DEFAULT_LOAD
    modes: tuple[str, ...] = tuple(MODES)
    ablation: str | None = None
    model: str | None = None
    real: bool = False
    slots: int = 8
    kv_tokens: int | None = None  # None: DEFAULT_KV_TOKENS, or max_model_len if that is more
    max_model_len: int = 1024
    block_size: int = 16
    chunk_tokens: int = 64
    max_delay_ms: float = 100.0
    paged: bool = True
    prefix_cache: bool = True
    out: Path | None = None
    as_json: bool = False


def lab(options: LabOptions) -> int:
    """Run the command and return the exit code. Raises ConfigError, or WorkerError of a real model."""
    settings = _settings(options)
    if options.real:
        return _compare_with_reality(options, settings)
    model = _simulated_model(options)
    workload = _workload(options, settings, model)
    if options.ablation is not None:
        return _print_ablation(options, settings, workload, model)
    runs = [_play(workload, mode, settings, model) for mode in options.modes]
    _show(options, settings, workload, runs, f"{_model_name(options)}, in virtual time")
    return 0


def _settings(options: LabOptions) -> LabSettings:
    for name in options.modes:
        if name not in MODES:
            raise ConfigError(f"--modes {name}: unknown; use one or several of {', '.join(MODES)}")
    if options.load <= 0:
        raise ConfigError("--load 0: no request would ever arrive; give a share above 0")
    if options.ablation is not None:
        if options.ablation not in ABLATIONS:
            raise ConfigError(f"ablation {options.ablation}: unknown; use one of {', '.join(ABLATIONS)}")
        if options.modes != tuple(MODES):
            raise ConfigError(f"--modes: the ablation {options.ablation} has modes of its own; leave --modes out")
    max_model_len = min(options.max_model_len, REAL_MAX_MODEL_LEN) if options.real else options.max_model_len
    num_kv_tokens = max(DEFAULT_KV_TOKENS, max_model_len) if options.kv_tokens is None else options.kv_tokens
    if num_kv_tokens < max_model_len:
        raise ConfigError(
            f"--kv-tokens {num_kv_tokens}: the longest sequence may have {max_model_len:,} tokens; give at least as "
            "many, or a smaller --max-model-len"
        )
    is_textbook = options.workload == "textbook" and not options.real
    return LabSettings(
        num_slots=options.slots,
        num_kv_tokens=num_kv_tokens,
        block_size=options.block_size,
        max_model_len=max_model_len,
        chunk_tokens=options.chunk_tokens,
        max_delay_s=options.max_delay_ms / 1e3,
        is_paged=options.paged,
        has_prefix_cache=options.prefix_cache,
        # Textbooks plan a step when the one before it is done. With two steps in flight, a slot is free one step later.
        max_steps_in_flight=1 if is_textbook else 2,
    )


def _model_name(options: LabOptions) -> str:
    if options.model is not None:
        return options.model
    if options.real:
        return REAL_MODEL
    return TEXTBOOK_MODEL if options.workload == "textbook" else DEFAULT_MODEL


def _simulated_model(options: LabOptions) -> SimulatedModel:
    name = _model_name(options)
    if not is_simulated(name):
        raise ConfigError(f"--model {name}: in virtual time the model is sim:SPEC; use --real for a real model")
    return parse_simulated(name)


def _workload(options: LabOptions, settings: LabSettings, model: SimulatedModel) -> Workload:
    """Make the workload. Requests come at `load` times the rate that continuous batching could serve."""
    num_requests = options.requests or (8 if options.workload == "textbook" else 64)
    at_once = make_workload(options.workload, num_requests, options.seed, float("inf"))
    if at_once.max_length > settings.max_model_len:
        raise ConfigError(
            f"--max-model-len {settings.max_model_len}: the workload has a request of {at_once.max_length} tokens; "
            "give at least as many"
        )
    num_in_blocks = settings.num_kv_tokens // settings.block_size * settings.block_size
    if at_once.max_length > num_in_blocks:
        raise ConfigError(
            f"--block-size {settings.block_size}: the KV cache has whole blocks for {num_in_blocks:,} tokens, and the "
            f"workload has a request of {at_once.max_length}; use smaller blocks, or more --kv-tokens"
        )
    capacity = summarise(VirtualRun(at_once, MODES["continuous"], settings, model).play(), settings.num_slots)
    rate = options.load * num_requests / capacity.duration_s if capacity.duration_s else float("inf")
    return make_workload(options.workload, num_requests, options.seed, rate)


class _Run(Struct, frozen=True):
    """One mode, how it was played (in virtual time, or with a real model), and what came of it."""

    mode: str
    how: str
    timeline: Timeline
    summary: Summary


def _play(workload: Workload, mode: str, settings: LabSettings, model: SimulatedModel) -> _Run:
    timeline = VirtualRun(workload, MODES[mode], settings, model).play()
    return _Run(mode, "virtual", timeline, summarise(timeline, settings.num_slots))


def _show(options: LabOptions, settings: LabSettings, workload: Workload, runs: Sequence[_Run], how: str) -> None:
    """Print the figures of all runs, and write the page if one is wanted."""
    title = (
        f"{workload.name}: {len(workload.requests)} requests, {workload.num_output_tokens:,} tokens, "
        f"{settings.num_slots} slots; {how}"
    )
    if options.as_json:
        figures = [{"mode": run.mode, "how": run.how, "summary": run.summary} for run in runs]
        print(as_json({"title": title, "settings": settings, "runs": figures}))
    else:
        print(title + "\n")
        has_both = len({run.how for run in runs}) > 1
        print(as_table("mode", [(f"{run.mode}, {run.how}" if has_both else run.mode, run.summary) for run in runs]))
        if workload.name == "textbook":
            print("\n" + TEXTBOOK_NOTE)
    if options.out is not None:
        pictures = [
            Picture(
                name=f"{run.mode}, {run.how}",
                explanation=MODES[run.mode].explanation,
                num_slots=settings.num_slots,
                timeline=run.timeline,
                summary=run.summary,
            )
            for run in runs
        ]
        modes = [run.mode for run in runs]
        first = modes.index("static") if "static" in modes else 0
        write_page(options.out / "lab.html", as_page(title, pictures, number_of_first=first))


# -- ablations --------------------------------------------------------------------------------------------------------


def _print_ablation(options: LabOptions, settings: LabSettings, workload: Workload, model: SimulatedModel) -> int:
    assert options.ablation is not None
    ablation = ABLATIONS[options.ablation]
    pictures = []
    for case in ablation.cases(workload, settings):
        timeline = VirtualRun(case.workload, case.mode, case.settings, model).play()
        pictures.append(
            Picture(
                name=case.label,
                explanation=case.mode.explanation,
                num_slots=case.settings.num_slots,
                timeline=timeline,
                summary=summarise(timeline, case.settings.num_slots),
            )
        )
        workload = case.workload  # an ablation may have a workload of its own, which the title then names
    title = f"{ablation.explanation}; {workload.name}, {_model_name(options)}, in virtual time"
    rows = [(picture.name, picture.summary) for picture in pictures]
    if options.as_json:
        print(as_json({"ablation": ablation.name, "runs": rows}))
    else:
        print(title + "\n")
        print(as_table(ablation.name, rows, ablation.figures))
        if ablation.name == "batch-size":
            print("\n" + _knee_text(rows))
    if options.out is not None:
        first = len(pictures) - 2 if ablation.is_in_pairs else 0
        write_page(options.out / "lab.html", as_page(title, pictures, ablation.figures, number_of_first=first))
    return 0


def _knee_text(rows: Sequence[tuple[str, Summary]]) -> str:
    index = knee([summary for _, summary in rows])
    label, _ = rows[index]
    following = rows[index + 1 : index + 2]
    if not following or not following[0][1].tokens_per_s_while_waiting:
        return f"There is no knee up to {label}: twice as many slots still give at least a quarter more tokens/s."
    return f"The knee is at {label}: up to there, twice as many slots give at least a quarter more tokens/s."


# -- a real model -----------------------------------------------------------------------------------------------------


def _compare_with_reality(options: LabOptions, settings: LabSettings) -> int:
    """Fit step times to runs of the real model, then play every mode with it and in virtual time."""
    name = _model_name(options)
    if options.ablation is not None:
        raise ConfigError("--real compares modes; leave out the ablation, or --real")
    runs: list[_Run] = []
    with tqdm(total=2 + len(options.modes), desc="lab", unit="run", disable=None) as bar:
        fit = fit_step_times(_calibrate(name, settings, bar))
        workload = _workload(options, settings, fit.model)
        for mode in options.modes:
            timeline = asyncio.run(RealRun(workload, MODES[mode], settings, name).play())
            runs.append(_Run(mode, "real", timeline, summarise(timeline, settings.num_slots)))
            runs.append(_play(workload, mode, settings, fit.model))
            bar.update()
    _show(options, settings, workload, runs, f"{name}, and in virtual time with the step times fitted to it")
    if not options.as_json:
        print(f"\nstep times, fitted to {fit.num_steps} steps of another workload: {as_spec(fit.model)}")
        print(f"median error of one step: {fit.median_relative_error:.1%}\n")
        _print_agreement(runs)
    return 0


def _calibrate(name: str, settings: LabSettings, bar: tqdm) -> list[MeasuredStep]:
    """Measure steps of prompts, of full batches and of single sequences, of another workload."""
    requests = make_workload("chat", CALIBRATION_REQUESTS, CALIBRATION_SEED, float("inf")).requests
    steps: list[MeasuredStep] = []
    for mode, num_requests in (("chunked", CALIBRATION_REQUESTS), ("one-by-one", CALIBRATION_REQUESTS // 6)):
        workload = Workload("calibration", requests[:num_requests])
        timeline = asyncio.run(RealRun(workload, MODES[mode], settings, name).play())
        steps += [MeasuredStep.of(step.plan, step.done_s - step.began_s) for step in timeline.steps]
        bar.update()
    return steps


def _print_agreement(runs: Sequence[_Run]) -> None:
    """Print tokens/s of each mode beside the first one's, real and virtual."""
    rates = {(run.mode, run.how): run.summary.tokens_per_s for run in runs}
    modes = list(dict.fromkeys(run.mode for run in runs))
    print("tokens/s beside the first mode: real, virtual, and how far the virtual ratio is off")
    for mode in modes:
        real, virtual = (rates[mode, how] / rates[modes[0], how] for how in ("real", "virtual"))
        print(f"  {mode:<12}{real:6.2f}{virtual:6.2f}{virtual / real - 1:+8.1%}")
    for how in ("real", "virtual"):
        print(f"ranking, {how}: {' < '.join(sorted(modes, key=lambda mode: rates[mode, how]))}")
