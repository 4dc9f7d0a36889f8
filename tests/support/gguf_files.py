"""GGUF files, written by the package of their authors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy

Arrays = dict[str, np.ndarray]


def write(path: Path, arrays: Mapping[str, np.ndarray], kind: str = "Q8_0", architecture: str = "flux") -> Arrays:
    """Write a file as usual converters do, and return the numbers that it holds, in the shapes that arrays had.

    Matrices of whole blocks are quantized as ``kind``; other arrays stay in float32, some of them in bfloat16. Axes of
    size 1 in front are dropped.
    """
    writer, numbers = gguf.GGUFWriter(path, architecture), {}
    writer.add_array("words", ["a", "b"])
    writer.add_array("sizes", [1, 2, 3])
    for i, (name, array) in enumerate(arrays.items()):
        array = np.ascontiguousarray(array, np.float32)
        shape = array.shape
        while array.ndim > 1 and array.shape[0] == 1:
            array = array[0]
        quantization = gguf.GGMLQuantizationType[kind]
        if array.ndim < 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[quantization][0]:
            quantization = gguf.GGMLQuantizationType["BF16" if i % 2 and array.ndim > 1 else "F32"]
        stored = gguf.quantize(array, quantization)
        writer.add_tensor(name, stored, raw_dtype=quantization)
        numbers[name] = gguf.dequantize(stored, quantization).reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def llama_cpp_names(names: Iterable[str]) -> dict[str, str]:
    """Names that llama.cpp's converter gives to arrays of a Qwen3 or a T5, by names of transformers; without others."""
    names = list(names)
    if "shared.weight" in names:
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 100)
        plain = {name: name for name in names}
    else:
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 100)
        plain = {name: "model." + name.removeprefix("model.").removeprefix("language_model.") for name in names}
    found = {name: table.get_name(whole, try_suffixes=(".weight", ".bias")) for name, whole in plain.items()}
    return {name: theirs for name, theirs in found.items() if theirs is not None}


def both(
    files: Mapping[str, Path], text: Arrays, into: Path, kind: str, part: str = "text_encoder"
) -> tuple[dict[str, Path], dict[str, Path]]:
    """The files of a model with transformer and text encoder in GGUF files, and in safetensors files of their numbers.

    Args:
        files: transformer ``model`` in a safetensors file, and other parts.
        text: arrays of its text encoder under the names of transformers.
        into: folder for the new files.
        kind: quantization of the text encoder; the transformer has Q8_0.
        part: the text encoder.
    """
    stem = files["model"].stem
    small, plain = (
        {**files, "model": into / f"{stem}.{end}", part: into / f"Qwen3.{end}"} for end in ("gguf", "safetensors")
    )
    numbers = write(small["model"], safetensors.numpy.load_file(files["model"]))
    safetensors.numpy.save_file(numbers, plain["model"])
    names = llama_cpp_names(text)
    numbers = write(small[part], {names[name]: text[name] for name in names}, kind, "qwen3")
    safetensors.numpy.save_file({name: numbers[names[name]] for name in names}, plain[part])
    return small, plain
