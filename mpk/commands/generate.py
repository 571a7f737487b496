"""`mpk generate`: answer a prompt with a model, streaming to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpk.commands.common import DEFAULT_MODEL, build, print_json
from mpk.errors import ModelError, RequestError

if TYPE_CHECKING:
    from mpk.frontend.tokenizer import Tokenizer
    from mpk.runtime.request import GenerateResult

DEFAULT_PROMPT = "Explain in two sentences why the sky is blue."
EXIT_CODES = {"error": 1, "cancelled": 130}  # by finish reason; 0 for all others


def command(
    model: Annotated[str, typer.Option(help="Folder with config.json and safetensors, a GGUF file, or smollm2-135m-instruct.")] = DEFAULT_MODEL,
    target: Annotated[str, typer.Option(help="auto, cpp, or another target that `mpk targets` lists.")] = "auto",
    prompt: Annotated[str | None, typer.Option(help="Text to continue (with --chat: a question to answer).")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", "-f", help="File that holds the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among the k most likely tokens only; 0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the most likely tokens that together reach this probability; 1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this times the most likely one; 0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Divide the logits of tokens seen before; 1: off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtract from tokens generated before; 0: off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Subtract per earlier generation of a token; 0: off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws; the same seed gives the same text.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="Type of weights and key-value cache: bf16 or f32.")] = "bf16",
    workers: Annotated[int | None, typer.Option(help="Worker threads or SMs (default: all of the target).")] = None,
    tp: Annotated[int, typer.Option(help="Devices that share the model (on cpp: groups of threads), 1 to 8.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-text tokens.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Continue a prompt, or answer a question with --chat; without a prompt, a default question is asked."""
    from mpk import frontend
    from mpk.compiler import Compiler

    if prompt is not None and prompt_file is not None:
        raise RequestError("--prompt and --prompt-file", expected="only one of them")
    compiler = Compiler(target, tensor_parallel_size=tp, dtype=dtype, workers=workers)
    compiler.require_device()
    loaded = frontend.load(model)
    if loaded.tokenizer is None:
        raise ModelError(f"model {loaded.name} has no tokenizer", remedy="give a folder with tokenizer.json or a GGUF file")
    text, chat = _prompt_text(prompt, prompt_file, chat, loaded.tokenizer)
    ids = _encode(text, chat, loaded.tokenizer)
    engine, _ = build(compiler, loaded, quiet=json)
    instance = engine.create_instance(max_batch=1)
    printer = _Printer(loaded.tokenizer, enabled=not json)
    result = instance.generate(
        [ids], max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed,
        stop_tokens=[] if ignore_eos else None, on_token=lambda slot, token: printer.add(token))
    printer.finish()
    if json:
        print_json(_report(compiler.target.name, loaded, ids, result))
    else:
        _print_summary(result)
    reason = result.finish_reasons[0]
    if reason == "error":
        print(f"mpk: the logits behind token {len(ids) + len(result.tokens[0])} were not numbers, generation stopped; check the model's weights",
              file=sys.stderr)
    if reason in EXIT_CODES:
        raise typer.Exit(EXIT_CODES[reason])


def _prompt_text(prompt: str | None, prompt_file: Path | None, chat: bool, tokenizer: Tokenizer) -> tuple[str, bool]:
    """The prompt and whether to use the chat template (always for the default question, where the model has one)."""
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8-sig"), chat
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"prompt file {prompt_file}: {error}") from error
    if prompt is not None:
        return prompt, chat
    return DEFAULT_PROMPT, chat or tokenizer.chat_template is not None


def _encode(text: str, chat: bool, tokenizer: Tokenizer) -> list[int]:
    if not text:
        raise RequestError("the prompt is empty", remedy="give at least one character with --prompt or --prompt-file")
    if chat:
        return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), add_special=False)
    return tokenizer.encode(text)


class _Printer:
    """Streams decoded text to standard output as tokens come."""

    def __init__(self, tokenizer: Tokenizer, enabled: bool) -> None:
        self.stream = tokenizer.stream()
        self.special = set(tokenizer.eos_tokens)
        self.enabled = enabled

    def add(self, token: int) -> None:
        if self.enabled and token not in self.special:
            sys.stdout.write(self.stream.add(token))
            sys.stdout.flush()

    def finish(self) -> None:
        if self.enabled:
            sys.stdout.write(self.stream.finish() + "\n")
            sys.stdout.flush()


def _report(target: str, loaded: Any, ids: list[int], result: GenerateResult) -> dict[str, Any]:
    tokens = result.tokens[0]
    visible = [t for t in tokens if t not in set(loaded.tokenizer.eos_tokens)]
    return {
        "target": target, "model": loaded.name, "prompt_tokens": ids, "tokens": tokens, "text": loaded.tokenizer.decode(visible),
        "finish_reason": result.finish_reasons[0], "first_token_ms": result.first_token_ms if tokens else None,
        "ms_per_token": result.ms_per_token if len(tokens) > 1 else None,
    }


def _print_summary(result: GenerateResult) -> None:
    count = len(result.tokens[0])
    reason = result.finish_reasons[0]
    ending = "" if reason in ("stop", "length") else f", {reason}"
    first = f", first after {result.first_token_ms:.0f} ms" if count else ""
    rest = f", {result.ms_per_token:.2f} ms per token, {1000 / result.ms_per_token:.1f} tokens per second" if result.ms_per_token else ""
    print(f"[{count} tokens{ending}{first}{rest}]", file=sys.stderr)
