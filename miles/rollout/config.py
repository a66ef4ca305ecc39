"""Configuration of rollouts, engines and the router (`rollout.*`, `engine.*`, `router.*` of a recipe)."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from miles.config import StrictModel, user_code
from miles.quant.config import NVFP4Options
from miles.rollout.rewards import RewardConfig


class NonzeroStdFilter(StrictModel):
    """Refuse a group whose rewards are all equal: it carries no gradient (dynamic sampling, DAPO).

    `part`: compare that part of the rewards instead, such as `judged`, the reward before its length was looked at.
    """

    kind: Literal["check_reward_nonzero_std"]
    part: str | None = None


class NoAbortedFilter(StrictModel):
    """Refuse a group with an aborted or failed sample, or one without a reward."""

    kind: Literal["check_no_aborted"]


class RewardRangeFilter(StrictModel):
    """Keep a group whose mean reward lies in [lo, hi]."""

    kind: Literal["reward_range"]
    lo: float
    hi: float

    @model_validator(mode="after")
    def _ordered(self) -> RewardRangeFilter:
        if self.lo > self.hi:
            raise ValueError(f"reward_range: lo {self.lo} is above hi {self.hi}; swap them")
        return self


class UserFilter(StrictModel):
    """A function of the user's own, `(group: list[Sample]) -> bool`; False refuses the group."""

    kind: Literal["python"]
    path: Annotated[str, AfterValidator(user_code.full_reference)]


FilterConfig = Annotated[
    NonzeroStdFilter | NoAbortedFilter | RewardRangeFilter | UserFilter, Field(discriminator="kind")
]


class FiltersConfig(StrictModel):
    """Applied in order to each finished group; the first refusal wins."""

    chain: list[FilterConfig] = Field(default_factory=list)
    # Consecutive refusals before the run stops; None: 64 times batch_groups.
    starvation_limit: int | None = Field(None, ge=1)
    # Rounds of requests that one step may take, the first included; None: as many as it needs.
    max_waves: int | None = Field(None, ge=1)
    # What follows when the last of them leaves groups missing: stop the run, or train on those that there are.
    at_limit: Literal["error", "train"] = "error"

    @model_validator(mode="after")
    def _bounds_something(self) -> FiltersConfig:
        if self.max_waves is not None and not self.chain:
            raise ValueError(
                "rollout.filters.max_waves has no effect with an empty rollout.filters.chain, which refuses nothing; add "
                "a filter such as check_reward_nonzero_std, or remove max_waves"
            )
        if self.at_limit != "error" and self.max_waves is None:
            raise ValueError(
                "rollout.filters.at_limit has no effect without rollout.filters.max_waves; set the limit, or remove it"
            )
        return self


class RolloutConfig(StrictModel):
    """How many prompts a step asks for, how they are sampled and judged."""

    batch_groups: int = Field(16, ge=1)
    group_size: int = Field(16, ge=1)
    # Groups asked for in a wave, relative to those still missing; surplus groups are dropped (synchronous mode).
    over_sampling: float = Field(1.0, ge=1.0)
    # How many versions behind the trained one a group may start (async mode); 0 is on-policy.
    max_staleness: int = Field(0, ge=0)
    partial: bool = False
    mask_offpolicy_in_partial: bool = False
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, lt=1)
    max_new_tokens: int = Field(64, ge=1)
    # Prompt plus response; None: the engine's own limit.
    max_context: int | None = Field(None, ge=2)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    ignore_eos: bool = False
    request_timeout_s: float = Field(600.0, gt=0)
    # A function of the user's own that turns a prompt into an answer, in several turns for instance: an `async def`
    # (ctx, sample, sampling) -> Sample or list of them; null: one request.
    generate: Annotated[str, AfterValidator(user_code.full_reference)] | None = None
    reward: RewardConfig = RewardConfig()
    filters: FiltersConfig = FiltersConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        if self.group_size == 1 and any(f.kind == "check_reward_nonzero_std" for f in self.filters.chain):
            raise ValueError(
                "rollout.group_size is 1 and rollout.filters has check_reward_nonzero_std, which would refuse every "
                "group; raise rollout.group_size to 2 or more, or remove the filter"
            )
        if self.mask_offpolicy_in_partial and not self.partial:
            raise ValueError("rollout.mask_offpolicy_in_partial needs rollout.partial=true; set it, or remove the mask")
        if self.filters.max_waves is not None and self.max_staleness:
            raise ValueError(
                f"rollout.filters.max_waves has no meaning with rollout.max_staleness {self.max_staleness}, where groups "
                "are asked for one by one; use rollout.filters.starvation_limit, or rollout.max_staleness=0"
            )
        overlong = self.reward.overlong
        if overlong is not None and overlong.buffer_tokens > self.max_new_tokens:
            raise ValueError(
                f"rollout.reward.overlong.buffer_tokens is {overlong.buffer_tokens}, above rollout.max_new_tokens "
                f"{self.max_new_tokens}: every answer would be punished; lower it"
            )
        if self.reward.length_normalised is not None and self.group_size == 1:
            raise ValueError(
                "rollout.reward.length_normalised compares the answers of a group, and rollout.group_size is 1; raise "
                "rollout.group_size, or use rollout.reward.overlong"
            )
        if self.generate is not None and self.partial:
            raise ValueError(
                "rollout.partial continues an aborted answer token by token, and rollout.generate decides by itself what "
                "comes next; set rollout.partial to false, or remove rollout.generate"
            )
        if self.top_k == 0:
            raise ValueError("rollout.top_k is 0, which allows no token; use -1 for no limit")
        return self

    @property
    def needs_sampling_mask(self) -> bool:
        """True when the sampler cuts the distribution, so that training must score on its support."""
        return self.top_p < 1.0 or self.min_p > 0.0 or self.top_k > 0

    @property
    def starvation_limit(self) -> int:
        return self.filters.starvation_limit or 64 * self.batch_groups


_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


def check_host(host: str) -> None:
    """`ValueError` for text that is neither an IP address nor a host name."""
    if re.fullmatch(r"[0-9.]*", host) or ":" in host:
        try:
            ipaddress.ip_address(host)
        except ValueError as error:
            raise ValueError(f"{error}; use an address of this machine, such as 127.0.0.1") from None
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is no host name; use an address of this machine, such as 127.0.0.1")


class EngineConfig(StrictModel):
    """One rollout engine. `max_total_tokens` bounds the KV cache, `max_running` the batch."""

    engine: Literal["embedded", "sglang"] = "embedded"
    count: int = Field(1, ge=1, le=256)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(1, ge=1, le=1024)
    host: str = "127.0.0.1"
    # 0: a free port, reported by the engine itself.
    port: int = Field(0, ge=0, le=65535)
    # None: the model's own limit.
    context_length: int | None = Field(None, ge=2)
    max_running: int = Field(512, ge=1)
    max_total_tokens: int = Field(65536, ge=16)
    max_prefill_tokens: int = Field(2048, ge=16)
    prefix_cache: bool = True
    # Embedded only: keep routed experts packed in NVFP4 and compute with what they decode to (`quant.nvfp4`'s twin).
    nvfp4_experts: NVFP4Options | None = None
    start_timeout_s: float = Field(120.0, gt=0)
    # SGLang only: further server arguments, e.g. {"mem-fraction-static": 0.5}.
    server_args: dict[str, Any] = Field(default_factory=dict)
    # SGLang only: the interpreter of its environment, as SGLang pins other versions than ours; None: this one.
    python: str | None = None
    # SGLang only: further variables of the server's environment.
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, host: str) -> str:
        check_host(host)
        return host

    @field_validator("device")
    @classmethod
    def _device_is_one_of_ours(cls, device: str) -> str:
        # torch keeps a device's number in a signed byte.
        if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", device):
            raise ValueError(f"{device!r} is no device; use cpu, cuda or cuda:N")
        return device

    @field_validator("python")
    @classmethod
    def _python_is_a_path(cls, python: str | None) -> str | None:
        # Not resolved: the interpreter of a virtual environment is a link to another one.
        return None if python is None else os.path.abspath(os.path.expanduser(python))

    @model_validator(mode="after")
    def _options_fit_engine(self) -> EngineConfig:
        for option in ("server_args", "python", "env"):
            if self.engine == "embedded" and getattr(self, option):
                raise ValueError(
                    f"engine.{option} is for engine.engine=sglang; the embedded engine takes engine.* keys, and runs in this "
                    "interpreter"
                )
        if "PYTHONPATH" in self.env:
            raise ValueError("engine.env.PYTHONPATH is set by the run; install into the environment of engine.python")
        if self.engine != "embedded" and self.nvfp4_experts is not None:
            raise ValueError("engine.nvfp4_experts is for the embedded engine; SGLang takes a converted checkpoint")
        if self.port and self.count > 1:
            raise ValueError(f"engine.port is {self.port} but engine.count is {self.count}; use port 0")
        return self


class RouterConfig(StrictModel):
    """Request spreading over several engines."""

    policy: Literal["least_inflight", "round_robin", "session"] = "least_inflight"
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    health_interval_s: float = Field(10.0, gt=0)
    health_timeout_s: float = Field(5.0, gt=0)
    fail_threshold: int = Field(3, ge=1)
    recover_threshold: int = Field(2, ge=1)
    timeout_s: float = Field(3600.0, gt=0)
