"""Claims about step times on a device, beside figures that books print and figures computed by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from servekit.errors import ConfigError
from servekit.planning.devices import find_device
from servekit.planning.model_shape import read_shape
from servekit.planning.roofline import (
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Layout,
    make_roofline,
)
from servekit.protocol.messages import ScheduledChunk, StepPlan
from tests.servekit.planning.test_model_shape import DEEPSEEK_V3, LLAMA_2_7B, LLAMA_8B

H100 = find_device("h100")


def test_an_l40s_computes_419_operations_for_each_byte_that_it_reads() -> None:
    device = find_device("l40s")
    assert device.flop_per_s("bfloat16") / device.bytes_per_s == pytest.approx(419, abs=0.5)


def test_a_token_of_llama_2_7b_takes_half_a_mebibyte_and_16_long_sequences_take_32_gibibytes() -> None:
    layout = Layout(shape=read_shape(LLAMA_2_7B))
    assert layout.kv_bytes_per_token == 2**19 and 16 * 4096 * layout.kv_bytes_per_token == 32 * 2**30


@pytest.mark.parametrize(("name", "number"), [("a10", 4), ("l40s", 16)])
def test_so_many_sequences_of_4096_tokens_of_llama_2_7b_fit_beside_its_weights(name: str, number: int) -> None:
    """Books fill the whole memory. servekit leaves a tenth of it free, so `servekit plan` prints fewer."""
    layout = Layout(shape=read_shape(LLAMA_2_7B))
    num_blocks = layout.num_kv_blocks(int(find_device(name).memory_bytes) - layout.num_weight_bytes, block_size=16)
    assert num_blocks * 16 // 4096 == number


def test_a_request_to_a_7b_model_keeps_268_megabytes_to_4_gigabytes() -> None:
    """For 512 and 8,192 tokens of a model without shared heads."""
    num_bytes = Layout(shape=read_shape(LLAMA_2_7B)).kv_bytes_per_token
    assert (round(512 * num_bytes / 1e6), round(8192 * num_bytes / 1e9, 1)) == (268, 4.3)


def test_seven_billion_weights_take_at_least_4_ms_on_an_h100() -> None:
    """Books say 4.2 ms for 14 GB at the data sheet's bandwidth, so at most 238 tokens/s."""
    num_bytes = Layout(shape=read_shape(LLAMA_2_7B)).num_weight_bytes
    assert num_bytes / H100.bytes_per_s == pytest.approx(4.02e-3, rel=0.01)
    assert 14e9 / H100.bytes_per_s == pytest.approx(4.2e-3, rel=0.01)


def test_latent_attention_would_keep_a_71st_of_what_whole_keys_and_values_take() -> None:
    shape = read_shape(DEEPSEEK_V3)
    whole, latent = 2 * shape.kv_numbers_per_token, 2 * shape.num_layers * shape.latent_dim
    assert latent == pytest.approx(70e3, rel=0.01) and whole / latent == pytest.approx(71, rel=0.01)
    # Books count heads of 128 numbers: 56.9 times less than with a head for each query, as much as with 2.25 heads.
    of_one_head = 2 * 128
    assert 128 * of_one_head / shape.latent_dim == pytest.approx(56.9, abs=0.05)
    assert shape.latent_dim / of_one_head == 2.25


def test_a_decode_step_of_one_sequence_reads_the_weights_once_and_a_prompt_computes() -> None:
    roofline = replace(make_roofline(Layout(shape=read_shape(LLAMA_8B)), H100), overhead_s=0.0)
    num_read = 16.06e9 - 2 * 4096 * 128256  # of the input embedding, only a row
    decode = roofline.step(1, 1, 0)
    assert decode.duration_s == pytest.approx(num_read / (MEMORY_EFFICIENCY * 3.35e12), rel=0.01)
    assert decode.is_memory_bound
    prompt = roofline.step(4096, 1, 0)
    flop = 2 * 4096 * 6.98e9  # all weights but the embeddings
    assert prompt.duration_s == pytest.approx(flop / (COMPUTE_EFFICIENCY * 989e12), rel=0.01)
    assert not prompt.is_memory_bound


def test_a_decode_of_a_half_precision_model_computes_one_operation_for_each_byte() -> None:
    """One multiplication and one addition for each weight of two bytes. (A textbook that counts h² twice says 0.5.)"""
    roofline = make_roofline(Layout(shape=read_shape(LLAMA_2_7B)), H100)
    assert roofline.step(1, 1, 0).arithmetic_intensity == pytest.approx(1.0, rel=0.001)
    assert roofline.step(64, 64, 0).arithmetic_intensity == pytest.approx(64.0, rel=0.001)


def test_a_mixture_reads_what_its_tokens_choose() -> None:
    """A decode of one token computes with all that it reads, so its intensity is that of a dense model."""
    roofline = make_roofline(Layout(shape=read_shape(DEEPSEEK_V3)), find_device("b200"))
    assert roofline.step(1, 1, 0).arithmetic_intensity == pytest.approx(1.0, rel=0.01)


def test_a_plan_takes_what_its_numbers_say() -> None:
    roofline = make_roofline(Layout(shape=read_shape(LLAMA_8B)), H100)
    chunks = (ScheduledChunk(0, 500, 1, (), (), True), ScheduledChunk(1, 100, 40, (), (), False))
    assert roofline.duration_s(StepPlan(0, 0, (), chunks)) == roofline.step(41, 1, 600, 40 * 120).duration_s


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 5), (3, 1), (0, 40), (6, 7), (20, 3)])
def test_layers_with_a_window_attend_to_the_last_tokens_only(start: int, num_tokens: int) -> None:
    config = {**LLAMA_8B, "sliding_window": 8, "layer_types": ["sliding_attention"] * 24 + ["full_attention"] * 8}
    roofline = make_roofline(Layout(shape=read_shape(config)), H100)

    def attended(position: float) -> float:
        return (24 * min(position, 8) + 8 * position) / 32

    assert roofline.num_attended(start) == attended(start)
    # Each token counts with its own middle, in 100 pieces, as an integral.
    points = (start + (piece + 0.5) / 100 for piece in range(100 * num_tokens))
    assert roofline.num_pairs(start, num_tokens) == pytest.approx(sum(map(attended, points)) / 100, rel=1e-6)


def test_float32_computes_at_its_own_rate_or_not_at_all() -> None:
    layout = Layout(shape=read_shape(LLAMA_8B), weight_format="float32")
    assert make_roofline(layout, H100).token_s == pytest.approx(
        make_roofline(Layout(shape=read_shape(LLAMA_8B)), H100).token_s * 989 / 67
    )
    with pytest.raises(ConfigError, match="no float32"):
        make_roofline(layout, replace(H100, tflops={"bfloat16": 1.0}))


def test_few_tokens_of_a_mixture_read_few_experts() -> None:
    roofline = make_roofline(Layout(shape=read_shape(DEEPSEEK_V3)), find_device("b200"))
    whole_s = roofline.dense_weights_s + roofline.experts_s
    assert roofline.weights_s(1) < 0.1 * whole_s and roofline.weights_s(512) == pytest.approx(whole_s, rel=1e-6)


def test_two_ranks_read_half_of_the_weights_each_and_exchange_what_they_compute() -> None:
    one, two = (make_roofline(Layout(shape=read_shape(LLAMA_8B), tensor_parallel_size=size), H100) for size in (1, 2))
    assert two.dense_weights_s == pytest.approx(one.dense_weights_s / 2) and two.context_s == one.context_s / 2
    assert one.exchange_s == 0.0 < two.exchange_s and two.token_s == pytest.approx(one.token_s / 2)


@pytest.mark.parametrize(
    ("weights", "gigabytes"), [("float32", 32.1), ("bfloat16", 16.06), ("int8", 8.03), ("int4", 4.65)]
)
def test_weights_take_what_their_format_takes(weights: str, gigabytes: float) -> None:
    assert Layout(shape=read_shape(LLAMA_8B), weight_format=weights).num_weight_bytes / 1e9 == pytest.approx(
        gigabytes, rel=0.01
    )


def test_quantized_keys_have_a_scale_for_each_vector() -> None:
    assert Layout(shape=read_shape(LLAMA_8B), kv_format="int8").kv_bytes_per_token == 32 * 8 * 2 * (128 + 4)
