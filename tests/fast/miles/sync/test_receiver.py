"""The engine-side state machine alone: no HTTP, no threads."""

from dataclasses import replace

import pytest
import torch

from miles.rollout.engines.embedded.weight_state import BeginUpdate, WeightState, WeightUpdateError
from miles.rollout.engines.embedded.weights import WeightReceiver, table_of
from miles.weight_wire.bucket import BucketHeader, Piece, align_up, digest
from miles.weight_wire.table import EngineTable, ParamEntry


class Setup:
    """A receiver with a target of two parameters and a frozen draft; helpers to play a trainer."""

    def __init__(self, **post_process):
        self.parameters = {"a": torch.zeros(4), "qk": torch.zeros(3, 2), "draft.w": torch.ones(4)}
        self.table = EngineTable(
            entries=(
                ParamEntry("a", (4,), "float32"),
                ParamEntry("qk", (3, 2), "float32", fused_from=("q", "k"), num_shards=2),
                ParamEntry("draft.w", (4,), "float32", module="draft", post_process="once"),
            )
        )
        self.state = WeightState()
        self.receiver = WeightReceiver(self.parameters, self.table, self.state, post_process=post_process)

    def begin(self, version=1, *, now=0.0, **changes):
        begin = BeginUpdate(
            run_id="run",
            version=version,
            selector=("target",),
            plan_digest="plan",
            table_digest=self.table.table_digest,
            engine_epoch=self.state.epoch,
            pause="retract",
            timeout_s=10.0,
        )
        begin = replace(begin, **changes)
        self.state.check_begin(begin, now)
        self.receiver.check_begin(begin)
        session = self.state.begin(begin, now)
        self.receiver.start(session)
        return session.token

    @property
    def view(self):
        return self.state.get()

    @property
    def dirty(self):
        return self.view.reason if self.view.phase == "dirty" else None

    def load(self, token, values, *, version=1, sequence=0, plan="plan", corrupt=False, checksum=True, now=0.0):
        header, buffer = bucket(values, version=version, sequence=sequence, checksum=checksum)
        if corrupt:
            buffer[1] ^= 1
        return self.receiver.load(token, plan, header, buffer, now)

    def whole(self, version=1, **changes):
        token = self.begin(version, **changes)
        self.load(token, FULL, version=version)
        self.receiver.complete(token, "plan", version, 1)
        self.state.finish(token)


A, Q, K = ("a", torch.arange(4.0), None), ("qk", torch.ones(2, 2), ((0, 2),)), ("qk", 5 * torch.ones(1, 2), ((2, 3),))
FULL = [A, Q, K]


def bucket(values, *, version, sequence, checksum=True, dtype=None, scale="none"):
    pieces, buffer, end = [], torch.zeros(4096, dtype=torch.uint8), 0
    for name, tensor, slot in values:
        offset, nbytes = align_up(end, 4), tensor.numel() * tensor.element_size()
        buffer[offset : offset + nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        kind = str(tensor.dtype).removeprefix("torch.")
        pieces.append(Piece(name, dtype or kind, tuple(tensor.shape), offset, nbytes, scale, slot))
        end = offset + nbytes
    return BucketHeader(version, sequence, end, tuple(pieces), digest(buffer[:end]) if checksum else None), buffer


def refused(code):
    return pytest.raises(WeightUpdateError, check=lambda error: error.code == code)


def test_a_whole_update_is_served_and_only_then_reported():
    setup = Setup()
    receiver = setup.receiver
    token = setup.begin(1)
    assert (setup.view.phase, setup.view.version, setup.view.session.begin.version) == ("updating", 0, 1)
    setup.load(token, [A], sequence=0)
    setup.load(token, [K, Q], sequence=1)
    receiver.complete(token, "plan", 1, 2)
    assert setup.view.version == 0
    setup.state.finish(token)
    assert (setup.view.phase, setup.view.version, setup.view.run_id) == ("serving", 1, "run")
    assert setup.parameters["qk"].tolist() == [[1, 1], [1, 1], [5, 5]]
    assert setup.parameters["a"].tolist() == [0, 1, 2, 3]
    assert setup.parameters["draft.w"].tolist() == [1, 1, 1, 1]


def test_waiting_set_must_be_empty():
    setup = Setup()
    token = setup.begin()
    setup.load(token, [Q])
    with pytest.raises(
        WeightUpdateError,
        match=r"waiting for 2 parameters: a: 4 of 4 elements, in rows \[0, 4\); qk: 2 of 6 elements, in rows \[2, 3\)",
    ):
        setup.receiver.complete(token, "plan", 1, 1)
    assert setup.dirty is not None
    assert setup.view.version == 0


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("unknown_name", [("nope", torch.zeros(4), None)]),
        ("not_covered", [("draft.w", torch.zeros(4), None)]),
        ("format_mismatch", [("a", torch.zeros(4, dtype=torch.bfloat16), None)]),
        ("shape_mismatch", [("a", torch.zeros(5), None)]),
        ("shape_mismatch", [("a", torch.zeros(2, 2), None)]),
        ("shape_mismatch", [("qk", torch.zeros(3, 2), None)]),
        ("shape_mismatch", [("qk", torch.zeros(1, 2), ((0, 2),))]),
        ("bad_slot", [("qk", torch.zeros(2, 2), ((2, 4),))]),
        ("bad_slot", [("qk", torch.zeros(2, 2), ((1, 1),))]),
        ("bad_slot", [("qk", torch.zeros(2, 2), ((0, 2), (0, 2), (0, 1)))]),
        ("bad_slot", [A, A]),
        ("bad_slot", [("a", torch.zeros(1), ((0, 1),)), A]),
        ("bad_slot", [Q, Q]),
        ("bad_slot", [Q, K, ("qk", torch.zeros(1, 2), ((1, 2),))]),
    ],
)
def test_a_piece_that_does_not_fit_makes_the_engine_dirty_before_anything_is_written(code, values):
    setup = Setup()
    before = {name: tensor.clone() for name, tensor in setup.parameters.items()}
    with refused(code):
        setup.load(setup.begin(), values)
    assert setup.view.phase == "dirty"
    assert code in setup.dirty
    assert all(torch.equal(before[name], tensor) for name, tensor in setup.parameters.items())


@pytest.mark.parametrize(
    ("held", "sent"), [("block128_fp32", "block128_e8m0"), ("block128_e8m0", "block128_fp32"), ("none", "mx32_e8m0")]
)
def test_receiver_rejects_wrong_scale_format(held, sent):
    weight = torch.zeros(4, dtype=torch.float8_e4m3fn)
    table = EngineTable(entries=(ParamEntry("w", (4,), "float8_e4m3fn", scale=held),))
    state = WeightState()
    receiver = WeightReceiver({"w": weight}, table, state)
    session = state.begin(BeginUpdate("run", 1, "all", "plan", table.table_digest, state.epoch, "retract", 1.0), 0.0)
    receiver.start(session)
    header, buffer = bucket([("w", weight, None)], version=1, sequence=0, scale=sent)
    with pytest.raises(
        WeightUpdateError, match=f"sent as float8_e4m3fn scale {sent}, the engine holds .* scale {held}"
    ):
        receiver.load(session.token, "plan", header, buffer, 0.0)


def test_corrupt_byte_makes_dirty_and_the_next_whole_update_heals():
    setup = Setup()
    with refused("digest_mismatch"):
        setup.load(setup.begin(1), FULL, corrupt=True)
    assert setup.view.phase == "dirty"
    assert setup.state.status()["weight_version"] == "0"
    setup.whole(2)
    assert (setup.view.phase, setup.view.version, setup.dirty) == ("serving", 2, None)


def test_without_checksum_the_acknowledgement_carries_none():
    setup = Setup()
    assert setup.load(setup.begin(), FULL, checksum=False) is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("plan_mismatch", {"plan": "other"}),
        ("version_mismatch", {"version": 2}),
        ("bad_sequence", {"sequence": 1}),
    ],
)
def test_a_message_that_contradicts_begin_is_fatal(code, message):
    setup = Setup()
    with refused(code):
        setup.load(setup.begin(1), FULL, **message)
    assert setup.view.phase == "dirty"


def test_a_stale_trainer_cannot_touch_the_running_session():
    setup = Setup()
    old = setup.begin(1)
    setup.state.expire(now=11.0)
    token = setup.begin(2, now=12.0)
    with refused("no_session"):
        setup.load(old, FULL)
    assert setup.view.phase == "updating"
    setup.load(token, FULL, version=2)


def test_two_syncs_concurrent_refused_without_harm_to_the_first():
    setup = Setup()
    token = setup.begin(1)
    with pytest.raises(WeightUpdateError, match="update to version 1 is in progress") as refusal:
        setup.begin(2, now=4.0)
    assert (refusal.value.fatal, refusal.value.retry_after_s) == (False, 6.0)
    setup.load(token, FULL)
    setup.receiver.complete(token, "plan", 1, 1)
    setup.state.finish(token)
    assert setup.view.version == 1


@pytest.mark.parametrize("version", [4, 5])
def test_a_version_of_the_same_run_never_goes_back(version):
    setup = Setup()
    setup.whole(5)
    with refused("version_going_back"):
        setup.begin(version)
    assert (setup.view.phase, setup.view.version) == ("serving", 5)


def test_an_engine_of_another_run_takes_lower_versions_of_the_new_run():
    setup = Setup()
    setup.whole(5)
    token = setup.begin(1, run_id="next", plan_digest="next plan")
    setup.load(token, FULL, version=1, plan="next plan")
    setup.receiver.complete(token, "next plan", 1, 1)
    setup.state.finish(token)
    assert (setup.view.run_id, setup.view.version) == ("next", 1)


def test_an_engine_that_restarted_is_not_the_one_that_was_planned_for():
    setup = Setup()
    for changes in ({"engine_epoch": "earlier life"}, {"table_digest": "other table"}):
        with refused("table_changed"):
            setup.begin(1, **changes)
    assert setup.view.phase == "serving"


def test_a_silent_trainer_leaves_the_engine_dirty():
    setup = Setup()
    token = setup.begin(1, now=100.0)
    setup.load(token, [A], now=105.0)
    assert not setup.state.expire(now=114.9)
    assert setup.state.expire(now=115.1)
    assert "no message for 10 s while updating" in setup.dirty


def test_selector_names_only_modules_the_engine_has_and_stays_the_same():
    setup = Setup()
    token = setup.begin(1)
    with refused("selector_mismatch"):
        setup.receiver.require_selector(token, "all")
    assert setup.view.phase == "dirty"


def test_a_begin_that_names_unknown_modules_changes_nothing():
    setup = Setup()
    for selector in (("vision",), ()):
        with refused("unknown_module"):
            setup.begin(2, selector=selector)
        assert setup.view.phase == "serving"


def test_noop_sync_leaves_draft_unshuffled():
    """A frozen draft with a transform that may run once only: updates of the target never run it again."""
    setup = Setup()
    runs = []

    def shuffle():
        setup.parameters["draft.w"].mul_(2)
        runs.append("draft")

    setup.receiver = WeightReceiver(setup.parameters, setup.table, setup.state, post_process={"draft": shuffle})
    for version in (1, 2, 3):
        setup.whole(version)
    assert runs == []
    assert setup.parameters["draft.w"].tolist() == [1, 1, 1, 1]
    token = setup.begin(4, selector="all")
    setup.load(token, [*FULL, ("draft.w", torch.full((4,), 3.0), None)], version=4)
    setup.receiver.complete(token, "plan", 4, 1)
    setup.state.finish(token)
    assert runs == ["draft"]
    assert setup.parameters["draft.w"].tolist() == [6, 6, 6, 6]
    assert setup.receiver.stamps["draft"] == ("run", 4, 16)


@pytest.mark.parametrize("announced", [0, 2])
def test_the_number_of_buckets_must_be_the_announced_one(announced):
    setup = Setup()
    token = setup.begin()
    setup.load(token, FULL)
    with pytest.raises(WeightUpdateError, match=f"after 1 of {announced} buckets; waiting for 0 parameters: -"):
        setup.receiver.complete(token, "plan", 1, announced)
    assert setup.view.phase == "dirty"


def test_one_row_is_not_the_whole_parameter():
    setup = Setup()
    token = setup.begin()
    setup.load(token, [("a", torch.zeros(1), ((0, 1),)), Q, K])
    with pytest.raises(WeightUpdateError, match=r"waiting for 1 parameters: a: 3 of 4 elements, in rows \[1, 4\)"):
        setup.receiver.complete(token, "plan", 1, 1)
    assert setup.view.phase == "dirty"


def test_a_parameter_may_come_in_more_pieces_than_the_table_says():
    setup = Setup()
    token = setup.begin()
    halves = [("a", torch.ones(2), ((2, 4),)), ("a", torch.zeros(2), ((0, 2),))]
    setup.load(token, halves, sequence=0)
    setup.load(token, [Q, K], sequence=1)
    setup.receiver.complete(token, "plan", 1, 2)
    setup.state.finish(token)
    assert setup.parameters["a"].tolist() == [0, 0, 1, 1]


class Shuffled(Setup):
    """The draft's bytes are doubled once they have all come."""

    def __init__(self):
        super().__init__(draft=lambda: self.parameters["draft.w"].mul_(2))

    def push(self, value, version, *, run_id="run", finish=True):
        token = self.begin(version, run_id=run_id, selector="all")
        self.load(token, [*FULL, ("draft.w", torch.full((4,), value), None)], version=version)
        self.receiver.complete(token, "plan", version, 1)
        if finish:
            self.state.finish(token)
        else:
            self.state.fail(token, "flush_failed", "by the test")
        return self.parameters["draft.w"].tolist()


def test_the_same_version_of_another_run_is_processed_too():
    setup = Shuffled()
    assert setup.push(3.0, 1) == [6.0] * 4
    assert setup.push(5.0, 1, run_id="next") == [10.0] * 4
    assert setup.receiver.stamps["draft"] == ("next", 1, 16)


def test_a_version_that_is_sent_again_after_a_failure_is_processed_again():
    setup = Shuffled()
    setup.push(3.0, 1, finish=False)
    assert setup.push(3.0, 1) == [6.0] * 4


def test_table_of_an_engine_with_tied_embeddings_lists_the_alias():
    embed = torch.zeros(4, 2)
    table = table_of({"embed": embed}, aliases={"head": "embed"})
    assert table.by_name["head"].alias_of == "embed"
    assert [e.name for e in table.entries if e.filled_by_sync] == ["embed"]


def test_a_table_that_does_not_describe_the_parameters_is_refused():
    table = EngineTable(entries=(ParamEntry("w", (4,), "bfloat16"),))
    with refused("bad_table"):
        WeightReceiver({"w": torch.zeros(4)}, table, WeightState())


def test_table_of_an_engine_with_fused_parameters_counts_their_pieces_and_names_their_modules():
    parameters = {"qkv": torch.zeros(6, 2), "norm": torch.zeros(2), "head": torch.zeros(3)}
    table = table_of(parameters, fused={"qkv": ("q", "k", "v")}, modules={"head": "value"})
    found = {entry.name: (entry.fused_from, entry.num_shards, entry.module) for entry in table.entries}
    assert found == {"qkv": (("q", "k", "v"), 3, "target"), "norm": ((), 1, "target"), "head": ((), 1, "value")}
