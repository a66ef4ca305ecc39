"""Test processes: one supervised pytest, what stands between it and the runner, and the plugin inside it."""

__all__ = ["process_tree", "pytest_process", "supervisor_client"]
