"""Training backends, checkpoints and replay of one step. `miles.train.backend` is the seam; nothing heavy is imported here."""
