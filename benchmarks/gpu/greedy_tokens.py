"""Compare the worker's greedy tokens with those of transformers' generate on the same device, and logits with float64.

In float32 all tokens should be the same. But cuBLAS and Triton sum in different orders, so a near-tie may be decided
differently on a GPU; more than one different token in a hundred is a failure. In bfloat16 near-ties go either way. So
the shares of equal tokens are reported, and the error of the logits, for the worker and for transformers' bfloat16.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.accuracy import by_generate, error_of, same
from benchmarks.gpu.session import BLOCK_SIZE, Session
from benchmarks.gpu.stage_process import run_stage
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.loading.model_manager import ModelManager
from workers.runner.cuda_graphs import CudaCapture

# A wider model shows more rounding: the proportions of an 8B, at a thirtieth of its size.
WIDE = (
    "llama",
    {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
)
MIN_SAME = 0.99  # share of the tokens in float32, counted up to an answer's first different one
NUM_PROMPTS, PROMPT_LENGTH, NUM_TOKENS = 24, 48, 32


def run(session: Session) -> None:
    torch.manual_seed(0)
    models = {name: ARCHITECTURES[name] for name in ("llama", "qwen2", "qwen3", "mistral_sliding", "gemma2")}
    if session.on_gpu:
        models["4 layers, 2048 wide"] = WIDE
    for name, (model_type, configuration) in models.items():
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), model_type, configuration)
            prompts = torch.randint(3, int(str(configuration["vocab_size"])), (NUM_PROMPTS, PROMPT_LENGTH))
            with session.row("tokens", model=name, dtype="float32") as row:
                row |= _compare(session, Path(folder), "float32", prompts)
                assert row["tokens_same"] >= MIN_SAME, f"{100 * row['tokens_same']:.2f} % of the tokens are the same"
            with session.row("tokens", model=name, dtype="bfloat16") as row:
                row |= _compare(session, Path(folder), "bfloat16", prompts)
                assert row["error"] < 3 * row["error_of_transformers"], "logits are further off than transformers' own"


def _compare(session: Session, folder: Path, dtype: str, prompts: Tensor) -> dict[str, Any]:
    """Compare tokens, and the logits of each prompt's last token; errors are medians over prompts."""
    on_device = prompts.to(session.device)
    exact, own = (_load_transformers(folder, each, session.device) for each in (torch.float64, getattr(torch, dtype)))
    with torch.inference_mode():
        exact_logits, own_logits = (
            model(input_ids=on_device, use_cache=False).logits[:, -1].double() for model in (exact, own)
        )
    del exact
    expected = by_generate(own, on_device, NUM_TOKENS)
    del own
    answers_of_worker, logits, attention = _by_worker(session, folder, dtype, prompts.tolist())
    answers, tokens = same(answers_of_worker, expected)
    return {
        "attention": attention,
        "answers_same": answers,
        "tokens_same": tokens,
        "error": float(error_of(logits, exact_logits).median()),
        "error_of_transformers": float(error_of(own_logits, exact_logits).median()),
    }


def _load_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(device)


def _by_worker(
    session: Session, folder: Path, dtype: str, prompts: list[list[int]]
) -> tuple[list[list[int]], Tensor, str]:
    """Return greedy answers of mixed batches with graphs, the prompts' last logits, and the attention backend."""
    loaded = ModelManager(str(session.device)).load(folder, dtype, None)
    engine = InProcessEngine(loaded, num_blocks=128, block_size=BLOCK_SIZE, max_num_seqs=16, max_num_batched_tokens=256)
    if session.on_gpu and engine.runner.attention.supports_cuda_graphs:
        capture = CudaCapture()
        engine.runner.capture_decodes(capture)
        engine.runner.capture_mixed_steps(capture)
    sequences = [engine.add(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts]
    engine.run()
    seen: list[Tensor] = []
    handle = loaded.model.register_forward_hook(lambda _, __, output: seen.append(output.logits[0, -1].double()))
    last = []
    for prompt in prompts:
        # The prefix cache must not know the prompt, or its last block alone would be computed, as a decode step.
        engine.add(prompt, max_tokens=1, ignore_eos=True)
        engine.run()
        last.append(seen[-1])
    handle.remove()
    return [sequence.output_token_ids for sequence in sequences], torch.stack(last), engine.runner.attention.name


if __name__ == "__main__":
    run_stage(run)
