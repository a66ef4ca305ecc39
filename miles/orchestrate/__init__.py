"""Ray actors, placement, the training loop, run folders and resume.

Order of reading: `run_folder` (where a run lives), `placement` (who gets which device), `cluster` (Ray), `actors`
(one process, one role), `actor_group` (all actors of a run), `loop` (one step after another), `train` (the command).
"""

__all__ = ["doctor", "dry_run", "eval_command", "event_loop", "replay_command", "run_result", "startable", "train"]
