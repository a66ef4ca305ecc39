"""Examples with given answers: rows of the data become token ids with a mask of what is learnt.

`source` gives a step its examples in a resumable order, `encoder` makes ids of one, `rows` reads them. The loss is
`miles.algos.losses.sft`, or one of the user's own that declares no advantages. Left out: pairs of a better and a worse
answer.
"""

__all__ = ["config", "rows", "source"]
