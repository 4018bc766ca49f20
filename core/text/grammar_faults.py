"""What is wrong with a grammar, in words for whoever wrote it. Control code: no torch.

llguidance says it in the words of its own parts: of its languages, its compilers, its settings. What callers can
cause is told here by what they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

MAX_REASON_CHARS = 300
"""Of an account; what it quotes may be of any length."""

NOTHING = "nothing satisfies it"
TOO_COMPLEX = "it is too complex to be followed"
OTHERWISE = "no grammar can be made of it"
"""Where llguidance says what nobody has met yet."""

_KINDS: Mapping[str, str] = {
    "f64": "a number",
    "number": "a number",
    "integer": "a whole number",
    "positive integer": "a whole number, 0 or more",
    "string": "a text",
    "array": "a list",
    "an array": "a list",
    "object": "an object",
    "an object": "an object",
    "bool": "true or false",
    "boolean": "true or false",
    "a string": "a text",
    "a string or array of strings": "a text or a list of texts",
}

Words = str | Callable[[re.Match[str]], str]

_ACCOUNTS: Sequence[tuple[re.Pattern[str], Words]] = [
    (re.compile(pattern), words)
    for pattern, words in (
        # schemas
        (r'Unimplemented keys: \["(?P<word>[^"]*)"', "the schema's keyword {word!r} is not supported"),
        (r"Unknown format: (?P<name>.*)", "the schema's format {name!r} is not supported"),
        (r"Invalid type:\s*(?P<name>.*)", "the schema's type {name!r} is none of JSON's"),
        (
            r"(?P<one>\w+) \((?P<a>[^()]*)\) is greater than (?P<other>\w+) \((?P<b>[^()]*)\)",
            NOTHING + ": the schema's {one} {a} is above its {other} {b}",
        ),
        (
            r"(?P<one>\w+) \((?P<a>[^()]*)\) is equal to (?P<other>\w+) \((?P<b>[^()]*)\)",
            NOTHING + ": between the schema's {one} {a} and its {other} {b} there is no number",
        ),
        (
            r"integer (?:interval|bounds) .*contains? no integer values",
            NOTHING + ": there is no whole number within the schema's bounds",
        ),
        (
            r"does not contain a multiple of (?P<step>[\d.e+-]+)",
            NOTHING + ": there is no multiple of {step} within the schema's bounds",
        ),
        (
            r"minProperties > maxProperties",
            NOTHING + ": the schema's minProperties is above its maxProperties",
        ),
        (
            r"required > maxProperties",
            NOTHING + ": the schema has more required properties than maxProperties",
        ),
        (
            r"anyOf is empty",
            NOTHING + ": no value of the schema's enum or const, or no alternative, is allowed",
        ),
        (
            r"required property '(?P<name>.*)' is unsatisfiable",
            NOTHING + ": the required property {name!r} can have no value",
        ),
        (r"Unsatisfiable schema|is unsatisfiable|are unsatisfiable|No options in anyOf", NOTHING),
        (
            r"coerce_one_of|oneOf constraints",
            "the schema's keyword 'oneOf' is supported only where its cases are plainly apart: by their types, by "
            "their enums, or by a required property with another const in each; 'anyOf' asks for any of them",
        ),
        (
            r"Expected (?P<kind>[\w ]+) for '(?P<word>.*?)', got (?P<given>.*)",
            lambda found: (
                f"the schema's keyword {found['word']!r} must be {_kind(found['kind'])}, not {found['given']}"
            ),
        ),
        (r"schema must be an object or boolean", "each schema must be an object, true or false"),
        (
            r"^(?P<word>\$?\w+) must be (?P<kind>an? [\w ]+)",
            lambda found: f"the schema's keyword {found['word']!r} must be {_kind(found['kind'])}",
        ),
        (
            r"(?:Pointer|Resource|Anchor) '(?:json-schema:///)?(?P<where>[^']*)'",
            "the schema refers to {where!r}, which is not in it",
        ),
        (r"URI reference '(?P<where>[^']*)'", "the schema's {where!r} is no reference"),
        (
            r"patternProperty regexes /(?P<one>.*)/ and /(?P<other>.*)/ are not disjoint",
            "a name may match the schema's patternProperties {one!r} and {other!r} both, which is not supported",
        ),
        (
            r"min/maxProperties only supported",
            "the schema's keywords 'minProperties' and 'maxProperties' are supported only where all its properties are "
            "required",
        ),
        (r"[Cc]ircular reference|infinite loop", "the schema refers to itself and to nothing else"),
        # patterns
        (
            r"lookarounds not supported",
            "a pattern has ^, $ or \\b at its ends alone, and looks around nowhere",
        ),
        (r"(?m)^error: (?P<what>.*)", "the pattern is wrong: {what}"),
        (r"invalid regex|regex parse error", "the pattern is wrong"),
        # all of them
        (r"^NoExtension", NOTHING),
        (r"(?i)too (?:big|large|many|long|deep)|fuel|limit|exceeded|TooComplex|states|digits", TOO_COMPLEX),
    )
]


def reason(message: str) -> str:
    """llguidance's account of an error in a few words of our own."""
    text = message.replace("<non-verbose/>", "").strip()
    text = re.sub(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?", "", text)
    if not text:
        return NOTHING
    if not text.startswith("invalid regex"):
        text = re.sub(r"(?m)^ +\d+ \| .*$", "", text)  # a grammar that nobody but us has written
    for pattern, words in _ACCOUNTS:
        if (found := pattern.search(text)) is not None:
            told = words(found) if callable(words) else words.format(**found.groupdict())
            return told[:MAX_REASON_CHARS]
    return OTHERWISE


def _kind(name: str) -> str:
    return _KINDS.get(name, f"a value of another kind ({name})")
