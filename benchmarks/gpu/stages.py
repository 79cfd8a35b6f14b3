"""The stages, the most important first: what each measures, how long it takes on an H200, which fit into a command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FINE, SKIPPED, FAILED = 0, 3, 4  # exit codes of a stage; 1 and 2 are Python's own, of a stage that crashed


@dataclass(frozen=True, slots=True)
class Stage:
    """One module that runs as a process of its own, because a faulty kernel can break CUDA for its whole process."""

    name: str
    module: str  # within this package
    minutes: float  # an estimate: not measured yet
    question: str

    @property
    def limit_s(self) -> float:
        """Seconds after which it is stopped, because something hangs."""
        return 60 * max(2.0, 2.5 * self.minutes)


STAGES = (
    Stage("attention", "attention_selection", 0.4, "Which attention backend is selected, and why not the others"),
    Stage("steps", "step_times", 3.5, "Whole steps compared with their theoretical minimum"),
    Stage("kernels", "kernels", 1.8, "Kernels compared with float64, and with the bytes or FLOP they need"),
    Stage("waits", "host_synchronisation", 0.8, "Whether a launch waits for the device, and its time on the host"),
    Stage("tokens", "greedy_tokens", 1.2, "Greedy tokens compared with transformers' on the same device"),
    Stage("memory", "memory", 2.2, "The size of the KV cache, and whether memory grows"),
    Stage("http", "http_throughput", 2.5, "Streams over HTTP compared with the same requests without it"),
    Stage("transformers", "transformers_baseline", 4.0, "transformers' generate on the same shapes"),
    Stage("tests", "gpu_tests", 4.6, "The tests that mean more on a GPU; two workers on it"),
    Stage("vllm", "vllm_baseline", 4.0, "vLLM on the same shapes, if it is installed"),
)
BY_NAME = {stage.name: stage for stage in STAGES}


def commands(stages: Iterable[Stage], minutes: float) -> list[list[Stage]]:
    """Group stages, in order, into commands of at most `minutes`; a stage that takes longer is a command of its own."""
    grouped: list[list[Stage]] = []
    left = 0.0
    for stage in stages:
        if not grouped or stage.minutes > left:
            grouped.append([])
            left = minutes
        grouped[-1].append(stage)
        left -= stage.minutes
    return grouped


def overview(stages: Sequence[Stage], minutes: float) -> str:
    """Describe the stages, and the commands that would run them."""
    lines = [f"{stage.name:13} {stage.minutes:4.1f} min  {stage.question}" for stage in stages]
    lines.append(f"{'total':13} {sum(stage.minutes for stage in stages):4.1f} min")
    for number, command in enumerate(commands(stages, minutes), 1):
        names = " ".join(stage.name for stage in command)
        lines.append(f"{number}. --stages {names}   ({sum(stage.minutes for stage in command):.1f} min)")
    return "\n".join(lines)
