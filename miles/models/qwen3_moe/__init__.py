"""Qwen3 mixture of experts: Qwen3 attention, every layer routed by a softmax router without shared experts."""
