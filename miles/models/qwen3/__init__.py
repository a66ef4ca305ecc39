"""Qwen3 dense: grouped-query attention with per-head query and key norms, SwiGLU, rotary embedding."""

__all__ = ["chat", "config", "weights"]
