"""Reference codecs, one module per format: `quantize`, `dequantize`, `qdq` in plain torch fp32.

Every operation is one fp32 operation rounded to nearest even, in the order its module states. A codec checks its
input (dtype, shape, finiteness) and raises with the tensor's name; it knows nothing of files, scopes or devices.
"""

from miles.quant.codecs import fp8_block, fp8_tensor, mxfp4, mxfp8, nvfp4

__all__ = ["checks", "fp8_block", "fp8_tensor", "mxfp4", "mxfp8", "nvfp4"]
