"""Text to token ids and back, by the model's own tokenizer files. Control code: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, models, processors

from ..checkpoint.errors import CheckpointError
from ..checkpoint.sentencepiece_model import read_sentencepiece
from .chat_messages import normalise_messages
from .chat_template import ChatTemplate, ChatTemplateError
from .text_decoder import (
    ByteLevelDecoder,
    PieceDecoder,
    PieceRules,
    TextDecoder,
    WindowDecoder,
    is_byte_level,
    piece_rules,
)

T = TypeVar("T")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


MANY_TOKENS = 1000


class TokenizerError(ValueError):
    """The model folder's tokenizer cannot be used; a start-up error for the user."""


class Tokenizer:
    """One model's tokenizer and chat template. Immutable after `load`, so threads may share it.

    Begin of text: where the model's tokenizer puts a begin token before a text, `encode` does so too, but not
    before a text that already begins with that token's own text, such as a rendered chat. `encode_chat` adds
    nothing: what a chat begins with is its template's choice.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
    ) -> None:
        """`special_tokens`: `bos_token`, `eos_token` … of `NAMED_TOKENS` to their text."""
        self._backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One above the largest id. The model's own may be larger; that is the bound for requests."""
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
        self._special_ids = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._byte_of = _byte_alphabet() if is_byte_level(decoder) else None
        self._rules: PieceRules | None = piece_rules(decoder)
        self._longest_token = _longest_token(backend, byte_level=self._byte_of is not None)
        self._known_bytes: dict[int, bytes] = {}
        """Of the tokens that were asked for; other ids than the vocabulary's are none of a request's."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `folder`'s tokenizer.json (or else tokenizer.model), its configuration and chat template.

        Raises `TokenizerError` for files that are missing or wrong, a chat template with a syntax error
        included.
        """
        folder = Path(folder)
        backend, built_in = _backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        named, others = _special_tokens(
            config, (built_in or {}) | _read_json(folder / "special_tokens_map.json")
        )
        known = [text for text in (*named.values(), *others) if backend.token_to_id(text) is not None]
        # Marks them as special where tokenizer.json has them as ordinary entries. One it lacks would get a
        # new id, which the model has no row for, so that one stays ordinary text.
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])
        backend.no_truncation()
        backend.no_padding()
        if (
            built_in is not None
        ):  # tokenizer.json says itself what it puts around a text, tokenizer.model leaves it to the flags
            _set_ends(backend, named, config.get("add_bos_token", True), config.get("add_eos_token", False))
        sources = _chat_templates(folder, config)
        try:
            template = ChatTemplate(sources, named) if sources else None
        except ChatTemplateError as error:
            raise TokenizerError(f"{folder}: {error}") from error
        return cls(backend, named, template)

    @property
    def joins_tokens(self) -> bool:
        """A text is its tokens' bytes one after the other, as it is in all but rare vocabularies."""
        return self._byte_of is not None or self._rules is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's begin token where it has one (see the class for the exact
        rule).

        Special tokens written in the text become those tokens.
        """
        # Not `encode`, which keeps all other threads from running until it is done; this also makes no offsets.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        bos = self.bos_token_id
        if add_special_tokens and ids[:2] == [bos, bos] and text.startswith(self.special_tokens["bos_token"]):
            return ids[1:]
        return ids

    def text_encoder(self) -> Callable[[str], list[int]]:
        """An encoder for text alone: no begin token, and special tokens' names are text like any other."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    def at_least(self, text: str) -> int:
        """So many tokens `text` has at the very least; known without a look into it, however long it is."""
        return 0 if self._longest_token is None else -(-len(text) // self._longest_token)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids outside the tokenizer's vocabulary have no text."""
        known = [id for id in token_ids if 0 <= id < self.vocab_size]
        if len(known) > MANY_TOKENS:  # lets other threads run meanwhile, which `decode` does not
            (text,) = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def text_decoder(
        self, prompt_token_ids: Sequence[int], kept: frozenset[int] = frozenset()
    ) -> TextDecoder:
        """A decoder for the tokens that follow `prompt_token_ids`, special tokens left out but for those that
        are `kept` (in a vocabulary whose tokens are just joined)."""
        if self._byte_of is not None:
            return ByteLevelDecoder(_keeping(kept, self._text_bytes, self.token_bytes), prompt_token_ids)
        if self._rules is not None:
            piece = _keeping(kept, self._text_piece, self._special_text)
            return PieceDecoder(self._rules, piece, prompt_token_ids)
        return WindowDecoder(self.decode, self._is_text, prompt_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, part of a character too; of a special token its name."""
        token = self._token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if self._byte_of is not None:
            return self._level_bytes(token)
        if self._rules is not None:
            piece = self._rules.piece(token)
            return piece if isinstance(piece, bytes) else piece.encode()
        return self.decode([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """One token for people to read; what is no whole character as OpenAI writes it: `bytes:\\xf0`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_name(self, token_id: int) -> str:
        """One token as its vocabulary spells it (`Ġthe`); "" for an id without one."""
        return self._token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Whether texts leave this token out."""
        return token_id in self._special_ids

    def special_id(self, text: str) -> int | None:
        """The special token that is written so; None where there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def render_chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises `ChatTemplateError` for messages that are wrong, or refused by
        the template, and where the model has no chat template.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; use completions, which need none")
        return self.chat_template.render(
            normalise_messages(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    def refuse_unheard_tools(self) -> None:
        """Raise `ChatTemplateError` where the chat template would leave tools out."""
        if self.chat_template is not None and not self.chat_template.takes_tools:
            raise ChatTemplateError("tools: the model's chat template does not take tools", "tools")

    def encode_chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `render_chat`'s text; nothing is added to what the template has written."""
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._added.get(token_id) or self._backend.id_to_token(token_id)
        return token

    def _is_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._token(token_id) is not None

    def _text_bytes(self, token_id: int) -> bytes:
        known = self._known_bytes.get(token_id)
        if known is None:
            token = None if token_id in self._special_ids else self._token(token_id)
            known = self._known_bytes[token_id] = b"" if token is None else self._level_bytes(token)
        return known

    def _text_piece(self, token_id: int) -> str | bytes | None:
        assert self._rules is not None
        token = None if token_id in self._special_ids else self._token(token_id)
        return None if token is None else self._rules.piece(token)

    def _special_text(self, token_id: int) -> str | bytes | None:
        return self._token(token_id)

    def _level_bytes(self, token: str) -> bytes:
        """Byte-level BPE spells a byte as one character; an added token with any other stands for itself."""
        assert self._byte_of is not None
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:
            return token.encode()


def _keeping(
    kept: frozenset[int], ordinary: Callable[[int], T], special: Callable[[int], T]
) -> Callable[[int], T]:
    """`ordinary`, but `special` for the tokens that are kept."""
    return ordinary if not kept else lambda token_id: (special if token_id in kept else ordinary)(token_id)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str] | None]:
    """The tokenizer; of a tokenizer.model also the special tokens that it names itself."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path)), None
        except Exception as error:  # what the Rust side raises for every fault of the file
            raise TokenizerError(f"{path} cannot be read: {error}") from error
    path = folder / "tokenizer.model"
    if path.is_file():
        try:
            model = read_sentencepiece(path)
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error
        return model.tokenizer, model.special_tokens
    raise TokenizerError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")


def _longest_token(backend: tokenizers.Tokenizer, byte_level: bool) -> int | None:
    """Characters of a text that one token stands for at the most; None where a token may swallow any number, or
    texts may be shortened first."""
    model = backend.model
    if not (isinstance(model, models.BPE) and (byte_level or model.byte_fallback)):
        return None
    normalizer = None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if not all(map(_keeps_length, steps)):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token takes all the white space beside it
    return max(map(len, backend.get_vocab(with_added_tokens=True)), default=None)


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a step of a normalizer (its JSON) makes no text shorter."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"]) >= len(replaced)
    return bool(step["type"] == "Prepend")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return content


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Named special tokens, and the texts of all others; tokenizer_config.json counts first."""
    named = {}
    for name in NAMED_TOKENS:
        text = _content(config.get(name, older.get(name)))
        if text is not None:
            named[name] = text
    others: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key, older.get(key)) or []
        values = tokens.values() if isinstance(tokens, dict) else tokens
        others += [text for text in map(_content, values) if text is not None]
    return named, others


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _set_ends(backend: tokenizers.Tokenizer, named: dict[str, str], add_bos: bool, add_eos: bool) -> None:
    """Put begin and end token around every text."""
    bos, eos = named.get("bos_token"), named.get("eos_token")
    before = [bos] if add_bos and bos is not None and backend.token_to_id(bos) is not None else []
    after = [eos] if add_eos and eos is not None and backend.token_to_id(eos) is not None else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in (*before, *after)],
    )


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: the folder's own files where there are any, else tokenizer_config.json's."""
    sources = {}
    try:
        if (folder / "chat_template.jinja").is_file():
            sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{folder}: a chat template cannot be read: {error}") from error
    if sources:
        return sources
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return {str(entry.get("name")): str(entry.get("template")) for entry in value}
    if isinstance(value, dict):
        return {str(name): str(template) for name, template in value.items()}
    if value is not None:
        raise TokenizerError(f"{folder}: chat_template must be a template or a list of named ones")
    return {}
