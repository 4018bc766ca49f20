"""What JSON schemas say of numbers, brought to where llguidance decides it rightly. Control code: no torch.

llguidance joins what several parts of a schema say of one number in float64 and in 32 bits. So all that is said beside
each other or in `allOf` is joined here, and handed to the alternatives it is said beside. What cannot be joined so is
refused where rounding could matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from .number_bounds import NOTHING_SAID, Numbers, Unsupported, exact, is_number
from .schema_words import BOUNDS, MAPS, SINGLE

ALTERNATIVES = ("anyOf", "oneOf")
DELICATE = frozenset({"multipleOf", "exclusiveMinimum", "exclusiveMaximum"})
"""Where llguidance may be wrong if they come from several places."""


def settled(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with its numbers so that llguidance decides them as decimals. Raises `NumberFault`."""
    before = _Settling(schema)
    try:
        result: Mapping[str, Any] = before.settled(schema, NOTHING_SAID)
    except OverflowError as error:
        raise Unsupported("the schema's numbers are not supported beyond what float64 holds") from error
    except RecursionError as error:
        raise Unsupported(
            "the schema's numbers are not supported beside so long a way of references"
        ) from error
    if result != schema:
        after = _Settling(result)
        for ref in _refs(schema):
            into = any(f"/{word}/" in ref for word in ("allOf", *ALTERNATIVES))
            if into and after.target(ref) != before.target(ref):  # what is said around it went into it
                raise Unsupported(
                    "the schema's numbers are not supported beside a $ref into one of its alternatives"
                )
    return result


class _Settling:
    """Of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, set[str]] = {}

    def settled(self, node: Any, outer: Numbers) -> Any:
        """`outer`: what is said of the same value further out."""
        if node is True:
            return outer.keywords() or True
        if not isinstance(node, Mapping):
            return node
        numbers = outer & _gathered(node)
        self._refuse_scattered(node, numbers)
        result, given = self._placed(node, numbers, given=numbers == NOTHING_SAID)
        return result if given else {**result, **numbers.keywords()}

    def _placed(self, node: Mapping[str, Any], numbers: Numbers, given: bool) -> tuple[dict[str, Any], bool]:
        """`node` without what it says of numbers, which its alternatives or those of its `allOf` are told instead,
        unless that is `given` already. Also whether it is now."""
        result = {word: value for word, value in node.items() if not _is_bound(word, value)}
        for word in MAPS:
            if isinstance(held := result.get(word), Mapping):
                result[word] = {name: self.settled(one, NOTHING_SAID) for name, one in held.items()}
        for word in (*SINGLE, "prefixItems"):
            if isinstance(held := result.get(word), list):
                result[word] = [self.settled(one, NOTHING_SAID) for one in held]
            elif word in result:
                result[word] = self.settled(held, NOTHING_SAID)
        if not given and (kept := _allowed(result, numbers)) is not None:
            result["enum"] = kept
            given = True
        for word in ALTERNATIVES:
            if isinstance(held := result.get(word), list):
                result[word] = [self.settled(one, NOTHING_SAID if given else numbers) for one in held]
                given = True
        if isinstance(held := result.get("allOf"), list):
            members: list[Any] = []
            for one in held:
                if isinstance(one, Mapping):
                    one, given = self._placed(one, numbers, given)
                members.append(one)
            result["allOf"] = members
        return result, given

    def _refuse_scattered(self, node: Mapping[str, Any], numbers: Numbers) -> None:
        """What is said of one number in several places that cannot be joined, where rounding could matter."""
        places = [*_heirs(node), *({"$ref": ref} for ref in _conjoined(node, "$ref"))]
        beside = bool(numbers.words and "$ref" in places[-1]) if places else False
        if len(places) + beside < 2:
            return
        speaking = [words for place in places if (words := self._words(place))]
        said = numbers.words.union(*speaking)
        if len(speaking) + beside > 1 and said & DELICATE:
            raise Unsupported(
                "the schema's numbers are not supported where they come from $ref or several of anyOf, oneOf, enum "
                "and const together"
            )

    def _words(self, node: Any) -> set[str]:
        """The keywords in which `node` speaks of the number that it is, wherever."""
        if not isinstance(node, Mapping):
            return set()
        words = {word for word, value in node.items() if _is_bound(word, value)}
        if any(is_number(value) for value in _values(node)):
            words.add("const")
        for word in ("allOf", *ALTERNATIVES):
            held = node.get(word)
            for one in held if isinstance(held, list) else ():
                words |= self._words(one)
        if isinstance(ref := node.get("$ref"), str):
            words |= self._words_at(ref)
        return words

    def _words_at(self, ref: str) -> set[str]:
        """Of what `ref` points at; where that leads on to itself, all there are."""
        if ref not in self._known:
            self._known[ref] = set(BOUNDS)
            self._known[ref] = self._words(self.target(ref))
        return self._known[ref]

    def target(self, ref: str) -> Any:
        """What a pointer within the schema points at. Of other references nobody knows here: they may say anything."""
        place: Any = self._root
        if not ref.startswith("#") or ref[1:2] not in ("", "/"):
            return dict.fromkeys(BOUNDS, 1)
        for part in unquote(ref).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list):
                place = place[int(name)] if name.isdecimal() and int(name) < len(place) else None
            else:
                place = place.get(name) if isinstance(place, Mapping) else None
        return place


def _gathered(node: Mapping[str, Any]) -> Numbers:
    """What a node says of a number itself and in `allOf`."""
    types = node.get("type")
    names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    numbers = Numbers(whole="integer" in names and "number" not in names)
    for word in BOUNDS:
        if is_number(value := node.get(word)):
            numbers &= Numbers.said(word, exact(value))
    held = node.get("allOf")
    for member in held if isinstance(held, list) else ():
        if isinstance(member, Mapping):
            numbers &= _gathered(member)
    return numbers


def _conjoined(node: Mapping[str, Any], word: str) -> Iterator[Any]:
    """The values of a keyword in a node and in its `allOf`."""
    if word in node:
        yield node[word]
    held = node.get("allOf")
    for member in held if isinstance(held, list) else ():
        if isinstance(member, Mapping):
            yield from _conjoined(member, word)


def _heirs(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The places in a node and its `allOf` that have alternatives, each as a schema of its own."""
    for word in (*ALTERNATIVES, "enum", "const"):
        for value in _conjoined(node, word):
            yield {word: value}


def _values(node: Mapping[str, Any]) -> list[Any]:
    """What a node's `const` and `enum` list."""
    held = node.get("enum")
    return [*([node["const"]] if "const" in node else []), *(held if isinstance(held, list) else [])]


def _allowed(node: Mapping[str, Any], numbers: Numbers) -> list[Any] | None:
    """What of a node's `enum`, or else of its `const`, `numbers` leave; None where there is neither."""
    values = node.get("enum")
    if not isinstance(values, list):
        if "const" not in node:
            return None
        values = [node["const"]]
    return [one for one in values if not is_number(one) or numbers.allow(exact(one))]


def _refs(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if isinstance(ref := one.get("$ref"), str):
                yield ref
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _is_bound(word: str, value: object) -> bool:
    """Of another kind it is llguidance's to refuse."""
    return word in BOUNDS and is_number(value)
