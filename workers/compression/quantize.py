"""Write a quantized checkpoint of an unquantized one, a decoder layer at a time.

Memory holds one decoder layer in float32, what its method measures, the hidden states of the calibration samples, and
the tensors of one file. The model's own weights stay mapped from its files.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from servekit.protocol.quantization_job import QuantizationJob
from workers.compression.calibration import read_calibration
from workers.compression.checkpoint_writer import CheckpointWriter, check_is_free, copy_companions, new_directory
from workers.compression.decoder_layers import DecoderLayers
from workers.compression.layer_quantizer import LayerQuantizer, QuantizedLayer
from workers.device.memory import allocation_refused_as
from workers.layers.linear import is_plain_linear
from workers.loading.checkpoint import find_weights, quantization_config
from workers.loading.gguf_index import has_gguf
from workers.loading.model_config import architecture_of, check_is_decoder, read_config
from workers.loading.progress import Progress
from workers.loading.refusals import loading_errors_named, refusal
from workers.loading.tensor_files import TensorFiles
from workers.loading.weights import read_weights
from workers.quantization.at_load import MIN_GROUP_SIZE, ROUTERS
from workers.quantization.formats.checks import FLOATS, finite
from workers.quantization.formats.compressed_tensors_writing import describe, layout_of, pack_matrix
from workers.quantization.formats.registry import name_of
from workers.quantization.methods.grid import Grid
from workers.quantization.quantized_tensor import Activations

log = logging.getLogger("servekit.worker")

ACTIVATIONS: dict[str, Activations] = {
    "w4a16": "float",
    "w4a8": "int8",
    "w8a16": "float",
    "w8a8": "int8",
    "fp8": "float8",
}
NAMED = 10  # patterns of unquantized matrices that are logged


def quantize_checkpoint(job: QuantizationJob) -> None:
    """Write the checkpoint that a job describes.

    Raises ConfigError for a model or a text that cannot be used, and for an output that cannot be written. Then there
    is no output.
    """
    transformers_logging.set_verbosity_error()
    job.check()
    path, output = Path(job.model), Path(job.output).absolute()
    check_is_free(output)
    described = quantization_config(path)
    if described is not None or has_gguf(path):
        name = "GGUF" if described is None else name_of(described)
        raise ConfigError(
            f"the weights in {path} are quantized already, in the format {name}; give the unquantized checkpoint of "
            "the same model"
        )
    config = read_config(path)
    check_is_decoder(config)
    architecture = architecture_of(config)
    samples: list[Tensor] = []
    if job.calibration is not None:
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or job.max_length
        max_length = min(job.max_length, longest)
        samples = read_calibration(Path(job.calibration), path, job.num_samples, max_length, job.seed)
        num_tokens = sum(sample.shape[1] for sample in samples)
        log.info("calibration: %d samples, %d tokens", len(samples), num_tokens)
    with loading_errors_named(architecture):
        model, _ = read_weights(path, config, "auto", None, Progress())
    with new_directory(output) as directory, torch.no_grad():
        checkpoint = _Checkpoint(job, model, samples, path, directory, architecture)
        checkpoint.write()
        copy_companions(path, directory)
    checkpoint.report(output)


class _Checkpoint:
    """A quantized checkpoint while it is written."""

    def __init__(
        self,
        job: QuantizationJob,
        model: PreTrainedModel,
        samples: list[Tensor],
        path: Path,
        directory: Path,
        architecture: str,
    ) -> None:
        self._job, self._model, self._path, self._directory = job, model, path, directory
        self._architecture = architecture
        self._source = TensorFiles(find_weights(path))
        self._names = set(self._source.names())
        self._writer = CheckpointWriter(directory)
        self._dtype = model.dtype if model.dtype in FLOATS else torch.bfloat16
        self._layers = DecoderLayers(model, samples, architecture)
        self._quantizer = LayerQuantizer(job, self._layers if samples else None, self._dtype)
        self._activations = ACTIVATIONS[job.scheme]
        self._layout = layout_of(self._grid_for(job.scale_group_size), self._activations)
        self._grids: dict[str, Grid] = {}  # of the quantized linear layers, by name
        self._written: set[str] = set()  # the files' names of tensors that are written, or replaced by others
        self._unquantized: list[str] = []

    def write(self) -> None:
        """Quantize all layers, and write weights and config.json. Raises ConfigError."""
        for index in range(len(self._layers)):
            started_s = time.monotonic()
            error = self._write_layer(index)
            log.info(
                "layer %d of %d: relative error of %s %.4f, %.1f s",
                index + 1,
                len(self._layers),
                "its outputs" if self._quantizer.has_samples else "its weights",
                error,
                time.monotonic() - started_s,
            )
        if not self._grids:
            raise refusal(self._architecture, "none of its matrices can be quantized")
        for name in sorted(self._names - self._written):
            self._writer.add(name, self._source.tensor(name))
        self._writer.finish()
        description = describe(self._layout, self._grids, self._activations, self._other_matrices())
        self._unquantized = description["ignore"]
        config = json.loads((self._path / "config.json").read_text())
        config["quantization_config"] = description
        (self._directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def report(self, output: Path) -> None:
        """Log what has been written, and what has not been quantized."""
        before = sum(file.stat().st_size for file in find_weights(self._path))
        names = ", ".join(map(_readable, self._unquantized[:NAMED]))
        log.info("not quantized: %s%s", names, " and others" if len(self._unquantized) > NAMED else "")
        log.info(
            "%s: %.1f MB, %.0f %% of the model's, in %d files. To serve it: servekit serve %s",
            output,
            self._writer.num_bytes / 1e6,
            100 * self._writer.num_bytes / before,
            self._writer.num_files,
            output,
        )

    def _write_layer(self, index: int) -> float:
        """Quantize one layer, and write it. Returns its relative error."""
        prefix = self._layers.name_of(index)
        grids = self._grids_of(self._layers.original(index), prefix)
        remedy = "give fewer samples (--num-samples), or shorter ones (--max-length)"
        cpu = torch.device("cpu")
        with loading_errors_named(self._architecture), allocation_refused_as("a decoder layer", cpu, remedy):
            done = self._quantizer.quantize(index, self._layers.in_float32(index), grids)
        if done.without_statistics:
            log.warning(
                "%s: no sample reached %s; rounded to nearest", prefix, ", ".join(done.without_statistics[:NAMED])
            )
        self._write_tensors(prefix, done, grids)
        return done.error

    def _write_tensors(self, prefix: str, done: QuantizedLayer, grids: dict[str, Grid]) -> None:
        for name, matrix in done.matrices.items():
            stored = self._stored_name(f"{prefix}.{name}.weight")
            assert stored is not None
            finite(matrix.scales, ".weight_scale", stored.removesuffix(".weight"))
            for suffix, tensor in pack_matrix(matrix, grids[name], self._layout).items():
                self._writer.add(stored.removesuffix(".weight") + suffix, tensor)
            self._written.add(stored)
            self._grids[f"{prefix}.{name}"] = grids[name]
        for name, parameter in done.parameters.items():
            stored = self._stored_name(f"{prefix}.{name}")
            if stored is None:
                raise refusal(
                    self._architecture,
                    f"{prefix}.{name}, which AWQ changes, has another name in its files; choose --method gptq",
                )
            self._writer.add(stored, parameter)
            self._written.add(stored)

    def _grids_of(self, layer: nn.Module, prefix: str) -> dict[str, Grid]:
        """Return the grids of a decoder layer's linear layers that can be quantized, by name within the layer."""
        grids = {}
        for name, module in layer.named_modules():
            if not is_plain_linear(module) or name.rpartition(".")[2] in ROUTERS:
                continue
            group_size = None
            if self._job.scale_group_size is not None:
                group_size = math.gcd(self._job.scale_group_size, module.in_features)
                if group_size < MIN_GROUP_SIZE:
                    continue
            stored = self._stored_name(f"{prefix}.{name}.weight")
            if stored is None:
                continue
            if not bool(module.weight.isfinite().all()):
                raise ConfigError(f"{stored} holds numbers that are not finite; download the model again")
            # transformers may have changed the order of rows, or joined matrices, as it read the files.
            if torch.equal(self._source.tensor(stored).to(module.weight.dtype), module.weight):
                grids[name] = self._grid_for(group_size)
        return grids

    def _grid_for(self, group_size: int | None) -> Grid:
        return Grid(
            self._job.num_bits,
            group_size=group_size,
            is_symmetric=not self._job.has_zero_points,
            is_float=self._job.scheme == "fp8",
            scale_dtype=self._dtype,
        )

    def _stored_name(self, name: str) -> str | None:
        """Return the name of a parameter in the files, which may leave out the base model's name, or add it."""
        base = f"{self._model.base_model_prefix}."
        for candidate in (name, name.removeprefix(base), base + name):
            if candidate in self._names:
                return candidate
        return None

    def _other_matrices(self) -> set[str]:
        """Return the names of linear layers and of other matrices in the files that are not quantized."""
        linears = {name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        embeddings = {name for name, module in self._model.named_modules() if isinstance(module, nn.Embedding)}
        kept = self._names - self._written
        matrices = {
            name.removesuffix(".weight")
            for name in kept
            if name.endswith(".weight") and len(self._source.lazy(name).get_shape()) > 1
        }
        stored_embeddings = {self._stored_name(f"{name}.weight") for name in embeddings}
        in_files = {name for name in matrices if f"{name}.weight" not in stored_embeddings}
        return (linears | in_files) - self._grids.keys()


def _readable(pattern: str) -> str:
    """Return a pattern of `ignore` as people write one."""
    return pattern.removeprefix("re:").removesuffix("$").replace(r"\d+", "*").replace("\\", "")
