"""`servekit replay`: check that a scheduler repeats its recorded decisions, or simulate other settings."""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from servekit import __version__
from servekit.errors import ConfigError
from servekit.laboratory.page import write_page
from servekit.laboratory.report import as_json
from servekit.observability.journal import JournalHeader, journal_paths, read_header, replay_journal
from servekit.replaying.changed_run import ChangedRun, StepDurations
from servekit.replaying.page import as_page
from servekit.replaying.recorded_run import ModelledSteps, RecordedRun
from servekit.replaying.report import Comparison, as_text
from servekit.scheduler.scheduler_config import SchedulerConfig, max_admissions_per_step
from servekit.simulation.model import is_simulated, parse_simulated
from servekit.simulation.step_time_fit import as_spec


class ReplayOptions(Struct, frozen=True, kw_only=True):
    """The arguments of the command. A setting that is None stays as it was recorded."""

    file: Path
    scheduling_policy: str | None = None
    num_kv_blocks: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_steps_in_flight: int | None = None
    itl_target_ms: float | None = None
    enable_prefix_caching: bool | None = None
    model: str | None = None
    out: Path | None = None
    as_json: bool = False

    @property
    def has_difference(self) -> bool:
        """Whether to play the requests in virtual time, in place of comparing decisions."""
        return self != ReplayOptions(file=self.file)


def replay(options: ReplayOptions) -> int:
    """Run the command and return the exit code. Raises ConfigError."""
    paths = journal_paths(options.file)
    if not options.has_difference:
        return max([_check_decisions(path) for path in paths])
    comparisons = [_compare(path, options) for path in paths]
    print(as_json(comparisons) if options.as_json else "\n\n".join(map(as_text, comparisons)))
    return 0


# -- the same decisions ------------------------------------------------------------------------------------------------


def _check_decisions(path: Path) -> int:
    result = replay_journal(path)
    _warn_of_version(path, result.header)
    counts = f"{result.num_steps:,} steps, {result.num_sequences:,} sequences, {result.num_restarts:,} restarts"
    if result.difference is not None:
        print(f"{path}: different after {counts}: {result.difference}")
        return 1
    print(f"{path}: every decision is the same: {counts}")
    if result.recorded_error is not None:
        print(f"{path}: ends with the same error as the server: {result.recorded_error}")
    if result.is_truncated:
        print(f"{path}: the last record is incomplete; the server did not exit by itself")
    return 0


def _warn_of_version(path: Path, header: JournalHeader) -> None:
    if header.servekit_version != __version__:
        print(f"servekit: {path} was recorded by servekit {header.servekit_version}", file=sys.stderr)


# -- other settings ----------------------------------------------------------------------------------------------------


def _compare(path: Path, options: ReplayOptions) -> Comparison:
    """Play the requests of a journal with other settings, and write the page if one is wanted. Raises ConfigError."""
    header = read_header(path)
    _warn_of_version(path, header)
    config, changes = change_settings(header.config, options)
    if config.max_drafts:
        raise ConfigError(
            f"{path}: the server used speculative decoding. It is not known which drafts other steps would have "
            "accepted; record with --speculative off, or leave the settings out to compare decisions"
        )
    if config.has_kv_connector:
        raise ConfigError(
            f"{path}: the server offloaded KV blocks, or handed them over. It is not known which blocks other steps "
            "would have found; record without --kv-offload-memory-bytes and --prefill-replicas, or leave the settings "
            "out to compare decisions"
        )
    recorded = read_run(path, header.config)
    if config.enable_prefix_caching and not header.config.enable_prefix_caching:
        raise ConfigError(
            f"{path}: the server ran without the prefix cache, so its journal does not show which prompts share a "
            "prefix; --enable-prefix-caching cannot be tried with it"
        )
    durations, step_times, error = _durations(path, recorded, options)
    replayed = ChangedRun(recorded, config, durations).play()
    if not replayed.requests:
        raise ConfigError(f"{path}: none of its requests fits into these settings")
    comparison = Comparison(
        file=path.name,
        num_requests=len(recorded.requests),
        changes=changes,
        step_times=step_times,
        step_time_error=error,
        happened=recorded.record.figures(),
        replayed=replayed.figures(),
    )
    if options.out is not None:
        name = "replay.html" if path == options.file else f"replay{path.name.removeprefix(options.file.name)}.html"
        write_page(options.out / name, as_page(comparison, recorded.record, replayed))
    return comparison


def read_run(path: Path, config: SchedulerConfig) -> RecordedRun:
    """Read what happened in a journal, up to its first difference. Raises ConfigError if nothing did."""
    recorded = RecordedRun(config)
    result = replay_journal(path, recorded)
    if result.difference is not None:
        print(f"servekit: {path}: the replay differs from here on: {result.difference}", file=sys.stderr)
    recorded.finish()
    if not recorded.requests:
        raise ConfigError(f"{path}: it has no requests")
    return recorded


def _durations(path: Path, recorded: RecordedRun, options: ReplayOptions) -> tuple[StepDurations, str, float | None]:
    """How long steps take, the same as sim:SPEC, and the median error of what was fitted. Raises ConfigError."""
    if options.model is not None:
        if not is_simulated(options.model):
            raise ConfigError(f"--model {options.model}: use sim:SPEC, which says how long steps take")
        return ModelledSteps(parse_simulated(options.model)), options.model, None
    times = recorded.step_times()
    if times is None:
        raise ConfigError(f"{path}: it has no steps, so how long they take is not known; give --model sim:SPEC")
    return times, as_spec(times.fit.model), times.fit.median_relative_error


def change_settings(config: SchedulerConfig, options: ReplayOptions) -> tuple[SchedulerConfig, dict[str, str]]:
    """Return the configuration with the settings that are given, and what is different. Raises ConfigError."""
    changed = {
        "scheduling_policy": options.scheduling_policy,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_steps_in_flight": options.max_steps_in_flight,
        "enable_prefix_caching": options.enable_prefix_caching,
        "block_size": options.block_size,
        "num_blocks": options.num_kv_blocks,
    }
    given: dict[str, object] = {name: value for name, value in changed.items() if value is not None}
    if options.itl_target_ms is not None:
        given["itl_target_s"] = options.itl_target_ms / 1e3 or None
    if options.block_size is not None and options.num_kv_blocks is None:  # as many tokens as before
        given["num_blocks"] = max(1, config.num_blocks * config.block_size // options.block_size)
    if options.max_num_seqs is not None:
        given["max_admissions_per_step"] = max_admissions_per_step(options.max_num_seqs)
    if config.pipeline_parallel_size > 1 and options.max_steps_in_flight is not None:
        raise ConfigError("--max-steps-in-flight: the journal is of a pipeline, which needs one for each stage")
    new = replace(config, **given)
    differences = {
        _FLAGS[name]: f"{_value(name, getattr(config, name))} → {_value(name, getattr(new, name))}"
        for name in _FLAGS
        if getattr(config, name) != getattr(new, name)
    }
    if options.model is not None:
        differences["step times"] = f"of the recorded model → of {options.model}"
    return new, differences


_FLAGS = {
    "scheduling_policy": "--scheduling-policy",
    "num_blocks": "--num-kv-blocks",
    "block_size": "--block-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_steps_in_flight": "--max-steps-in-flight",
    "itl_target_s": "--itl-target-ms",
    "enable_prefix_caching": "--enable-prefix-caching",
}


def _value(name: str, value: object) -> str:
    if value is None:
        return "none"
    if name == "itl_target_s":
        assert isinstance(value, float)
        return f"{1e3 * value:g}"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)
