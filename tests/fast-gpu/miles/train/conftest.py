"""Tiny model folders, and ranks of the backend as processes of their own that run side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ONE_RANK = Path(__file__).with_name("one_rank.py")


class Ranks:
    """Processes started together; `results` waits for all of them and ends all when one fails.

    They write files, not pipes: a rank that fills a pipe nobody reads yet would wait for ever.
    """

    def __init__(self, folder: Path, arguments: Sequence[dict]) -> None:
        # The interpreter puts the script's folder in front: name the places of the packages too.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # what megatron-core asks for under tensor parallelism
        self._arguments, self._folder, self._processes = arguments, folder, []
        for number, words in enumerate(arguments):
            command = [sys.executable, str(ONE_RANK), json.dumps(words)]
            with (folder / f"{number}.out").open("w") as out, (folder / f"{number}.err").open("w") as err:
                self._processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=env))

    def results(self, limit_s: float = 240) -> list[dict]:
        try:
            for number, process in enumerate(self._processes):
                code = process.wait(limit_s)
                problem = (self._folder / f"{number}.err").read_text()[-4000:]
                assert code == 0, f"{self._arguments[number]}: exit code {code}\n{problem}"
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
        outputs = [(self._folder / f"{number}.out").read_text() for number in range(len(self._processes))]
        return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory) -> Callable[[Sequence[dict]], Ranks]:
    """Start ranks with these keyword arguments of `one_rank.main`."""
    return lambda arguments: Ranks(tmp_path_factory.mktemp("ranks"), arguments)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A dense and an expert model with weights large enough that every part matters."""
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    folder = tmp_path_factory.mktemp("models")
    build_char_tokenizer("0123456789=+-", folder / "tokenizer")
    return {
        family: create_checkpoint(
            folder / family,
            family=family,
            shape=ModelShape(init_std=0.1),
            tokenizer_dir=folder / "tokenizer",
            seed=0,
        )
        for family in ("qwen3", "qwen3_moe")
    }
