"""One module for each family of generated workflow files; each returns `{file name: document}`."""

__all__ = ["bots", "pr_test", "reusable", "scheduled", "service"]
