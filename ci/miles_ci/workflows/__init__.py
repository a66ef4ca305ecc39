"""GitHub Actions workflows as output: generated from `registry.yaml`, linted, and proven by a simulator.

`generate` renders the files, `simulate` executes the semantics of jobs, conditions, matrices, reusable
workflows and concurrency, `walk` proves invariants over every reachable state, `lint` holds our own rules
and drives the official tools. Nothing here talks to the network.
"""

__all__ = ["check", "edits", "events", "files", "generate", "images", "model", "parts", "patches", "simulate"]
