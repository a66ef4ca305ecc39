"""What a run shows and leaves behind: the metrics log, samples as text, trackers, live progress, the reward report."""

__all__ = [
    "config",
    "metrics_log",
    "progress",
    "reward_report",
    "samples_log",
    "samples_view",
    "trackers",
]
