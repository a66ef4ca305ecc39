"""The scalar types that SGLang's quantisation modules name when they are imported."""

from __future__ import annotations


class ScalarType(str):
    """A name; nothing computes with it here."""

    size_bits = 4


class _ScalarTypes:
    def __getattr__(self, name: str) -> ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        return ScalarType(name)


scalar_types = _ScalarTypes()
