__all__ = ["cli", "config", "errors", "session"]
