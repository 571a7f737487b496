"""Decode and prompt speed of SmolLM2-135M beside llama.cpp, measured alternately in one process on this machine.

    pip install llama-cpp-python==0.3.36   # built for this machine (CMAKE_ARGS=-DGGML_NATIVE=ON)
    python benchmarks/against_llama_cpp.py --rounds 5 --json

Both systems run the same weights (the dequantised ones of the bundled file, as BF16; F16 too for llama.cpp), greedy, batch 1,
the same number of threads, after a warm-up; rounds alternate between the systems and medians are reported. Decode: the time of
`--tokens` steps behind a prompt of `--context` tokens. Prompt: reading `--prompt` tokens at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import entry
from mpk.errors import TargetError


def convert(source: Path, target: Path, kind: str) -> None:
    """Write `source` (any quantisation) again with its matrices as BF16 or F16."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value_type = field.types[0]
        item_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        value = field.contents()
        if field.name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16 if kind == "bf16" else gguf.LlamaFileType.MOSTLY_F16)
        writer.add_key_value(field.name, value, value_type, item_type)
    quant = gguf.GGMLQuantizationType.BF16 if kind == "bf16" else gguf.GGMLQuantizationType.F16
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if data.ndim == 1:
            writer.add_tensor(tensor.name, data)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(data, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Measurement = Callable[[], tuple[float, float]]  # -> (ms per decoded token, prompt tokens per second)


def llama_cpp(path: Path, prompt: list[int], context: int, tokens: int, threads: int) -> Measurement:
    from llama_cpp import Llama

    llm = Llama(str(path), n_ctx=len(prompt) + tokens + 64, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)

    def measure() -> tuple[float, float]:
        llm.reset()
        started = time.perf_counter()
        llm.eval(prompt)
        read = time.perf_counter() - started
        llm.reset()
        llm.eval(prompt[:context])
        token = int(np.argmax(llm._ctx.get_logits_ith(-1)[: llm.n_vocab()])) if hasattr(llm._ctx, "get_logits_ith") else prompt[0]
        started = time.perf_counter()
        for _ in range(tokens):
            llm.eval([token])
            token = llm.sample(temp=0.0, repeat_penalty=1.0, top_k=1)
        return (time.perf_counter() - started) / tokens * 1e3, len(prompt) / read

    return measure


def mpk(model: str, prompt: list[int], context: int, tokens: int, threads: int) -> Measurement:
    from mpk import Compiler

    compiler = Compiler("cpp", dtype="bf16", workers=threads)
    instance = compiler.build(compiler.lower_model(model)).create_instance(max_batch=1)

    def measure() -> tuple[float, float]:
        read = instance.generate([prompt], max_new_tokens=1, stop_tokens=[]).first_token_ms
        result = instance.generate([prompt[:context]], max_new_tokens=tokens + 1, stop_tokens=[])
        return result.ms_per_token, len(prompt) / read * 1e3

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print a JSON line a system instead of a table")
    args = parser.parse_args()
    entry.require_least(args, rounds=1, tokens=1, context=1, prompt=args.context, threads=1)  # the context is the begin of the prompt
    if importlib.util.find_spec("llama_cpp") is None:
        raise TargetError("llama_cpp is not installed", remedy="pip install llama-cpp-python==0.3.36")

    from mpk.frontend import load

    model = "smollm2-135m-instruct"
    source = _bundled()
    vocab = load(model).config.vocab_size
    prompt = np.random.default_rng(0).integers(1000, vocab, size=args.prompt).tolist()
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, Measurement] = {}
        for kind in ("bf16", "f16"):
            path = Path(folder) / f"{kind}.gguf"
            convert(source, path, kind)
            systems[f"llama.cpp {kind}"] = llama_cpp(path, prompt, args.context, args.tokens, args.threads)
        systems["mpk bf16"] = mpk(model, prompt, args.context, args.tokens, args.threads)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
        for measure in systems.values():
            measure()  # warm-up
        for _ in range(args.rounds):
            for name, measure in systems.items():
                samples[name].append(measure())
    report(samples, args)


def _bundled() -> Path:
    from mpk.frontend import bundled_model_path

    return Path(bundled_model_path())


def report(samples: dict[str, list[tuple[float, float]]], args: argparse.Namespace) -> None:
    for name, values in samples.items():
        decode, prompt = (statistics.median(v[i] for v in values) for i in (0, 1))
        low, high = min(v[0] for v in values), max(v[0] for v in values)
        if args.json:
            print(json.dumps({"system": name, "model": "SmolLM2-135M", "threads": args.threads, "context": args.context,
                              "ms_per_token": round(decode, 3), "min": round(low, 3), "max": round(high, 3),
                              "prompt_tokens_per_s": round(prompt, 1), "prompt": args.prompt, "rounds": args.rounds,
                              "date": date.today().isoformat()}))
        else:
            print(f"{name:16} {decode:7.2f} ms per token ({low:.2f} to {high:.2f}), prompt {prompt:7.1f} tokens per second")


if __name__ == "__main__":
    entry.run(main)
