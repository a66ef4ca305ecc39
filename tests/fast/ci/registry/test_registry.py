"""The shipped registry, its schema, and every way a registry file can be wrong."""

from __future__ import annotations

from datetime import date

import pytest

from miles_ci.errors import ConfigErrors, UsageError
from miles_ci.registry import load_fleet
from miles_ci.registry.load import read_fleet
from miles_ci.registry.schema import SCHEMA_PATH, schema_findings, schema_text
from tests.fast.ci.helpers.trees import REPOSITORY, TODAY

SOURCE = (REPOSITORY / "registry.yaml").read_text(encoding="utf-8")


def edited(*changes: tuple[str, str]) -> str:
    """The shipped registry with replacements, each of which must apply (first occurrence)."""
    text = SOURCE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def findings(text: str | bytes, *, today: date = TODAY):
    return read_fleet(text if isinstance(text, bytes) else text.encode(), today=today).findings


def test_the_shipped_registry_has_no_findings_and_the_fleet_of_the_documentation() -> None:
    assert findings(SOURCE) == ()
    fleet = load_fleet(REPOSITORY / "registry.yaml")
    assert list(fleet.hardware) == ["cpu", "h100", "h200", "b200", "mi300x", "mi355x"]
    assert [fleet.hardware[name].memory_gib for name in fleet.hardware] == [0, 79, 139, 178, 191, 287]
    assert list(fleet.suites) == [
        "stage-a-cpu",
        "stage-b-cpu",
        "stage-b-1-gpu-h200",
        "stage-b-2-gpu-h200",
        "stage-c-2-gpu-h200",
        "stage-c-4-gpu-h200",
        "stage-c-8-gpu-h200",
        "stage-c-8-gpu-h100",
        "stage-c-4-gpu-b200",
        "stage-c-4-gpu-mi300x",
        "stage-c-4-gpu-mi355x",
    ]
    assert fleet.cadences["nightly"].crons == ["0 15 * * 0-5"]
    assert fleet.cadences["weekly"].crons == ["0 15 * * 6"]
    assert fleet.pools["mi300x-4gpu"].labels == ["self-hosted", "amd", "mi300x", "4gpu"]
    assert fleet.pools["mi300x-4gpu"].count == 2


def test_machines_of_other_projects_are_described_by_the_same_model() -> None:
    new = """
  a100: {vendor: nvidia, arch: ampere, sm: 80, memory_gib: 79, capabilities: [bf16]}
  l40s: {vendor: nvidia, arch: ada, sm: 89, memory_gib: 44, capabilities: [bf16, fp8]}
  mi250x: {vendor: amd, arch: cdna2, gfx: gfx90a, memory_gib: 63, capabilities: [bf16]}
"""
    text = edited(("  cpu: {vendor: cpu, arch: cpu}\n", "  cpu: {vendor: cpu, arch: cpu}" + new))
    reading = read_fleet(text.encode(), today=TODAY)
    assert reading.findings == ()
    assert reading.fleet is not None
    assert reading.fleet.models_of("ampere") == ("a100",)
    # A model that is called like its architecture is offered once.
    assert reading.fleet.hardware_names().count("cpu") == 1


def test_architectures_and_models_name_hardware() -> None:
    fleet = load_fleet(REPOSITORY / "registry.yaml")
    assert fleet.models_of("hopper") == ("h100", "h200")
    assert fleet.models_of("h100") == ("h100",)
    assert fleet.models_of("volta") == ()
    assert fleet.capabilities("h200-8gpu") == {"bf16", "fp8", "nvlink", "rdma"}


def test_the_committed_schema_is_generated_from_the_model() -> None:
    assert (REPOSITORY / SCHEMA_PATH).read_text(encoding="utf-8") == schema_text()


# Structure: both the model and the schema refuse. (what, edits, code, place of the finding in the text)
H100 = "h100: {vendor: nvidia, arch: hopper, sm: 90, memory_gib: 79, capabilities: [bf16, fp8]}"
NPU = "backends:\n  npu: {vendor: acme, architectures: [a2], visible: ACME_VISIBLE, devices: [acme-smi], health: [acme-check], workflow: own}\n"
STRUCTURE = [
    ("version missing", ("version: 1\n", ""), "missing-field", None),
    ("another version", ("version: 1\n", "version: 2\n"), "bad-value", "2"),
    ("version as string", ("version: 1\n", 'version: "1"\n'), "wrong-type", '"1"'),
    ("version as float", ("version: 1\n", "version: 1.0\n"), "wrong-type", "1.0"),
    ("unknown section", ("hardware:\n", "machines: {}\nhardware:\n"), "unknown-key", "machines"),
    ("hardware as list", (SOURCE[SOURCE.index("  cpu: {") : SOURCE.index("# To switch")], "  - cpu\n\n"), "wrong-type", "- cpu"),
    ("no hardware", (SOURCE[SOURCE.index("hardware:") : SOURCE.index("# To switch")], "hardware: {}\n"), "bad-value", "{}"),
    ("hardware key unknown", (H100, H100.replace("sm: 90", "smx: 90")), "unknown-key", "smx"),
    ("vendor is no name", (H100, H100.replace("nvidia", "NV IDIA")), "bad-value", "NV IDIA"),
    ("roots empty", ("hardware:\n", "roots: []\nhardware:\n"), "bad-value", "[]"),
    ("root is absolute", ("hardware:\n", "roots: [/tests]\nhardware:\n"), "bad-value", "/tests"),
    ("root climbs out", ("hardware:\n", "roots: [tests/../..]\nhardware:\n"), "bad-value", "tests/../.."),
    ("root is a text", ("hardware:\n", "roots: tests\nhardware:\n"), "wrong-type", "tests"),
    ("backend is no name of a function", ("hardware:\n", NPU.replace("npu:", "n-pu:") + "hardware:\n"), "bad-value", "n-pu"),
    ("backend without a device query", ("hardware:\n", NPU.replace("devices: [acme-smi], ", "") + "hardware:\n"), "missing-field", None),
    ("backend with a generated workflow", ("hardware:\n", NPU.replace("own", "made") + "hardware:\n"), "unknown-value", "made"),
    ("sm too small", (H100, H100.replace("90", "9")), "bad-value", "9,"),
    ("memory negative", (H100, H100.replace("79", "-79")), "bad-value", "-79"),
    ("memory as string", (H100, H100.replace("79", '"79"')), "wrong-type", '"79"'),
    ("memory as bool", (H100, H100.replace("79", "true")), "wrong-type", "true"),
    ("capability unknown", (H100, H100.replace("fp8]", "fp9]")), "unknown-value", "fp9"),
    ("gfx malformed", ("gfx: gfx942", "gfx: mi300"), "bad-value", "mi300,"),
    ("pool without labels", ("labels: [self-hosted, nvidia, h200, 1gpu]", "labels: []"), "bad-value", "[]"),
    ("pool label with space", ("h200, 1gpu]", '"h200 1gpu"]'), "bad-value", '"h200 1gpu"'),
    ("pool count zero", ("count: 8", "count: 0"), "bad-value", "0"),
    ("pool devices missing", ("    gpus_per_runner: 1\n", ""), "missing-field", None),
    ("pool key unknown", ("    count: 8\n", "    counts: 8\n"), "unknown-key", "counts"),
    ("pool capability is no host's", ("capabilities: [nvlink]", "capabilities: [fp8]"), "unknown-value", "fp8"),
    ("disabled without issue", ("count: 8", 'count: 8\n    disabled: {reason: "a reason of length", until: 2026-12-24}'), "missing-field", None),
    ("disabled reason short", ("count: 8", 'count: 8\n    disabled: {reason: "short", issue: "#1", until: 2026-12-24}'), "bad-value", '"short"'),
    ("disabled issue malformed", ("count: 8", 'count: 8\n    disabled: {reason: "a reason of length", issue: "1", until: 2026-12-24}'), "bad-value", '"1", until'),
    ("disabled date malformed", ("count: 8", 'count: 8\n    disabled: {reason: "a reason of length", issue: "#1", until: 24.12.2026}'), "bad-value", "24.12.2026"),
    ("tier unknown", ("tier: a", "tier: d"), "unknown-value", "d\n"),
    ("backend is no name", ("backend: cpu", "backend: CPU"), "bad-value", "CPU"),
    ("target missing", ("    target_wall_s: 420\n", ""), "missing-field", None),
    ("target zero", ("target_wall_s: 420", "target_wall_s: 0"), "bad-value", "0\n    setup_s"),
    ("affected as number", ("affected: true", "affected: 1"), "wrong-type", "1\n    owner"),
    ("affected as yes", ("affected: true", "affected: yes"), "wrong-type", "yes"),
    ("owner empty", ("owner: ci\n", 'owner: ""\n'), "bad-value", '""'),
    ("suite name in capitals", ("  stage-b-cpu:", "  Stage-B-cpu:"), "bad-value", "Stage-B-cpu"),
    ("label without owner", (', owner: algos}', "}"), "missing-field", None),
    ("cadence unknown", ("  regular:\n", "  hourly:\n"), "unknown-value", "hourly"),
    ("cron with four fields", ('"0 15 * * 6"', '"0 15 * *"'), "bad-value", '"0 15 * *"'),
    ("arches unknown", ("arches: home", "arches: every"), "unknown-value", "every"),
    ("image without key files", ('key_files: ["docker/Dockerfile.rocm", "docker/patches/**", constraints.txt, pyproject.toml]', "key_files: []"), "bad-value", "[]"),
    ("retry action unknown", ("action: none", "action: ignore"), "unknown-value", "ignore"),
    ("retry place unknown", ("where: [signal]", "where: [signall]"), "unknown-value", "signall"),
    ("too many attempts", ("max_attempts: 2", "max_attempts: 9"), "bad-value", "9"),
    ("notify kind unknown", ("kind: summary", "kind: email"), "unknown-value", "email"),
    ("edge without tests", ('- {when: registry.yaml, tests: "**"}', "- {when: registry.yaml}"), "missing-field", None),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "code", "at"), [case[1:] for case in STRUCTURE], ids=[case[0] for case in STRUCTURE])
def test_model_and_schema_both_refuse_a_broken_structure(edit: tuple[str, str], code: str, at: str | None) -> None:
    text = edited(edit)
    reading = read_fleet(text.encode(), today=TODAY)
    assert reading.fleet is None
    assert code in [item.code for item in reading.errors]
    assert list(schema_findings(reading.document.data)), "the schema accepts what the model refuses"
    if at is not None:
        offset = text.index(at, text.index(edit[1]) if at in edit[1] else 0)
        line, column = text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
        assert (line, column) in [(item.line, item.column) for item in reading.errors]


def test_the_corpus_of_broken_structures_has_at_least_forty_files() -> None:
    assert len({edited(case[1]) for case in STRUCTURE}) >= 40


def test_the_schema_accepts_the_shipped_registry() -> None:
    assert list(schema_findings(read_fleet(SOURCE.encode()).document.data)) == []


POOL_OFF = 'count: 8\n    disabled: {{reason: "node is being re-imaged", issue: "#1", until: {until}}}'
# Rules across entries: (what, edits, code, words of the message)
RULES = [
    ("vendor unknown", [(H100, H100.replace("nvidia", "nvida"))], "unknown-vendor", "did you mean 'nvidia'?"),
    ("architecture unknown", [(H100, H100.replace("arch: hopper", "arch: hoper"))], "unknown-arch", "did you mean 'hopper'?"),
    ("backend unknown", [("backend: rocm\n", "backend: rocn\n")], "unknown-backend", "'rocn' is not known; did you mean 'rocm'?"),
    ("root inside another", [("hardware:\n", "roots: [tests/e2e, tests]\nhardware:\n")], "overlapping-roots", "'tests/e2e' lies inside 'tests'"),
    ("root twice", [("hardware:\n", "roots: [tests, tests]\nhardware:\n")], "duplicate-name", "'tests' is listed twice"),
    ("backend that is always there", [("hardware:\n", NPU.replace("npu:", "cuda:") + "hardware:\n")], "shipped-backend", "always there"),
    ("backend of a shipped vendor", [("hardware:\n", NPU.replace("acme,", "nvidia,") + "hardware:\n")], "duplicate-name", "'nvidia' already belongs"),
    ("backend with a shipped architecture", [("hardware:\n", NPU.replace("[a2]", "[hopper]") + "hardware:\n")], "duplicate-name", "'hopper' already belongs"),
    ("backend with CUDA's variable", [("hardware:\n", NPU.replace("ACME_VISIBLE", "CUDA_VISIBLE_DEVICES") + "hardware:\n")], "wrong-variable", "another meaning"),
    ("backend with a variable of the harness", [("hardware:\n", NPU.replace("ACME_VISIBLE", "MILES_CI_LEASE") + "hardware:\n")], "wrong-variable", "another meaning"),
    ("suite of an added backend on other hardware", [("hardware:\n", NPU + "hardware:\n"), ("backend: rocm\n", "backend: npu\n")], "wrong-backend", "is amd, the suite's backend is npu"),
    ("hardware of a pool unknown", [("hardware: h200\n    labels", "hardware: h20\n    labels")], "unknown-hardware", "did you mean 'h200'?"),
    ("pool on a CPU", [("hardware: h200\n    labels", "hardware: cpu\n    labels")], "pool-without-devices", "CPU suites use runs_on"),
    ("pool of a suite unknown", [("pools: [h200-1gpu]", "pools: [h200-1gpus]")], "unknown-pool", "did you mean 'h200-1gpu'?"),
    ("hardware of a suite unknown", [("hardware: [h200]\n    gpus: 1", "hardware: [h2000]\n    gpus: 1")], "unknown-hardware", "'h2000'"),
    ("pool labels are a subset", [("labels: [self-hosted, amd, mi300x, 4gpu]", "labels: [self-hosted, 4gpu]")], "ambiguous-labels", "could land there"),
    ("pool labels differ only in case", [("labels: [self-hosted, amd, mi300x, 4gpu]", "labels: [Self-Hosted, AMD, MI355X, 4gpu]")], "ambiguous-labels", "mi355x-4gpu"),
    ("label twice in a pool", [("h200, 1gpu]", "h200, h200]")], "duplicate-name", "listed twice"),
    ("host twice in a pool", [("hosts: [h200-node-0]", "hosts: [h200-node-0, h200-node-0]")], "duplicate-name", "pools.h200-1gpu.hosts: 'h200-node-0' is listed twice"),
    ("hardware twice in a suite", [("hardware: [cpu]", "hardware: [cpu, cpu]")], "duplicate-name", "suites.stage-a-cpu.hardware: 'cpu' is listed twice"),
    ("pool twice in a suite", [("pools: [h200-1gpu]", "pools: [h200-1gpu, h200-1gpu]")], "duplicate-name", "'h200-1gpu' is listed twice"),
    ("runner label twice in a suite", [("runs_on: [ubuntu-24.04]", "runs_on: [ubuntu-24.04, ubuntu-24.04]")], "duplicate-name", "'ubuntu-24.04' is listed twice"),
    ("capability twice", [("capabilities: [bf16, fp8]", "capabilities: [bf16, bf16]")], "duplicate-name", "hardware.h100.capabilities: 'bf16'"),
    ("label subtracted twice", [("subtract: [long, ft-long]", "subtract: [long, long]")], "duplicate-name", "'long' is listed twice"),
    ("edge twice", [('- {when: registry.yaml, tests: "**"}', '- {when: registry.yaml, tests: "**"}\n    - {when: registry.yaml, tests: "**"}')], "duplicate-name", "selection.edges: the same entry"),
    ("no pool fits", [("gpus: 1\n    pools: [h200-1gpu]", "gpus: 2\n    pools: [h200-1gpu]")], "no-fitting-pool", "2 devices"),
    ("pool of other hardware", [("pools: [h200-1gpu]", "pools: [h200-1gpu, h100-8gpu]")], "wrong-hardware", "'h100-8gpu' is h100"),
    ("hardware without a pool", [("hardware: [h200]\n    gpus: 1", "hardware: [h200, h100]\n    gpus: 1")], "no-fitting-pool", "no pool of the suite has 'h100'"),
    ("backend of another vendor", [("backend: rocm\n    hardware: [mi300x]", "backend: cuda\n    hardware: [mi300x]")], "wrong-backend", "'mi300x' is amd"),
    ("CPU suite with pools", [("runs_on: [ubuntu-24.04]", "runs_on: [ubuntu-24.04]\n    pools: [h200-1gpu]")], "cpu-suite", "not allowed on a CPU suite"),
    ("CPU suite without runner", [("    runs_on: [ubuntu-24.04]\n", "")], "missing-field", "runs_on"),
    ("GPU suite with runs_on", [("pools: [h200-1gpu]", "pools: [h200-1gpu]\n    runs_on: [ubuntu-24.04]")], "gpu-suite", "names pools"),
    ("GPU suite without devices", [("    gpus: 1\n", "")], "missing-field", "at least 1"),
    ("GPU suite without pools", [("    pools: [h200-1gpu]\n", "")], "missing-field", "pools: is required"),
    ("former key of needs", [("needs: stage-a-cpu", "gate: stage-a-cpu")], "unknown-key", "suites.stage-b-cpu.gate: the key is called `needs` now"),
    ("needed suite unknown", [("needs: stage-a-cpu", "needs: stage-a-cpus")], "unknown-suite", "did you mean 'stage-a-cpu'?"),
    ("circle of needed suites", [("    runs_on: [ubuntu-24.04]\n    target_wall_s: 420", "    runs_on: [ubuntu-24.04]\n    needs: stage-b-cpu\n    target_wall_s: 420")], "needs-cycle", "stage-a-cpu -> stage-b-cpu -> stage-a-cpu"),
    ("suite needs itself", [("needs: stage-a-cpu", "needs: stage-b-cpu")], "needs-cycle", "stage-b-cpu -> stage-b-cpu"),
    ("fewer shards at most than at least", [("min_shards: 2\n    max_shards: 8", "min_shards: 9\n    max_shards: 8")], "shard-range", "less than min_shards 9"),
    ("target within the setup", [("target_wall_s: 420\n    setup_s: 120", "target_wall_s: 120\n    setup_s: 120")], "target-too-short", "leaves nothing"),
    ("test may outlast the shard", [("timeout_s: 1800\n    test_timeout_s: 600", "timeout_s: 1800\n    test_timeout_s: 1801")], "timeout-range", "exceeds"),
    ("shard timeout below target", [("timeout_s: 1800\n    test_timeout_s: 600", "timeout_s: 400\n    test_timeout_s: 400")], "timeout-range", "less than target_wall_s"),
    ("first suite missing", [("  stage-a-cpu:", "  stage-0-cpu:")], "missing-suite", "reports faulty files"),
    ("label in two groups", [("    ok-to-test:", "    kernels:")], "duplicate-name", "already a domain label"),
    ("subtracted label unknown", [("subtract: [long, ft-long]", "subtract: [long, ft-lang]")], "unknown-label", "did you mean 'ft-long'?"),
    ("cadence missing", [("  release:\n", "  # release:\n"), ("    admit_nightly: true\n    include: all\n    bypass_fastfail: true\n    write_baseline: false\n    arches: all\n", "")], "missing-cadence", "release"),
    ("cron absent", [('    crons: ["0 15 * * 6"]\n', "")], "missing-cron", "needs at least one cron"),
    ("cron of a cadence without schedule", [("  regular:\n", '  regular:\n    crons: ["0 3 * * *"]\n')], "cron-without-cadence", "only nightly and weekly"),
    ("cron out of range", [('"0 15 * * 6"', '"0 25 * * 6"')], "bad-cron", "hour '25' is outside 0-23"),
    ("cron on a day that no year has", [('"0 15 * * 6"', '"0 0 30 2 *"')], "bad-cron", "never fires: no month '2' has a day '30'"),
    ("cron twice", [('"0 15 * * 6"', '"0 15 * * 0-5"')], "duplicate-cron", "already belongs to 'nightly'"),
    ("pattern no regular expression", [("pattern: '11'", "pattern: '(11'")], "bad-pattern", "no regular expression"),
    ("retry that never repeats", [("action: retry_other_host\n    max_attempts: 2", "action: retry_other_host")], "retry-attempts", "contradicts"),
    ("pattern without a bound", [("pattern: '11'", "pattern: '(a+)+$'")], "slow-pattern", "can take for ever"),
    ("pattern of repeated alternatives", [("pattern: '11'", "pattern: '(?:ab|ac?)*x'")], "slow-pattern", "can take for ever"),
    ("pattern with many variable parts", [("pattern: '11'", "pattern: '(?:a{1,50}){1,50}x'")], "slow-pattern", "can take for ever"),
    ("edge glob unclosed", [("when: Makefile", "when: '[a'")], "bad-glob", "'[' has no meaning in a path glob"),
    ("edge tests with braces", [("when: Makefile, tests: \"tests/fast/**\"", "when: Makefile, tests: 'tests/{a,b}/**'")], "bad-glob", "'{' has no meaning"),
    ("inert with a class", [("LICENSE", "LICEN[CS]E")], "bad-glob", "selection.inert"),
    ("key file with a class", [("docker/Dockerfile\"", "docker/[Dd]ockerfile\"")], "bad-glob", "images.cuda.key_files"),
    ("owner with a control character", [("owner: kernels", 'owner: "ker\\x7fnels"')], "bad-value", "cannot be seen; remove it"),
    ("owner with a direction mark", [("owner: kernels", 'owner: "ker\\u202enels"')], "bad-value", "'\\u202e' cannot be seen"),
    ("test failure repeated", [("pattern: '11'\n    action: none", "pattern: '11'\n    action: retry\n    max_attempts: 2")], "retry-attempts", "never repeated"),
    ("lark without secret", [("    secret: LARK_WEBHOOK_SECRET\n", "")], "notify-secret", "required for lark"),
    ("architecture of another vendor", [(H100, H100.replace("arch: hopper", "arch: cdna3"))], "inconsistent-hardware", "no architecture of vendor"),
    ("no compute capability", [(H100, H100.replace(" sm: 90,", ""))], "inconsistent-hardware", "required for vendor 'nvidia'"),
    ("until too far", [("count: 8", POOL_OFF.format(until="2027-06-01"))], "until-too-far", "at most 90"),
    ("until no day", [("count: 8", POOL_OFF.format(until="2026-02-30"))], "bad-date", "no day of the calendar"),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "code", "words"), [case[1:] for case in RULES], ids=[case[0] for case in RULES])
def test_a_broken_rule_across_entries_is_refused(edits: list[tuple[str, str]], code: str, words: str) -> None:
    reading = read_fleet(edited(*edits).encode(), today=TODAY)
    matching = [item for item in reading.errors if item.code == code and words in item.message]
    assert matching, [item.text() for item in reading.errors]
    assert reading.fleet is None
    assert all(item.line > 1 for item in matching)


YAML = [
    ("duplicate key", ("count: 8", "count: 8\n    count: 9"), "duplicate-key", "first in line"),
    ("tab", ("count: 8", "count:\t8"), "tab", "spaces"),
    ("anchor", ("pools: [h200-1gpu]", "pools: &p [h200-1gpu]"), "yaml-alias", "an anchor"),
    ("alias", ("version: 1", "version: 1\nnotify: *x"), "yaml-syntax", "alias"),
    ("merge key", ("count: 8", "<<: {count: 8}"), "yaml-alias", "a merge key"),
    ("tag", ("count: 8", "count: !!int 8"), "yaml-alias", "a tag"),
    ("two documents", ("version: 1", "version: 1\n---\nversion: 1"), "yaml-syntax", "several documents"),
    ("list as key", ("count: 8", "? [a]\n    : 8"), "bad-key", "plain string"),
    ("unclosed bracket", ("pools: [h200-1gpu]", "pools: [h200-1gpu"), "yaml-syntax", "not valid YAML"),
]


@pytest.mark.parametrize(("edit", "code", "words"), [case[1:] for case in YAML], ids=[case[0] for case in YAML])
def test_yaml_that_hides_what_it_says_is_refused(edit: tuple[str, str], code: str, words: str) -> None:
    matching = [item for item in findings(edited(edit)) if item.code == code]
    assert matching
    assert words in matching[0].message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "yaml-syntax"),
        (b"[]", "wrong-type"),
        (b"null", "wrong-type"),
        (b"version: 1\n\xff", "not-utf8"),
        (b"a: " + b"[" * 100 + b"]" * 100, "too-deep"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "yaml-syntax"),
        (b"- " * 5000, "too-deep"),
        (b"#" * (2 << 20), "too-large"),
        (b"a: &x [*x]", "yaml-alias"),
    ],
)
def test_hostile_bytes_are_a_finding(data: bytes, code: str) -> None:
    assert code in [item.code for item in findings(data)]


def test_all_errors_come_in_one_report_sorted_by_place() -> None:
    text = edited(
        ("sm: 90", "sn: 90"),
        ("pools: [h200-1gpu]", "pools: [h200-1]"),
        ("count: 4", "count: none"),
        ("action: none", "action: nine"),
    )
    found = findings(text)
    codes = {item.code for item in found}
    assert {"unknown-key", "wrong-type", "unknown-pool", "unknown-value"} <= codes
    assert list(found) == sorted(found, key=lambda item: (item.line, item.column))


def test_a_finding_names_file_line_column_code_and_nearest_name() -> None:
    text = edited(("hardware: h200\n    labels", "hardware: h20\n    labels"))
    line = text[: text.index("h20\n")].count("\n") + 1
    assert findings(text)[0].text() == (
        f"registry.yaml:{line}:15: error[unknown-hardware] pools.h200-1gpu.hardware: 'h20' is not known; did you mean 'h200'?"
    )


def test_without_a_near_name_a_short_list_of_valid_names_is_given() -> None:
    text = edited(("hardware: h200\n    labels", "hardware: gaudi\n    labels"))
    assert findings(text)[0].message.endswith("'gaudi' is not known; valid: b200, cpu, h100, h200, mi300x, mi355x")


@pytest.mark.parametrize(
    ("until", "severity", "loads"),
    [
        ("2026-11-30", None, True),
        ("2026-11-29", "warning", True),
        ("2026-11-16", "warning", True),
        ("2026-11-15", "error", True),
    ],
)
def test_a_passed_date_warns_then_fails_lint_but_never_stops_planning(
    until: str, severity: str | None, loads: bool
) -> None:
    reading = read_fleet(edited(("count: 8", POOL_OFF.format(until=until))).encode(), today=TODAY)
    assert [item.severity for item in reading.findings] == ([severity] if severity else [])
    assert (reading.fleet is not None) is loads


def test_load_raises_all_errors_and_names_a_missing_file(tmp_path) -> None:
    path = tmp_path / "registry.yaml"
    with pytest.raises(UsageError, match="registry cannot be read"):
        load_fleet(path)
    path.write_text(edited(("tier: a", "tier: d"), ("count: 8", "count: -1")))
    with pytest.raises(ConfigErrors) as caught:
        load_fleet(path)
    assert len(caught.value.diagnostics) == 2
    assert caught.value.exit_code == 2
