"""One module for each family of generated workflow files; each returns `{file name: document}`."""
