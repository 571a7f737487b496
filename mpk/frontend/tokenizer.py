"""Text to token ids and back, built on the `tokenizers` package; chat prompts through the model's own template.

`decode` is defined as the concatenation of what the stream emits, so that text shown while generating and the final text agree.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers

from mpk.errors import ModelError, RequestError
from mpk.frontend.chat import ChatTemplate
from mpk.frontend.files import read_json

FILE_FORMAT = 1
_SPACE = "\u2581"  # how sentencepiece spells a space


@cache
def _byte_of_char() -> Mapping[str, int]:
    """Bytes behind the printable characters that byte-level vocabularies are spelled in (the GPT-2 table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if chr(b) not in table)
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table


class Tokenizer:
    """Encoding, decoding and chat prompts of one model. Token ids are plain ints."""

    def __init__(self, core: tokenizers.Tokenizer, *, bos_token: int | None = None, eos_tokens: Iterable[int] = (),
                 chat_template: str | None = None) -> None:
        """`core` does the splitting; `ModelError` if its decoder is neither byte-level nor sentencepiece-like."""
        self.core = core
        self.bos_token = bos_token
        self.eos_tokens = tuple(dict.fromkeys(eos_tokens))
        self.chat_template = chat_template
        self._added = core.get_added_tokens_decoder()
        self._special = {i for i, token in self._added.items() if token.special}
        self._byte_level, self._strip_first_space = _decoder_kind(core)
        self._bytes: dict[int, bytes] = {}

    # ---- text and ids
    @property
    def vocab_size(self) -> int:
        """Number of tokens; a model's head may have more columns (padding)."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells a token."""
        return self.core.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self.core.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token (end of text, roles of a chat) that stands for no text."""
        return token_id in self._special

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled in it become single ids. `add_special`: with the tokens (such as the first)
        that the model expects around every text. `RequestError` for text that has no UTF-8 form (lone surrogates)."""
        try:
            return list(self.core.encode(text, add_special_tokens=add_special).ids)
        except (TypeError, UnicodeEncodeError) as e:
            raise RequestError("the prompt is not valid text", expected="text that can be encoded as UTF-8", actual=_invalid(text)) from e

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        stream = self.stream(skip_special)
        return "".join([stream.add(i) for i in ids]) + stream.finish()

    def stream(self, skip_special: bool = True, continuation: bool = False) -> DecodeStream:
        """A decoder that takes one id at a time. `continuation`: the text goes on after other text, so that a leading space
        that a sentencepiece vocabulary adds to every text is kept."""
        return DecodeStream(self, skip_special, self._strip_first_space and not continuation)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token adds to the text (possibly a part of a character)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self.core.id_to_token(token_id) if 0 <= token_id < 1 << 31 else None
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            table = _byte_of_char()
            return bytes([table[c] for c in token]) if all(c in table for c in token) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE, " ").encode()

    # ---- chat
    @cached_property
    def _chat(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError("the model has no chat template", remedy="give a plain prompt")
        bos = self.core.id_to_token(self.bos_token) if self.bos_token is not None else None
        eos = self.core.id_to_token(self.eos_tokens[0]) if self.eos_tokens else None
        return ChatTemplate(self.chat_template, bos_token=bos or "", eos_token=eos or "")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation ([{"role": ..., "content": ...}, ...]); `variables` go to the template.
        `RequestError` if the model has no template or the template refuses the messages."""
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Ids of `render_chat`; the template itself writes the special tokens."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special=False)

    # ---- files
    def to_file(self, path: Path) -> None:
        """Write everything to one JSON file that `from_file` reads back."""
        data = {"format": FILE_FORMAT, "bos_token": self.bos_token, "eos_tokens": list(self.eos_tokens), "chat_template": self.chat_template,
                "tokenizer": self.core.to_str()}
        Path(path).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    @staticmethod
    def from_file(path: Path) -> Tokenizer:
        """Read what `to_file` wrote; `ModelError` for a damaged file or another format."""
        data = read_json(Path(path))
        if data.get("format") != FILE_FORMAT:
            raise ModelError(f"tokenizer file {path}", expected=f"format {FILE_FORMAT}", actual=repr(data.get("format")))
        try:
            return Tokenizer(core_from_json(data["tokenizer"], Path(path)), bos_token=data["bos_token"], eos_tokens=data["eos_tokens"],
                             chat_template=data["chat_template"])
        except KeyError as e:
            raise ModelError(f"tokenizer file {path} is damaged", actual=f"no {e}") from e


def _invalid(text: Any) -> str:
    """What is wrong with a text that is refused; undecodable bytes of the command line are surrogates U+DC80 to U+DCFF."""
    if not isinstance(text, str):
        return type(text).__name__
    place = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), 0)
    code = ord(text[place]) if text else 0
    return f"byte 0x{code - 0xDC00:02x} at character {place}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X} at character {place}"


class DecodeStream:
    """Incremental decoding: emits text as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, strip_first_space: bool) -> None:
        self._tokenizer, self._skip_special, self._strip = tokenizer, skip_special, strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The text that is complete now and was not before; may be empty."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._emit(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest: U+FFFD for a character that stayed incomplete."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def core_from_json(text: str, path: Path) -> tokenizers.Tokenizer:
    """The `tokenizers` object of a tokenizer.json; `ModelError` naming the file if it is damaged."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the package raises plain Exception
        raise ModelError(f"{path} is not a valid tokenizer.json", actual=str(e)) from e


def _decoder_kind(core: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level rather than sentencepiece, whether the first space of a text is dropped)."""
    state: dict[str, Any] = json.loads(core.decoder.__getstate__()) if core.decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return False, kinds.get("Strip", {}).get("start", 0) > 0
    raise ModelError(f"unsupported tokenizer decoder '{state['type']}'", remedy="supported: ByteLevel, ByteFallback, Metaspace")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder in transformers' layout, None if it has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    core = core_from_json(path.read_text(encoding="utf-8"), path)
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings.update(read_json(folder / name))
    bos, eos = (_special_id(core, settings.get(key)) for key in ("bos_token", "eos_token"))
    return Tokenizer(core, bos_token=bos, eos_tokens=() if eos is None else (eos,), chat_template=_folder_template(folder, settings))


def _special_id(core: tokenizers.Tokenizer, token: Any) -> int | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return core.token_to_id(token) if isinstance(token, str) else None


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A template file wins over tokenizer_config.json; of several named templates the one called default is taken."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None and (folder / "chat_template.json").is_file():
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
