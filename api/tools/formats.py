"""How families of models write tool calls, recognised by their chat templates.

| format | models | a call |
|---|---|---|
| Hermes | Hermes, Qwen 2.5, SmolLM2 | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, a list of them too |
| Llama | Llama 3.1 to 3.3 | `{"name": …, "parameters": {…}}` as the whole answer, `<|python_tag|>` before it or not |
| Mistral | Mistral to 0.3, Nemo | `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]` |
| Mistral named | Mistral Small 3.1 and later, Devstral, Ministral 3 | `[TOOL_CALLS]name[ARGS]{…}`, several of them |
| functions | Llama 3.1 finetunes (Functionary) | `<function=name>{…}</function>`, several of them |
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
    named: ClassVar[str] = ""
    """Stands between a call's name and its arguments; "": both are in one object."""
    call_id: ClassVar[str] = ""
    """May stand behind the name, with an id of the model's own behind it, which nobody needs."""
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
        marks = (self.opener, self.prefix, self.closer, self.named, self.call_id)
        return [text for text in marks if text]

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def read(
        self, value: str, names: Collection[str], name: str | None = None
    ) -> list[tuple[str, str]] | None:
        """Names and arguments (JSON text) of the calls that a JSON value is; None where it is none, or calls
        what is not among `names`. `name`: the value is the arguments alone, of this one."""
        try:
            data = json.loads(value)
        except (ValueError, RecursionError):
            return None
        if name is not None:
            data = {"name": name, "arguments": data}
        calls = []
        for entry in data if isinstance(data, list) else [data]:
            call = _read_call(entry, names)
            if call is None:
                return None
            calls.append(call)
        return calls or None

    def must_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        """A Lark grammar: calls and nothing else. `functions`: the schema of each one's arguments by name."""
        return "\n".join(["start: calls", self._calls(many, spell), *self._call(functions, spell)])

    @abstractmethod
    def may_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        """Any text, and calls whose arguments obey their schemas."""

    def answer_or_call(
        self, answer: str, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell
    ) -> str:
        """What obeys the Lark expression `answer`, or calls. Raises `GrammarError` where that cannot be."""
        rules = ["start: answer | calls", f"answer: {answer}", self._calls(many, spell)]
        return "\n".join([*rules, *self._call(functions, spell)])

    @abstractmethod
    def _calls(self, many: bool, spell: Spell) -> str:
        """The rule `calls`, made of `call`, one object."""

    def _call(self, functions: Mapping[str, Mapping[str, Any]], spell: Spell) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
        for index, (name, schema) in enumerate(functions.items()):
            rules.append(f"call_{index}: {self._one(name, f'arguments_{index}', spell)}")
            rules.append(f"arguments_{index}: {lark_json(schema)}")
        return rules

    def _one(self, name: str, arguments: str, spell: Spell) -> str:
        """The call of one function. `arguments`: the rule for them."""
        before = lark_text(f'{{"name": "{name}", "{self.arguments}": ')
        return f'{before} {arguments} "}}"'


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
        ) + "\n".join(self._call(functions, spell))

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
        return "\n".join([*rules, *self._call(functions, spell)])

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
        return _nine_characters()

    def may_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        more = ' (", " call)*' if many else ""
        return _free_text_until(self.opener, f'" [" call{more} "]"', False, spell) + "\n".join(
            self._call(functions, spell)
        )

    def _calls(self, many: bool, spell: Spell) -> str:
        more = ' (", " call)*' if many else ""
        return f'calls: {spell(self.opener)} " [" call{more} "]"'


class Named(ToolFormat):
    """A call's name stands before its arguments, each call behind an opener of its own."""

    def may_call(self, functions: Mapping[str, Mapping[str, Any]], many: bool, spell: Spell) -> str:
        return _free_text_until(self.opener, f"call {self._end(spell)}", many, spell) + "\n".join(
            self._call(functions, spell)
        )

    def _calls(self, many: bool, spell: Spell) -> str:
        return f"one: {spell(self.opener)} call {self._end(spell)}\ncalls: one" + (" one*" if many else "")

    def _end(self, spell: Spell) -> str:
        return spell(self.closer) if self.closer else ""

    def _one(self, name: str, arguments: str, spell: Spell) -> str:
        return f"{lark_text(name)} {spell(self.named)} {arguments}"


class MistralNamed(Named):
    name = "mistral named"
    opener = "[TOOL_CALLS]"
    named = "[ARGS]"
    call_id = "[CALL_ID]"

    @staticmethod
    def in_template(source: str) -> bool:
        return "[TOOL_CALLS]" in source and "[ARGS]" in source

    def new_id(self) -> str:
        return _nine_characters()


class Functions(Named):
    name = "functions"
    opener = "<function="
    named = ">"
    closer = "</function>"

    @staticmethod
    def in_template(source: str) -> bool:
        """Qwen3-Coder's, which writes each argument as text between marks of its own, is another one."""
        return "<function=" in source and "<parameter=" not in source and "<tool_call>" not in source

    @property
    def markers(self) -> list[str]:
        return [self.opener, self.closer]


FORMATS: Sequence[ToolFormat] = (Hermes(), MistralNamed(), Mistral(), Functions(), Llama())


def format_in(template: str) -> ToolFormat | None:
    """The format that a chat template's source asks its model for; None: none that is known here."""
    return next((one for one in FORMATS if one.in_template(template)), None)


def _free_text_until(opener: str, call: str, many: bool, spell: Spell) -> str:
    """Text up to the opener, where there is one, and the call that it then must be; the end, if not `many`."""
    marker = spell(opener)
    head = f"head: TEXT {marker}" if marker.startswith("<") else f"head[lazy]: /(.|\\n)*/ {marker}"
    start = "one* TEXT" if many else "one | TEXT"
    return f"start: {start}\none: head {call}\n{head}\n{TEXT}\n"


def _nine_characters() -> str:
    """Letters and digits: Mistral's templates refuse any other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


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
