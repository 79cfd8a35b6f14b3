"""The stages, those that matter most first; how long each takes on an H200, and which of them fit into a command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FINE, SKIPPED, FAILED = 0, 3, 4  # exit codes of a stage's process; 1 and 2 are Python's, of one that told nothing


@dataclass(frozen=True, slots=True)
class Stage:
    """One module, which is a program, in a process of its own: what a wrong kernel does to CUDA ends with it."""

    name: str
    module: str  # within this package
    minutes: float  # as estimated; nobody has measured it yet
    question: str

    @property
    def limit_s(self) -> float:
        """After that it is ended: something hangs, and the others want their turn."""
        return 60 * max(2.0, 2.5 * self.minutes)


STAGES = (
    Stage("attention", "attention", 0.4, "Which way to attend is taken, and why not the others"),
    Stage("steps", "steps", 3.5, "Whole steps as shares of their floors"),
    Stage("kernels", "kernels", 1.8, "Kernels against float64, and against the bytes or FLOP they need"),
    Stage("waits", "waits", 0.8, "Whether a launch waits for the device, and how long it takes the host"),
    Stage("tokens", "tokens", 1.2, "Greedy tokens beside transformers' own on the same device"),
    Stage("memory", "memory", 2.2, "The KV cache's arithmetic, and whether memory grows"),
    Stage("http", "over_http", 2.5, "Streams over HTTP beside the same requests without it"),
    Stage("transformers", "by_transformers", 4.0, "transformers' generate on the same shapes"),
    Stage("tests", "suite", 4.0, "The tests that a GPU makes meaningful"),
    Stage("vllm", "by_vllm", 4.0, "vLLM on the same shapes, if it is installed"),
)
BY_NAME = {stage.name: stage for stage in STAGES}


def commands(stages: Iterable[Stage], minutes: float) -> list[list[Stage]]:
    """One after the other, as many in a command as fit into `minutes`; one that never fits has a command of its own."""
    told: list[list[Stage]] = []
    left = 0.0
    for stage in stages:
        if not told or stage.minutes > left:
            told.append([])
            left = minutes
        told[-1].append(stage)
        left -= stage.minutes
    return told


def overview(stages: Sequence[Stage], minutes: float) -> str:
    """For people: what would be run, in which commands."""
    lines = [f"{stage.name:13} {stage.minutes:4.1f} min  {stage.question}" for stage in stages]
    lines.append(f"{'in all':13} {sum(stage.minutes for stage in stages):4.1f} min")
    for number, command in enumerate(commands(stages, minutes), 1):
        names = " ".join(stage.name for stage in command)
        lines.append(f"{number}. --stages {names}   ({sum(stage.minutes for stage in command):.1f} min)")
    return "\n".join(lines)
