import itertools
import threading
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.sync.bucket import BucketStager, FixedBucket, bucket_size, staged_bytes
from miles.sync.entry import SourceSpec
from miles.sync.plan import build_plan
from miles.weight_wire.bucket import BucketHeader, Piece, WeightWireError, align_up, piece_view
from miles.weight_wire.table import EngineTable, ParamEntry


def plan_of(shapes, dtype="float32"):
    entries = tuple(ParamEntry(name, shape, dtype) for name, shape in shapes.items())
    weights = {name: SourceSpec(shape, dtype) for name, shape in shapes.items()}
    return build_plan(weights, [EngineTable(entries=entries)], run_id="r")


def test_largest_parameter_grows_bucket():
    rows = 622_329_856 // 4
    plan = plan_of({"embed": (rows,), **{f"w{i}": (1 << 20,) for i in range(4)}})
    assert bucket_size(plan, 512 << 20) == 622_329_856
    assert bucket_size(plan, 1 << 30) == 622_329_856 + 4 * (4 << 20), "never more than the whole plan needs"


def test_an_atomic_group_grows_the_bucket_with_its_alignment():
    names = ("a", "b")
    entry = ParamEntry("ab", (10,), "uint8", fused_from=names, num_shards=2)
    plan = build_plan(dict.fromkeys(names, SourceSpec((5,), "uint8")), [EngineTable(entries=(entry,))], run_id="r")
    assert bucket_size(plan, 4) == 16 + 5


def fixed(count, nbytes):
    bucket = FixedBucket(count, lambda n: torch.zeros(n, dtype=torch.uint8), lambda buffer: None)
    bucket.reserve(nbytes)
    return bucket


DTYPES = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
groups = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 60), min_size=1, max_size=4)),
    min_size=1,
    max_size=12,
)


@given(groups, st.integers(0, 2000), st.randoms(use_true_random=False))
def test_pieces_are_aligned_and_whole_groups_share_a_round(groups, extra, random):
    """Each group is one fused destination; rounds hold as many groups as fit, in the order they are completed."""
    entries, sources = [], {}
    for number, (dtype, lengths) in enumerate(groups):
        names = tuple(f"g{number}.p{piece}" for piece in range(len(lengths)))
        sources |= {name: SourceSpec((length,), dtype) for name, length in zip(names, lengths, strict=True)}
        fused = {"fused_from": names, "num_shards": len(names)} if len(names) > 1 else {"fused_from": names}
        entries.append(ParamEntry(f"g{number}", (sum(lengths),), dtype, **fused))
    plan = build_plan(sources, [EngineTable(entries=tuple(entries))], run_id="r")
    (key,) = plan.layouts
    capacity = bucket_size(plan, 1) + extra
    rounds = []
    stager = BucketStager(plan, key, 1, fixed(2, capacity), True, lambda header, buffer: rounds.append(header) or [])
    offered = list(plan.layouts[key])
    random.shuffle(offered)
    for entry in offered:
        stager.add(entry, torch.zeros(entry.shape, dtype=DTYPES[entry.dtype]))
    stager.flush()
    assert stager.waiting() == []
    of_group: dict[str, set[int]] = {}
    for number, header in enumerate(rounds):
        end = 0
        for piece in header.pieces:
            assert piece.offset % max(16, DTYPES[piece.dtype].itemsize) == 0
            assert end <= piece.offset < end + 16
            end = piece.offset + piece.nbytes
            of_group.setdefault(piece.name, set()).add(number)
        assert end == header.nbytes <= capacity
    assert sum(len(header.pieces) for header in rounds) == len(sources)
    assert all(len(numbers) == 1 for numbers in of_group.values()), "an atomic group was split"
    # No round could have taken the first group of the next one as well.
    for header, following in itertools.pairwise(rounds):
        first = [piece for piece in following.pieces if piece.name == following.pieces[0].name]
        sizes = [(piece.nbytes, DTYPES[piece.dtype].itemsize) for piece in first]
        assert align_up(header.nbytes, 16) + staged_bytes(sizes) > capacity


@pytest.mark.parametrize("count", [1, 2])
def test_bucket_not_rewritten_before_all_acks(count):
    """The stager blocks on the buffer it wants to reuse until the slowest receiver acknowledged it."""
    shapes = {f"w{i}": (4,) for i in range(count + 1)}
    plan = plan_of(shapes)
    (key,) = plan.layouts
    acks, seen = [], []

    def send(header, buffer):
        seen.append(buffer[: header.nbytes].clone())
        fast, slow = Future(), Future()
        fast.set_result(None)
        acks.append((slow, buffer, seen[-1]))
        return [fast, slow]

    stager = BucketStager(plan, key, 1, fixed(count, 16), True, send)

    def stage():
        for value, entry in enumerate(plan.layouts[key]):
            stager.add(entry, torch.full((4,), float(value)))
        stager.flush()

    thread = threading.Thread(target=stage)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "the buffer was reused although a receiver still reads it"
    assert len(acks) == count
    for _, buffer, content in acks[:count]:
        assert torch.equal(buffer[:16], content)
    acks[0][0].set_result(None)
    thread.join(5)
    assert not thread.is_alive()
    assert len(acks) == count + 1
    for slow, _, _ in acks[1:]:
        slow.set_result(None)


def test_gaps_are_zero_and_pieces_read_back_bit_for_bit():
    plan = plan_of({"a": (3,), "b": (5,)})
    (key,) = plan.layouts
    bucket = fixed(1, 64)
    bucket._buffers[0].fill_(0xAA)
    headers = []

    def send(header, buffer):
        headers.append((header, buffer))
        return []

    stager = BucketStager(plan, key, 7, bucket, True, send)
    values = {"a": torch.randn(3), "b": torch.randn(5)}
    for entry in plan.layouts[key]:
        stager.add(entry, values[entry.hf_name])
    stager.flush()
    ((header, buffer),) = headers
    assert torch.equal(buffer[12:16], torch.zeros(4, dtype=torch.uint8))
    for piece in BucketHeader.from_wire(header.to_wire()).pieces:
        assert torch.equal(piece_view(buffer, piece), values[piece.name])


def test_fused_pieces_travel_together_whatever_order_they_come_in():
    names = ("q", "k", "v")
    qkv = ParamEntry("qkv", (12,), "float32", fused_from=names, num_shards=3)
    entries = (qkv, ParamEntry("w", (8,), "float32"))
    weights = {**dict.fromkeys(names, SourceSpec((4,), "float32")), "w": SourceSpec((8,), "float32")}
    plan = build_plan(weights, [EngineTable(entries=entries)], run_id="r")
    (key,) = plan.layouts
    sent = []
    stager = BucketStager(plan, key, 1, fixed(2, 64), True, lambda h, b: sent.append([p.name for p in h.pieces]) or [])
    for name in ("v", "w", "q", "k"):
        for entry in plan.by_source[name]:
            stager.add(entry, torch.zeros(weights[name].shape))
        if name != "k":
            assert stager.waiting() == ["qkv"]
    stager.flush()
    assert sent == [["w"], ["qkv", "qkv", "qkv"]]
    assert stager.waiting() == []


def test_buffers_are_allocated_once_and_again_only_to_grow():
    bucket = fixed(2, 64)
    bucket.reserve(32)
    bucket.reserve(64)
    assert (bucket.allocations, bucket.nbytes) == (1, 64)
    bucket.reserve(65)
    assert (bucket.allocations, bucket.nbytes) == (2, 65)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"version": 7}, "decimal string"),
        ({"version": "07"}, "decimal string"),
        ({"version": "9223372036854775808"}, "int64"),
        ({"count": 2}, "says 2 pieces and lists 1"),
        ({"nbytes": 8}, "end at byte 16"),
        ({"version": "9" * 5000}, "decimal string"),
        ({"digest": "zz"}, "hex digits"),
        ({"digest": "0x1" + "0" * 16}, "hex digits"),
        ({"digest": "0x1_0"}, "hex digits"),
        ({"digest": 5}, "hex digits"),
        ({"digest": "f" * 5000}, "hex digits"),
        ({"sequence": True}, "integers >= 0"),
        ({"sequence": 1 << 63}, "integers >= 0"),
        ({"pieces": {"0": 1}, "count": 1}, "a list"),
        ({"pieces": [1] * 65537, "count": 65537}, "more than 65536"),
        ({"pieces": [["w" * 513, "float32", [4], 0, 16, "none", None]]}, "at most 512 characters"),
        ({"pieces": [["w", ["float32"], [4], 0, 16, "none", None]]}, "texts"),
        ({"pieces": [["w", "float32", [4], 0, 16, {}, None]]}, "texts"),
        ({"pieces": [["w", "float32", [1] * 9, 0, 4, "none", None]]}, "integers >= 0"),
        ({"pieces": [["w", "float32", [1 << 63], 0, 16, "none", None]]}, "integers >= 0"),
        ({"pieces": [["w", "float32", [4], 0, 16, "none", [[0, 1]] * 9]]}, "slot"),
        ({"pieces": [["w", "float32", [4], 0, 16, "none", [[0, 1.0]]]]}, "slot"),
        ({"pieces": [["w", "float32", [4], 4, 16, "none", None]]}, "do not fit"),
        ({"pieces": [["w", "float32", [5], 0, 16, "none", None]]}, "do not fit"),
        ({"pieces": [["w", "float99", [4], 0, 16, "none", None]]}, "unknown"),
        ({"pieces": [["w", "float32", [4], 0, 16, "mx99", None]]}, "unknown"),
        ({"pieces": [["w", "float32", [4], 0, 16, "none", [1]]]}, "slot"),
        ({"pieces": [["w", "float32", [4], 0, 16, "none"]]}, "7 fields"),
    ],
)
def test_malformed_headers_are_refused(change, message):
    header = BucketHeader(7, 0, 16, (Piece("w", "float32", (4,), 0, 16),), 5)
    assert BucketHeader.from_wire(header.to_wire()) == header
    with pytest.raises(WeightWireError, match=message):
        BucketHeader.from_wire({**header.to_wire(), **change})


def test_overlapping_pieces_are_refused():
    pieces = (Piece("a", "float32", (8,), 0, 32), Piece("b", "float32", (4,), 16, 16))
    with pytest.raises(WeightWireError, match="overlaps"):
        BucketHeader.from_wire(BucketHeader(1, 0, 64, pieces, None).to_wire())


def test_a_group_that_comes_in_another_order_still_fits_the_bucket_made_for_it():
    """Two and one bfloat16: 18 bytes in the plan's order, 20 in the other."""
    entry = ParamEntry("ab", (3,), "bfloat16", fused_from=("a", "b"), num_shards=2)
    sources = {"a": SourceSpec((2,), "bfloat16"), "b": SourceSpec((1,), "bfloat16")}
    plan = build_plan(sources, [EngineTable(entries=(entry,))], run_id="r")
    (key,) = plan.layouts
    assert bucket_size(plan, 1) == 18
    sent = []
    stager = BucketStager(plan, key, 1, fixed(1, 18), True, lambda header, buffer: sent.append(header) or [])
    for piece in reversed(plan.layouts[key]):
        stager.add(piece, torch.zeros(piece.shape, dtype=torch.bfloat16))
    stager.flush()
    assert [(piece.shape, piece.offset) for piece in sent[0].pieces] == [((2,), 0), ((1,), 16)]


def test_growing_gives_the_old_buffers_back_and_less_keeps_them():
    released = []
    bucket = FixedBucket(2, lambda n: torch.zeros(n, dtype=torch.uint8), lambda buffer: released.append(len(buffer)))
    bucket.reserve(8)
    bucket.reserve(8)
    bucket.reserve(4)
    assert (released, bucket.nbytes, bucket.allocations) == ([], 8, 1)
    bucket.reserve(9)
    assert (released, bucket.nbytes, bucket.allocations) == ([8, 8], 9, 2)
    bucket.close()
    assert released == [8, 8, 9, 9]
