"""The records that travel from engine to optimizer, and how they are packed and scheduled.

`sample` (the one record type), `prompts` (where a run's prompts come from: `tasks` reads them, `chat` and
`prompt_encoder` make token ids of them), `counting` (who counts in a step), `schedule` and `packing` (which
data-parallel rank trains what), `batch` (tensors), `step_bundle` (one step on disk). What is computed on these records lives in `miles.algos`. Nothing is imported here: each
module is imported by name, so that a process pays only for what it uses.
"""

__all__ = [
    "batch",
    "batch_layout",
    "bundle_marker",
    "chat",
    "config",
    "counting",
    "end_tokens",
    "packing",
    "prompt_encoder",
    "prompts",
    "sample",
    "sampling_mask",
    "schedule",
    "step_bundle",
    "supervised",
    "tasks",
    "tensors",
    "tokenizer",
]
