"""Which devices a runner may use, and how a test is shown only its own."""

from __future__ import annotations

import pytest

from miles_ci.errors import UsageError
from miles_ci.run.devices.inventory import Device, inherited, visibility, with_visibility

HOST = tuple(Device(n, f"0000:{n:02x}:00.0", f"GPU-{n}a5f0000-1111", "d", 1000) for n in range(8))


def indices(backend: str, **environ: str) -> list[int]:
    return [device.index for device in inherited(HOST, backend, environ)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2,5", [2, 5]),
        ("5,2", [5, 2]),
        ("GPU-3a5f", [3]),
        ("gpu-3a5f", []),
        ("0,9,1", [0]),
        ("-1", []),
        ("", []),
        ("none", []),
    ],
)
def test_cuda_variable_restricts_the_runner_like_the_driver_does(value, expected):
    assert indices("cuda", CUDA_VISIBLE_DEVICES=value) == expected


def test_unset_variable_restricts_nothing_and_the_other_vendors_does_not_count():
    assert indices("cuda") == list(range(8))
    assert indices("cuda", HIP_VISIBLE_DEVICES="1", ROCR_VISIBLE_DEVICES="1") == list(range(8))
    assert indices("rocm", CUDA_VISIBLE_DEVICES="1") == list(range(8))
    assert indices("cpu") == []


def test_hip_indices_count_within_what_rocr_left():
    assert indices("rocm", ROCR_VISIBLE_DEVICES="4,5,6,7", HIP_VISIBLE_DEVICES="1,3") == [5, 7]
    assert indices("rocm", ROCR_VISIBLE_DEVICES="GPU-6a5f0000-1111") == [6]


def test_rocr_is_translated_to_hip_indices_of_the_host_and_removed():
    left = inherited(HOST, "rocm", {"ROCR_VISIBLE_DEVICES": "4,5,6,7"})
    env = with_visibility({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0", "A": "b"}, left[1:3], "rocm")
    assert env == {"HIP_VISIBLE_DEVICES": "5,6", "A": "b"}


def test_cuda_tests_see_uuids_in_bus_order_and_nothing_of_hip():
    env = with_visibility({"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}, HOST[1:3], "cuda")
    assert env == {"CUDA_VISIBLE_DEVICES": f"{HOST[1].uuid},{HOST[2].uuid}", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_cpu_tests_see_no_device_at_all():
    assert visibility((), "cpu") == {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "ROCR_VISIBLE_DEVICES": None,
    }


def test_mig_slices_and_repeated_devices_are_refused_with_the_variable():
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=MIG-1: MIG slices cannot be leased"):
        indices("cuda", CUDA_VISIBLE_DEVICES="MIG-1")
    with pytest.raises(UsageError, match="names device 2 twice"):
        indices("cuda", CUDA_VISIBLE_DEVICES="2,2")
