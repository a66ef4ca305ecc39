"""Every field of a generate or control request has bounds: 422 with the field's name, and nothing changes."""

import asyncio

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.engines.embedded.fields import MAX_DEPTH, BadRequest, Fields, read_body, read_object
from miles.rollout.engines.embedded.generate_body import parse_generate
from miles.rollout.engines.embedded.requests import Limits
from miles_ci.declare import register_cpu_ci

register_cpu_ci(10, "stage-a-cpu", nightly=True)

LIMITS = Limits(vocab_size=16, context_length=64, max_total_tokens=128, eos_ids=(1,))
PARAMS = "sampling_params."


def field_of(body):
    with pytest.raises(BadRequest) as raised:
        parse_generate(body, LIMITS)
    assert raised.value.status == 422
    assert raised.value.field in str(raised.value)
    return raised.value.field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"stop_token_ids": [16]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [2] * 257}, "stop_token_ids"),
        ({"stop_token_ids": [[2]]}, "stop_token_ids"),
        ({"stop_token_ids": {"a": 1}}, "stop_token_ids"),
        ({"temperature": 1e-42}, "temperature"),
        ({"temperature": 9e-7}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": -1e-9}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2**70}, "max_new_tokens"),
        ({"max_new_tokens": 64}, "max_new_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"no_stop_trim": "yes"}, "no_stop_trim"),
        ({"skip_special_tokens": []}, "skip_special_tokens"),
        ({"sampling_seed": 2**64}, "sampling_seed"),
        ({"sampling_seed": -(2**63) - 1}, "sampling_seed"),
        ({"sampling_seed": 0.5}, "sampling_seed"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logit_bias": {}}, "logit_bias"),
    ],
)
def test_sampling_parameters(params, field):
    assert field_of({"input_ids": [3, 4], "sampling_params": params}) == PARAMS + field
    assert field_of({"input_ids": [[3], [4]], "sampling_params": [{"max_new_tokens": 2}, params]}) == PARAMS + field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": "ab"}, "input_ids"),
        ({"input_ids": [2**63]}, "input_ids"),
        ({"input_ids": [2**64]}, "input_ids"),
        ({"input_ids": [1.0]}, "input_ids"),
        ({"input_ids": [[3], 4]}, "input_ids"),
        ({"input_ids": [[3], [[4]]]}, "input_ids"),
        ({"input_ids": [[2]] * 8193}, "input_ids"),
        ({"input_ids": [2] * 8193}, "input_ids"),
        ({"rid": ""}, "rid"),
        ({"rid": "x" * 257}, "rid"),
        ({"rid": 7}, "rid"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"return_sampling_mask": 1}, "return_sampling_mask"),
        ({"return_sampling_mask": [True, True]}, "return_sampling_mask"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"stream": 1}, "stream"),
        ({"top_logprobs_num": 5}, "top_logprobs_num"),
        ({"top_logprobs_num": "5"}, "top_logprobs_num"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"lora_path": {}}, "lora_path"),
        ({"min_weight_version": -1}, "min_weight_version"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": "{}"}, "sampling_params"),
        ({"text": "hello"}, "text"),
        ({"x" * 5000: 1}, "x" * 256),
    ],
)
def test_body_fields(change, field):
    assert field_of({"input_ids": [3, 4], **change}) == field


def test_what_asks_for_nothing_is_taken():
    body = {"input_ids": [3], "stream": False, "top_logprobs_num": 0, "logprob_start_len": -1, "lora_path": None}
    params = {
        "stop_token_ids": [15],
        "temperature": 1e-6,
        "top_k": -1,
        "sampling_seed": 2**64 - 1,
        "max_new_tokens": 63,
    }
    (request,), batched = parse_generate({**body, "sampling_params": params}, LIMITS)
    assert (request.sampling.stop_ids, request.sampling.temperature, batched) == ((1, 15), 1e-6, False)
    assert (
        parse_generate({"input_ids": [3], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}, LIMITS)[0][
            0
        ].seed
        >= 0
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["n", "top_p", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = st.sampled_from(
    ["input_ids", "sampling_params", "rid", "stream", "min_weight_version", "return_logprob", "top_logprobs_num",
     "lora_path", "return_sampling_mask", "logprob_start_len", "other"]
)  # fmt: skip


@settings(max_examples=400)
@given(st.dictionaries(NAMES, JSON, max_size=5), JSON)
def test_any_json_is_a_request_or_a_bad_request(body, params):
    for sent in (body, {"input_ids": [3], "sampling_params": params}, params):
        requests, problem = [], ""
        try:
            requests, _ = parse_generate(sent, LIMITS)
        except BadRequest as error:
            problem = str(error)
        assert bool(requests) != bool(problem)
        assert len(problem) < 600
        assert all(len(r.input_ids) + r.sampling.max_new <= 64 for r in requests)


def test_depth_is_bounded_and_brackets_in_texts_do_not_count():
    def nested(depth):
        return b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert read_object(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 900, 5000):
        with pytest.raises(BadRequest) as raised:
            read_object(nested(depth))
        assert raised.value.field == "body"
    assert read_object(orjson.dumps({"rid": "[" * 100})) == {"rid": "[" * 100}


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b'"a"', b"NaN", b'{"a": NaN}', b"\xff", b'{"a": "\\ud800"}'])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(BadRequest, match=r"^body: "):
        read_object(body)


def received(*parts):
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]]
    messages.append({"type": "http.request", "body": parts[-1], "more_body": False})

    async def receive():
        return messages.pop(0)

    return receive


def test_a_body_is_read_up_to_its_bound_and_not_further():
    assert asyncio.run(read_body(received(b"ab", b"cd"), most=4)) == b"abcd"
    with pytest.raises(BadRequest) as raised:
        asyncio.run(read_body(received(b"ab", b"cde"), most=4))
    assert (raised.value.status, raised.value.field) == (413, "body")


def test_a_body_whose_sender_left_is_no_body():
    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(BadRequest, match="closed"):
        asyncio.run(read_body(receive, most=4))


@pytest.mark.parametrize("text", ["-1", "01", "1.0", "", " 1", "1_0", "9" * 5000, str(2**63), "٣", 1, None, ["1"]])
def test_a_version_is_the_decimal_text_of_an_int64(text):
    with pytest.raises(BadRequest, match=r"^v: "):
        Fields({"v": text}).version("v")


def test_the_largest_version_is_taken():
    assert Fields({"v": str(2**63 - 1)}).version("v") == 2**63 - 1


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (lambda f: f.text("v", most=3), ["a", "abc"], ["", "abcd", "a\0", 1, ["a"]]),
        (lambda f: f.choice("v", ("a", "b")), ["a", "b"], ["c", 1, ["a"], {}]),
        (lambda f: f.integer("v", 1, 3), [1, 3], [0, 4, 1.0, True, "1"]),
        (lambda f: f.number("v", 0.5, 2), [0.5, 1, 2], [0.4, 2.1, True, "1", float("nan"), float("inf")]),
        (lambda f: f.flag("v"), [True, False], [0, 1, "true"]),
        (lambda f: f.texts("v", most=2), [["a"], ["a", "b"]], [[], ["a", "b", "c"], "ab", [1], [""], ["x" * 257]]),
        (lambda f: f.items("v", most=2), [[], [1, {}]], [[1, 2, 3], "ab", {}]),
        (lambda f: f.object("v"), [{}, {"a": 1}], [[], "a", 1]),
    ],
)  # fmt: skip
def test_each_kind_of_field_has_its_bounds(read, good, bad):
    for value in good:
        found = read(Fields({"v": value}))
        assert found == (tuple(value) if isinstance(found, tuple) else value)
    for value in [*bad, None]:
        with pytest.raises(BadRequest, match=r"^v: "):
            read(Fields({"v": value}))


def test_fields_that_nobody_took_are_refused():
    fields = Fields({"a": 1, "b": 2}, "inner")
    fields.integer("a", 0, 9)
    with pytest.raises(BadRequest, match=r"inner\.b: unsupported option"):
        fields.done()
