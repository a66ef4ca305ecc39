"""`quant` section of a recipe: fake quantisation in the trainer, and gates on metrics. Light: no torch, no Triton."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from miles.config import StrictModel, metric_names
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant.errors import QuantConfigError, QuantError
from miles.quant.nvfp4_config import VARIABLES, current_nvfp4_qdq_config, fake_qat_gate, process_environment
from miles.quant.scope import Ignore, Scope, check_pairs, decoder_layer_count, edge_layers_ignore


class NVFP4Options(StrictModel):
    """Recipe form of `NVFP4QDQConfig`, same names and rules, and which routed experts stay unquantised.

    `ignore`: Hugging Face names, prefixes ending in a dot, or `re:` patterns.
    """

    use_4over6: bool = False
    e4m3_max: Literal[448, 256] = 448
    error_mode: Literal["MAE", "MSE"] = "MAE"
    error_use_fast_math: bool = False
    decode: Literal["te", "stored"] = "te"
    ignore: tuple[str, ...] = ()
    bf16_first_layers: int = Field(default=0, ge=0)
    bf16_last_layers: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _legal(self) -> NVFP4Options:
        self.resolve()
        Ignore(self.ignore)
        if self.error_mode == "MSE" and not self.use_4over6:
            raise ValueError("error_mode=MSE needs use_4over6=true: only the 4over6 choice compares errors")
        return self

    def scope(self, names: Iterable[str], hf_config: Mapping[str, Any]) -> Scope:
        """What is quantised of a model with these Hugging Face names and this config.json.

        QuantConfigError: an entry that matches nothing, more bf16 layers than there are, or half a gate/up pair.
        """
        known = list(names)
        if unused := Ignore(self.ignore).unused(known):
            raise QuantConfigError(
                f"nvfp4 ignore: {unused[0]!r} matches no weight of the model; give a Hugging Face name, a prefix ending in "
                "a dot, or re:PATTERN for the whole name"
            )
        scope = Scope(Ignore(self.ignore))
        first, last = self.bf16_first_layers, self.bf16_last_layers
        try:
            if first or last:
                edges = edge_layers_ignore(known, decoder_layer_count(hf_config), first, last)
                scope = Scope(Ignore((*self.ignore, *edges.entries)))
            chosen = scope.select(known)
            check_pairs(chosen)
            if not chosen and Scope().select(known):
                raise ValueError("no routed expert is left to quantise")
        except ValueError as error:
            raise QuantConfigError(f"nvfp4 ignore, bf16_first_layers, bf16_last_layers: {error}") from None
        return scope

    def resolve(self) -> NVFP4QDQConfig:
        return NVFP4QDQConfig(
            use_4over6=self.use_4over6,
            e4m3_max=self.e4m3_max,
            error_mode=ErrorMode(self.error_mode),
            error_use_fast_math=self.error_use_fast_math,
            decode=self.decode,
        )


class MetricGate(StrictModel):
    """Stops a run when |metric| exceeds `max_abs`; a missing or NaN metric fails too.

    Metrics that may be negative (rewards, differences, the k1 estimate of a KL) can be wrong in both directions, so a
    one-sided `max` is refused for them: a large negative value would pass. The table of metric names says which those
    are; `signed` speaks of a metric that is not in it.
    """

    name: str
    max_abs: float | None = Field(default=None, ge=0)
    max: float | None = None
    signed: bool | None = None

    @model_validator(mode="after")
    def _two_sided(self) -> MetricGate:
        if (self.max_abs is None) == (self.max is None):
            raise ValueError(f"gate {self.name!r}: give exactly one of max_abs and max")
        if self.signed is False and metric_names.signed(self.name):
            raise ValueError(
                f"gate {self.name!r}: the metric is signed, `signed: false` cannot change that; use max_abs"
            )
        if self.max is not None and self.is_signed:
            raise ValueError(f"gate {self.name!r}: the metric is signed, so a one-sided limit `max` would pass any large negative value; use max_abs")  # fmt: skip
        return self

    @property
    def is_signed(self) -> bool:
        """What the gate or the table says; a metric of which neither says anything may be negative."""
        known = metric_names.signed(self.name) if self.signed is None else self.signed
        return known is not False

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raises `QuantError` naming metric, value and limit."""
        if self.name not in metrics:
            raise QuantError(f"gate {self.name!r}: the metric is missing from this step's metrics")
        value = float(metrics[self.name])
        limit = self.max_abs if self.max_abs is not None else self.max
        assert limit is not None
        exceeded = abs(value) > limit if self.max_abs is not None else value > limit
        if math.isnan(value) or exceeded:
            raise QuantError(f"gate {self.name!r}: {value!r} against a limit of {limit!r}")


class QuantConfig(StrictModel):
    """`quant.fake_qat: nvfp4` turns on fake quantisation of routed-expert weights with `quant.nvfp4`.

    The environment may say the same (`OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG=1` and the NVTE_NVFP4_* variables); where
    both are set and differ, that is an error.
    """

    fake_qat: Literal["none", "nvfp4"] = "none"
    nvfp4: NVFP4Options | None = None
    gates: tuple[MetricGate, ...] = ()

    @model_validator(mode="after")
    def _acts(self) -> QuantConfig:
        if self.nvfp4 is not None and self.fake_qat == "none":
            raise ValueError("quant.nvfp4 acts only with quant.fake_qat: nvfp4; set it, or remove quant.nvfp4")
        return self

    def fake_qat_config(self, environ: Mapping[str, str] | None = None) -> NVFP4QDQConfig | None:
        """The rounding to train with, or None when fake quantisation is off. QuantConfigError: a wrong variable."""
        environ = process_environment() if environ is None else environ
        gate = fake_qat_gate(environ)
        if self.fake_qat == "none" and not gate:
            return None
        try:
            from_environment = current_nvfp4_qdq_config(environ)
        except ValueError as error:
            raise QuantConfigError(f"{error}; give the variable one of these values, or unset it") from None
        if self.fake_qat == "none" or self.nvfp4 is None:
            return from_environment
        mine = self.nvfp4.resolve()
        if any(environ.get(v) for v in VARIABLES):
            for field in ("use_4over6", "e4m3_max", "error_mode", "error_use_fast_math"):
                ours, theirs = getattr(mine, field), getattr(from_environment, field)
                if ours != theirs:
                    raise QuantConfigError(
                        f"quant.nvfp4.{field} is {ours!r} but the NVTE_NVFP4_* variables ask for {theirs!r}; unset them or make them agree"
                    )
        return mine

    def check_gates(self, metrics: Mapping[str, float]) -> None:
        for gate in self.gates:
            gate.check(metrics)
