"""Show how many prompts are answered: a bar by tqdm at a terminal and in notebooks, elsewhere nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int, int], None]  # (prompts that are answered, tokens in their answers)


@contextmanager
def progress_bar(num_prompts: int, is_wanted: bool) -> Iterator[Show]:
    """Yield what shows the progress."""
    if not is_wanted or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield lambda num_done, num_tokens: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]  # imported here: most programs that serve show no bar

    class Bar(tqdm):  # type: ignore[misc]
        """A bar without tqdm's thread that looks whether a bar stands still."""

        monitor_interval = 0

    # tqdm's own lock contains a semaphore of multiprocessing, which may start a process to track it.
    Bar.set_lock(threading.RLock())
    with Bar(total=num_prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True) as bar:

        def show(num_done: int, num_tokens: int) -> None:
            elapsed_s = bar.format_dict["elapsed"]
            if elapsed_s:
                bar.set_postfix_str(f"{num_tokens / elapsed_s:,.0f} tokens/s", refresh=False)
            bar.update(num_done - bar.n)

        yield show
