"""Qwen3-MoE speaks the same chat format as the dense Qwen3."""

from __future__ import annotations

from miles.models.qwen3.chat import FORMAT, THINK, TOOL_CALL, TURN_END, TURN_START, split_thinking

__all__ = ["FORMAT", "THINK", "TOOL_CALL", "TURN_END", "TURN_START", "split_thinking"]
