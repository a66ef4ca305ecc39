"""A seeded sample of generated pairs against SymPy's own verdict; `benchmarks/math_judge.py` does it on thousands."""

from __future__ import annotations

from sympy_pairs import generate, sympy_verdict

from miles.rollout.math_answers.compare import equal


def test_pairs_made_by_sympy_are_judged_as_sympy_judges_its_objects():
    decided, wrong = 0, []
    verdicts = set()
    for pair in generate(120, seed=7):
        truth = sympy_verdict(pair, limit_s=3.0)
        if truth is None:
            continue
        decided += 1
        verdicts.add(truth)
        if equal(pair.found, pair.wanted) != truth:
            wrong.append((pair.found, pair.wanted, truth))
    assert decided > 90
    assert verdicts == {True, False}
    assert len(wrong) <= 0.02 * decided, wrong
