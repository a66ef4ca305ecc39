"""Keys do not get into messages and settings."""

from __future__ import annotations

import pytest

from miles.observe.trackers.redaction import public_settings, without_secrets

ENVIRON = {
    "WANDB_API_KEY": "abcdef123456",
    "MLFLOW_TRACKING_PASSWORD": "abcdef123456789",
    "HF_TOKEN": "hf-12345678",
    "SHORT_TOKEN": "12",
    "HOME": "/home/someone",
    "TOKENIZERS_PARALLELISM": "false!",
}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key abcdef123456 refused", "key [left out] refused"),
        ("abcdef123456789", "[left out]"),
        ("get https://me:pw@host/a?x", "get https://[left out]@host/a?x"),
        ("hf-12345678/hf-12345678", "[left out]/[left out]"),
        ("12 of /home/someone, false!", "12 of /home/someone, false!"),
    ],
)
def test_values_of_secret_variables_and_users_of_addresses_are_left_out(text: str, clean: str) -> None:
    assert without_secrets(text, ENVIRON) == clean


def test_settings_lose_what_is_named_like_a_key_and_no_other() -> None:
    kept = {"data.jsonl.prompt_key": "question", "rollout.max_new_tokens": 4, "rollout.stop_token_ids": None}
    lost = {
        f"rollout.reward.options.{name}": "x" for name in ("api_key", "token", "judge_password", "API_KEY", "secret")
    }
    assert public_settings({**kept, **lost, "a": "u abcdef123456"}, ENVIRON) == {**kept, "a": "u [left out]"}
