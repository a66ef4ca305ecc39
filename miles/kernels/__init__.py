__all__ = ["formats", "log_probs", "mxfp4_to_fp8", "nvfp4_qdq", "row_attention"]
