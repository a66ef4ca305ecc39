"""What a user must not forget, as rules: each looks at a recipe and its model's config.json and may object.

A rule is one function that yields findings; `RULES` lists them by id. Severity `error` stops the run before
anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from miles.config import ConfigError
from miles.data.prompts import Prompt
from miles.data.tokenizer import char_vocabulary
from miles.recipe import dtype_rules, evaluation_rules, idle_rules, measured, nvfp4_rules, tokenizer_files
from miles.recipe.created_tokenizer import created_tokenizer
from miles.recipe.inputs import FirstPrompts, check_answers, check_files, first_examples, first_prompts
from miles.recipe.schema import Recipe
from miles.recipe.sglang_rules import sglang_objections
from miles.recipe.warm_start import origin


@dataclass(frozen=True)
class Finding:
    """One objection: which rule, how grave, what is wrong, what to do."""

    rule: str
    severity: Literal["error", "warning"]
    message: str
    fix: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}; {self.fix}"


@dataclass(frozen=True)
class Facts:
    """What the rules may know beside the recipe. `hf_config`: the model's config.json, or what it will be.

    `longest_prompt`: tokens of the longest among the prompts that come first, `longest_evaluated` in each evaluation set;
    `overlap`: how many prompts of a set training sees too. `tokenizer`: what its files ask for that a run does otherwise.
    """

    hf_config: Mapping[str, Any]
    where: str
    longest_prompt: int = 1
    longest_evaluated: Mapping[str, int] = field(default_factory=dict)
    overlap: Mapping[str, int] = field(default_factory=dict)
    tokenizer: tuple[tokenizer_files.Objection, ...] = ()
    prompts: FirstPrompts = field(default_factory=FirstPrompts)


@dataclass(frozen=True)
class Rule:
    """`reason` is what `miles recipe explain` prints."""

    id: str
    reason: str
    check: Callable[[Recipe, Facts], Iterator[Finding]]


def facts_of(recipe: Recipe) -> Facts:
    """`model_facts`, and the length of the prompts. Raises `ConfigError` for prompts that the run would refuse."""
    facts = model_facts(recipe)
    if recipe.supervised:
        return replace(facts, prompts=first_examples(recipe))
    prompts = first_prompts(recipe)
    return replace(
        facts,
        longest_prompt=_longest(prompts.training),
        longest_evaluated={name: _longest(drawn) for name, drawn in prompts.evaluation.items()},
        overlap=prompts.overlap,
        prompts=prompts,
    )


def _longest(prompts: Sequence[Prompt]) -> int:
    return max((len(prompt.input_ids) for prompt in prompts), default=1)


def model_facts(recipe: Recipe) -> Facts:
    """Read the model's config.json, or build the one of the model that the run will create."""
    from miles.models import registry
    from miles.models.family import read_hf_config

    # Of the model that an earlier phase exports, what that phase starts from has the shape and the tokenizer.
    recipe = origin(recipe)
    if recipe.model.path is not None:
        path = Path(recipe.model.path)
        said = tuple(tokenizer_files.objections(path))
        return Facts(read_hf_config(path), str(path / "config.json"), tokenizer=said)
    vocabulary = len(char_vocabulary(*created_tokenizer(recipe)))
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    family = registry.by_name(recipe.model.family)
    return Facts(family.hf_config(recipe.model.create, vocabulary, special), "model.create")


def _user_code(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    """Estimator and loss of the user's own: imported, asked for their needs, and these compared with the options."""
    del facts
    try:
        recipe.algo.check_declared()
        recipe.check_source()
    except (ConfigError, ValueError) as error:
        message, _, fix = str(error).partition("; ")
        yield Finding("USER-CODE", "error", message, fix)


def _parallelism(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    from miles.models import registry
    from miles.train.errors import ParallelismError
    from miles.train.parallel_checks import check_parallelism

    family = registry.resolve(facts.hf_config, where=facts.where)
    model = family.to_mcore(facts.hf_config, rope_kind=recipe.model.rope.type, where=facts.where)
    try:
        check_parallelism(recipe.train.parallel, model)
    except ParallelismError as error:
        yield Finding("PARALLEL", "error", str(error), "change train.parallel")


def _family(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    found = facts.hf_config.get("model_type")
    if found != recipe.model.family:
        message = f"model.family is {recipe.model.family} but {facts.where} says model_type {found!r}"
        yield Finding("FAMILY", "error", message, f"set model.family to {found}")


def _sequence_fits(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    rollout, prompt = recipe.rollout, facts.longest_prompt
    positions, context = facts.hf_config.get("max_position_embeddings"), recipe.engine.context_length
    if recipe.supervised:
        longest = facts.prompts.longest_example
        if positions is not None and longest > positions:
            message = f"an example has {longest} tokens, above the model's {positions} positions"
            fix = f"set data.supervised.max_tokens={positions} and data.too_long=drop, or shorten the example"
            yield Finding("SEQ-FIT", "error", message, fix)
        return
    if rollout.max_context is not None and rollout.max_context <= prompt:
        message = f"rollout.max_context {rollout.max_context} leaves no token after a prompt of {prompt}"
        yield Finding("SEQ-FIT", "error", message, f"raise it to at least {prompt + 1}, or shorten the prompts")
        return
    need = prompt + rollout.max_new_tokens
    if rollout.max_context is not None:
        need = min(need, rollout.max_context)
    limits = {"the model's positions": positions, "engine.context_length": context}
    limits["engine.max_total_tokens"] = recipe.engine.max_total_tokens
    for name, limit in limits.items():
        if limit is not None and need > limit:
            message = (
                f"rollout.max_new_tokens {rollout.max_new_tokens} and a prompt of {prompt} tokens need {need} "
                f"positions, {name} allow{'' if name.endswith('positions') else 's'} {limit}"
            )
            fix = f"lower rollout.max_new_tokens to {limit - prompt}" if limit > prompt else "shorten the prompts"
            yield Finding("SEQ-FIT", "error", message, fix)
    if context is not None and positions is not None and context > positions:
        message = f"engine.context_length {context} is above the model's {positions} positions"
        yield Finding("SEQ-FIT", "error", message, f"lower it to {positions}, or remove it")


def _engine_model(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    """A trainer may know more of a family than the engine beside it."""
    if recipe.supervised or recipe.engine.engine != "embedded" or recipe.model.path is None:
        return  # a created model is one that both know
    from miles.rollout.engines.embedded.models import check_served

    try:
        check_served(facts.hf_config)
    except ConfigError as error:
        message, _, fix = str(error).rpartition("; ")
        yield Finding("ENGINE-MODEL", "error", message, fix)


def _stop_ids(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    size = facts.hf_config["vocab_size"]
    wrong = [str(token) for token in recipe.rollout.stop_token_ids if not 0 <= token < size]
    if wrong:
        message = f"rollout.stop_token_ids has {', '.join(wrong)}, but the model's tokens are 0 to {size - 1}"
        yield Finding("STOP-IDS", "error", message, "name ids of the model's tokenizer")


def _tokenizer(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del recipe
    for severity, message, fix in facts.tokenizer:
        yield Finding("TOKENIZER", severity, message, fix)


def _reward(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    from miles.rollout.rewards import build_reward

    if recipe.supervised:
        return
    try:
        reward = build_reward(recipe.rollout.reward, recipe.data, seed=recipe.seed)
        check_answers(recipe, [*facts.prompts.training, *chain(*facts.prompts.evaluation.values())], reward)
    except ConfigError as error:
        message, _, fix = str(error).rpartition("; ")
        yield Finding("REWARD", "error", message, fix)


def _rollout_code(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    """Functions that a rollout calls; a reward whose failures are masked may fail."""
    from miles.recipe import own_code_rules

    for fault in own_code_rules.faults(recipe, facts.prompts.training):
        message, _, fix = fault.partition("; ")
        masked = fault.startswith("rollout.reward:") and recipe.rollout.reward.on_error == "mask"
        yield Finding("ROLLOUT-CODE", "warning" if masked else "error", message, fix)


def _prompts(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del recipe
    for note in facts.prompts.notes:
        message, _, fix = note.rpartition("; ")
        yield Finding("PROMPTS", "warning", message, fix)


def _teacher(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    if recipe.algo.needs_teacher and recipe.algo.teacher is None:
        message = "algo.opd_coef needs log-probs of a teacher, but algo.teacher names none"
        yield Finding("TEACHER", "error", message, "set algo.teacher to a Hugging Face folder, or algo.opd_coef to 0")


def _support(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    algo = recipe.algo
    if algo.needs_reference_support and not (recipe.rollout.needs_sampling_mask and algo.support_log_probs == "auto"):
        message = (
            "algo.kl.estimator support_exact sums over the ids that the sampler could draw, but the rollout samples "
            "from the whole vocabulary or algo.support_log_probs is off"
        )
        yield Finding("SUPPORT", "error", message, "set rollout.top_p below 1 (or top_k, min_p), or use k2 or low_var")


def _rollout_mode(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    if recipe.supervised:
        return  # nothing is sampled
    rollout, engine = recipe.rollout, recipe.engine
    correction = recipe.algo.correction
    if rollout.max_staleness and not (correction.active or correction.bypass):
        message = (
            f"rollout.max_staleness is {rollout.max_staleness}: samples come from older weights than the loss assumes"
        )
        fix = "set algo.correction.bypass=true (clip against the rollout's log-probs) or algo.correction.mode=truncate"
        yield Finding("ROLLOUT-MODE", "error", message, fix)
    if rollout.max_staleness and rollout.over_sampling != 1.0:
        message = (
            f"rollout.over_sampling is {rollout.over_sampling:g}, but with rollout.max_staleness {rollout.max_staleness} "
            "whole batches are in flight already"
        )
        yield Finding("ROLLOUT-MODE", "error", message, "set rollout.over_sampling to 1, or rollout.max_staleness to 0")
    if recipe.algo.opsm is not None and not (recipe.several_steps or correction.bypass):
        message = (
            "algo.opsm compares the policy before the step with the current one, which is the same policy when a "
            "rollout is trained in one optimizer step"
        )
        fix = "set data.global_batch_size below the step's rollouts, or algo.correction.bypass=true, or remove opsm"
        yield Finding("ROLLOUT-MODE", "error", message, fix)
    if engine.engine == "sglang":
        for message, fix in sglang_objections(recipe):
            yield Finding("ROLLOUT-MODE", "error", message, fix)


def _devices(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    if ":" in recipe.engine.device:
        message = f"engine.device {recipe.engine.device} names one device, and the placement gives each engine its own"
        yield Finding("DEVICES", "error", message, "use engine.device=cuda; CUDA_VISIBLE_DEVICES limits what is used")
    if recipe.placement.mode == "colocated" and recipe.rollout.max_staleness:
        message = (
            f"placement.mode colocated has no engines while the trainer trains, and rollout.max_staleness "
            f"{recipe.rollout.max_staleness} has them generate meanwhile"
        )
        yield Finding("DEVICES", "error", message, "set rollout.max_staleness=0 or placement.mode=disaggregated")
    if recipe.placement.mode == "colocated" and recipe.engine.nvfp4_experts is not None:
        message = (
            "placement.mode colocated has engines release their weights, and engine.nvfp4_experts keeps packed copies"
        )
        yield Finding("DEVICES", "error", message, "use placement.mode=disaggregated")


def _quantisation(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    for message, fix in nvfp4_rules.objections(recipe, facts.hf_config, facts.where):
        yield Finding("NVFP4-CONTRACT", "error", message, fix)


def _fused(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    from miles.algos.fusable import why_not_fused

    del facts
    algo = recipe.algo
    scored = algo.needs_old_log_probs or algo.correction.bypass or recipe.several_steps
    reason = why_not_fused(
        algo,
        tensor_parallel=recipe.train.parallel.tp,
        on_policy=not scored,
        on_support=recipe.rollout.needs_sampling_mask and algo.support_log_probs == "auto",
    )
    if recipe.train.fused_loss == "on" and reason is not None:
        yield Finding("FUSED", "error", f"train.fused_loss is on but {reason}", "use train.fused_loss=auto")


def _dtypes(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    for severity, message, fix in dtype_rules.objections(recipe):
        yield Finding("DTYPE", severity, message, fix)


def _idle(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    for message, fix in idle_rules.objections(recipe):
        yield Finding("IDLE", "warning", message, fix)


def _evaluation(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    positions = facts.hf_config.get("max_position_embeddings")
    for severity, message, fix in evaluation_rules.objections(
        recipe,
        positions=positions,
        trained=facts.longest_prompt,
        longest=facts.longest_evaluated,
        overlap=facts.overlap,
    ):
        yield Finding("EVALUATION", severity, message, fix)


def _bounds(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    for message, fix in measured.objections(recipe):
        yield Finding("MEASURED", "error", message, fix)


def _validation(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    del facts
    if recipe.validation.status != "validated":
        message = f"this recipe is {recipe.validation.status}: nobody has recorded its expected numbers"
        yield Finding("VALIDATION", "warning", message, "compare the first run with care")


USER_CODE = Rule("USER-CODE", "Code of your own must import, take its arguments and get what it declares.", _user_code)
RULES: tuple[Rule, ...] = (
    USER_CODE,
    Rule("FAMILY", "The recipe's family must be the one that the checkpoint states.", _family),
    Rule("PARALLEL", "Heads, KV groups, layers and experts must divide over the mesh.", _parallelism),
    Rule("SEQ-FIT", "Prompt and response must fit the model's positions.", _sequence_fits),
    Rule("TEACHER", "Distillation needs a teacher's scores of the policy's answers.", _teacher),
    Rule("SUPPORT", "Exact KL is a sum over the sampler's support, so there must be one.", _support),
    Rule("ROLLOUT-MODE", "Only combinations that the loop drives may start.", _rollout_mode),
    Rule(
        "DEVICES", "The placement alone gives out devices, and colocated engines stand still while training.", _devices
    ),
    Rule("ENGINE-MODEL", "What the trainer can train, the engine must be able to serve.", _engine_model),
    Rule("STOP-IDS", "A token that the model does not have never stops an answer.", _stop_ids),
    Rule("TOKENIZER", "Prompts are encoded whole, and an answer ends at every token that a file names.", _tokenizer),
    Rule("PROMPTS", "A prompt that is left out, cut or both trained and held out is told before the run.", _prompts),
    Rule("REWARD", "A reward that cannot be made would stop the run at its first answer.", _reward),
    Rule("ROLLOUT-CODE", "A function of your own that fails would stop the run at its first group.", _rollout_code),
    Rule("NVFP4-CONTRACT", "Trainer and engine must round routed experts by one contract.", _quantisation),
    Rule("FUSED", "A fused loss has kernels for some algorithms on unsplit logits only.", _fused),
    Rule("DTYPE", "Trainer and engine that compute in different dtypes give one token two log-probs.", _dtypes),
    Rule("IDLE", "An option that acts nowhere in this run promises what does not happen.", _idle),
    Rule(
        "EVALUATION",
        "An evaluation tells something only of prompts that fit and that training does not see.",
        _evaluation,
    ),
    Rule("MEASURED", "A bound on what no step reports would stop the run, at its first step or its last.", _bounds),
    Rule("VALIDATION", "A recipe without recorded numbers may be wrong in ways nobody saw.", _validation),
)


def check(recipe: Recipe, facts: Facts) -> list[Finding]:
    """All findings, errors first, in the order of `RULES`."""
    if broken := list(USER_CODE.check(recipe, facts)):
        return broken  # the other rules ask it what it needs
    findings = [finding for rule in RULES for finding in rule.check(recipe, facts)]
    return sorted(findings, key=lambda finding: finding.severity != "error")


def check_or_raise(recipe: Recipe) -> list[Finding]:
    """Findings of a recipe that may start; `ConfigError` with every error otherwise. Then its files are looked at."""
    findings = check(recipe, facts_of(recipe))
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    check_files(recipe)
    return findings
