"""Patches on real git checkouts, counted edits, images by content, dependencies by commit."""

from __future__ import annotations

import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_ci.bot.dependency_checkouts import DependencyError, checkout, load_dependencies, perform, resolve
from miles_ci.bot.directives import Target
from miles_ci.bot.oci import Registry, RegistryError, parse_reference
from miles_ci.cli import main
from miles_ci.errors import UsageError
from miles_ci.registry import Fleet
from miles_ci.workflows import images
from miles_ci.workflows.edits import EditRefused, clean_checkout, load_edits, mentions, replay_edits
from miles_ci.workflows.patches import AlreadyPresent, Applied, Refused, apply_all, apply_patch


def git(repo: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(repo), *identity, *args], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = tmp_path / "repo"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    (path / "a.txt").write_text("".join(f"line {n}\n" for n in range(20)))
    (path / "python").mkdir()
    (path / "python/pyproject.toml").write_text(
        'deps = [\n  "cuda-python>=13.0",\n  "flashinfer_python[cu13]==0.6",\n  "nvidia-cutlass-dsl[cu13]>=4",\n]\n'
    )
    git(path, "add", ".")
    git(path, "commit", "-qm", "one")
    return path


def patch_of(repo: Path, folder: Path, old: str, new: str, name: str = "0001-x.patch") -> Path:
    text = (repo / "a.txt").read_text()
    (repo / "a.txt").write_text(text.replace(old, new))
    path = folder / name
    path.write_text(git(repo, "diff") + "\n")
    git(repo, "checkout", "-q", "--", ".")
    return path


def state(repo: Path) -> str:
    return git(repo, "status", "--porcelain") + git(repo, "diff")


def test_a_patch_is_applied_once_and_then_already_present(repo: Path, tmp_path: Path) -> None:
    patch = patch_of(repo, tmp_path, "line 5\n", "line five\n")
    assert apply_patch(repo, patch) == Applied(patch)
    assert "line five" in (repo / "a.txt").read_text()
    before = state(repo)
    assert apply_patch(repo, patch) == AlreadyPresent(patch)
    assert state(repo) == before


@pytest.mark.parametrize("kind", ["neither", "empty", "missing", "corrupt"])
def test_what_does_not_fit_is_refused_and_the_tree_is_untouched(repo: Path, tmp_path: Path, kind: str) -> None:
    patch = patch_of(repo, tmp_path, "line 5\n", "line five\n")
    if kind == "neither":
        (repo / "a.txt").write_text("changed upstream\n")
    elif kind == "empty":
        patch.write_text("\n")
    elif kind == "missing":
        patch.unlink()
    else:
        patch.write_text(patch.read_text()[: len(patch.read_text()) // 2])
    before = state(repo)
    found = apply_patch(repo, patch)
    assert isinstance(found, Refused)
    assert str(patch) in found.reason
    assert state(repo) == before


def test_a_patch_that_fits_both_ways_is_refused(repo: Path, tmp_path: Path) -> None:
    (repo / "b.txt").write_text("x\n")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "b")
    patch = tmp_path / "both.patch"
    patch.write_text("diff --git a/b.txt b/b.txt\nold mode 100644\nnew mode 100644\n")
    assert isinstance(apply_patch(repo, patch), Refused)


def test_the_first_refusal_stops_the_sequence_with_exit_1(repo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    folder.mkdir()
    patch_of(repo, folder, "line 5\n", "line five\n", "0001-a.patch")
    (folder / "0002-b.patch").write_text("")
    patch_of(repo, folder, "line 9\n", "line nine\n", "0003-c.patch")
    results = apply_all(repo, sorted(folder.glob("*.patch")))
    assert [type(result) for result in results] == [Applied, Refused]
    git(repo, "checkout", "-q", "--", ".")
    assert main(["images", "patches", "--repo", str(repo), "--patches", str(folder)]) == 1
    assert "line nine" not in (repo / "a.txt").read_text()


CU12 = Path(__file__).resolve().parents[4] / "docker/edits/cu12.yaml"


def test_the_cuda_12_edits_replay_once_and_are_then_already_applied(repo: Path) -> None:
    edits = load_edits(CU12)
    assert [(edit.find, edit.replace, edit.count) for edit in edits] == [
        ("cuda-python>=13.0", "cuda-python>=12,<13", 1),
        ("flashinfer_python[cu13]", "flashinfer_python[cu12]", 1),
        ("nvidia-cutlass-dsl[cu13]", "nvidia-cutlass-dsl", 1),
    ]
    assert {entry.status for entry in replay_edits(repo, edits)} == {"applied"}
    text = (repo / "python/pyproject.toml").read_text()
    assert "cu13" not in text
    assert '"cuda-python>=12,<13"' in text
    again = replay_edits(repo, [edit for edit in edits if edit.replace != "nvidia-cutlass-dsl"])
    assert {entry.status for entry in again} == {"already"}


def test_one_edit_that_does_not_fit_writes_nothing_at_all(repo: Path) -> None:
    path = repo / "python/pyproject.toml"
    path.write_text(path.read_text().replace("flashinfer_python[cu13]", "flashinfer_python[cu14]"))
    before = path.read_text()
    with pytest.raises(
        EditRefused, match=r"python/pyproject.toml: 'flashinfer_python\[cu13\]' occurs 0 times, expected 1"
    ):
        replay_edits(repo, load_edits(CU12))
    assert path.read_text() == before
    path.write_text(before.replace("[cu14]", "[cu13]") + "# cuda-python>=13.0\n")
    with pytest.raises(EditRefused, match="occurs 2 times, expected 1"):
        replay_edits(repo, load_edits(CU12))


def test_a_dirty_tree_that_aborts_a_plain_checkout_does_not_abort_ours(repo: Path) -> None:
    first = git(repo, "rev-parse", "HEAD")
    (repo / "python/pyproject.toml").write_text("second\n")
    git(repo, "commit", "-qam", "two")
    (repo / "python/pyproject.toml").write_text("dirty\n")
    with pytest.raises(subprocess.CalledProcessError):
        git(repo, "checkout", first)
    assert main(["images", "edits", "--repo", str(repo), "--commit", first, "--edits", str(CU12)]) == 0
    assert "cuda-python>=12,<13" in (repo / "python/pyproject.toml").read_text()
    with pytest.raises(EditRefused, match="git checkout -f"):
        clean_checkout(repo, "nothing")


@pytest.mark.parametrize(
    "text",
    ["edits: 3", "edits: [{file: a, find: b, replace: c}]", "edits: [{file: a, find: '', replace: c, count: 1}]", "edits: [{file: ../a, find: b, replace: c, count: 1}]", "edits: [{file: a, find: b, replace: c, count: true}]", "edits: [{file: a, find: b, replace: c, count: 1, extra: 1}]"],
)  # fmt: skip
def test_a_malformed_edit_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "edits.yaml"
    path.write_text(text)
    with pytest.raises(UsageError):
        load_edits(path)


def test_metadata_that_still_asks_for_the_other_generation_is_found(tmp_path: Path) -> None:
    info = tmp_path / "x-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: x\nRequires-Dist: y[cu13]>=1\nSummary: for cu13\n")
    assert mentions(tmp_path, "cu13") == ["x-1.dist-info: y[cu13]>=1"]
    assert main(["images", "metadata", "--forbid", "cu13", "--site", str(tmp_path)]) == 1
    assert main(["images", "metadata", "--forbid", "cu14", "--site", str(tmp_path)]) == 0


DIGEST = "sha256:" + "ab" * 32


def test_the_key_follows_content_base_and_arguments_and_nothing_else(fleet: Fleet, root: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(root / "docker", tmp_path / "docker")
    for name in ("constraints.txt", "pyproject.toml", "registry.yaml"):
        shutil.copy(root / name, tmp_path)
    made = images.recipe(fleet, tmp_path, "cuda")
    key = images.content_key(tmp_path, made, DIGEST)
    (tmp_path / "README.md").write_text("other")
    assert images.content_key(tmp_path, made, DIGEST) == key
    assert images.content_key(tmp_path, made, "sha256:" + "cd" * 32) != key
    assert images.content_key(tmp_path, images.recipe(fleet, tmp_path, "cuda12"), DIGEST) != key
    (tmp_path / "docker/edits/cu12.yaml").write_text("edits: []\n")
    assert images.content_key(tmp_path, made, DIGEST) != key
    assert images.tag_of(key) == f"ci-{key[:16]}"
    command = images.build_command(made, key, DIGEST, push=True)
    assert f"BASE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04@{DIGEST}" in command


def test_a_key_file_glob_that_matches_nothing_is_an_error(fleet: Fleet, root: Path) -> None:
    made = images.recipe(fleet, root, "cuda")
    broken = images.Recipe(made.name, made.repository, made.dockerfile, made.base, made.build_args, ("docker/none/**",))
    with pytest.raises(UsageError, match="matches no file"):
        images.content_key(root, broken, DIGEST)


def test_every_image_of_the_registry_can_be_built_and_copies_nothing_it_does_not_name(fleet: Fleet, root: Path) -> None:
    for name in fleet.images:
        made = images.recipe(fleet, root, name)
        text = (root / made.dockerfile).read_text()
        assert "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}" in text
        for argument in made.build_args:
            assert f"ARG {argument}" in text
        sources = [word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
        assert all((root / source).exists() for source in sources)


# -- registry ---------------------------------------------------------------------------------------


@pytest.fixture
def oci() -> Iterator[tuple[str, list[str]]]:
    log: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            log.append(f"HEAD {self.path} {self.headers.get('authorization')}")
            if self.headers.get("authorization") != "Bearer t0ken":
                realm = f"http://127.0.0.1:{self.server.server_address[1]}/token"
                return self.answer(401, {"www-authenticate": f'Bearer realm="{realm}",service="x",scope="y"'})
            if self.path.endswith("/there"):
                return self.answer(200, {"docker-content-digest": DIGEST})
            return self.answer(500 if self.path.endswith("/broken") else 404, {})

        def do_GET(self) -> None:
            log.append(f"GET {self.path}")
            self.answer(200, {}, b'{"token":"t0ken"}')

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}", log
    server.shutdown()
    server.server_close()


def test_a_tag_becomes_a_digest_an_absent_one_none_and_a_broken_registry_an_error(oci: tuple[str, list[str]]) -> None:
    host, log = oci
    registry = Registry("github-token", scheme="http")
    assert registry.digest(f"{host}/a/b:there") == DIGEST
    assert registry.digest(f"{host}/a/b:gone") is None
    with pytest.raises(RegistryError, match="500"):
        registry.digest(f"{host}/a/b:broken")
    assert not any("github-token" in line for line in log)


@pytest.mark.parametrize("text", ["a b", "x:$(id)", "Ü/x", "x@sha256:1", "../x", "http://x/y"])
def test_a_malformed_image_reference_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_reference(text)


def test_docker_hub_and_other_hosts_are_told_apart() -> None:
    assert parse_reference("nvidia/cuda:13").repository == "registry-1.docker.io/nvidia/cuda"
    assert parse_reference("ubuntu").name == "library/ubuntu"
    assert parse_reference("ghcr.io/a/b:c").host == "ghcr.io"


# -- dependencies -----------------------------------------------------------------------------------


def test_directives_resolve_to_commits_on_the_allowed_origin_only(root: Path) -> None:
    dependency = load_dependencies(root)["sglang"]
    asked: list[list[str]] = []

    def run(command: Any) -> str:
        asked.append(list(command))
        return (
            f"{'a' * 40}\trefs/heads/dev\n"
            if "refs/heads/dev" in command
            else f"{'c' * 40}\trefs/pull/7/head\n"
            if "refs/pull/7/head" in command
            else ""
        )

    assert resolve(dependency, Target("ref", "dev"), run) == "a" * 40
    assert resolve(dependency, Target("pull", "#7"), run) == "c" * 40
    assert resolve(dependency, Target("sha", "d" * 40), run) == "d" * 40
    with pytest.raises(DependencyError, match="does not exist"):
        resolve(dependency, Target("ref", "gone"), run)
    assert all(command[:4] == ["git", "ls-remote", "--", "https://github.com/sgl-project/sglang"] for command in asked)


def test_a_name_that_is_both_branch_and_tag_is_refused_and_annotated_tags_are_peeled(root: Path) -> None:
    dependency = load_dependencies(root)["megatron"]
    both = f"{'a' * 40}\trefs/heads/x\n{'b' * 40}\trefs/tags/x\n"
    with pytest.raises(DependencyError, match="both a branch and a tag"):
        resolve(dependency, Target("ref", "x"), lambda command: both)
    peeled = f"{'b' * 40}\trefs/tags/x\n{'c' * 40}\trefs/tags/x^{{}}\n"
    assert resolve(dependency, Target("ref", "x"), lambda command: peeled) == "c" * 40


def test_only_the_named_dependency_is_touched(repo: Path, tmp_path: Path, root: Path) -> None:
    commit = git(repo, "rev-parse", "HEAD")
    target = tmp_path / "opt-sglang"
    subprocess.run(["git", "clone", "-q", str(repo), str(target)], check=True)
    (target / "a.txt").write_text("dirty")
    (target / "left-over.so").write_text("x")
    known = load_dependencies(root)
    sglang = known["sglang"].__class__("sglang", str(repo), target, ".", tmp_path / "no-patches")
    assert perform("checkout", {"sglang": sglang}, {"sglang": commit, "megatron": ""}) == [f"sglang: at {commit}"]
    assert git(target, "status", "--porcelain") == ""
    assert perform("check", {"sglang": sglang}, {"sglang": "", "megatron": ""}) == [
        "nothing named: the image's copies are used"
    ]
    calls: list[list[str]] = []
    perform("install", {"sglang": sglang}, {"sglang": commit}, run=lambda command: calls.append(list(command)) or "")
    assert calls[0][-4:] == ["--no-deps", "--no-build-isolation", "--editable", str(target)]
    with pytest.raises(UsageError, match="not a commit"):
        perform("checkout", {"sglang": sglang}, {"sglang": "main; id"})
    with pytest.raises(DependencyError):
        checkout(sglang, "e" * 40)
