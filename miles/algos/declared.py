"""What each advantage estimator and policy loss needs of a run: read by configuration and rules, before anything runs.

Built-in ones are listed here, so that reading a recipe imports neither numpy nor torch; a function of the user's own
says it with the decorator `declares`, and nothing said means that it needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from miles.config import user_code
from miles.config.names import suggestion

Kind = Literal["advantage", "loss"]
FunctionType = TypeVar("FunctionType", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Needs of an estimator or a loss.

    `groups`: compares the rollouts of a prompt, so that a group of one is refused. `critic`: a value model is trained
    and its values are there. `reference`: the start policy's log-probs are there, and the old policy's.
    `token_rewards`: rewards are per token, so that they may hold a KL (`kl.where: reward`). `advantages` (of a loss):
    it uses them. `ratio_only` (of a loss): differs from ppo_clip only where the ratio leaves 1. `reads`: the options of
    `algo` that it looks at; setting another one is refused as idle.
    """

    groups: bool = False
    critic: bool = False
    reference: bool = False
    token_rewards: bool = False
    advantages: bool = True
    ratio_only: bool = False
    reads: tuple[str, ...] = ()


_CLIPS = ("eps_clip", "eps_clip_high")
BUILT_IN: Mapping[Kind, Mapping[str, Declared]] = {
    "advantage": {
        "grpo": Declared(groups=True, reads=("normalize_std",)),
        "rloo": Declared(groups=True),
        "gae": Declared(critic=True, token_rewards=True, reads=("gamma", "gae_lambda", "value")),
        "reinforce_pp": Declared(token_rewards=True, reads=("gamma",)),
        "reinforce_pp_baseline": Declared(groups=True, token_rewards=True),
    },
    "loss": {
        "ppo_clip": Declared(ratio_only=True, reads=_CLIPS),
        "dual_clip": Declared(ratio_only=True, reads=(*_CLIPS, "dual_clip_c")),
        "gspo": Declared(ratio_only=True, reads=_CLIPS),
        "cispo": Declared(ratio_only=True, reads=_CLIPS),
        "sft": Declared(advantages=False),
    },
}
# Losses of other methods, by the names that people look for.
_PAIRS = (
    "learns from pairs of a better and a worse answer, and nothing here reads pairs; use loss sft on the better answers, "
    "then GRPO with a reward that prefers them (rollout.reward.kind python or remote_http), or TRL's DPOTrainer on the "
    "exported hf_model, whose folder model.path takes"
)
ELSEWHERE: Mapping[str, str] = dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo", "cpo"), _PAIRS)
_USABLE: Mapping[Kind, tuple[str, ...]] = {
    "advantage": ("groups", "critic", "reference", "token_rewards", "reads"),
    "loss": ("reference", "advantages", "ratio_only", "reads"),
}
_MARK = "__miles_declared__"


def declares(
    *,
    groups: bool = False,
    critic: bool = False,
    reference: bool = False,
    token_rewards: bool = False,
    advantages: bool = True,
    reads: tuple[str, ...] = (),
) -> Callable[[FunctionType], FunctionType]:
    """Decorator of a user's own estimator or loss; the words are those of `Declared`."""
    declared = Declared(
        groups=groups,
        critic=critic,
        reference=reference,
        token_rewards=token_rewards,
        advantages=advantages,
        reads=tuple(reads),
    )

    def mark(function: FunctionType) -> FunctionType:
        setattr(function, _MARK, declared)
        return function

    return mark


def check_name(kind: Kind, text: str) -> None:
    """`ValueError` for what is neither built in nor a reference to code of the user's own. Imports nothing."""
    if user_code.is_reference(text):
        user_code.check_form(text)
    elif kind == "loss" and text.lower() in ELSEWHERE:
        raise ValueError(f"loss {text} {ELSEWHERE[text.lower()]}")
    elif text not in BUILT_IN[kind]:
        raise ValueError(
            f"unknown {kind} {text!r}; {suggestion(text, BUILT_IN[kind])} (built in: {', '.join(BUILT_IN[kind])}; your "
            f"own code: {user_code.FORMS})"
        )


def user_function(kind: Kind, text: str) -> Callable[..., Any]:
    """The function that a `python:` reference names. `ConfigError` when it cannot be imported or has no such form."""
    return user_code.load(text, option=f"algo.{kind}", parameters=("inputs",))


def declared(kind: Kind, text: str) -> Declared:
    """Needs of the estimator or loss `text`; imports the user's code where `text` names some."""
    if not user_code.is_reference(text):
        return BUILT_IN[kind][text]
    return getattr(user_function(kind, text), _MARK, None) or Declared()


def unusable(kind: Kind, found: Declared) -> list[str]:
    """Words of a declaration that mean nothing for this kind."""
    plain = Declared()
    return [
        name
        for name in Declared.__dataclass_fields__
        if name not in _USABLE[kind] and getattr(found, name) != getattr(plain, name)
    ]


def readers(kind: Kind, option: str) -> str:
    """Built-in names that read an option of `algo`, as a phrase: "gae or reinforce_pp"."""
    *most, last = [name for name, needs in BUILT_IN[kind].items() if option in needs.reads]
    return f"{', '.join(most)} or {last}" if most else last
