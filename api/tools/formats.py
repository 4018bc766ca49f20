"""How families of models write tool calls, recognised by their chat templates.

| format | models | a call |
|---|---|---|
| Hermes | Hermes, Qwen 2.5, SmolLM2 | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, a list of them too |
| Llama | Llama 3.1 to 3.3 | `{"name": …, "parameters": {…}}` as the whole answer, `<|python_tag|>` before it or not |
| Mistral | Mistral to 0.3, Nemo | `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]` |
"""

from __future__ import annotations

import json
import secrets
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from ...core.text.grammar import GrammarError, lark_json, lark_text

Spell = Callable[[str], str]
"""A marker as the model writes it, in a Lark grammar: one special token, or text."""

TEXT = "TEXT: /(.|\\n)*/"


class ToolFormat(ABC):
    """What a format's parser and its grammars need to know of it."""

    name: ClassVar[str]
    opener: ClassVar[str] = ""
    """Stands before calls; "": a call is the whole answer, from its beginning."""
    prefix: ClassVar[str] = ""
    """May stand before a call where there is no opener."""
    closer: ClassVar[str] = ""
    """Stands behind a call; models leave it out at times."""
    separator: ClassVar[str] = ""
    """Stands between calls where there is no opener."""
    arguments: ClassVar[str] = "arguments"
    """The key of the arguments in what the model is made to write; in what it writes by itself both names are
    understood."""

    @staticmethod
    @abstractmethod
    def in_template(source: str) -> bool:
        """Whether a chat template tells its model to write calls like this."""

    @property
    def markers(self) -> list[str]:
        """Texts that may be special tokens, which other answers leave out."""
        return [text for text in (self.opener, self.prefix, self.closer) if text]

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def read(self, value: str, names: Collection[str]) -> list[tuple[str, str]] | None:
        """Names and arguments (JSON text) of the calls that a JSON value is; None where it is none, or calls
        what is not among `names`."""
        try:
            data = json.loads(value)
        except (ValueError, RecursionError):
            return None
        calls = []
        for entry in data if isinstance(data, list) else [data]:
            call = _read_call(entry, names)
            if call is None:
                return None
            calls.append(call)
        return calls or None

    def must_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        """A Lark grammar: calls and nothing else. `functions`: the schema of each one's arguments by name."""
        return "\n".join(["start: calls", self._calls(many, spell), *self._call(functions)])

    @abstractmethod
    def may_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        """Any text, and calls whose arguments obey their schemas."""

    def answer_or_call(
        self, answer: str, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell
    ) -> str:
        """What obeys the Lark expression `answer`, or calls. Raises `GrammarError` where that cannot be."""
        rules = ["start: answer | calls", f"answer: {answer}", self._calls(many, spell)]
        return "\n".join([*rules, *self._call(functions)])

    @abstractmethod
    def _calls(self, many: bool, spell: Spell) -> str:
        """The rule `calls`, made of `call`, one object."""

    def _call(self, functions: Mapping[str, Mapping[str, Any]]) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
        for index, (name, schema) in enumerate(functions.items()):
            before = lark_text(f'{{"name": "{name}", "{self.arguments}": ')
            rules.append(f'call_{index}: {before} arguments_{index} "}}"')
            rules.append(f"arguments_{index}: {lark_json(schema)}")
        return rules


class Hermes(ToolFormat):
    name = "hermes"
    opener = "<tool_call>"
    closer = "</tool_call>"

    @staticmethod
    def in_template(source: str) -> bool:
        return "<tool_call>" in source and "<function=" not in source

    def may_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        return _free_text_until(
            self.opener, f'"\\n" call "\\n" {spell(self.closer)}', many, spell
        ) + "\n".join(self._call(functions))

    def _calls(self, many: bool, spell: Spell) -> str:
        one = f'{spell(self.opener)} "\\n" call "\\n" {spell(self.closer)}'
        return f"one: {one}\ncalls: one" + (' ("\\n" one)*' if many else "")


class Llama(ToolFormat):
    name = "llama"
    prefix = "<|python_tag|>"
    separator = ";"
    arguments = "parameters"

    @staticmethod
    def in_template(source: str) -> bool:
        return '{"name": function name, "parameters"' in source

    def may_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        rules = ["start: TEXT? | calls", "TEXT: /[^{](.|\\n)*/", self._calls(many, spell)]
        return "\n".join([*rules, *self._call(functions)])

    def answer_or_call(
        self, answer: str, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell
    ) -> str:
        """Raises `GrammarError`: from its first characters nobody could tell which of both it is to be."""
        raise GrammarError("this model's calls are JSON without a mark, so no other JSON can be asked for")

    def _calls(self, many: bool, spell: Spell) -> str:
        return "calls: call"  # these models make one call at a time


class Mistral(ToolFormat):
    name = "mistral"
    opener = "[TOOL_CALLS]"

    @staticmethod
    def in_template(source: str) -> bool:
        return "[TOOL_CALLS]" in source and "[ARGS]" not in source

    def new_id(self) -> str:
        """Nine letters and digits: their templates refuse any other."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def may_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        more = ' (", " call)*' if many else ""
        return _free_text_until(self.opener, f'" [" call{more} "]"', False, spell) + "\n".join(
            self._call(functions)
        )

    def _calls(self, many: bool, spell: Spell) -> str:
        more = ' (", " call)*' if many else ""
        return f'calls: {spell(self.opener)} " [" call{more} "]"'


FORMATS: Sequence[ToolFormat] = (Hermes(), Mistral(), Llama())


def format_in(template: str) -> ToolFormat | None:
    """The format that a chat template's source asks its model for; None: none that is known here."""
    return next((one for one in FORMATS if one.in_template(template)), None)


def _free_text_until(opener: str, call: str, many: bool, spell: Spell) -> str:
    """Text up to the opener, where there is one, and the call that it then must be; the end, if not `many`."""
    marker = spell(opener)
    head = f"head: TEXT {marker}" if marker.startswith("<") else f"head[lazy]: /(.|\\n)*/ {marker}"
    start = "one* TEXT" if many else "one | TEXT"
    return f"start: {start}\none: head {call}\n{head}\n{TEXT}\n"


def _read_call(entry: object, names: Collection[str]) -> tuple[str, str] | None:
    if not isinstance(entry, dict):
        return None
    name = entry.get("name")
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI's own messages have it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
