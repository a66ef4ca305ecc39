"""Trackers: TensorBoard, Weights & Biases, MLflow. They get every row of `metrics.jsonl` and can stop no run.

TensorBoard's file is written by the driver. The others talk to servers and databases, so each has a process of its own
that follows `metrics.jsonl`: there is no queue to fill, the driver writes one byte when there is a new row and never waits.
One that fails is told once and tried again; one that hangs is left when the run ends.
"""

__all__ = ["feed"]
