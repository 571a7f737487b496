"""The tokenizer that a GGUF file describes in its metadata, as a `tokenizers` object.

Two kinds: `gpt2` (byte-level BPE with merges; the splitting of text before the merges is named, not stored, so each name has
its rule here) and `llama` (sentencepiece BPE: scores instead of merges, bytes for what the vocabulary lacks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mpk.errors import ModelError
from mpk.frontend import tokenizer as mpk_tokenizer

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types that are matched in text as a whole (unknown: never split)
SPACE = "\u2581"

# How text is cut into words, as the tokenizer.json of the models says. \p{L}: letters, \p{N}: digits.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class Splitting:
    """One rule: `pattern` (None: GPT-2's own), digits one by one, NFC first, whole words before merges, first token by default."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2, _CODE = Splitting(), Splitting(single_digits=True)
SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": _GPT2, "default": _GPT2,
    "smollm": _CODE, "starcoder": _CODE, "refact": _CODE,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Splitting(_LLAMA3, ignore_merges=True, add_bos=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Splitting(_QWEN2, nfc=True)),
    "tekken": Splitting(_TEKKEN, ignore_merges=True, add_bos=True),
}


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path, eos_tokens: Sequence[int]) -> mpk_tokenizer.Tokenizer | None:
    """The tokenizer of a file, None if it has none; `ModelError` naming the kind or splitting that is not supported."""
    kind = metadata.get(f"{KEY}model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{path}: unsupported tokenizer '{kind}'", remedy="supported: gpt2, llama")
    tokens = metadata.get(f"{KEY}tokens")
    if not tokens:
        raise ModelError(f"{path}: metadata '{KEY}tokens'", expected="the vocabulary", actual="nothing")
    try:
        core = _byte_level(metadata, tokens, path) if kind == "gpt2" else _sentencepiece(metadata, tokens, path)
    except ModelError:
        raise
    except Exception as e:  # the tokenizers package raises plain Exception
        raise ModelError(f"{path}: damaged tokenizer", actual=str(e)) from e
    template = metadata.get("tokenizer.chat_template")
    bos = metadata.get(f"{KEY}bos_token_id")
    return mpk_tokenizer.Tokenizer(core, bos_token=bos, eos_tokens=eos_tokens, chat_template=template)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    name = metadata.get(f"{KEY}pre", "default")
    if name not in SPLITTINGS:
        raise ModelError(f"{path}: unsupported splitting of text '{name}' ({KEY}pre)", remedy=f"supported: {', '.join(SPLITTINGS)}")
    rule = SPLITTINGS[name]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [_pair(m) for m in metadata.get(f"{KEY}merges", ())]
    for left, right in merges:  # the tokenizers package takes what is not in the vocabulary badly
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"{path}: damaged tokenizer", expected="merges of tokens that make a token", actual=repr(f"{left} {right}"))
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    _add_tokens(core, metadata, tokens)
    _add_surroundings(core, metadata, tokens, rule.add_bos)
    return core


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # a part is never empty, so a space in front belongs to it
    return merge[:cut], merge[cut + 1:]


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    scores = metadata.get(f"{KEY}scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{path}: metadata '{KEY}scores'", expected=f"{len(tokens)} scores, one a token",
                         actual="nothing" if scores is None else str(len(scores)))
    vocab = {t: i for i, t in enumerate(tokens)}
    unknown = tokens[int(metadata.get(f"{KEY}unknown_token_id", 0))]
    merges = merges_from_scores(vocab, [float(s) for s in scores])
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in vocab))
    prefix = bool(metadata.get(f"{KEY}add_space_prefix", True))
    prepend = [normalizers.Prepend(SPACE)] if prefix else []
    core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    core.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    _add_tokens(core, metadata, tokens)
    _add_surroundings(core, metadata, tokens, add_bos=True)
    return core


def merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the best scored result first: sentencepiece's choice as a list of merges.

    As transformers converts such vocabularies. Long runs of spaces may be cut at other places than by sentencepiece, which
    prefers the left of equally scored pairs where a list of merges must prefer one of the pairs.
    """
    found = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], left, right, token, cut))
    found.sort(key=lambda m: m[:3])
    return [(token[:cut], token[cut:]) for _, _, _, token, cut in found]


def _add_tokens(core: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Have control and user-defined tokens recognised as a whole wherever they stand in a text."""
    types = metadata.get(f"{KEY}token_type")
    if types is None:
        return
    added = [(tokens[i], int(types[i])) for i in range(min(len(tokens), len(types))) if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)]
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in added if kind != USER_DEFINED])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in added if kind == USER_DEFINED])


def _add_surroundings(core: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], add_bos: bool) -> None:
    """Put the first and last token around every text where the file asks for it."""
    def wanted(name: str, default: bool) -> list[tuple[str, int]]:
        token_id = metadata.get(f"{KEY}{name}_token_id")
        if token_id is None or not metadata.get(f"{KEY}add_{name}_token", default):
            return []
        return [(tokens[token_id], int(token_id))]

    first, last = wanted("bos", add_bos), wanted("eos", False)
    if first or last:
        parts = [*(t for t, _ in first), "$A", *(t for t, _ in last)]
        core.post_processor = processors.TemplateProcessing(single=parts, special_tokens=first + last)
