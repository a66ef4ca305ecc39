"""The subcommands of `miles-ci`, one module each; see `ci.cli` for what a module must offer."""
