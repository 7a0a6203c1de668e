"""What kind of run this is: facts with the reason for each, from the keys, the configuration and the log.

A fact nobody can know is None, and its reason says what would tell. The log beats the configuration where
they contradict each other: a configuration may belong to another run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_audit.ingest.adapters import (
    FAMILIES,
    SYNC_TRAINERS,
    Adapter,
    FactRule,
    choose_adapter,
    holds,
    load_adapters,
)
from verl_audit.ingest.settings_facts import SETTINGS

FactValue = str | float | bool | None
Kind = Literal["text", "number", "flag"]

OFF_POLICY = "training/off_policy/"
SPANS = f"{OFF_POLICY}trajectory_spans/mean"
LAGS = (f"{OFF_POLICY}trajectory_staleness/max", f"{OFF_POLICY}trajectory_staleness_worst/max")
STALE = (f"{OFF_POLICY}evicted_samples", f"{OFF_POLICY}dropped_samples")
FILTERED = "training/filter_groups/evicted_samples"
SURPLUS = "training/filter_groups/discarded_surplus_samples"
STANDALONE = ("timing_s/switch_to_trainer", "timing_s/switch_to_rollout", "timing_s/switch_wait")
ONE_STEP = ("timing_s/sync_rollout_weights", "timing_s/generate_async", "timing_s/wait_prev_gen")
OLD_NAMES = re.compile(r"mfu/actor|val/test_score/.+|timing/(step|gen)")
FULL_ROW = frozenset({"timing_s/step", "critic/score/mean", "actor/grad_norm"})
REJECTION = re.compile(r"rollout_corr/rollout_rs_(token_k\d|seq_(?:sum|mean|max)_k\d)_.+")
CORRECTION = "algorithm.rollout_correction"
ASYNC = "async_training"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SAMPLER = "trainer.v1.sampler"
RECORDER = "verl_audit.record.verl"


@dataclass(frozen=True)
class Fact:
    """One property of a run; None when it cannot be known, and the reason always says why."""

    value: FactValue
    reason: str


@dataclass(frozen=True)
class Clues:
    """Everything the facts are derived from."""

    keys: frozenset[str]
    config: Mapping[str, Any] | None
    announced: tuple[str, ...]
    values: Mapping[str, tuple[float, float]]

    def any_key(self, *names: str) -> str | None:
        """The first of the keys the run logs."""
        return next((name for name in names if name in self.keys), None)

    def prefixed(self, *prefixes: str) -> str | None:
        """The first key that starts with one of the prefixes."""
        return next((key for key in sorted(self.keys) if key.startswith(prefixes)), None)

    @property
    def full_rows(self) -> bool:
        """Whether whole rows are at hand: an absent key means nothing in a hand-picked selection."""
        return self.keys >= FULL_ROW

    def top(self, *names: str) -> float | None:
        """The largest value any of the keys took, NaN aside."""
        tops = [self.values[n][1] for n in names if n in self.values and not math.isnan(self.values[n][1])]
        return max(tops) if tops else None

    def has(self, path: str) -> bool:
        """Whether the configuration holds the path at all, resolved or not."""
        return _walk(self.config, path)[0]

    def get(self, path: str) -> Any:
        """The configured value; None when absent, null or left unresolved."""
        value = _walk(self.config, path)[1]
        return None if isinstance(value, str) and ("${" in value or value == "???") else value

    def flag(self, path: str) -> bool | None:
        """The configured value as a truth value."""
        value = self.get(path)
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value.lower())
        return value if isinstance(value, bool) else None

    def number(self, path: str) -> float | None:
        """The configured value as a number."""
        return _as_number(self.get(path))


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


@dataclass
class _Run:
    """The clues with the facts found so far; later facts build on earlier ones."""

    clues: Clues
    facts: dict[str, Fact] = field(default_factory=dict)

    def value(self, name: str) -> FactValue:
        return self.facts[name].value


def detect(
    keys: Collection[str],
    config: Mapping[str, Any] | None,
    announced: Collection[str] = (),
    values: Mapping[str, tuple[float, float]] | None = None,
    given: Mapping[str, FactValue] | None = None,
) -> dict[str, Fact]:
    """Derive the facts of a run.

    `values` holds (smallest, largest) per key; `announced` are texts of the log such as Ray class names; `given`
    are facts the user sets, from which later ones follow.
    """
    run = _Run(Clues(frozenset(keys), config, tuple(announced), values or {}))
    for name, rule in _RULES.items():
        if given and name in given:
            run.facts[name] = Fact(given[name], "set by the user")
            continue
        adapter = None if name in _COMMON else _other_framework(run)
        run.facts[name] = rule(run) if adapter is None else _declared(run, adapter, name)
    return run.facts


def plain(facts: Mapping[str, Fact]) -> dict[str, FactValue]:
    """The values without their reasons, as the adapters take them."""
    return {name: fact.value for name, fact in facts.items()}


def _leaves(tree: object, name: str) -> Iterator[Any]:
    """Every value in the configuration whose last name is `name`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if str(key).rpartition(".")[2] == name:
                yield value
            yield from _leaves(value, name)


def _walk(tree: object, path: str) -> tuple[bool, Any]:
    if isinstance(tree, Mapping) and path in tree:
        return True, tree[path]
    for part in path.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False, None
        tree = tree[part]
    return True, tree


def _missing(run: _Run, *paths: str) -> Fact:
    """The answer when a setting is not known."""
    names = " or ".join(paths)
    if run.clues.config is None:
        return Fact(None, f"no configuration found, and the metrics do not tell {names}")
    if any(run.clues.has(path) for path in paths):
        return Fact(None, f"{names} is null or not resolved in the configuration")
    return Fact(None, f"the configuration does not contain {names}")


# ------------------------------------------------------------------ other frameworks than verl


def _other_framework(run: _Run) -> Adapter | None:
    """The adapter of a framework that declares its own facts, where the run is not one of verl's trainers."""
    name = run.facts["framework"].value
    return next((a for a in load_adapters() if a.framework == name and a.modes), None)


def _declared(run: _Run, adapter: Adapter, name: str) -> Fact:
    """A fact from the adapter's own rules; the first rule whose evidence is there decides."""
    trainer = run.facts["trainer"].value if name != "trainer" else None
    if name == "is_async" and isinstance(trainer, str) and trainer in adapter.modes:
        return Fact(adapter.modes[trainer], run.facts["trainer"].reason)
    rules = [rule for rule in adapter.facts if rule.fact == name]
    found = next((rule for rule in rules if _proven(run, adapter, rule)), None)
    if found is not None:
        return Fact(found.value, found.because)
    if rules:
        return Fact(None, f"neither the metrics nor the configuration tell it for {adapter.framework}")
    return Fact(None, f"a setting of verl; what corresponds to it in {adapter.framework} is not read")


def _proven(run: _Run, adapter: Adapter, rule: FactRule) -> bool:
    bare = {adapter.bare(key) for key in run.clues.keys}
    values = {adapter.bare(key): span for key, span in run.clues.values.items()}
    logged = [any(p.fullmatch(key) for key in bare for p in rule.logs)] if rule.logs else []
    return (
        all(logged)
        and _some(rule.positive, lambda key: values.get(key, (0, 0))[1] > 0)
        and _some(rule.negative, lambda key: values.get(key, (0, 0))[0] < 0)
        and _some(rule.zero, lambda key: values.get(key) == (0, 0))
        and _some(rule.smallest_zero, lambda key: values.get(key, (1, 1))[0] == 0)
        and all(_set_to(run.clues.config, name, value) for name, value in rule.settings.items())
        and all(_set_above(run.clues.config, name, bound) for name, bound in rule.settings_above.items())
        and holds(rule.when, {name: fact.value for name, fact in run.facts.items()})
    )


def _some(keys: Collection[str], test: Callable[[str], bool]) -> bool:
    """Whether a kind of evidence that is asked for is there for any of its keys."""
    return not keys or any(map(test, keys))


def _set_to(config: object, name: str, wanted: object) -> bool:
    """Whether the setting is there and has this value, or one of them, everywhere."""
    found = [str(value).lower() for value in _leaves(config, name)]
    allowed = {str(value).lower() for value in (wanted if isinstance(wanted, list) else [wanted])}
    return bool(found) and set(found) <= allowed


def _set_above(config: object, name: str, bound: float) -> bool:
    found = [_as_number(value) for value in _leaves(config, name)]
    return bool(found) and all(number is not None and number > bound for number in found)


# ------------------------------------------------------------------ framework and trainer


def _framework(run: _Run) -> Fact:
    adapter, reason = choose_adapter(run.clues.keys)
    if adapter is not None:
        return Fact(adapter.framework, reason)
    if run.clues.has("actor_rollout_ref"):
        return Fact("verl", "the configuration has verl's actor_rollout_ref section")
    return Fact(None, reason)


def _framework_version(run: _Run) -> Fact:
    if run.facts["framework"].value != "verl":
        return Fact(None, "only verl's versions can be told from what a run leaves")
    found = next(_version_clues(run.clues), None)
    if found is None:
        return Fact(None, "nothing in keys or configuration is particular to a verl version")
    return Fact(f"{found[0]} ({found[1]})", found[1])


def _version_clues(clues: Clues) -> Iterator[tuple[str, str]]:
    if clues.any_key(STALE[1]):
        yield "<0.9.0", "dropped_samples logged"
    if {"num_turns/mean", "training/num_turns/mean"} <= clues.keys:
        yield ">=0.9.1", "num_turns logged by a v1 trainer"
    if any(key.startswith("val-aux/") and "/acc_success_only/" in key for key in clues.keys):
        yield ">=0.9.1", "acc_success_only logged"
    if clues.has("trainer.checkpoint_callback_class"):
        yield ">=0.9.1", "checkpoint_callback_class configured"
    if SPANS in clues.keys:
        yield ">=0.9.0", "trajectory_spans logged"
    if clues.prefixed("mismatch/mismatch_"):
        yield ">=0.5, <0.7", "mismatch/* logged"
    old = next((key for key in sorted(clues.keys) if OLD_NAMES.fullmatch(key)), None)
    if old is not None:
        yield "<0.4", f"{old} logged"


def _trainer(run: _Run) -> Fact:
    """The trainer, from what it alone logs or prints, then from the configuration, then from old names."""
    if run.facts["framework"].value not in ("verl", None):
        return Fact(None, "the trainer kinds are verl's")
    for rule in (_trainer_logged, _trainer_configured, _trainer_by_absence):
        fact = rule(run.clues)
        if fact is not None:
            return fact
    if _is_v1(run.clues):
        return Fact(None, _v1_undecided(run.clues))
    return Fact(None, "neither configuration, log nor metric keys name the trainer")


def _trainer_logged(clues: Clues) -> Fact | None:
    spoken = " ".join(clues.announced)
    found: list[tuple[object, str, str]] = [
        (clues.prefixed("fully_async/"), "fully_async", "only fully_async logs {}"),
        (re.search(r"FullyAsync(TaskRunner|Trainer|Rollouter)", spoken), "fully_async", "the log names {}"),
        (clues.any_key(*ONE_STEP), "one_step_off", "only one_step_off logs {}"),
        (re.search(r"OneStepTaskRunner", spoken), "one_step_off", "the log names {}"),
        (clues.prefixed("separate_async/"), "separate_async", "only separate_async logs {}"),
        (clues.any_key(*STANDALONE), "separate_async", "only separate_async logs {}"),
        (clues.any_key(SURPLUS), "sync", "only a v1 sync run logs {}"),
        (re.search(r"\bTaskRunner\b", spoken), "v0", "the log names {}"),
    ]
    for hit, trainer, reason in found:
        if hit:
            name = hit.group() if isinstance(hit, re.Match) else hit
            return Fact(trainer, reason.format(name))
    return None


def _trainer_configured(clues: Clues) -> Fact | None:
    """`async_training` comes first: fully_async inherits the v1 settings without reading them."""
    if clues.has(f"{ASYNC}.trigger_parameter_sync_step"):
        return Fact("fully_async", "the configuration has async_training.trigger_parameter_sync_step")
    if clues.flag("trainer.use_v1") is False:
        return Fact("v0", "trainer.use_v1=false")
    if clues.flag("actor_rollout_ref.hybrid_engine") and not clues.has("trainer.v1") and not _is_v1(clues):
        return Fact("v0", "the configuration has a hybrid engine and no trainer.v1 section")
    return _v1_configured(clues)


def _v1_configured(clues: Clues) -> Fact | None:
    mode = clues.get("trainer.v1.trainer_mode")
    if mode == "sync" and (clues.top(*LAGS) or 0) > 0:
        return Fact(None, "the configuration says trainer_mode=sync, but lag above 0 is logged")
    if mode == "sync" and clues.flag("actor_rollout_ref.hybrid_engine") is False and SPANS not in clues.keys:
        return Fact("one_step_off", "hybrid_engine=false without separate_async or async_training")
    if mode in FAMILIES["v1"]:
        return Fact(str(mode), f"trainer.v1.trainer_mode={mode}")
    return None


def _trainer_by_absence(clues: Clues) -> Fact | None:
    old = next((key for key in sorted(clues.keys) if OLD_NAMES.fullmatch(key)), None)
    if old is not None:
        return Fact("v0", f"{old} is logged, a name older than every other trainer")
    if clues.full_rows and not _is_v1(clues):
        return Fact("v0", "full rows without the keys every v1, fully_async or one_step_off run logs")
    return None


def _is_v1(clues: Clues) -> bool:
    return bool(clues.prefixed(OFF_POLICY, "training/num_turns/", "training/rollout_failure/")) or any(
        "TaskRunnerV1" in text for text in clues.announced
    )


def _v1_undecided(clues: Clues) -> str:
    top = clues.top(*LAGS)
    if top is not None and top > 0:
        return "v1 trainer with lag above 0: colocate_async or separate_async, the metrics do not tell which"
    if top == 0:
        return "v1 trainer; lag 0 throughout is consistent with sync, but no proof of it"
    return "v1 trainer; its mode (trainer.v1.trainer_mode) is in no configuration found"


def _trainer_family(run: _Run) -> Fact:
    trainer, reason = run.facts["trainer"].value, run.facts["trainer"].reason
    for family, members in FAMILIES.items():
        if trainer in members:
            return Fact(family, reason)
    if _is_v1(run.clues):
        return Fact("v1", "the run logs keys or names classes that only v1 trainers have")
    return Fact(None, reason)


def _is_async(run: _Run) -> Fact:
    trainer, reason = run.facts["trainer"].value, run.facts["trainer"].reason
    if trainer is not None:
        return Fact(trainer not in SYNC_TRAINERS, reason)
    top, stale = run.clues.top(*LAGS, "partial/avg_staleness"), run.clues.any_key(*STALE)
    if top is not None and top > 0:
        return Fact(True, "lag above 0 is logged")
    if stale is not None:
        return Fact(True, f"{stale} is logged, which only asynchronous trainers do")
    return Fact(None, reason)


# ------------------------------------------------------------------ log-probs and updates


def _three_decimals(run: _Run) -> Fact:
    """Rounded when ten or more keys have fractional values and all of them end after three decimals."""
    tops = [top for _, top in run.clues.values.values() if math.isfinite(top) and top != int(top)]
    if len(tops) < 10:
        return Fact(None, "too few fractional values to tell whether the log rounds")
    rounded = all(abs(v - round(v, 3)) < 1e-9 for v in tops)
    return Fact(rounded, "every value ends after three decimals" if rounded else "values have full precision")


def _log_prob_mode(run: _Run) -> Fact:
    clues, path = run.clues, f"{CORRECTION}.bypass_mode"
    bypass = clues.flag(path)
    logged = _log_prob_mode_logged(clues)
    if logged is not None:
        return logged
    if bypass is not None:
        return Fact("bypass" if bypass else "decoupled", f"{path}={str(bypass).lower()}")
    if _v1_updates(run):
        return Fact("bypass", "a v1 run that updates the actor and logs no actor/entropy")
    return _missing(run, path)


def _log_prob_mode_logged(clues: Clues) -> Fact | None:
    logged = clues.any_key("training/rollout_probs_diff_mean", "rollout_corr/kl", "actor/entropy")
    if logged:
        return Fact("decoupled", f"{logged} is logged, which bypass mode never does")
    if clues.prefixed("mismatch/mismatch_") or any(OLD_NAMES.fullmatch(key) for key in clues.keys):
        return Fact("decoupled", "this version had no other mode than recomputing")
    if clues.prefixed("actor/rollout_corr/"):
        return Fact("bypass", "actor/rollout_corr/* is logged, which only the bypass loss does")
    return None


def _v1_updates(run: _Run) -> bool:
    return run.value("trainer_family") == "v1" and run.clues.full_rows


def _calculate_log_probs(run: _Run) -> Fact:
    clues = run.clues
    logged = clues.any_key("training/rollout_probs_diff_mean", "rollout_corr/kl")
    if logged:
        return Fact(True, f"{logged} is logged, which needs them")
    path = f"{ROLLOUT}.calculate_log_probs"
    if clues.flag(path) is not None:
        return Fact(clues.flag(path), f"{path}={str(clues.flag(path)).lower()}")
    if run.value("trainer") == "fully_async":
        return Fact(True, "fully_async does not start without them")
    if _v1_updates(run) and "actor/entropy" in clues.keys:
        return Fact(False, "actor/entropy is logged without training/rollout_probs_diff_mean")
    return _missing(run, path)


def _updates_per_version(run: _Run) -> Fact:
    """Optimiser updates between two weight syncs.

    separate_async: parameter_sync_step * ppo_epochs. fully_async: trigger_parameter_sync_step *
    require_batches * ppo_epochs. Others: ceil(train_batch_size / ppo_mini_batch_size) * ppo_epochs.
    """
    clues, trainer = run.clues, run.value("trainer")
    epochs = clues.number(f"{ACTOR}.ppo_epochs") or 1.0
    if trainer is None:
        return Fact(None, "depends on the trainer: " + run.facts["trainer"].reason)
    if trainer == "separate_async":
        paths = ["trainer.v1.separate_async.parameter_sync_step"]
    elif trainer == "fully_async":
        paths = [f"{ASYNC}.trigger_parameter_sync_step", f"{ASYNC}.require_batches"]
    else:
        return _updates_per_batch(run, epochs)
    factors = [clues.number(path) for path in paths]
    if None in factors:
        return _missing(run, *paths)
    return Fact(math.prod(f for f in factors if f) * epochs, f"{' * '.join(paths)} * ppo_epochs")


def _updates_per_batch(run: _Run, epochs: float) -> Fact:
    paths = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    batch, mini = (run.clues.number(path) for path in paths)
    if not batch or not mini:
        return _missing(run, *paths)
    return Fact(math.ceil(batch / mini) * epochs, "train_batch_size / ppo_mini_batch_size * ppo_epochs")


def _on_policy_updates(run: _Run) -> Fact:
    updates = run.facts["updates_per_version"]
    if isinstance(updates.value, float):
        return Fact(updates.value == 1, f"{updates.value:g} optimiser updates per pi_old: {updates.reason}")
    still = run.clues.values.get("actor/ppo_kl") == (0, 0) and run.value("three_decimals") is False
    if still and run.value("log_prob_mode") == "decoupled":
        return Fact(True, "actor/ppo_kl is exactly 0 throughout, so no update came before the measured one")
    return Fact(None, updates.reason)


def _correction(run: _Run) -> Fact:
    """The importance correction that acts, not the one configured."""
    clues, path = run.clues, f"{CORRECTION}.rollout_is"
    if clues.get(path) is not None:
        return _configured_correction(run, path)
    if clues.prefixed("rollout_corr/rollout_is_", "actor/rollout_corr/rollout_is_"):
        return Fact(None, f"correction weights are logged, but not whether per token or sequence ({path})")
    if clues.has(path) and _walk(clues.config, path)[1] is None:
        return Fact("none", f"{path} is null")
    if "rollout_corr/kl" in clues.keys and clues.full_rows:
        return Fact("none", "rollout_corr/* is logged without correction weights")
    return _missing(run, path)


def _configured_correction(run: _Run, path: str) -> Fact:
    configured, off = run.clues.get(path), _correction_is_off(run)
    if off:
        return Fact("none", f"{path}={configured} is set, but {off}")
    return Fact(str(configured), f"{path}={configured}")


def _correction_is_off(run: _Run) -> str | None:
    own_loss = run.clues.get(f"{ACTOR}.policy_loss.loss_mode") == "bypass_mode"
    if run.value("log_prob_mode") == "bypass" and not own_loss:
        return "bypass mode without policy_loss.loss_mode=bypass_mode ignores it"
    if run.value("calculate_log_probs") is False:
        return "without calculate_log_probs it is silently off"
    return None


def _rejection(run: _Run) -> Fact:
    clues, path = run.clues, f"{CORRECTION}.rollout_rs"
    if clues.get(path) is not None:
        return _configured_correction(run, path)
    names = sorted({m[1] for key in clues.keys if (m := REJECTION.fullmatch(key))})
    if names:
        return Fact(",".join(names), "statistics of this option are logged")
    if clues.has(path) and _walk(clues.config, path)[1] is None:
        return Fact("none", f"{path} is null")
    if "rollout_corr/kl" in clues.keys and clues.full_rows:
        return Fact("none", "rollout_corr/* is logged without rejection statistics")
    return _missing(run, path)


# ------------------------------------------------------------------ batch, buffer, filter


def _groups_per_step(run: _Run) -> Fact:
    """Groups per logged row: the train batch, in fully_async everything trained in one sync cycle."""
    if run.value("trainer") != "fully_async":
        size = run.clues.number("data.train_batch_size")
        return Fact(size, "data.train_batch_size") if size else _missing(run, "data.train_batch_size")
    paths = (
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ASYNC}.require_batches",
        f"{ASYNC}.trigger_parameter_sync_step",
    )
    factors = [run.clues.number(path) for path in paths]
    if None in factors:
        return _missing(run, *paths)
    reason = "ppo_mini_batch_size * require_batches * trigger_parameter_sync_step per logged row"
    return Fact(math.prod(f for f in factors if f), reason)


def _samples_per_step(run: _Run) -> Fact:
    groups, size = run.facts["groups_per_step"], run.facts["group_size"]
    if isinstance(groups.value, float) and isinstance(size.value, float):
        return Fact(groups.value * size.value, f"({groups.reason}) * {size.reason}")
    return Fact(None, groups.reason if groups.value is None else size.reason)


def _threshold_setting(name: str, kind: Kind) -> Callable[[_Run], Fact]:
    path = f"{SAMPLER}.{name}"

    def rule(run: _Run) -> Fact:
        trainer = run.value("trainer")
        if trainer is not None and trainer not in ("colocate_async", "separate_async"):
            return Fact(None, f"{trainer} does not read {path}")
        return _setting(path, kind=kind)(run)

    return rule


def _warmup_batches(run: _Run) -> Fact:
    trainer = run.value("trainer")
    if trainer not in ("colocate_async", "separate_async"):
        reason = run.facts["trainer"].reason if trainer is None else f"{trainer} has no warmup"
        return Fact(None, reason)
    return _setting(f"trainer.v1.{trainer}.num_warmup_batches", kind="number")(run)


def _dapo_enabled(run: _Run) -> Fact:
    path = "algorithm.filter_groups.enable"
    logged = run.clues.any_key(FILTERED, SURPLUS)
    return Fact(True, f"{logged} is logged") if logged else _setting(path, kind="flag")(run)


def _dapo_effective(run: _Run) -> Fact:
    logged = run.clues.any_key(FILTERED, SURPLUS)
    if logged:
        return Fact(True, f"{logged} is logged")
    if run.value("dapo_enabled") is False:
        return Fact(False, "algorithm.filter_groups is not enabled")
    if run.value("trainer_family") not in ("v1", None):
        return Fact(False, f"{run.value('trainer')} ignores algorithm.filter_groups")
    if run.value("custom_sampler"):
        return Fact(False, "a custom sampler turns verl's own filter off, and no filtered group is logged")
    if run.value("dapo_enabled") and run.value("trainer_family") == "v1":
        return Fact(True, "algorithm.filter_groups is enabled and a v1 trainer applies it")
    return Fact(None, run.facts["dapo_enabled"].reason)


def _custom_sampler(run: _Run) -> Fact:
    path = f"{SAMPLER}.custom_sampler"
    name = run.clues.get(f"{path}.name") or run.clues.get(f"{path}.path")
    if RECORDER in str(run.clues.get(f"{path}.path")):
        return Fact(False, f"{path} is the recorder's, which selects and filters as verl's own")
    if name:
        return Fact(True, f"{path} names {name}")
    if run.clues.has(path):
        return Fact(False, f"{path} is empty")
    return _missing(run, path)


def _partial_rollout(run: _Run) -> Fact:
    trainer = run.value("trainer")
    if trainer in ("colocate_async", "separate_async"):
        return Fact(True, f"{trainer} always resumes interrupted requests")
    if trainer in SYNC_TRAINERS or trainer == "one_step_off":
        return Fact(False, f"{trainer} syncs weights between generations")
    return _setting(f"{ASYNC}.partial_rollout", kind="flag")(run)


def _fa_staleness_share(run: _Run) -> Fact:
    if run.value("trainer") not in ("fully_async", None):
        return Fact(None, f"{run.value('trainer')} has no async_training.staleness_threshold")
    return _setting(f"{ASYNC}.staleness_threshold", kind="number")(run)


# ------------------------------------------------------------------ settings as configured


def _router_replay(run: _Run) -> Fact:
    paths = [f"{ACTOR}.{engine}.router_replay.mode" for engine in ("megatron", "veomni")]
    paths.append(f"{ACTOR}.router_replay.mode")
    mode = next((m for m in map(run.clues.get, paths) if m and m != "disabled"), None)
    if mode:
        return Fact(str(mode), f"router_replay.mode={mode}")
    path = f"{ROLLOUT}.enable_rollout_routing_replay"
    if run.clues.flag(path) is None:
        return _missing(run, path)
    return Fact("rollout only" if run.clues.flag(path) else "none", f"{path}={run.clues.get(path)}")


def _quantization(run: _Run) -> Fact:
    path = f"{ROLLOUT}.quantization"
    value = run.clues.get(path)
    if value is not None:
        return Fact(str(value), f"{path}={value}")
    if run.clues.has(path) and _walk(run.clues.config, path)[1] is None:
        return Fact("none", f"{path} is null (an engine may still load a quantised checkpoint)")
    return _missing(run, path)


def _setting(*paths: str, kind: Kind = "text") -> Callable[[_Run], Fact]:
    """A fact that is a setting: the first of the paths that is configured and resolved."""

    def rule(run: _Run) -> Fact:
        for path in paths:
            value = _typed(run.clues, path, kind)
            if value is not None:
                return Fact(value, f"{path}={value}")
        return _missing(run, *paths)

    return rule


def _typed(clues: Clues, path: str, kind: Kind) -> FactValue:
    if kind == "number":
        return clues.number(path)
    if kind == "flag":
        return clues.flag(path)
    value = clues.get(path)
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    return None if value is None or isinstance(value, Mapping) else str(value)


def _configured(name: str) -> Callable[[_Run], Fact]:
    """A fact that is a setting, null included where null says something."""
    setting = SETTINGS[name]
    plainly = _setting(*setting.paths, kind=setting.kind)

    def rule(run: _Run) -> Fact:
        found = plainly(run)
        null = next((p for p in setting.paths if run.clues.has(p) and _walk(run.clues.config, p)[1] is None), None)
        return found if found.value is not None or null is None else Fact(setting.null, f"{null} is null")

    return rule


def _age_unbounded(run: _Run) -> Fact:
    path = f"{SAMPLER}.max_off_policy_threshold"
    if not run.clues.has(path):
        return _missing(run, path)
    return Fact(_walk(run.clues.config, path)[1] is None, f"{path}={_walk(run.clues.config, path)[1]}")


_SAME_TYPE = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def _dtypes_differ(run: _Run) -> Fact:
    names = [run.value("rollout_dtype"), run.value("trainer_dtype")]
    if not all(isinstance(name, str) for name in names):
        return Fact(None, "the precision of one side is not configured")
    rollout, trainer = (str(name).removeprefix("torch.").lower() for name in names)
    differ = _SAME_TYPE.get(rollout, rollout) != _SAME_TYPE.get(trainer, trainer)
    return Fact(differ, f"rollout {rollout}, trainer {trainer}")


_MOE_NAME = re.compile(
    r"moe|mixtral|[-_]\d+b[-_]a\d+(?:\.\d+)?b|deepseek-?v[23]|gpt-oss|kimi-k2|glm-4\.5", re.IGNORECASE
)
"""Names under which mixture-of-experts models are published."""


def _model_is_moe(run: _Run) -> Fact:
    path, model = f"{ACTOR}.megatron.expert_model_parallel_size", "actor_rollout_ref.model.path"
    if (run.clues.number(path) or 1) > 1:
        return Fact(True, f"{path}={run.clues.get(path)}")
    name = run.clues.get(model)
    if not isinstance(name, str):
        return _missing(run, model)
    return Fact(bool(_MOE_NAME.search(name)), f"by its name {name}")


def _full_precision(run: _Run) -> Fact:
    loggers = run.clues.get("trainer.logger")
    if loggers is None:
        return _missing(run, "trainer.logger")
    named = re.findall(r"\w+", str(loggers))
    return Fact(any(name != "console" for name in named), f"trainer.logger={','.join(named)}")


def _told_by_log_prob_mode(_: _Run) -> Fact:
    return Fact(None, "asked only of other frameworks: in verl log_prob_mode tells what a clip share of 0 means")


def _told_by_key(_: _Run) -> Fact:
    return Fact(None, "asked only of other frameworks: in verl the metric's name tells")


_RULES: Mapping[str, Callable[[_Run], Fact]] = {
    "framework": _framework,
    "framework_version": _framework_version,
    "trainer": _trainer,
    "trainer_family": _trainer_family,
    "is_async": _is_async,
    "three_decimals": _three_decimals,
    "log_prob_mode": _log_prob_mode,
    "calculate_log_probs": _calculate_log_probs,
    "updates_per_version": _updates_per_version,
    "on_policy_updates": _on_policy_updates,
    "group_size": _setting(f"{ROLLOUT}.n", kind="number"),
    "groups_per_step": _groups_per_step,
    "samples_per_step": _samples_per_step,
    "staleness_threshold": _threshold_setting("max_off_policy_threshold", "number"),
    "staleness_strategy": _threshold_setting("max_off_policy_strategy", "text"),
    "fa_staleness_share": _fa_staleness_share,
    "warmup_batches": _warmup_batches,
    "custom_sampler": _custom_sampler,
    "dapo_enabled": _dapo_enabled,
    "dapo_effective": _dapo_effective,
    "correction": _correction,
    "rejection": _rejection,
    "loss_mode": _setting(f"{ACTOR}.policy_loss.loss_mode"),
    "rollout_quantization": _quantization,
    "rollout_dtype": _setting(f"{ROLLOUT}.dtype"),
    "trainer_dtype": _setting(
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype",
        f"{ACTOR}.fsdp_config.dtype",
        f"{ACTOR}.megatron.dtype",
    ),
    "router_replay": _router_replay,
    "temperature": _setting(f"{ROLLOUT}.temperature", kind="number"),
    "top_p": _setting(f"{ROLLOUT}.top_p", kind="number"),
    "top_k": _setting(f"{ROLLOUT}.top_k", kind="number"),
    "learning_rate": _setting(f"{ACTOR}.optim.lr", kind="number"),
    "partial_rollout": _partial_rollout,
    "response_limit": _setting(f"{ROLLOUT}.response_length", "data.max_response_length", kind="number"),
    "total_steps": _setting("trainer.total_training_steps", kind="number"),
    "test_freq": _setting("trainer.test_freq", kind="number"),
    "train_files": _setting("data.train_files"),
    "model_path": _setting("actor_rollout_ref.model.path"),
    "clip_always_zero": _told_by_log_prob_mode,
    "gap_estimator": _told_by_key,
    "lag_labels": _told_by_key,
    **{name: _configured(name) for name in SETTINGS},
    "age_unbounded": _age_unbounded,
    "dtypes_differ": _dtypes_differ,
    "model_is_moe": _model_is_moe,
    "full_precision": _full_precision,
    "project": _setting("trainer.project_name"),
    "experiment": _setting("trainer.experiment_name"),
}
FACTS = tuple(_RULES)
_COMMON = frozenset({"framework", "framework_version", "three_decimals", "trainer_family"})
"""Facts that are derived alike for every framework."""
