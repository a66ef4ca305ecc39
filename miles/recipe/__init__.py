"""The typed recipe: one YAML file that starts one run, composed of the components' own configurations.

`load(path, overrides)` reads, merges, validates and cross-checks; it needs no GPU, Ray, torch or network.
"""

from miles.recipe.loader import load
from miles.recipe.schema import Recipe, digest

__all__ = ["Recipe", "created_tokenizer", "digest", "dtype_rules", "load", "placement", "rules", "schema", "warm_start"]
