"""What the ranks of tests need, imported once for all of them; see forked_ranks.py."""

from servekit.protocol.light_imports import light_imports

with light_imports(shares_model=True):
    import tests.workers.parallel.lora_rank_process
    import tests.workers.speculation.rank_process  # noqa: F401
