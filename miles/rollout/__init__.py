__all__ = [
    "access",
    "async_rollout",
    "cli",
    "config",
    "engine",
    "engines",
    "errors",
    "http_server",
    "pool",
    "protocol",
    "rewards",
    "sync_rollout",
]
