"""Checks of this repository's own code, part of `make lint`; no product code imports them."""
