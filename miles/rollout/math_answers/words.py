"""The vocabulary of answers: functions, constants, units, and the spellings that LaTeX and Unicode have for them."""

from __future__ import annotations

# Our name of each function -> how many arguments it takes (least, most).
ARITY = {
    **dict.fromkeys(("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"), (1, 1)),
    **dict.fromkeys(("sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh"), (1, 1)),
    **dict.fromkeys(("exp", "abs", "sign", "floor", "ceiling", "re", "im", "arg", "conjugate"), (1, 1)),
    **dict.fromkeys(("factorial", "gamma"), (1, 1)),
    "log": (1, 2),
    "sqrt": (1, 1),
    "root": (2, 2),
    "binomial": (2, 2),
    **dict.fromkeys(("gcd", "lcm", "min", "max"), (1, 20)),
}
ALIASES = {
    "ln": "log",
    "lg": "lg",
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"arc{name}h": f"a{name}h" for name in ("sin", "cos", "tan")},
    **{f"ar{name}h": f"a{name}h" for name in ("sin", "cos", "tan")},
    "Abs": "abs",
    "ceil": "ceiling",
    "sgn": "sign",
    "Re": "re",
    "Im": "im",
    "Gamma": "gamma",
    "tg": "tan",
    "ctg": "cot",
    "cosec": "csc",
}
FUNCTION_WORDS = frozenset(ARITY) | frozenset(ALIASES)
CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "oo": "oo", "infty": "oo", "inf": "oo", "infinity": "oo", "imath": "i"}
# Inverse by a power of -1: \sin^{-1} x.
INVERSES = {name: f"a{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")}
_GREEK_LETTERS = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon "
    "phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell"
)
GREEK = frozenset(_GREEK_LETTERS.split())
_UNIT_WORDS = (
    "cm mm km kg mg ml mph inch inches foot feet ft meter meters metre metres mile miles hour hours minute minutes "
    "second seconds day days week weeks month months year years dollar dollars cent cents degree degrees unit units "
    "percent square cubic"
)
UNITS = frozenset(_UNIT_WORDS.split())
SAME_UNIT = {
    "degrees": "degree",
    "deg": "degree",
    "inches": "inch",
    "feet": "foot",
    "ft": "foot",
    "dollars": "dollar",
    "units": "unit",
}

# Written in Unicode -> the same in ASCII.
CHARACTERS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "*",
        "\u00b7": "*",
        "\u22c5": "*",
        "\u2217": "*",
        "\u00f7": "/",
        "\u2215": "/",
        "\u2044": "/",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u221a": r"\sqrt ",
        "\u2264": "<=",
        "\u2265": ">=",
        "\u2260": "!=",
        "\u00b1": r"\pm ",
        "\u222a": r"\cup ",
        "\u2208": r"\in ",
        "\u2205": r"\emptyset ",
        "\u211d": r"\mathbb{R}",
        "\u00bd": "(1/2)",
        "\u00bc": "(1/4)",
        "\u00be": "(3/4)",
        "\u03b8": r"\theta ",
        "\u03b1": r"\alpha ",
        "\u03b2": r"\beta ",
        **{
            character: f"^{{{number}}}"
            for number, character in enumerate("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
        },
    }
)
# LaTeX commands that are one of our operators.
OPERATORS = {
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "div": "/",
    "pm": "±",
    "mp": "±",
    "le": "<=",
    "leq": "<=",
    "leqslant": "<=",
    "ge": ">=",
    "geq": ">=",
    "geqslant": ">=",
    "lt": "<",
    "gt": ">",
    "ne": "!=",
    "neq": "!=",
    "in": "in",
    "cup": "U",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "mid": "|",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "langle": "(",
    "rangle": ")",
    "lfloor": "lfloor",
    "rfloor": "rfloor",
    "lceil": "lceil",
    "rceil": "rceil",
    "circ": "°",
    "degree": "°",
    "prime": "'",
}
