"""Tokenizers: text survives the way to ids and back, special tokens are single ids, streams emit whole characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpk.errors import ModelError, RequestError
from mpk.frontend import load
from mpk.frontend.gguf_tokenizer import gguf_tokenizer
from mpk.frontend.tokenizer import Tokenizer, _byte_of_char, load_tokenizer

TEXTS = ["Hello, world!", "  two  spaces\n\n\nlines\t\ttabs ", "Ünïcödé ñ 你好 мир", "🙂👩‍👩‍👧 e\u0301", "12345 3.14159", "don't I'LL we've",
         "def f(x):\n    return x ** 2\n", "", " ", "\n", "\x00\x7f", "<|im_start|>user\nhi<|im_end|>\n"]
SPACE = "\u2581"


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    tokenizer = load("smollm2-135m-instruct").tokenizer
    assert tokenizer is not None
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.add(i) for i in ids), stream.finish()]


# ---- SmolLM2

@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(smollm: Tokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text), skip_special=False) == text


# The vocabulary of SmolLM2 has no token for some bytes that only control and unassigned characters need.
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=("Cc", "Cn", "Cs", "Co"), include_characters="\n\t"), max_size=40))
def test_any_text_survives_encoding_and_decoding(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids, skip_special=False) == text
    assert "".join(streamed(smollm, ids, skip_special=False)) == text


def test_known_ids_of_smollm(smollm: Tokenizer) -> None:
    assert smollm.encode("Hello world") == [19556, 905]
    assert smollm.encode("12") == [33, 34]  # digits stand alone
    assert (smollm.vocab_size, smollm.bos_token, smollm.eos_tokens) == (49152, 1, (2,))
    assert smollm.token(2) == "<|im_end|>" and smollm.token_id("<|im_start|>") == 1 and smollm.token_id("nothing like this") is None


def test_decoding_agrees_with_the_tokenizers_package(smollm: Tokenizer) -> None:
    ids = np.random.default_rng(0).integers(0, 49152, 3000).tolist()
    assert smollm.decode(ids) == smollm.core.decode(ids)
    assert smollm.decode(ids, skip_special=False) == smollm.core.decode(ids, skip_special_tokens=False)


def test_special_tokens_are_single_ids_and_can_be_left_out_of_text(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and ids.count(1) == ids.count(2) == 1
    assert smollm.is_special(1) and not smollm.is_special(ids[1])
    assert smollm.decode(ids) == "user\nhi"


def test_streams_hold_back_incomplete_characters(smollm: Tokenizer) -> None:
    ids = smollm.encode("a🙂b")
    pieces = streamed(smollm, ids)
    assert len(ids) > 3 and "".join(pieces) == "a🙂b"
    assert all("\ufffd" not in piece for piece in pieces)
    assert streamed(smollm, ids[:2])[-1] == "\ufffd"  # the text ends inside the character
    assert smollm.decode([10**6, -1, ids[0]]) == "a"  # columns of a padded head stand for nothing


def test_chat_prompts_are_rendered_by_the_models_template(smollm: Tokenizer) -> None:
    text = smollm.render_chat([{"role": "user", "content": "Hi"}])
    assert text == ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm.encode_chat([{"role": "user", "content": "Hi"}])
    assert smollm.decode(ids, skip_special=False) == text
    assert ids.count(1) == 3 and ids.count(2) == 2
    both = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert smollm.render_chat(both, add_generation_prompt=False) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"


def test_text_without_a_utf8_form_is_refused(smollm: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"the prompt is not valid text, expected text that can be encoded as UTF-8, got U\+D800 at character 0"):
        smollm.encode("\ud800")


def test_a_tokenizer_is_kept_in_a_file(smollm: Tokenizer, tmp_path: Path) -> None:
    smollm.to_file(tmp_path / "t.json")
    again = Tokenizer.from_file(tmp_path / "t.json")
    assert (again.bos_token, again.eos_tokens, again.chat_template) == (smollm.bos_token, smollm.eos_tokens, smollm.chat_template)
    assert [again.encode(t) for t in TEXTS] == [smollm.encode(t) for t in TEXTS]
    (tmp_path / "t.json").write_text('{"format": 99}')
    with pytest.raises(ModelError, match=r"tokenizer file .*t.json, expected format 1, got 99"):
        Tokenizer.from_file(tmp_path / "t.json")


# ---- chat templates

def with_template(smollm: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(smollm.core, bos_token=1, eos_tokens=(2,), chat_template=template)


def test_templates_see_what_transformers_gives_them(smollm: Tokenizer) -> None:
    template = ("{{ bos_token }}{% for m in messages %}\n{% if m.role == 'stop' %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
                "{{ eos_token }}{{ extra }}{{ strftime_now('%Y') | length }}")
    text = with_template(smollm, template).render_chat([{"role": "a", "content": "<é>"}, {"role": "stop"}], extra="!")
    assert text == '<|im_start|>{"role": "a", "content": "<é>"}<|im_end|>!4'


def test_templates_that_refuse_or_are_missing_say_so(smollm: Tokenizer) -> None:
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="the chat template refuses the messages, got no such role"):
        with_template(smollm, "{{ raise_exception('no such role') }}").render_chat(message)
    with pytest.raises(RequestError, match="the model has no chat template"):
        with_template(smollm, None).render_chat(message)
    with pytest.raises(ModelError, match="chat template does not compile"):
        with_template(smollm, "{% for %}").render_chat(message)
    with pytest.raises(RequestError, match="an empty conversation, expected at least one message"):
        smollm.render_chat([])
    with pytest.raises(RequestError, match="the chat template refuses the messages, got 'dict object' has no attribute 'content'"):
        smollm.render_chat([{"role": "user"}])
    with pytest.raises(RequestError, match="the chat template cannot use the messages, expected messages with 'role' and 'content'"):
        with_template(smollm, "{{ messages[0].content + 1 }}").render_chat(message)


@pytest.mark.parametrize(("template", "name"), [
    ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"), ("{{ 10.0 ** (messages | length * 999) }}", "OverflowError"),
    ("{{ range(10 ** 9) | list }}", "OverflowError"), ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ("{{ 'a'.encode('nowhere') }}", "LookupError"), ("{{ messages[0].content.index('y') }}", "ValueError"),
])
def test_any_failure_of_a_template_is_one_line(smollm: Tokenizer, template: str, name: str) -> None:
    with pytest.raises(RequestError, match=rf"^the chat template fails on the messages, got {name}: ") as caught:
        with_template(smollm, template).render_chat([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_named(smollm: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"the prompt is not valid text, .*, got byte 0xff at character 2"):
        smollm.encode(b"ab\xff".decode("utf-8", "surrogateescape"))
    with pytest.raises(RequestError, match=r"the prompt is not valid text, .*, got int"):
        smollm.encode(3)  # type: ignore[arg-type]


def test_templates_run_in_a_sandbox(smollm: Tokenizer) -> None:
    with pytest.raises(RequestError, match="the chat template refuses the messages"):
        with_template(smollm, "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}").render_chat([{"role": "user", "content": "x"}])


# ---- byte-level vocabularies with other ways of splitting

def byte_level(pre: str, merges: list[str], **changes: Any) -> Tokenizer:
    """A vocabulary of all bytes, the results of the merges, and two tokens that are matched as a whole."""
    tokens = [*_byte_of_char(), *(m.replace(" ", "") for m in merges), "<|begin|>", "<tool>"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
                "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 2) + [3, 4]), "tokenizer.ggml.bos_token_id": len(tokens) - 2}
    metadata.update({f"tokenizer.ggml.{k}": v for k, v in changes.items()})
    tokenizer = gguf_tokenizer(metadata, Path("m.gguf"), ())
    assert tokenizer is not None
    return tokenizer


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], skip_special=False) for i in tokenizer.encode(text, add_special=False)]


@pytest.mark.parametrize(("pre", "expected"), [
    ("gpt-2", ["12", "12", "'", "L", "L"]), ("default", ["12", "12", "'", "L", "L"]), ("smollm", ["1", "2", "1", "2", "'", "L", "L"]),
    ("llama-bpe", ["12", "1", "2", "'", "LL"]), ("qwen2", ["1", "2", "1", "2", "'", "LL"]), ("tekken", ["1", "2", "1", "2", "'", "LL"])])
def test_text_is_split_as_the_file_names_it(pre: str, expected: list[str]) -> None:
    tokenizer = byte_level(pre, ["1 2", "L L"])
    if pre in ("gpt-2", "default", "smollm"):
        expected = [*expected[:-2], "LL"]  # the merge applies wherever no split stands between
    assert pieces(tokenizer, "1212'LL") == expected


def test_llama3_splits_digits_by_three_and_ignores_merges_for_whole_words() -> None:
    tokenizer = byte_level("llama-bpe", ["1 2", "3 4", "a b", "c d", "ab cd"])
    assert pieces(tokenizer, "1234") == ["12", "3", "4"]  # 123 | 4
    assert pieces(byte_level("gpt-2", ["1 2", "3 4"]), "1234") == ["12", "34"]
    assert pieces(tokenizer, "abcd") == ["abcd"]


def test_qwen2_composes_characters_first() -> None:
    assert byte_level("qwen2", []).encode("e\u0301") == byte_level("qwen2", []).encode("\u00e9")
    assert byte_level("gpt-2", []).encode("e\u0301") != byte_level("gpt-2", []).encode("\u00e9")


def test_first_and_last_tokens_are_added_as_the_file_asks() -> None:
    assert byte_level("gpt-2", []).encode("a")[0] != 256
    assert byte_level("llama-bpe", []).encode("a")[0] == 256  # by default there
    assert byte_level("llama-bpe", []).encode("a", add_special=False)[0] != 256
    assert byte_level("llama-bpe", [], add_bos_token=False).encode("a")[0] != 256
    both = byte_level("gpt-2", [], add_bos_token=True, add_eos_token=True, eos_token_id=257)
    assert [both.encode("a")[i] for i in (0, -1)] == [256, 257]


def test_control_tokens_are_hidden_and_user_defined_tokens_are_text() -> None:
    tokenizer = byte_level("qwen2", [])
    ids = tokenizer.encode("<|begin|>x<tool>")
    assert (ids[0], ids[2], len(ids)) == (256, 257, 3)
    assert tokenizer.decode(ids) == "x<tool>"


def test_damaged_vocabularies_are_refused() -> None:
    with pytest.raises(ModelError, match=r"m.gguf: damaged tokenizer, expected merges of tokens that make a token, got '1 2'"):
        byte_level("gpt-2", ["1 2"], tokens=["a", "b"], token_type=np.array([1, 1]), bos_token_id=0)
    with pytest.raises(ModelError, match=r"metadata 'tokenizer.ggml.tokens', expected the vocabulary, got nothing"):
        byte_level("gpt-2", [], tokens=[])
    with pytest.raises(ModelError, match=r"metadata 'tokenizer.ggml.scores', expected 258 scores, one a token, got nothing"):
        byte_level("gpt-2", [], model="llama")
    assert gguf_tokenizer({}, Path("m.gguf"), ()) is None


# ---- sentencepiece vocabularies

@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    words = ["a", "b", "c", SPACE, "ab", SPACE + "ab", "bc", SPACE + "c"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    scores = [0.0] * 259 + [-20, -21, -22, -23, -1, -2, -3, -4]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    tokenizer = gguf_tokenizer({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types), "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}, Path("m.gguf"), (2,))
    assert tokenizer is not None
    return tokenizer


def test_sentencepiece_takes_the_best_scored_merges(sentencepiece: Tokenizer) -> None:
    def spelled(text: str) -> list[str | None]:
        return [sentencepiece.token(i) for i in sentencepiece.encode(text)]

    assert spelled("abc") == ["<s>", SPACE + "ab", "c"]  # ab (-1) before bc (-3)
    assert spelled("bc c") == ["<s>", SPACE, "bc", SPACE + "c"]
    assert spelled("é") == ["<s>", SPACE, "<0xC3>", "<0xA9>"]


def test_sentencepiece_text_survives(sentencepiece: Tokenizer) -> None:
    for text in ["abc", "ab  c", " ab", "é中🙂 ab", "a\nb"]:
        ids = sentencepiece.encode(text)
        assert sentencepiece.decode(ids) == text == sentencepiece.core.decode(ids)
        assert all("\ufffd" not in piece for piece in streamed(sentencepiece, ids))


def test_a_continuation_keeps_its_first_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("ab", add_special=False)
    assert "".join(streamed(sentencepiece, ids)) == "ab"
    assert "".join(streamed(sentencepiece, ids, continuation=True)) == " ab"


# ---- folders

def test_tokenizers_of_folders(smollm: Tokenizer, tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(smollm.core.to_str())
    plain = load_tokenizer(tmp_path)
    assert plain is not None and (plain.bos_token, plain.eos_tokens, plain.chat_template) == (None, (), None)
    settings_ = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>",
                 "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    full = load_tokenizer(tmp_path)
    assert full is not None and (full.bos_token, full.eos_tokens, full.chat_template) == (1, (2,), "D")
    assert [full.encode(t) for t in TEXTS] == [smollm.encode(t) for t in TEXTS]
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(tmp_path).chat_template == "J"  # type: ignore[union-attr]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json is not a valid tokenizer.json"):
        load_tokenizer(tmp_path)


def test_tokenizers_that_decode_in_other_ways_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models

    core = Core(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="unsupported tokenizer decoder 'WordPiece'; supported: ByteLevel, ByteFallback, Metaspace"):
        load_tokenizer(tmp_path)
