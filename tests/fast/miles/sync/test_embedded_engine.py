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
from miles.sync.source import weight_map_of

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
    with WeightPusher([engine.url], SyncConfig(timeout_s=20.0), "real", token=engine.token) as pusher:
        yield pusher


@pytest.fixture(scope="module")
def shapes(engine):
    _, reply = ask(engine.url, "/parameter_table", token=engine.token)
    return {entry["name"]: tuple(entry["shape"]) for entry in reply["tables"][0]["entries"]}


def saying(shapes, token):
    """Weights of a policy whose every greedy token is `token`: the residual stream is constant, the head picks."""
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    weights["model.embed_tokens.weight"].fill_(1.0)
    weights["model.norm.weight"].fill_(1.0)
    weights["lm_head.weight"][token] = 1.0
    return weights


def generate(engine, prompt=(5, 6, 7), new_tokens=4):
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    return ask(engine.url, "/generate", body, token=engine.token)


def tokens_of(reply):
    return [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]]


def version_of(engine):
    return int(ask(engine.url, "/model_info", token=engine.token)[1]["weight_version"])


def test_response_version_equals_weights(engine, pusher, shapes):
    """200 requests while 10 versions are pushed: each token names the version that the answer reports for it."""
    first = version_of(engine) + 1
    pusher.push(saying(shapes, first).items(), first)
    wrong, versions, stop = [], set(), threading.Event()

    def client(number):
        asked = 0
        while not stop.is_set() or asked < 50:
            status, reply = generate(engine, prompt=(2 + number, 3, 4))
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
    pusher.push(saying(shapes, 20).items(), version_of(engine) + 1)
    generate(engine, prompt)
    assert generate(engine, prompt)[1]["meta_info"]["cached_tokens"] > 0, "the cache does nothing: no proof"
    pusher.push(saying(shapes, 21).items(), version_of(engine) + 1)
    reply = generate(engine, prompt)[1]
    assert reply["meta_info"]["cached_tokens"] == 0
    assert tokens_of(reply) == [21] * 4


def test_dirty_engine_refuses_generation_until_a_whole_sync(engine, pusher, shapes):
    version = version_of(engine)
    bad = saying(shapes, 9)
    bad["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(Exception, match=r"1 of .* values are not finite"):
        pusher.push(bad.items(), version + 1)
    status, reply = generate(engine)
    assert (status, reply["error"]["type"]) == (503, "weights_dirty")
    assert version_of(engine) == version
    pusher.push(saying(shapes, 9).items(), version + 2)
    assert tokens_of(generate(engine)[1]) == [9] * 4


def test_requests_that_arrive_during_an_update_wait_for_it(engine, pusher, shapes):
    version = version_of(engine) + 1
    updating, go_on = threading.Event(), threading.Event()

    def slow():
        for item in saying(shapes, 11).items():
            yield item
            updating.set()
            go_on.wait(10)

    with ThreadPoolExecutor(2) as pool:
        push = pool.submit(pusher.push, slow(), version)
        updating.wait(10)
        answer = pool.submit(generate, engine)
        time.sleep(0.1)
        assert not answer.done()
        go_on.set()
        push.result(30)
        status, reply = answer.result(30)
    assert (status, reply["meta_info"]["weight_version"], tokens_of(reply)) == (200, str(version), [11] * 4)


class Interrupted:
    """Weights whose first half has arrived when `during` is called."""

    def __init__(self, weights, during):
        self.weights, self.during = list(weights.items()), during

    def __iter__(self):
        for index, item in enumerate(self.weights):
            if index == len(self.weights) // 2:
                self.during()
            yield item


def push_interrupted(pusher, weights, version, during):
    # With a weight map the update has begun before the first weight is read.
    pusher.push(Interrupted(weights, during), version, weight_map=weight_map_of(list(weights.items())))


def test_memory_released_and_resumed_during_an_update_is_refused_and_nothing_is_lost(engine, pusher, shapes):
    """What was served after it were the zeros that came back, as the new version."""
    version, replies = version_of(engine) + 1, []

    def during():
        for path in ("release_memory_occupation", "resume_memory_occupation"):
            replies.append(ask(engine.url, f"/{path}", {"tags": ["weights"]}, token=engine.token))

    push_interrupted(pusher, saying(shapes, 14), version, during)
    for code, reply in replies:
        assert (code, reply["code"], reply["weights"]["state"]) == (409, "illegal_transition", "updating")
        assert reply["weights"]["allowed"] == ["finish", "fail", "read_weights"]
    status, reply = generate(engine)
    assert (status, reply["meta_info"]["weight_version"], tokens_of(reply)) == (200, str(version), [14] * 4)


def test_released_weights_are_served_again_after_a_whole_sync_only(engine, pusher, shapes):
    def post(path, tags):
        return ask(engine.url, f"/{path}", {"tags": tags}, token=engine.token)[0]

    released = ask(engine.url, "/release_memory_occupation", {"tags": ["weights", "kv_cache"]}, token=engine.token)
    assert (released[0], released[1]["held"]) == (200, {"weights": 0, "kv_cache": 0})
    assert generate(engine)[1]["error"]["type"] == "weights_released"
    assert ask(engine.url, "/parameter_digests", token=engine.token)[0] == 409
    with pytest.raises(NoEngineLeft, match="begin is not possible while the weights are released"):
        pusher.push(saying(shapes, 15).items(), version_of(engine) + 1)
    assert post("resume_memory_occupation", ["weights"]) == 200
    assert generate(engine)[1]["error"]["type"] == "weights_dirty"
    pusher.push(saying(shapes, 15).items(), version_of(engine) + 2)
    assert post("resume_memory_occupation", ["kv_cache"]) == 200
    assert tokens_of(generate(engine)[1]) == [15] * 4


def test_a_users_pause_during_an_update_is_kept(engine, pusher, shapes):
    def pause():
        assert ask(engine.url, "/pause_generation", {"mode": "retract"}, token=engine.token)[0] == 200

    push_interrupted(pusher, saying(shapes, 16), version_of(engine) + 1, pause)
    info = ask(engine.url, "/server_info", token=engine.token)[1]
    assert info["pauses"] == [{"owner": "user", "mode": "retract"}]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, engine)
        time.sleep(0.1)
        assert not answer.done()
        ask(engine.url, "/continue_generation", {}, token=engine.token)
        assert tokens_of(answer.result(10)[1]) == [16] * 4


def test_another_run_starts_from_its_own_versions(engine, shapes):
    with WeightPusher([engine.url], SyncConfig(), "other run", token=engine.token) as other:
        report = other.push(saying(shapes, 12).items(), 1)
    assert version_of(engine) == 1
    status = ask(engine.url, "/weight_status", token=engine.token)[1]
    assert (status["run_id"], status["plan_digest"]) == ("other run", report.plan_digest)
    with (
        WeightPusher([engine.url], SyncConfig(), "other run", token=engine.token) as stale,
        pytest.raises(NoEngineLeft, match="not above 1"),
    ):
        stale.push(saying(shapes, 12).items(), 1)
    with WeightPusher([engine.url], SyncConfig(), "third run", token=engine.token) as healer:
        healer.push(saying(shapes, 13).items(), 1)
    assert tokens_of(generate(engine)[1]) == [13] * 4


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
