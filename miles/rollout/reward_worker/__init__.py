"""What runs in reward worker processes: a fork server, the worker's loop, and the functions that it can make.

`fork_server.py` is a program. It imports what the function needs once and copies itself for each worker, so that a
worker that was killed is replaced in milliseconds. Nothing here imports more than a worker needs.
"""

__all__ = ["fork_server", "linux", "user_function", "values", "wire"]
