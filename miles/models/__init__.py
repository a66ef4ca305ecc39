__all__ = [
    "config",
    "create",
    "errors",
    "family",
    "hf_files",
    "packed_experts",
    "registry",
    "rope",
    "safetensors_header",
    "spellings",
    "weightmap",
]
