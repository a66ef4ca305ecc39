"""From what a test process left behind to the outcome of its unit."""
