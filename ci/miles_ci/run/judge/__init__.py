"""From what a test process left behind to the outcome of its unit."""

__all__ = ["judge", "metric_bounds", "never_executed", "pytest_events", "retry", "signature"]
