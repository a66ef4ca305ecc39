"""Accelerators of this host: which there are, whether they work, who uses them, and leases on them."""

__all__ = ["added", "dispatch", "health", "inventory", "locks", "probe_child", "slots"]
