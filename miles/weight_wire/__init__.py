"""How weights travel from a trainer to an engine: bucket, folder, delta, the engine's table, memory that both map.

Knows bytes, dtypes and names; which weights go where is `miles.sync`, who receives them is the engine's affair.
"""

__all__ = ["bucket", "delta", "folder", "server_loader", "shared_buffer", "table"]
