"""Which part of each parameter a rank holds, by transformers' own plan for the model's class.

A model's `tp_plan` names a style for modules and parameters: "colwise" cuts a matrix product's outputs, "rowwise" its
inputs, and so on. The plan is data here: how parts are cut and what is added up afterwards is servekit's own.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
section 3, is where the cuts come from.
"""

from __future__ import annotations

import re
from typing import Any

from servekit.errors import ConfigError

# What a rank holds of a parameter: a part of the outputs, of the inputs, or all of it.
CUTS_OUTPUTS = {"colwise", "colwise_gather_output", "embedding_rowwise", "packed_colwise"}
CUTS_INPUTS = {"rowwise", "rowwise_split_input", "embedding_colwise"}
CUTS_NOTHING = {"replicate", "replicated_with_grad_allreduce", "moe_tp_experts", "all_reduce"}
KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj"}

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class TensorParallelPlan:
    """The styles of a model's modules and parameters, and the heads of each rank."""

    def __init__(self, architecture: str, styles: dict[str, str], num_heads: int, num_kv_heads: int, size: int) -> None:
        """`styles` is the model's `tp_plan`. Raises ConfigError for what cannot be cut into `size` parts."""
        unknown = sorted(set(styles.values()) - CUTS_OUTPUTS - CUTS_INPUTS - CUTS_NOTHING)
        if unknown or not any(".*." in name and style not in CUTS_NOTHING for name, style in styles.items()):
            reason = f"it uses {', '.join(unknown)}" if unknown else "it divides none of its layers"
            raise ConfigError(
                f"architecture {architecture} cannot be served with --tensor-parallel-size {size}: servekit cuts "
                f"weights by the plan that transformers has for an architecture, and {reason}; use "
                "--tensor-parallel-size 1"
            )
        if num_heads % size:
            raise ConfigError(
                f"{num_heads} attention heads cannot be divided among {size} ranks (tensor_parallel_size); choose a "
                f"divisor of {num_heads}"
            )
        self.size = size
        self._styles = styles
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        if num_kv_heads % size:
            # Every rank reads all of these, and keeps the heads that its queries need.
            projections = [name for name in styles if name.rpartition(".")[2] in KEY_VALUE_PROJECTIONS]
            self._styles = {**styles, **{name: "replicate" for name in projections if styles[name] == "colwise"}}

    @classmethod
    def of(cls, model: Any, architecture: str, size: int) -> TensorParallelPlan:
        """Return the plan of a model of transformers. Raises ConfigError."""
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        return cls(architecture, dict(model.tp_plan or {}), num_heads, num_kv_heads, size)

    def style_of(self, name: str) -> str:
        """Return the style of the module or parameter of this name; "replicate" if the plan does not name it."""
        return self._styles.get(_NUMBER.sub(".*", name), "replicate")

    def style_of_parameter(self, name: str) -> str:
        """Return the style of a parameter: its own, or that of its module."""
        own = self.style_of(name)
        return own if own != "replicate" else self.style_of(name.rpartition(".")[0])

    def is_selected(self, name: str) -> bool:
        """Return whether this module projects keys or values whose heads cannot be divided evenly."""
        leaf, pattern = name.rpartition(".")[2], _NUMBER.sub(".*", name)
        is_replicated = self._styles.get(pattern) == "replicate"
        return leaf in KEY_VALUE_PROJECTIONS and is_replicated and bool(self.num_kv_heads % self.size)

    def kv_heads_of(self, rank: int) -> list[int]:
        """Return the key-value heads that a rank holds, in the order in which its query heads use them.

        A head that the queries of two ranks use is held by both. Where a rank's key-value heads are not each used by
        equally many of its query heads, it holds one for each query head: attention knows no other grouping.
        """
        group, num_local = self.num_heads // self.num_kv_heads, self.num_heads // self.size
        of_queries = [query // group for query in range(rank * num_local, (rank + 1) * num_local)]
        heads = sorted(set(of_queries))
        is_even = len({of_queries.count(head) for head in heads}) == 1
        return heads if is_even else of_queries
