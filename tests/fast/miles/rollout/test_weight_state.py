"""`WeightState` against a model of it: any order of events, legal or not."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from miles.rollout.engines.embedded.weight_state import (
    TRANSITIONS,
    BeginUpdate,
    IllegalTransition,
    WeightState,
    WeightUpdateError,
    allowed_in,
)

RUNS = st.sampled_from(["run a", "run b"])
VERSIONS = st.integers(0, 6)


def announced(state, run_id, version, timeout_s=10.0):
    return BeginUpdate(run_id, version, "all", "plan", "table", state.epoch, "retract", timeout_s)


class AgainstAModel(RuleBasedStateMachine):
    """The model: phase, what was finished last, the session, and whether memory is there and holds a version."""

    def __init__(self):
        super().__init__()
        self.state = WeightState(0)
        self.phase, self.finished, self.session = "serving", (None, 0), None
        self.weights, self.cache, self.whole = True, True, True
        self.now = 0.0
        self.changes = 0
        self.state.listener = self.changed

    def changed(self):
        self.changes += 1

    def refused(self, call, error=IllegalTransition):
        before, changes = self.state.get(), self.changes
        with pytest.raises(error) as raised:
            call()
        assert (self.state.get(), self.changes) == (before, changes)
        assert not raised.value.fatal
        return raised.value

    @rule(run_id=RUNS, version=VERSIONS, timeout_s=st.sampled_from([1.0, 5.0]))
    def begin(self, run_id, version, timeout_s):
        begin = announced(self.state, run_id, version, timeout_s)
        if self.phase == "updating":
            error = self.refused(lambda: self.state.begin(begin, self.now))
            assert error.code == "busy"
        elif self.phase == "released":
            assert self.refused(lambda: self.state.begin(begin, self.now)).code == "illegal_transition"
        elif self.finished[0] == run_id and version <= self.finished[1]:
            self.refused(lambda: self.state.begin(begin, self.now), WeightUpdateError)
        else:
            self.session = (self.state.begin(begin, self.now), self.now + timeout_s)
            self.phase = "updating"

    @rule()
    def finish(self):
        if self.phase != "updating":
            assert self.refused(lambda: self.state.finish("stale"), WeightUpdateError).code == "no_session"
            return
        self.refused(lambda: self.state.finish("stale"), WeightUpdateError)
        begin = self.session[0].begin
        self.state.finish(self.session[0].token)
        self.phase, self.finished, self.session, self.whole = "serving", (begin.run_id, begin.version), None, True

    @rule()
    def fail(self):
        if self.phase != "updating":
            self.refused(lambda: self.state.fail("stale", "code", "why"), WeightUpdateError)
            return
        self.state.fail(self.session[0].token, "code", "why")
        self.phase, self.session, self.whole = "dirty", None, False

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds):
        self.now += seconds
        due = self.session is not None and self.now >= self.session[1]
        assert self.state.expire(self.now) == due
        if due:
            self.phase, self.session, self.whole = "dirty", None, False

    @rule()
    def hear(self):
        if self.session is not None:
            session = self.session[0]
            self.state.heard(session.token, self.now)
            self.session = (session, self.now + session.begin.timeout_s)

    @rule()
    def release_weights(self):
        if self.phase == "updating":
            self.refused(self.state.weights_released)
        else:
            self.state.weights_released()
            self.phase, self.weights, self.whole = "released", False, False

    @rule()
    def resume_weights(self):
        if self.phase == "updating":
            self.refused(self.state.weights_resumed)
        else:
            self.state.weights_resumed()
            self.phase = "dirty" if self.phase == "released" else self.phase
            self.weights = True

    @rule(held=st.booleans())
    def move_cache(self, held):
        call = self.state.cache_resumed if held else self.state.cache_released
        if self.phase == "updating":
            self.refused(call)
        else:
            call()
            self.cache = held

    @invariant()
    def agrees(self):
        view = self.state.get()
        assert view.phase == self.phase
        assert (view.run_id, view.version) == self.finished
        assert view.cache_held == self.cache
        assert (view.session is None) == (self.phase != "updating")
        assert view.intact == self.whole
        # Served is only what is whole, in memory, and of no update in progress.
        assert (view.refusal is None) == (self.phase == "serving")
        if view.refusal is None:
            assert self.whole
            assert self.weights
        assert self.state.status()["allowed"] == [e for e, moves in TRANSITIONS.items() if self.phase in moves]


AgainstAModel.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestAgainstAModel = AgainstAModel.TestCase


def test_a_refusal_says_what_is_possible():
    state = WeightState()
    state.weights_released()
    with pytest.raises(
        IllegalTransition, match=r"while the weights are released; possible now: release_weights, resume"
    ):
        state.require("begin")
    assert allowed_in("updating") == ("finish", "fail", "read_weights")


def test_a_busy_engine_says_how_long():
    state = WeightState()
    state.begin(announced(state, "run", 1), 100.0)
    with pytest.raises(IllegalTransition, match="an update to version 1 is in progress") as raised:
        state.check_begin(announced(state, "run", 2), 104.0)
    assert raised.value.retry_after_s == 6.0


def test_an_update_planned_for_an_earlier_life_of_the_engine_is_refused():
    earlier, state = WeightState(), WeightState()
    with pytest.raises(WeightUpdateError, check=lambda error: error.code == "table_changed"):
        state.begin(announced(earlier, "run", 1), 0.0)
    assert state.get().phase == "serving"
