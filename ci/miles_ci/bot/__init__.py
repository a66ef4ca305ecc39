"""The bots: comment gateway, approvals, `/rerun-test`, sweeper, required check, and the GitHub client they share.

They act on exact SHAs only, verify what they did, and never leave a message that says "running" for ever.
Everything a person or a pull request wrote is data: it is parsed by one grammar and never reaches a shell.
"""

__all__ = ["dependency_checkouts", "github", "jobs", "oci", "planning", "required_check"]
