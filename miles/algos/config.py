"""Configuration of the algorithm (`algo.*` of a recipe): estimator, loss, KL, corrections, who counts.

Every combination that has no correct meaning is refused here, before anything starts.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from miles.algos.declared import Declared, Kind, check_name, declared, readers, unusable
from miles.config import StrictModel, user_code

Level = Literal["token", "sequence", "geometric"]

# Loss forms whose gradient, on the policy's own samples, already is that of the reverse KL.
_EXACT_AS_THEY_ARE = ("k2", "support_exact")


class KLConfig(StrictModel):
    """`where: reward` subtracts coef·kl from each token's reward; `loss` adds coef·kl to the loss."""

    where: Literal["none", "reward", "loss"] = "none"
    estimator: Literal["k1", "k2", "k3", "low_var", "support_exact"] = "k1"
    coef: float = Field(default=0.0, ge=0.0)
    # Multiply the loss form by the ratio to the old policy, gradient through the ratio. Where old is the current policy
    # (one optimizer step without `correction.bypass`) the ratio is 1 and only its gradient acts.
    unbiased: bool = False

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KLConfig:
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError(
                "algo.kl.estimator k1 in the loss has zero expected gradient; use k2 (unbiased gradient), k3 or "
                "low_var, or put k1 in the reward (algo.kl.where=reward)"
            )
        if self.where == "reward" and self.estimator == "support_exact":
            raise ValueError(
                "algo.kl.estimator support_exact is a loss term; use algo.kl.where=loss, or k1 in the reward"
            )
        if self.unbiased and self.where != "loss":
            raise ValueError("algo.kl.unbiased applies to the loss form only; set algo.kl.where=loss or unbiased=false")
        if self.unbiased and self.estimator in _EXACT_AS_THEY_ARE:
            raise ValueError(
                f"algo.kl.unbiased corrects k3 and low_var; the gradient of {self.estimator} is exact without it and "
                "wrong or noisier with it: set unbiased=false, or estimator=k3"
            )
        if self.where != "none" and self.coef == 0.0:
            raise ValueError("algo.kl.where is set but algo.kl.coef is 0; set a coefficient or where=none")
        if self.where == "none" and (self.coef > 0.0 or self.estimator != "k1"):
            raise ValueError("algo.kl has a coef or an estimator, but algo.kl.where is none; use loss or reward")
        return self


def _check_lower_bound(option: str, lo: float | None) -> None:
    if lo is not None and lo > 1.0:
        raise ValueError(
            f"{option} is {lo}, so the weight 1 of a sample that is exactly on policy lies outside; set it to 1 or "
            "lower (default: 1/hi)"
        )


class RejectConfig(StrictModel):
    """Weight 0 where the off-policy weight at `level` leaves [lo, hi]; lo defaults to 1/hi."""

    level: Level = "geometric"
    lo: float | None = Field(default=None, gt=0.0)
    hi: float = Field(default=1.05, gt=1.0)

    @property
    def low(self) -> float:
        return 1.0 / self.hi if self.lo is None else self.lo

    @model_validator(mode="after")
    def _keeps_what_is_on_policy(self) -> RejectConfig:
        _check_lower_bound("algo.correction.reject.lo", self.lo)
        return self


class CorrectionConfig(StrictModel):
    """Weights w = exp(old - rollout log-probs): truncate = TIS, mask = IcePop, with reject/veto = MIS."""

    mode: Literal["none", "truncate", "clip", "mask"] = "none"
    level: Level = "token"
    lo: float | None = Field(default=None, gt=0.0)
    hi: float = Field(default=2.0, gt=1.0)
    reject: RejectConfig | None = None
    veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    # Use the rollout's log-probs as the old policy: no weight is then left to correct.
    bypass: bool = False

    @property
    def low(self) -> float:
        return 1.0 / self.hi if self.lo is None else self.lo

    @property
    def active(self) -> bool:
        return self.mode != "none" or self.reject is not None or self.veto is not None

    @model_validator(mode="after")
    def _bypass_is_alone(self) -> CorrectionConfig:
        if self.bypass and self.active:
            raise ValueError(
                "algo.correction.bypass makes old = rollout log-probs, so every weight is 1; "
                "drop mode, reject and veto, or set bypass=false"
            )
        idle = {"level", "lo", "hi"} if self.mode == "none" else {"lo"} if self.mode == "truncate" else set()
        for name in sorted(idle):
            if getattr(self, name) != CorrectionConfig.model_fields[name].get_default():
                raise ValueError(
                    f"algo.correction.{name} has no effect with mode {self.mode}; choose a mode that uses it, or remove it"
                )
        _check_lower_bound("algo.correction.lo", self.lo)
        return self


class OPSMConfig(StrictModel):
    """Weight 0 for a sequence with A < 0 whose mean of old - new log-prob exceeds `delta`."""

    delta: float = Field(ge=0.0)


class ValueConfig(StrictModel):
    """Critic of `advantage: gae`: a model of its own, so `lr` alone scales its steps and its loss has no weight."""

    eps_clip: float = Field(default=0.2, gt=0.0)
    lr: float = Field(default=1e-3, gt=0.0)


# Options that shape advantages, or say which of them count.
_OF_ADVANTAGES = ("advantage", "normalize_std", "gamma", "gae_lambda", "value", "zero_variance", "mask_truncated")


def _known(kind: Kind) -> AfterValidator:
    def check(name: str) -> str:
        check_name(kind, name)
        return user_code.reference(name)

    return AfterValidator(check)


class AlgoConfig(StrictModel):
    """`advantage` and `loss` name a built-in one (`miles.algos.declared.BUILT_IN`) or code of the user's own."""

    advantage: Annotated[str, _known("advantage")] = "grpo"
    loss: Annotated[str, _known("loss")] = "ppo_clip"
    # GRPO divides by the group's standard deviation; false is Dr. GRPO.
    normalize_std: bool = True
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    gae_lambda: float = Field(default=1.0, ge=0.0, le=1.0)
    value: ValueConfig = ValueConfig()
    eps_clip: float = Field(default=0.2, gt=0.0)
    eps_clip_high: float | None = Field(default=None, gt=0.0)
    dual_clip_c: float | None = None
    kl: KLConfig = KLConfig()
    entropy_coef: float = Field(default=0.0, ge=0.0)
    # On-policy distillation: A -= opd_coef·(old - teacher log-probs).
    opd_coef: float = Field(default=0.0, ge=0.0)
    # Hugging Face folder of the teacher; any supported family with the policy's tokenizer.
    teacher: str | None = None
    correction: CorrectionConfig = CorrectionConfig()
    opsm: OPSMConfig | None = None
    reduction: Literal["rollout_mean", "token_mean", "fixed"] = "rollout_mean"
    # L_max of `reduction: fixed`, in tokens.
    fixed_length: int | None = Field(default=None, ge=1)
    mask_truncated: bool = False
    zero_variance: Literal["keep", "drop"] = "keep"
    nonfinite: Literal["raise", "skip_step"] = "raise"
    # Score the policy on the sampler's support when the rollout samples with top-p, top-k or min-p.
    support_log_probs: Literal["auto", "off"] = "auto"

    @property
    def clip_high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def declared_advantage(self) -> Declared:
        """What the estimator needs. For a user's own this imports it: `ConfigError` when it cannot be."""
        return declared("advantage", self.advantage)

    @property
    def declared_loss(self) -> Declared:
        """What the policy loss needs. For a user's own this imports it: `ConfigError` when it cannot be."""
        return declared("loss", self.loss)

    @property
    def needs_values(self) -> bool:
        return self.declared_advantage.critic

    @property
    def declares_reference(self) -> bool:
        """The estimator or the loss asks for the start policy's log-probs, beside any KL."""
        return self.declared_advantage.reference or self.declared_loss.reference

    @property
    def needs_reference(self) -> bool:
        return self.kl.where != "none" or self.declares_reference

    @property
    def needs_reference_support(self) -> bool:
        """The reference is scored on every id of the sampler's supports instead of the drawn tokens."""
        return self.kl.where != "none" and self.kl.estimator == "support_exact"

    @property
    def needs_old_log_probs(self) -> bool:
        """The advantage compares the policy before the step, and the rollout's own log-probs do not stand for it."""
        return (self.kl.where == "reward" or self.declared_advantage.reference) and not self.correction.bypass

    @property
    def needs_teacher(self) -> bool:
        return self.opd_coef > 0.0

    def _idle_unless(self) -> tuple[tuple[str, bool, str], ...]:
        """(option, whether it acts, what it acts with): setting one that does not act is refused."""
        advantage, loss = self.declared_advantage, self.declared_loss

        def read(kind: Kind, option: str) -> tuple[str, bool, str]:
            reads = advantage.reads if kind == "advantage" else loss.reads
            return option, option in reads, f"{kind}={readers(kind, option)}, or your own that declares it in `reads`"

        return (
            *(read("advantage", option) for option in ("normalize_std", "gamma", "gae_lambda")),
            ("value", advantage.critic, f"advantage={readers('advantage', 'value')} (it configures the critic)"),
            # The others learn from differences between groups too: equal rewards in a group are no reason to drop it.
            ("zero_variance", advantage.groups, "an advantage within groups"),
            ("teacher", self.opd_coef > 0.0, "opd_coef above 0"),
            ("opd_coef", loss.advantages, "a loss that uses advantages"),
            *(read("loss", option) for option in ("eps_clip", "eps_clip_high", "dual_clip_c")),
        )

    def check_declared(self) -> None:
        """Options against what the estimator and the loss declare: `ValueError`, or `ConfigError` for user code that
        cannot be imported. Built-in ones are checked when the configuration is made, others where a recipe is checked.
        """
        kinds: tuple[tuple[Kind, str, Declared], ...] = (
            ("advantage", self.advantage, self.declared_advantage),
            ("loss", self.loss, self.declared_loss),
        )
        for kind, name, found in kinds:
            for word in unusable(kind, found):
                raise ValueError(f"algo.{kind} {name} declares {word}, which means nothing for a {kind}; remove it")
            for option in found.reads:
                if option not in AlgoConfig.model_fields:
                    raise ValueError(
                        f"algo.{kind} {name} declares that it reads {option!r}, which is no option of algo"
                    )
        if not self.declared_loss.advantages:
            for field in _OF_ADVANTAGES:
                if getattr(self, field) != AlgoConfig.model_fields[field].get_default():
                    raise ValueError(
                        f"algo.{field} has no effect with loss {self.loss}, which learns from given answers and uses no "
                        "advantages; remove it"
                    )
        for field, acts, where in self._idle_unless():
            if not acts and getattr(self, field) != AlgoConfig.model_fields[field].get_default():
                raise ValueError(f"algo.{field} has no effect here, it acts with {where}; remove it")
        corrected = self.correction.active or self.correction.bypass or self.opsm is not None
        if not self.declared_loss.advantages and (self.kl.where == "reward" or corrected):
            raise ValueError(f"algo.loss {self.loss} uses no advantages: remove kl.where=reward, correction and opsm")
        if self.kl.where == "reward" and not self.declared_advantage.token_rewards:
            raise ValueError(
                f"algo.advantage {self.advantage} has one reward per rollout and no per-token reward; use "
                "kl.where=loss, or an advantage of gae, reinforce_pp or reinforce_pp_baseline"
            )
        if self.declares_reference and self.needs_reference_support:
            raise ValueError(
                "algo.kl.estimator support_exact scores the reference on supports, but algo.advantage or algo.loss "
                "declares its log-probs of the drawn tokens; use kl.estimator k2"
            )

    @model_validator(mode="after")
    def _is_consistent(self) -> AlgoConfig:
        if self.loss == "dual_clip" and (self.dual_clip_c is None or self.dual_clip_c <= 1.0):
            raise ValueError(
                f"algo.dual_clip_c is {self.dual_clip_c}; loss dual_clip needs a value above 1 (usually 3)"
            )
        if self.reduction == "fixed" and self.fixed_length is None:
            raise ValueError(
                "algo.reduction fixed divides by N·L_max; set algo.fixed_length, e.g. rollout.max_new_tokens"
            )
        if self.reduction != "fixed" and self.fixed_length is not None:
            raise ValueError(f"algo.fixed_length has no effect with reduction {self.reduction}; use reduction=fixed")
        if self.eps_clip >= 1.0:
            raise ValueError(f"algo.eps_clip is {self.eps_clip}; 1 - eps_clip must stay above 0")
        if not (user_code.is_reference(self.advantage) or user_code.is_reference(self.loss)):
            self.check_declared()
        return self
