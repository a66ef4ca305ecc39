"""SGLang servers behind the engine contract: how one is started and supervised.

A small supervisor process of ours (`python -m miles.rollout.engines.sglang`) leases the ports, starts
`sglang.launch_server`, reports its address once it is healthy, and takes the server down with itself or with its
parent. What a build offers is read by `EngineClient.info()`.
"""

from miles.rollout.engines.sglang.launch import launch

__all__ = ["interpreter", "launch", "wire"]
