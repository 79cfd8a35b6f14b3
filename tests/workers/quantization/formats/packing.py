"""Pack codes into words one by one, as the tools that write checkpoints do. It shares nothing with the readers."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.quantization.formats.interface import WeightFormat

NAME = "model.layers.0.mlp.up_proj"


def words(rows: list[list[int]]) -> Tensor:
    """Return int32 words of these bits."""
    return torch.tensor([[word - (1 << 32) if word >= 1 << 31 else word for word in row] for row in rows]).to(
        torch.int32
    )


def packed_down(codes: Tensor, bits: int) -> Tensor:
    """Pack [rows, columns] into words along the rows, the first row lowest (AutoGPTQ's `qweight`)."""
    per_word = 32 // bits
    packed = [[0] * codes.shape[1] for _ in range(len(codes) // per_word)]
    for row in range(len(codes)):
        for column in range(codes.shape[1]):
            packed[row // per_word][column] |= int(codes[row, column]) << bits * (row % per_word)
    return words(packed)


def packed_across(
    codes: Tensor, bits: int, order: tuple[int, ...] | None = None, subtract_from_each: int = 0
) -> Tensor:
    """Pack [rows, columns] into words along the columns.

    The code at place i of a word is column order[i] of the word's columns; None: column i. `subtract_from_each` is
    subtracted from each whole word.
    """
    per_word = 32 // bits
    packed = [[0] * (codes.shape[1] // per_word) for _ in range(len(codes))]
    for row in range(len(codes)):
        for word in range(codes.shape[1] // per_word):
            for place in range(per_word):
                column = place if order is None else order[place]
                packed[row][word] |= int(codes[row, word * per_word + column]) << bits * place
            packed[row][word] = (packed[row][word] - subtract_from_each) % (1 << 32)
    return words(packed)


def dense(codes: Tensor, zero_points: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return W [columns, rows] of codes [rows, columns] by the definition, one number after the other, exactly."""
    matrix = torch.empty(codes.shape[1], codes.shape[0])
    for row in range(len(codes)):
        group = int(groups[row])
        for column in range(codes.shape[1]):
            steps = int(codes[row, column]) - int(zero_points[group, column])
            matrix[column, row] = steps * float(scales[group, column])
    return matrix


def read_checked(weight_format: WeightFormat, tensors: dict[str, Tensor]) -> Tensor:
    """Return the matrix that a format reads, after it has checked the tensors as the loader does."""
    shape = weight_format.check(tensors, NAME)
    matrix = weight_format.read(tensors, NAME).dequantize()
    assert matrix.shape == shape
    return matrix
