"""Where a run's processes go (`placement.*`) and on which Ray cluster (`cluster.*`)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from miles.config import StrictModel


class PlacementConfig(StrictModel):
    """Disaggregated: trainer ranks and engines have devices of their own. Colocated: each engine shares the device of
    one trainer rank and hands its memory over while that rank trains."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"


class ClusterConfig(StrictModel):
    """Which Ray cluster runs the actors; says nothing of what is trained, so it is no part of the recipe's digest."""

    # None: the cluster of the environment variable RAY_ADDRESS, else one of the command's own on this machine.
    # `local`: one of its own; `auto`: the one that runs on this machine; host:port: that one.
    address: str | None = None
    # How long to wait for devices of an existing cluster that others are using.
    wait_s: float = Field(default=60.0, gt=0)

    @field_validator("address")
    @classmethod
    def _address_is_one_that_a_driver_can_join(cls, address: str | None) -> str | None:
        if address is not None:
            check_address(address)
        return address


def check_address(address: str) -> None:
    """`ValueError` for text that is neither local, auto nor host:port."""
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is Ray's client protocol, but the command must run on a node of the cluster: start it there "
            "with the address host:port of the head, or auto"
        )
    found = re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(\d{1,5})", address)
    if address not in ("local", "auto") and not (found and 0 < int(found[2]) < 65536):
        raise ValueError(
            f"{address!r} is no address of a Ray cluster; use host:port, auto, or local for one of its own"
        )
