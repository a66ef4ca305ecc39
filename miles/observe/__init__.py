"""What a run shows and leaves behind: the metrics log, TensorBoard events, live progress, the reward report."""
