"""What guides the answers of a request: the grammar they obey, and the tools they may call.

All of it is worked out in threads of its own and tried out in a process of its own, before the engine hears of the
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...core.sampling_params import MAX_GRAMMAR_BYTES
from ...core.text.check_grammars import Item
from ...core.text.grammar import Grammar, GrammarError, schema_text
from ...core.text.tokenizer import Tokenizer
from ..errors import invalid
from ..protocol.chat import ChatRequest
from ..protocol.generation import GenerationBody
from ..protocol.guided import Form, Kind
from ..tools.parser import ToolParser
from ..tools.toolset import Toolset, toolset_of
from ..workers import Workers
from .grammar_checker import GrammarChecker

Items = dict[Item, tuple[str, str]]
"""What is to be checked; what to call it in an error, and the field to blame."""

WRITERS: Mapping[Kind, Callable[[Any], str]] = {
    "json": Grammar.json,
    "json_object": lambda _: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
}


@dataclass(frozen=True)
class Guidance:
    """Of one request."""

    grammar: str | None = None
    field: str | None = None
    """The request's field that the grammar comes from."""
    toolset: Toolset | None = None

    @property
    def definitions(self) -> list[dict[str, Any]] | None:
        """The tools as the chat template takes them."""
        return None if self.toolset is None else self.toolset.definitions

    @property
    def kept(self) -> frozenset[int]:
        """Special tokens that are text in the answers."""
        return frozenset() if self.toolset is None else self.toolset.kept

    def parser(self) -> ToolParser | None:
        """What finds the tool calls of one answer; None where nothing is looked for."""
        return None if self.toolset is None else self.toolset.parser(sure=self.grammar is not None)


UNGUIDED = Guidance()


class GuidanceService:
    """Of one base."""

    def __init__(self, tokenizer: Tokenizer, checker: GrammarChecker, workers: Workers) -> None:
        self._tokenizer = tokenizer
        self._checker = checker
        self._write_in_thread = workers.grammars

    async def of(self, body: GenerationBody, tenant: str) -> Guidance:
        """Raises `invalid_request` that names the field."""
        form = body.form()
        with_tools = isinstance(body, ChatRequest) and (body.tools or body.tool_choice)
        if form is None and not with_tools:
            return UNGUIDED
        guidance, items = await self._write_in_thread(self._write, body, form)
        if items:
            verdict = await self._checker.check(list(items), tenant)
            if verdict is not None:
                what, field = list(items.values())[verdict.index]
                raise invalid(f"{what}: {verdict.reason}", field)
        return guidance

    def _write(self, body: GenerationBody, form: Form | None) -> tuple[Guidance, Items]:
        """The grammar as text, and what is to be checked."""
        toolset = toolset_of(body, self._tokenizer) if isinstance(body, ChatRequest) else None
        if toolset is not None:
            return self._write_with_tools(toolset, form)
        if form is None:
            return UNGUIDED, {}
        with _blaming(form.field):
            self._refuse_unguidable()
            grammar = WRITERS[form.kind](form.value)
        return Guidance(grammar, form.field), {Item("grammar", grammar): (form.field, form.field)}

    def _write_with_tools(self, toolset: Toolset, form: Form | None) -> tuple[Guidance, Items]:
        answer = None
        if form is not None:
            with_field = "tool_choice" if toolset.forced else "tools"
            if toolset.forced or form.field != "response_format":
                raise invalid(f"{form.field} and {with_field} exclude each other", form.field)
            answer = {"type": "object"} if form.kind == "json_object" else form.value
        field = "tools" if form is None else form.field
        items: Items = {}
        with _blaming("tools"):
            for index, parameters in toolset.schemas():
                items[Item("schema", schema_text(parameters))] = (
                    f"tools[{index}].function.parameters",
                    "tools",
                )
        with _blaming(field):
            grammar = toolset.grammar(answer)
            if grammar is not None:
                self._refuse_unguidable()
                if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
                    raise GrammarError(f"all schemas together have more than {MAX_GRAMMAR_BYTES} bytes")
                items[Item("grammar", grammar)] = (field, field)
        return Guidance(grammar, field, toolset), items

    def _refuse_unguidable(self) -> None:
        if not self._tokenizer.joins_tokens:
            raise GrammarError("the tokens of this model are not simply joined, so no grammar can guide them")


@contextmanager
def _blaming(field: str) -> Iterator[None]:
    """A grammar that cannot be written is this field's fault."""
    try:
        yield
    except GrammarError as error:
        raise invalid(f"{field}: {error}", field) from error
