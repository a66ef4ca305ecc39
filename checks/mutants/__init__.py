"""Does a test see it when the code changes? `python -m checks.mutants`, which `make mutants` calls.

One small change at a time (a comparison, an operand, a constant, a statement left out) is made in a copy of the tree,
and the tests that reach the changed line are run there. A change that they all pass is a survivor: a line that could be
wrong without anybody noticing. `mutants.toml` beside this file says which packages are looked at and lists survivors
that stay, each with its reason.

Which tests reach a line comes from one run under coverage.py, processes that the tests start included. Tests run in
forked children of this process, which has the large libraries loaded already; a child has a limit of processor time,
of memory and of time on the clock, and everything it leaves behind is killed. Changes are drawn by a seed, so that a
run can be repeated. Leaves out: changes of text, of annotations and of decorators, and several changes at once.
"""
