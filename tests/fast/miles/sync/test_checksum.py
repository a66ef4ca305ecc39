import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.sync.checksum import ChecksumPolicy, plan_digest
from miles.weight_wire.bucket import WORDS_PER_CHUNK, digest


def reference_digest(data: bytes) -> int:
    """The formula of the specification, word by word in Python integers."""
    padded = data + bytes(-len(data) % 4)
    total = 0
    for i in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * i : 4 * i + 4], "little")
        total += (word + 1) * (2 * i + 1)
    return (total % 2**64) ^ len(data)


def test_digest_golden_cpu_gpu():
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        assert digest(torch.arange(16, dtype=torch.uint8, device=device)) == 0xB8A89888
        assert digest(torch.full((7,), 0xFF, dtype=torch.uint8, device=device)) == 0x103000007
        assert digest(torch.empty(0, device=device)) == 0


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_digest_equals_the_formula_for_any_bytes(data):
    tensor = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    assert digest(tensor) == reference_digest(data)


def test_digest_is_the_same_across_chunk_borders():
    values = np.random.default_rng(0).integers(0, 256, 4 * WORDS_PER_CHUNK * 2 + 12, dtype=np.uint8)
    assert digest(torch.from_numpy(values)) == reference_digest(values.tobytes())


def test_digest_sees_order_padding_and_length():
    one = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
    swapped = torch.tensor([5, 6, 7, 8, 1, 2, 3, 4], dtype=torch.uint8)
    longer = torch.cat([one, torch.zeros(1, dtype=torch.uint8)])
    assert len({digest(one), digest(swapped), digest(longer)}) == 3


def test_digest_of_a_view_that_starts_off_a_word_border():
    buffer = torch.arange(64, dtype=torch.uint8)
    assert digest(buffer[3:43]) == reference_digest(bytes(range(3, 43)))


@pytest.mark.parametrize(
    ("mode", "expected"), [("full", [True] * 18), ("off", [False] * 18), ("sampled", [True] * 2 + [False] * 14 + [True, False])]
)  # fmt: skip
def test_checksum_policy_picks_the_syncs_it_promises(mode, expected):
    policy = ChecksumPolicy(mode)
    assert [policy.next_sync() for _ in range(18)] == expected


def test_sampled_checksums_cover_the_sync_after_a_membership_change():
    policy = ChecksumPolicy("sampled")
    for _ in range(5):
        policy.next_sync()
    policy.membership_changed()
    assert [policy.next_sync(), policy.next_sync()] == [True, False]


def test_plan_digest_depends_on_the_run_and_on_every_entry():
    layouts = [("tp1", [["a", 1]])]
    digests = {
        plan_digest("run-1", layouts),
        plan_digest("run-2", layouts),
        plan_digest("run-1", [("tp1", [["a", 2]])]),
        plan_digest("run-1", [("tp2", [["a", 1]])]),
    }
    assert len(digests) == 4
