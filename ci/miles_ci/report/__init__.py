"""What is said about results: tables and JUnit XML of one shard, the merge of all shards, analysis, cards.

Reads what `miles_ci.run` wrote; runs nothing itself.
"""

__all__ = ["analyse", "analyst", "cards", "escape", "junit", "merge", "results", "strict_json", "untrusted"]
