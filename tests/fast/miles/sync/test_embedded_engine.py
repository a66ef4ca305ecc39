"""Weight sync into the real embedded engine process: what it answers is computed with what it says."""

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sync_engines import ask

from miles.data.tokenizer import build_char_tokenizer
from miles.models.config import ModelShape
from miles.models.create import create_checkpoint
from miles.rollout.config import EngineConfig
from miles.rollout.engines.embedded.launch import launch
from miles.sync.config import SyncConfig
from miles.sync.errors import NoEngineLeft
from miles.sync.session import WeightPusher

VOCAB = 32


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_char_tokenizer("0123456789abcdefghijklmnopqrst", folder)
    assert tokenizer.vocab_size == VOCAB
    create_checkpoint(folder, family="qwen3", shape=ModelShape(), tokenizer_dir=folder, seed=0)
    handle = launch(EngineConfig(), folder)
    yield handle
    handle.kill()


@pytest.fixture(scope="module")
def pusher(engine):
    with WeightPusher([engine.url], SyncConfig(timeout_s=20.0), "real") as pusher:
        yield pusher


@pytest.fixture(scope="module")
def shapes(engine):
    _, reply = ask(engine.url, "/parameter_table")
    return {entry["name"]: tuple(entry["shape"]) for entry in reply["tables"][0]["entries"]}


def saying(shapes, token):
    """Weights of a policy whose every greedy token is `token`: the residual stream is constant, the head picks."""
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    weights["model.embed_tokens.weight"].fill_(1.0)
    weights["model.norm.weight"].fill_(1.0)
    weights["lm_head.weight"][token] = 1.0
    return weights


def generate(url, prompt=(5, 6, 7), new_tokens=4):
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    return ask(url, "/generate", {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True})


def tokens_of(reply):
    return [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]]


def version_of(url):
    return int(ask(url, "/model_info")[1]["weight_version"])


def test_response_version_equals_weights(engine, pusher, shapes):
    """200 requests while 10 versions are pushed: each token names the version that the answer reports for it."""
    first = version_of(engine.url) + 1
    pusher.push(saying(shapes, first).items(), first)
    wrong, versions, stop = [], set(), threading.Event()

    def client(number):
        asked = 0
        while not stop.is_set() or asked < 50:
            status, reply = generate(engine.url, prompt=(2 + number, 3, 4))
            asked += 1
            version = int(reply["meta_info"]["weight_version"])
            versions.add(version)
            # A request that an update re-queued keeps its tokens and says which version each one is of.
            spans = reply["meta_info"].get("weight_version_spans", [[version, 4]])
            if status != 200 or tokens_of(reply) != [int(v) for v, count in spans for _ in range(count)]:
                wrong.append((status, tokens_of(reply), spans))

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        for version in range(first + 1, first + 11):
            pusher.push(saying(shapes, version).items(), version)
            time.sleep(0.01)
        stop.set()
        for each in clients:
            each.result()
    assert not wrong, wrong[:3]
    assert len(versions) >= 3


def test_prefix_cache_not_reused_across_versions(engine, pusher, shapes):
    prompt = [2 + i % 20 for i in range(100)]
    pusher.push(saying(shapes, 20).items(), version_of(engine.url) + 1)
    generate(engine.url, prompt)
    assert generate(engine.url, prompt)[1]["meta_info"]["cached_tokens"] > 0, "the cache does nothing: no proof"
    pusher.push(saying(shapes, 21).items(), version_of(engine.url) + 1)
    reply = generate(engine.url, prompt)[1]
    assert reply["meta_info"]["cached_tokens"] == 0
    assert tokens_of(reply) == [21] * 4


def test_dirty_engine_refuses_generation_until_a_whole_sync(engine, pusher, shapes):
    version = version_of(engine.url)
    bad = saying(shapes, 9)
    bad["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(Exception, match=r"1 of .* values are not finite"):
        pusher.push(bad.items(), version + 1)
    status, reply = generate(engine.url)
    assert (status, reply["error"]["type"]) == (503, "weights_dirty")
    assert version_of(engine.url) == version
    pusher.push(saying(shapes, 9).items(), version + 2)
    assert tokens_of(generate(engine.url)[1]) == [9] * 4


def test_requests_that_arrive_during_an_update_wait_for_it(engine, pusher, shapes):
    version = version_of(engine.url) + 1
    updating, go_on = threading.Event(), threading.Event()

    def slow():
        for item in saying(shapes, 11).items():
            yield item
            updating.set()
            go_on.wait(10)

    with ThreadPoolExecutor(2) as pool:
        push = pool.submit(pusher.push, slow(), version)
        updating.wait(10)
        answer = pool.submit(generate, engine.url)
        time.sleep(0.1)
        assert not answer.done()
        go_on.set()
        push.result(30)
        status, reply = answer.result(30)
    assert (status, reply["meta_info"]["weight_version"], tokens_of(reply)) == (200, str(version), [11] * 4)


def test_another_run_starts_from_its_own_versions(engine, shapes):
    with WeightPusher([engine.url], SyncConfig(), "other run") as other:
        report = other.push(saying(shapes, 12).items(), 1)
    assert version_of(engine.url) == 1
    status = ask(engine.url, "/weight_status")[1]
    assert (status["run_id"], status["plan_digest"]) == ("other run", report.plan_digest)
    with (
        WeightPusher([engine.url], SyncConfig(), "other run") as stale,
        pytest.raises(NoEngineLeft, match="not above 1"),
    ):
        stale.push(saying(shapes, 12).items(), 1)
    with WeightPusher([engine.url], SyncConfig(), "third run") as healer:
        healer.push(saying(shapes, 13).items(), 1)
    assert tokens_of(generate(engine.url)[1]) == [13] * 4


def test_replies_are_not_held_back(engine):
    """A listening socket made without IPPROTO_TCP keeps Nagle's algorithm on: 40 ms for each small reply."""
    import http.client
    import urllib.parse

    parts = urllib.parse.urlsplit(engine.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.perf_counter() - start)
    connection.close()
    assert statistics.median(times) < 0.03
