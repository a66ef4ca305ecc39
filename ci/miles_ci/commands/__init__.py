"""The subcommands of `miles-ci`, one module each; see `miles_ci.cli` for what a module must offer."""
