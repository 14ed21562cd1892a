"""Where a worked answer first claims something false: the first equation between numbers that does
not hold.

Only what can be read for certain is judged: numbers, brackets and + - * / to the left of ``=``, one
number to the right. Everything else (units inside, percent, powers, letters) is passed over.
"""

from __future__ import annotations

import ast
import re
from decimal import Decimal
from fractions import Fraction

LONGEST = 200  # characters of an expression that are read

# each is replaced by as many characters, so that offsets stay
_SPELLINGS = [
    (re.compile(r"\\times|\\cdot|[×·]|(?<=[\d\s)])x(?=[\s$(]*\d)"), "*"),
    (re.compile(r"\\div|÷"), "/"),
    (re.compile(r"[–−]"), "-"),
    (re.compile(r"\\[()\[\]]"), "\n"),
]
_LEFT = re.compile(r"[\d\s.,$()+\-*/]*$")
_BULLET = re.compile(r"^\s*(?:[-*+]\s+|\d+[.)]\s+)")
_BREAK = re.compile(r"[.,]\s+|\n")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MANY_WAYS = re.compile(r"/\s+\d+\s*/")  # 25 / 1/3: by which of the two is meant?
_RIGHT = re.compile(r"[\s$]*((?:-[\s$]*)?(\d[\d,]*(?:\.\d+)?))")
# after the number on the right: it was the beginning of something else
_GOES_ON = re.compile(
    r"[^\W\d_]|[.,:]\d|[\s$]*(?:[+*/^%!=\d(]|-[\s$]*[\d(]|and\b|cents?\b)", re.IGNORECASE
)


def false_equation(text: str) -> int | None:
    """The offset of the first wrong character in a number that an equation claims, None where every
    equation that can be read holds.

    A rounded result holds: a whole number within a half, decimals within one unit of the last.

    >>> text = "She pays 3 * $4 = $12. With tips 12 + 5 = 18 dollars."
    >>> text[false_equation(text) :]
    '8 dollars.'
    >>> false_equation("100 / 3 = 33.3, and half of it = 20")
    """
    plain = text
    for spelling, sign in _SPELLINGS:
        plain = spelling.sub(lambda match, sign=sign: sign.ljust(len(match[0])), plain)
    for equals in re.finditer("=", plain):
        claim = _RIGHT.match(plain, equals.end())
        if claim is None or _GOES_ON.match(plain, claim.end()):
            continue
        value = left_value(plain[max(0, equals.start() - LONGEST) : equals.start()])
        if value is not None and not _holds(value, claim):
            return first_wrong(value, claim)
    return None


def left_value(before: str) -> Fraction | None:
    """The value of the expression that a text ends with; None unless it has an operator and can be
    read from its first character on.

    >>> left_value("So we get (2 + 3) * 4 ")
    Fraction(20, 1)
    >>> left_value("20% * 50 ")
    """
    run = _LEFT.search(before)
    if run is None or len(run[0]) == LONGEST:
        return None
    line = run[0].rpartition("\n")
    opens_line = bool(line[1]) or before[: run.start()][-1:] in ("", "\n")
    expression = _BULLET.sub("", line[2]) if opens_line else line[2]
    expression = _inside(_BREAK.split(expression)[-1])
    expression = _THOUSANDS.sub("", expression).replace("$", "").strip()
    if not expression or expression[0] in "+-*/.," or _MANY_WAYS.search(expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
        return _value(tree) if isinstance(tree, ast.BinOp) else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _inside(expression: str) -> str:
    """What follows the last bracket that is not closed.

    >>> _inside("2 * (3 + (4 - 1)")
    '3 + (4 - 1)'
    """
    depth = 0
    for at in range(len(expression) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(expression[at], 0)
        if depth < 0:
            return expression[at + 1 :]
    return expression


def _value(tree: ast.expr) -> Fraction:
    match tree:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(f"{type(tree).__name__} is not read here")


def first_wrong(value: Fraction, claim: re.Match[str]) -> int:
    """The offset at which the claimed number first differs from the true one as one writes it; its
    first digit where the true one has no last decimal.

    >>> first_wrong(Fraction(1250), re.match("[ ]*(-?(1,350))", " 1,350"))
    3
    """
    decimal = Decimal(value.numerator) / value.denominator
    if Fraction(decimal) != value or (value < 0) != claim[1].startswith("-"):
        return claim.start(1)
    true, places = f"{abs(decimal):f}", [*range(*claim.span(2))]
    places = [at for at in places if claim.string[at] != ","]
    wrong = [at for at, digit in zip(places, true) if claim.string[at] != digit]
    return [*wrong, *places[len(true) :], claim.end(2)][0]


def _holds(value: Fraction, claim: re.Match[str]) -> bool:
    digits = claim[2].replace(",", "")
    claimed = Fraction(digits) * (-1 if claim[1].startswith("-") else 1)
    decimals = len(digits.partition(".")[2])
    allowed = Fraction(1, 10**decimals) if decimals else Fraction(1, 2)
    return value == claimed or abs(value - claimed) < allowed
