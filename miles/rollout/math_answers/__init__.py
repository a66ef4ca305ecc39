"""Are two mathematical answers equal? An own grammar, exact and high-precision arithmetic, SymPy last.

Nothing here executes text, and every size is bounded before anything is computed. `judge.make` is what a worker
process runs; modules of this package import neither numpy nor pydantic, so that such a process starts quickly.
"""

__all__ = ["boxed", "grammar", "symbolic", "tree"]
