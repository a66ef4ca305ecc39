"""What a run shows and leaves behind: the metrics log, TensorBoard events, live progress, the reward report."""

__all__ = ["metrics_log", "progress", "reward_report", "tensorboard_events"]
