"""The structs and functions of kernels.h, for ctypes. Change both together; tests compare the layouts.

ctypes passes addresses only, so the caller must keep every tensor and struct alive that a struct points to.
"""

from __future__ import annotations

import ctypes
from typing import Any

MAX_HEAD_DIM = 512  # as in kernels.h: a thread keeps one head on its stack
PAGE_FORMATS = {"auto": 0, "int8": 1, "fp8_e4m3": 2}  # by the format's name, the numbers in kernels.h
STRIP = 32  # as in kernels.h: outputs are multiplied in strips of as many
MAX_STEP_TOKENS = 32  # as in kernels.h: a whole model has memory for so many tokens of a step
LORA_RUN_ROWS = 16  # as in kernels.h: so many rows with one adapter are multiplied together

_pointer: Any = ctypes.c_void_p
_int64: Any = ctypes.c_int64
_float: Any = ctypes.c_float


class CAttentionParams(ctypes.Structure):
    """How one layer attends: `attention_params`."""

    _fields_ = (
        ("num_heads", _int64),
        ("num_kv_heads", _int64),
        ("key_dim", _int64),
        ("value_dim", _int64),
        ("block_size", _int64),
        ("window", _int64),
        ("sinks", _pointer),
        ("scale", _float),
        ("softcap", _float),
        ("page_format", _int64),
        ("key_scales", _pointer),
        ("value_scales", _pointer),
    )


class CLayerPages(ctypes.Structure):
    """The pages of one layer: `layer_pages`."""

    _fields_ = (("params", _pointer), ("keys", _pointer), ("values", _pointer))


class CAttentionMetadata(ctypes.Structure):
    """The sequences of one step: `attention_metadata`."""

    _fields_ = (
        ("num_tokens", _int64),
        ("slot_mapping", _pointer),
        ("num_sequences", _int64),
        ("query_starts", _pointer),
        ("lengths", _pointer),
        ("block_table", _pointer),
        ("table_width", _int64),
    )


class CPreparedWeight(ctypes.Structure):
    """What the struct of every kind of weight begins with: `prepared_weight`."""

    _fields_ = (
        ("multiply", _pointer),
        ("data", _pointer),
        ("bias", _pointer),
        ("num_inputs", _int64),
        ("num_outputs", _int64),
        ("strip_bytes", _int64),
        ("next", _pointer),
    )


class CPackedWeight(ctypes.Structure):
    """A weight in oneDNN's layout: `packed_weight`."""

    _fields_ = (("base", CPreparedWeight), ("block_width", _int64))


class CQuantizedWeight(ctypes.Structure):
    """A quantized weight: `quantized_weight`."""

    _fields_ = (
        ("base", CPreparedWeight),
        ("kernel", _int64),
        ("group_size", _int64),
        ("scale_type", _int64),
        ("offset_type", _int64),
        ("super_block_groups", _int64),
        ("zero_point", _int64),
        ("levels", _pointer),
        ("input_order", _pointer),
    )


class CSideBySideWeight(ctypes.Structure):
    """Weights with the same input: `side_by_side_weight`."""

    _fields_ = (("base", CPreparedWeight), ("num_parts", _int64), ("parts", _pointer))


class CRotation(ctypes.Structure):
    """By how much heads are rotated: `rotation`."""

    _fields_ = (("cosines", _pointer), ("sines", _pointer), ("dim", _int64))


class CHeadNorms(ctypes.Structure):
    """RMS norms of queries and keys: `head_norms`."""

    _fields_ = (("query", _pointer), ("key", _pointer), ("epsilon", _float), ("spans_heads", _int64))


class CNorm(ctypes.Structure):
    """An RMS norm: `norm`."""

    _fields_ = (("weight", _pointer), ("epsilon", _float))


class CExperts(ctypes.Structure):
    """The experts of a layer: `experts`."""

    _fields_ = (
        ("router", _pointer),
        ("router_bias", _pointer),
        ("gate_up", _pointer),
        ("down", _pointer),
        ("num_experts", _int64),
        ("num_chosen", _int64),
        ("normalizes", _int64),
        ("max_rows", _int64),
        ("gate", _pointer),
        ("shared_gate_up", _pointer),
        ("shared_down", _pointer),
        ("shared_router", _pointer),
        ("workspace_bytes", _int64),
    )


class CDecoderLayer(ctypes.Structure):
    """The weights of one decoder layer: `decoder_layer`."""

    _fields_ = (
        ("qkv", _pointer),
        ("output", _pointer),
        ("gate_up", _pointer),
        ("down", _pointer),
        ("attention_norm", CNorm),
        ("attention_output_norm", CNorm),
        ("mlp_norm", CNorm),
        ("mlp_output_norm", CNorm),
        ("head_norms", CHeadNorms),
        ("rotation", _int64),
        ("gate", _pointer),
        ("experts", _pointer),
        ("qkv_lora", _pointer),
        ("output_lora", _pointer),
        ("gate_up_lora", _pointer),
        ("down_lora", _pointer),
    )


class CLoraPart(ctypes.Structure):
    """What one adapter adds to some outputs of a weight: `lora_part`."""

    _fields_ = (
        ("a", _pointer),
        ("b", _pointer),
        ("rank", _int64),
        ("first_output", _int64),
        ("num_outputs", _int64),
    )


class CLoraWeight(ctypes.Structure):
    """What all adapters add to a weight: `lora_weight`."""

    _fields_ = (("num_inputs", _int64), ("num_outputs", _int64), ("num_parts", _int64), ("parts", _pointer))


class CLoraRun(ctypes.Structure):
    """Some rows of a step that have one adapter: `lora_run`."""

    _fields_ = (("first", _int64), ("num_rows", _int64), ("place", _int64))


class CLoraStep(ctypes.Structure):
    """The rows of one step that have adapters: `lora_step`."""

    _fields_ = (
        ("rows", _pointer),
        ("runs", _pointer),
        ("num_runs", _int64),
        ("max_rank", _int64),
        ("hidden", _pointer),
    )


class CLanguageModel(ctypes.Structure):
    """A whole model with its pages, and memory for intermediate results: `language_model`."""

    _fields_ = (
        ("layers", _pointer),
        ("pages", _pointer),
        ("num_layers", _int64),
        ("hidden_size", _int64),
        ("rotary_dim", _int64),
        ("embeddings", _pointer),
        ("num_embeddings", _int64),
        ("all_cosines", _pointer),
        ("all_sines", _pointer),
        ("last_norm", _pointer),
        ("head", _pointer),
        ("num_choices", _int64),
        ("largest_weight", _int64),
        ("states", _pointer),
        ("cosines", _pointer),
        ("sines", _pointer),
        ("logits", _pointer),
        ("block_table", _pointer),
        ("workspace", _pointer),
        ("gemm_workspace", _pointer),
        ("last_norm_epsilon", _float),
    )


class CSlotTable(ctypes.Structure):
    """The tokens and blocks of all slots: `slot_table`."""

    _fields_ = (
        ("token_ids", _pointer),
        ("block_tables", _pointer),
        ("row_length", _int64),
        ("width", _int64),
        ("block_size", _int64),
    )


class CTokenSpan(ctypes.Structure):
    """Positions of a slot's sequence, and how many tokens are chosen: `token_span`."""

    _fields_ = (("slot", _int64), ("start", _int64), ("stop", _int64), ("num_chosen", _int64))


_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {  # name: (result, arguments)
    # pages, metadata; queries, keys and values, each with its stride; output
    "store_and_attend": (None, [_pointer] * 2 + [_pointer, _int64] * 3 + [_pointer]),
    # pages, metadata, qkv, rotation, norms, output
    "rotate_store_and_attend": (None, [_pointer] * 6),
    # params
    "attention_uses_tiles": (_int64, [_pointer]),
    "let_attention_use_tiles": (None, [_int64]),
    # x, weight, residual, output; num_rows, size; epsilon
    "rms_norm": (None, [_pointer] * 4 + [_int64] * 2 + [_float]),
    # gate_up, output; num_rows, size
    "swiglu": (None, [_pointer] * 2 + [_int64] * 2),
    "geglu": (None, [_pointer] * 2 + [_int64] * 2),
    "clamped_swiglu": (None, [_pointer] * 2 + [_int64] * 2),
    "skinny_gemm_max_rows": (_int64, []),
    "blocked_gemm_block_width": (_int64, []),
    # weight, packed; num_outputs, num_inputs, num_bytes
    "packed_block_width": (_int64, [_pointer] * 2 + [_int64] * 3),
    # weight, x, residual, output; num_rows; workspace
    "skinny_gemm": (None, [_pointer] * 4 + [_int64, _pointer]),
    # weight, x, residual, output; num_rows; workspace
    "blocked_gemm": (None, [_pointer] * 4 + [_int64, _pointer]),
    # weight; num_outputs, num_inputs, panel_bytes; data
    "write_compact_panels": (_int64, [_pointer] + [_int64] * 3 + [_pointer]),
    # weight, x, residual, output; num_rows; workspace
    "compact_gemm": (None, [_pointer] * 4 + [_int64, _pointer]),
    # weight
    "quantized_gemm_workspace_bytes": (_int64, [_pointer]),
    # weight, x, residual, output; num_rows; workspace
    "quantized_gemm": (None, [_pointer] * 4 + [_int64, _pointer]),
    # weight, x, residual, output; num_rows; workspace
    "multiply_side_by_side": (None, [_pointer] * 4 + [_int64, _pointer]),
    # weight, step, x, output
    "add_lora": (None, [_pointer] * 4),
    # experts, x, output; num_rows; workspace, gemm_workspace
    "add_experts": (None, [_pointer] * 3 + [_int64] + [_pointer] * 2),
    # layers, pages; num_layers; metadata, adapters, rotations, x, workspace, gemm_workspace
    "decode_layers": (None, [_pointer] * 2 + [_int64] + [_pointer] * 6),
    # model, table, adapters, spans; num_spans; chosen
    "compute_step": (None, [_pointer] * 4 + [_int64, _pointer]),
    # model, table, spans; num_spans; drafts; drafts_width
    "continue_greedily": (None, [_pointer] * 3 + [_int64, _pointer, _int64]),
    "use_all_threads": (None, []),
}


def declare_prototypes(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the types of all functions that the library has, and return it.

    A library for processors without the instructions has no skinny GEMM, see skinny_gemm.c.
    """
    for name, (result, arguments) in _PROTOTYPES.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library
