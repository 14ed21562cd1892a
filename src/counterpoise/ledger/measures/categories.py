"""What kind of token it is, by its text alone: template, connective, number, operator, reasoning or
other.

A rule sees one vocabulary entry without its context, so that a whole vocabulary is labelled once.
Replace the rules by your own function
``fn(texts: list[str]) -> list[str]`` with the config key ``ledger.categories: "your.module:fn"``;
it may use other names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from counterpoise.errors import import_path
from counterpoise.run.schema import REST

CATEGORIES = ("template", "connective", "number", "operator", "reasoning", "other")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONNECTIVE = words(
    "so then next now after before and but or nor yet because since therefore thus hence first"
    " firstly second secondly third finally last lastly also if else when while whereas however"
    " moreover furthermore although though unless until which instead otherwise consequently"
    " meanwhile likewise similarly accordingly once"
)
REASONING = words(
    "let lets us wait check verify suppose assume consider compute calculate evaluate solve"
    " simplify add adding added subtract subtracting minus plus multiply divide sum total"
    " difference product quotient remainder equals equal get gets gives give gave making make makes"
    " go up down start begin term terms work running keep recall note notice observe try again"
    " actually maybe perhaps hmm alternatively mistake wrong correct recheck find determine show"
    " prove means implies imply case cases substitute factor expand convert combine apply need know"
    " given think see count compare increase decrease double half twice"
)
TEMPLATE = words(
    "answer answers final solution question problem step steps boxed box user assistant system"
    " result results text"
)
NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
    " hundred thousand million billion"
)
LATEX_OPERATORS = words(
    r"\times \cdot \div \pm \mp \frac \dfrac \sqrt \sum \prod \le \leq \ge \geq \ne \neq \approx"
    r" \equiv \to"
)

_MARKS = str.maketrans(
    {"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"}
)  # how byte-level and sentencepiece vocabularies write spaces
_SPECIAL = re.compile(r"<[^<>\s]*>|<\|[^<>]*\|>|\[(PAD|UNK|CLS|SEP|MASK|INST|/INST)\]")
_NUMBER = re.compile(r"[+-]?[0-9][0-9.,]*%?")
_OPERATOR = re.compile(r"[-+*/=<>^×÷±∓≤≥≠≈√∑∏→⇒%]|[<>=!]=|->|=>|\+=|\(-|\)=|=-|=\+")


def categories(texts: Sequence[str]) -> list[str]:
    """The category of each vocabulary entry.

    Spaces before a token and its case do not count. Punctuation, line breaks, markup and special
    tokens are template; digits and number words are numbers; pieces of words are other, unless they
    are a listed word by themselves.

    >>> categories(["So", " the", " answer", " is", " -", "7", ".", "<eos>", " subtract"])
    ['connective', 'other', 'template', 'other', 'operator', 'number', 'template', 'template',
    'reasoning']"""
    return [category(text) for text in texts]


@functools.lru_cache(maxsize=1 << 18)  # a vocabulary: batch after batch asks for the same texts
def category(text: str) -> str:
    """The category of one token text."""
    bare = text.translate(_MARKS).strip()
    if not bare or _SPECIAL.fullmatch(bare):
        return "template"
    if _NUMBER.fullmatch(bare):
        return "number"
    if _OPERATOR.fullmatch(bare) or bare in LATEX_OPERATORS:
        return "operator"
    word = bare.lower().strip("\\.,:;!?\"'`*_#()[]{}$")
    if not word:
        return "template"
    for name, words in (
        ("number", NUMBER_WORDS),
        ("connective", CONNECTIVE),
        ("reasoning", REASONING),
        ("template", TEMPLATE),
    ):
        if word in words:
            return name
    return "other" if any(map(str.isalpha, word)) else "template"


def name_tokens(
    function: Callable[[Sequence[str]], list[str]], texts: Sequence[str]
) -> tuple[list[str], str | None]:
    """The category of each text by a function of the user's; by the default rules, and why, where
    what it gives cannot be used.

    >>> name_tokens(lambda texts: ["a", "b"], ["x", "7"])
    (['a', 'b'], None)
    >>> names, why = name_tokens(lambda texts: ["a"], ["x", "7"])
    >>> names, why.split(":")[0]
    (['other', 'number'], 'ledger.categories gave 1 names for 2 tokens')
    """
    try:
        names = list(function(texts))
    except (
        Exception
    ) as error:  # the ledger is an observer: what a user's function does must not end a run
        wrong = f"raised {type(error).__name__}: {error}"
    else:
        if len(names) == len(texts) and all(
            isinstance(name, str) and name != REST for name in names
        ):
            return names, None
        wrong = f"gave {len(names)} names for {len(texts)} tokens"
        if len(names) == len(texts):
            wrong = (
                "gave"
                f" {next(name for name in names if not isinstance(name, str) or name == REST)!r} as"
                " a name"
            )
    return (
        categories(texts),
        (
            f"ledger.categories {wrong}: the default rules are used. Give one name a token, any but"
            f" {REST!r}."
        ),
    )


def load_categories(spec: str | None) -> Callable[[Sequence[str]], list[str]]:
    """The default rules, or a function of your own by import path ``"your.module:fn"``."""
    if spec is None:
        return categories
    return import_path(spec, "ledger.categories")
