"""A model whose template has tools gets them in its prompt, and may call them by its own choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import serving

Json = dict[str, Any]
# In the manner of Qwen's templates.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|><tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>{{ eos_token }}{% endif %}{% for message in messages %}'
    "{{ '<|' + message.role + '|>' + message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{{ eos_token }}{% endfor %}<|assistant|>"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_call_by_the_models_own_choice_goes_round(tmp_path: Path, num_processes: int) -> None:
    """A grammar of one choice makes the model write a given text: it stands for one that was trained to."""
    file = tmp_path / "tools.jinja"
    file.write_text(TEMPLATE)
    arguments = ["--chat-template", str(file), "--api-processes", str(num_processes)]
    with serving(*arguments, log=tmp_path / "log") as server:

        def chat(*messages: Json, **fields: Any) -> Json:
            body = {"messages": [{"role": "user", "content": "Rome?"}, *messages], "max_tokens": 90, **fields}
            response = server.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answer: Json = response.json()
            return answer

        plain, offered = chat(), chat(tools=[TOOL], tool_choice="auto")
        assert offered["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 20, "the prompt has the tools"
        assert not offered["choices"][0]["message"].get("tool_calls"), "this model does not call by itself"
        choice = {"structured_outputs": {"choice": [CALL]}}
        answer = chat(tools=[TOOL], **choice)["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
        as_text = chat(tools=[TOOL], tool_choice="none", **choice)["choices"][0]
        assert as_text["message"]["content"] == CALL and as_text["finish_reason"] == "stop"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
        again = chat(answer["message"], result, tools=[TOOL], max_tokens=5)
        assert again["usage"]["prompt_tokens"] > offered["usage"]["prompt_tokens"]
        streamed = server.client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Rome?"}], "tools": [TOOL], "stream": True, **choice},
        )
        chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert "".join(delta["function"].get("arguments", "") for delta in deltas) == '{"city": "Rome"}'
        assert len(deltas) > 3 and deltas[0]["function"]["name"] == "get_weather"
