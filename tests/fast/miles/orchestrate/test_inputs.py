"""What is checked before anything starts: model folders, weights, ports."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.models.hf_files import FolderWriter
from miles.orchestrate import preflight
from miles.orchestrate.model_folder import prepare_model
from miles.orchestrate.preflight import check_port
from miles.orchestrate.run_folder import locate
from miles.orchestrate.startable import check_start
from miles.recipe.inputs import check_model_files
from miles.recipe.schema import Recipe
from miles.rollout.config import EngineConfig
from miles.rollout.errors import PortError

Make = Callable[..., Recipe]


@pytest.fixture
def model(recipe: Make) -> Path:
    made = recipe()
    folder = locate(made, [])
    folder.path.mkdir(parents=True)
    return prepare_model(made, folder)


def test_created_model_is_complete_repeatable_and_made_once(recipe: Make, model: Path) -> None:
    names = {entry.name for entry in model.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    check_model_files(model)
    before = (model / "model.safetensors").read_bytes()
    stamp = (model / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(recipe(), locate(recipe(), [])) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == stamp
    shutil.rmtree(model)
    prepare_model(recipe(), locate(recipe(), []))
    assert (model / "model.safetensors").read_bytes() == before
    assert not (model.parent / ".tokenizer").exists()


def test_another_seed_makes_other_weights(recipe: Make, model: Path) -> None:
    other = recipe(name="other", seed=1)
    folder = locate(other, [])
    folder.path.mkdir()
    made = prepare_model(other, folder)
    assert (made / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_users_folder_is_used_where_it_is(recipe: Make, model: Path) -> None:
    given = recipe(model={"path": str(model)})
    assert prepare_model(given, locate(given, [])) == model


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_incomplete_folder_names_what_is_missing(recipe: Make, model: Path, missing: str) -> None:
    (model / missing).unlink()
    given = recipe(model={"path": str(model)})
    with pytest.raises(ConfigError, match=f"{missing} is missing; give a complete Hugging Face model folder"):
        prepare_model(given, locate(given, []))


def test_missing_model_folder_is_named(recipe: Make, tmp_path: Path) -> None:
    given = recipe(model={"path": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="no such folder; give a Hugging Face model folder"):
        prepare_model(given, locate(given, []))
    with pytest.raises(ConfigError, match="model folder does not exist"):
        check_start(given)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_truncated_weights_are_found_by_their_header(model: Path, share: float) -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ConfigError, match=r"model\.safetensors: truncated safetensors file"):
        check_model_files(model)


def test_weights_of_another_shape_and_missing_weights_are_named(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ConfigError, match=r"mlp\.\w+_proj\.weight: expected shape .*, got"):
        check_model_files(model)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.2\.\S+ is missing"):
        check_model_files(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor .* is this a model folder\?"):
        check_model_files(model)


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder


def test_taken_port_is_refused_with_its_key_and_a_way_out(
    recipe: Make, taken: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "PORT_WAIT_S", 0.2)
    port = taken.getsockname()[1]
    with pytest.raises(PortError, match=rf"engine\.port {port} on 127\.0\.0\.1: .*or 0 for a free one") as raised:
        check_start(recipe(engine={"port": port}))
    assert raised.value.exit_code == 2


def test_port_that_a_dying_engine_still_holds_is_waited_for(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    threading.Timer(0.3, taken.close).start()
    started = time.monotonic()
    check_port(EngineConfig(port=port))
    assert 0.2 < time.monotonic() - started < preflight.PORT_WAIT_S


def test_free_ports_and_port_zero_pass(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    taken.close()
    check_port(EngineConfig(port=port))
    check_port(EngineConfig(port=0))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_host_of_another_machine_is_refused_by_its_own_key(recipe: Make, host: str) -> None:
    with pytest.raises(PortError, match=rf"engine\.host {re.escape(host)}: .*; use an address of this machine"):
        check_start(recipe(engine={"host": host}))


def test_prompts_that_the_evaluation_would_lack_are_missed_before_the_start(recipe: Make, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    data = {"task": "jsonl", "jsonl": {"path": str(tmp_path / "one.jsonl")}}
    with pytest.raises(ConfigError, match="no prompt of task jsonl is held out"):
        check_start(recipe(data=data))


def test_disk_error_inside_the_safetensors_library_keeps_its_meaning(tmp_path: Path) -> None:
    def write() -> None:
        with FolderWriter(tmp_path / "model"):
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(ConfigError, match="the disk is full; free space or choose another folder"):
        write()
    assert list(tmp_path.iterdir()) == []
