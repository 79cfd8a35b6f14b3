"""Make the drafter that the settings name."""

from __future__ import annotations

from servekit.errors import ConfigError
from workers.speculation.drafter import Drafter, Target
from workers.speculation.ngram import NgramDrafter


def make_drafter(target: Target) -> Drafter | None:
    """Return the drafter that `--speculative` names; None if speculation is off. Raises ConfigError.

    In a pipeline the next step begins before the last stage has sampled. So it is not known by then which drafts are
    accepted.
    """
    settings, speculative = target.settings, target.settings.speculative
    if not speculative.is_on:
        return None
    if settings.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--speculative {speculative.method} does not work with pipeline parallelism, and "
            f"--pipeline-parallel-size is {settings.pipeline_parallel_size}; choose --speculative off, or divide the "
            "model by --tensor-parallel-size"
        )
    match speculative.method:
        case "ngram":
            return NgramDrafter()
    raise ConfigError(f"--speculative {speculative.method}: this worker has no such drafter; choose ngram or off")
