"""Test reading error bodies of several servers."""

from __future__ import annotations

import pytest

from loadtest.running.error_bodies import refusal_code, refusal_message


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('{"error":{"message":"m","type":"overloaded_error","param":null,"code":"overloaded"}}', "overloaded"),
        ('{"error":{"message":"m","type":"BadRequestError","param":null,"code":400}}', "BadRequestError"),
        ('{"object":"error","message":"m","type":"NotFoundError","code":404}', "NotFoundError"),
        ('{"error":"Model is overloaded","error_type":"overloaded"}', "overloaded"),
        ('{"error":"queue full"}', "queue full"),
        ("<html>Bad Gateway</html>", ""),
        ("{}", ""),
    ],
)
def test_a_refusal_is_counted_by_the_servers_own_code(body: str, code: str) -> None:
    assert refusal_code(body.encode()) == code


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error":{"message":"no field `temprature`","code":"unknown_field"}}', "no field `temprature`"),
        ('{"object":"error","message":"too long","type":"NotFoundError","code":404}', "too long"),
        ('{"error":"Model is overloaded","error_type":"overloaded"}', "Model is overloaded"),
        ('{"error":{"message":["m"]}}', ""),
        ('{"error":{"message":"' + "m" * 600 + '"}}', "m" * 500),
        ("<html>Bad Gateway</html>", ""),
        ("{}", ""),
    ],
)
def test_a_refusal_quotes_the_servers_message(body: str, message: str) -> None:
    assert refusal_message(body.encode()) == message
