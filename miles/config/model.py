"""Base of every typed configuration: unknown keys refused, values strict, instances frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A configuration class stands beside the component it configures and derives from this.

    Frozen and closed (`extra="forbid"`). Strict: a number written as a string is an error, an integer
    is accepted where a float is asked for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)
