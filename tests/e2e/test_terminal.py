"""Claims about `servekit chat` and `servekit top` at a terminal: Ctrl-C at every stage, and what is printed."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator

import pytest

from servekit.observability.live_frames import LiveSequence
from tests.support.scripted_server import DONE, Script, ScriptedServer, event, frame, piece, scripted_server
from tests.support.server_process import ServerProcess, serving
from tests.support.terminal import CTRL_C, HARMFUL, HOSTILE, TIMEOUT_S, Terminal, terminal

PROMPT = "\n>"
CTRL_D = "\x04"
CHAT = "/v1/chat/completions"
NEVER = threading.Event()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that takes ten minutes for an answer of 12,000 tokens, so that tests have time to stop it."""
    log = tmp_path_factory.mktemp("slow") / "log"
    with serving("--model", "sim:step=50ms", "--num-kv-blocks", "2000", log=log) as server:
        yield server


def quit_chat(at: Terminal) -> None:
    at.type(CTRL_C)
    assert at.expect_end() == 0
    assert at.is_restored()


# -- chat: the conversation --------------------------------------------------------------------------------------------


def test_chat_prints_the_servers_answers_and_sends_the_whole_conversation(server: ServerProcess) -> None:
    def answer(messages: list[dict[str, str]]) -> str:
        body = {"messages": messages, "temperature": 0, "max_tokens": 24}
        content: str = server.client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        return content

    messages = [{"role": "system", "content": "Be kind."}]
    flags = ("--system", "Be kind.", "--temperature", "0", "--max-tokens", "24")
    with terminal("chat", server.url, *flags, columns=200) as at:
        for question in ("What color is the sky?", "And at night?"):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer(messages)})
            at.expect(PROMPT)
            at.type(question + "\r")
            at.expect(question + "\n")
            assert at.expect("[").strip() == messages[-1]["content"].strip()
            assert re.fullmatch(r"\d+ tokens, \d+\.\d\d s to the first, \d+ tok/s(, .*)?", at.expect("]"))
        at.expect(PROMPT)
        quit_chat(at)


def test_chat_commands_and_messages_of_several_lines(scripted: ScriptedServer) -> None:
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for typed, printed in (
            ("one\r", "[1 token,"),
            ("two \\\rlines\r", "[1 token,"),
            ("/new\r", "[new conversation]"),
            ("three\r", "[1 token,"),
            ("/system Be brief.\r", "[new conversation with this system message]"),
            ("four\r", "[1 token,"),
            ("/sistem\r", "[unknown command /sistem;"),
            (" /etc/passwd\r", "[1 token,"),
            ("/help\r", "start a new conversation"),
        ):
            at.type(typed)
            at.expect(printed)
            at.expect(PROMPT)
        at.type("/quit\r")
        assert at.expect_end() == 0 and at.is_restored()
    one, four = ["user: one", "assistant: yes"], ["system: Be brief.", "user: four", "assistant: yes"]
    assert scripted.chats() == [
        one[:1],
        [*one, "user: two \nlines"],
        ["user: three"],
        four[:2],
        [*four, "user:  /etc/passwd"],
    ]


def test_the_up_arrow_recalls_earlier_messages(scripted: ScriptedServer) -> None:
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        at.type("before\r")
        at.expect("yes")
        at.expect(PROMPT)
        # A prompt loads its history after it is drawn: the first arrow may come too early. There is only one message.
        for _ in range(100):
            at.type("\x1b[A")
            if at.is_printed("before", within_s=0.3):
                break
        at.type("\r")
        at.expect("yes")
        at.expect(PROMPT)
        quit_chat(at)
    assert scripted.chats()[1][-1] == "user: before"


# -- chat: Ctrl-C, at every stage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_stops_the_answer_and_frees_its_blocks(slow: ServerProcess, how: str) -> None:
    with terminal("chat", slow.url) as at:
        for _ in range(2):
            at.expect(PROMPT)
            at.type("hello\r")
            at.expect("hello\n" if how == "key" else "hello")
            slow.wait_for_metric("servekit_num_requests_running", 1)
            at.interrupt(how)
            at.expect("[stopped: ")
            slow.wait_until_at_rest()
        at.expect(PROMPT)
        quit_chat(at)


WAITS_WHEN: dict[str, Script] = {
    "nothing was answered": [NEVER],
    "there is no token yet": [b": hello\n\n", NEVER],
    "in the middle": [piece("some"), piece("thing"), NEVER, piece("else"), DONE],
    "all tokens are there": [piece("something"), piece("", "stop"), NEVER],
}


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_during_a_turn_ends_the_turn_and_never_the_program(scripted: ScriptedServer, how: str) -> None:
    """At every stage of the answer, and repeatedly."""
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for when, script in WAITS_WHEN.items():
            has_begun = len(script) > 2
            scripted.scripts[CHAT] = [script, script, [piece("the end"), DONE]]
            for _ in range(2):
                num_asked, num_departed = len(scripted.asked), scripted.num_departed
                at.type("hello\r")
                scripted.wait_for(num_asked + 1)
                if has_begun:
                    at.expect("something")
                at.interrupt(how)
                scripted.wait_for(num_asked + 1, num_departed + 1)
                at.expect("[stopped: ")
                at.expect(PROMPT)
            at.type("bye\r")
            at.expect("the end")
            at.expect(PROMPT)
            cut = ["user: hello", "assistant: something…"] if has_begun else []
            assert scripted.chats()[-1] == [*cut, *cut, "user: bye"], when
            at.type("/new\r")
            at.expect("[new conversation]")
            at.expect(PROMPT)
        quit_chat(at)


def test_ctrl_c_typed_after_an_enter_stops_the_answer(scripted: ScriptedServer) -> None:
    """Both are typed before the Enter can have an effect: keys keep their order at any speed."""
    scripted.scripts[CHAT] = [[NEVER]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for keys in 3 * ("hello\r" + CTRL_C, "hello\r" + CTRL_C * 3, "hello\rtyped ahead" + CTRL_C):
            at.type(keys)
            at.expect("[stopped: 0 tokens]")
            at.expect(PROMPT)
        at.type("/help\r")  # nothing typed ahead is left before it
        at.expect("Ctrl-C stops an answer")
        at.expect(PROMPT)
        quit_chat(at)


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_clears_a_prompt_and_quits_at_an_empty_one(scripted: ScriptedServer, how: str) -> None:
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for wrong in ("aaaa", "bbbb", "cccc"):  # different letters, so that all are drawn again
            at.type(wrong)
            at.expect(wrong)
            at.interrupt(how)
            if how == "signal":  # a signal does not keep its order with typed keys
                at.expect_output(b"\x1b[K")
        at.type("right\r")
        at.expect("yes")
        at.expect(PROMPT)
        at.interrupt(how)
        assert at.expect_end() == 0 and at.is_restored()
    assert scripted.chats() == [["user: right"]]


def test_keys_typed_during_an_answer_become_the_next_message(scripted: ScriptedServer) -> None:
    goes_on = threading.Event()
    scripted.scripts[CHAT] = [[piece("one"), goes_on, DONE], [piece("two"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        at.type("first\r")
        at.expect("one")
        at.type("second\r")
        goes_on.set()
        at.expect("two")
        at.expect(PROMPT)
        quit_chat(at)
    assert scripted.chats()[1] == ["user: first", "assistant: one", "user: second"]


def test_ctrl_c_before_the_first_prompt_ends_the_program(scripted: ScriptedServer) -> None:
    scripted.scripts["/v1/models"] = [[NEVER]]
    with terminal("chat", scripted.url) as at:
        scripted.wait_for(num_asked=1)
        at.type(CTRL_C)
        assert at.expect_end() == 130 and at.is_restored()
        assert "Traceback" not in at.plain()


@pytest.mark.parametrize("at_a_prompt", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_program_restore_the_terminal(
    scripted: ScriptedServer, number: signal.Signals, at_a_prompt: bool
) -> None:
    scripted.scripts[CHAT] = [[piece("some"), NEVER]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        if not at_a_prompt:
            at.type("hello\r")
            at.expect("some")
        at.process.send_signal(number)
        assert at.expect_end() == 128 + number and at.is_restored()
        assert "Traceback" not in at.plain()


@pytest.mark.parametrize("command", ["chat", "top"])
def test_the_program_ends_when_its_terminal_closes(scripted: ScriptedServer, command: str) -> None:
    scripted.scripts["/ui/events"] = [[frame("demo"), NEVER]]
    with terminal(command, scripted.url) as at:
        at.expect("no sequences" if command == "top" else PROMPT)
        at.hang_up()
        assert at.process.wait(TIMEOUT_S) == 128 + signal.SIGHUP


def test_typed_text_that_looks_like_a_terminal_report_is_ignored(scripted: ScriptedServer) -> None:
    """prompt_toolkit takes some colours for mouse events, and cannot parse numbers with too many digits."""
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for keys in ("a\x1b[31mb\r", f"a\x1b[{'1' * 5000};1Rb\r", "a\x1b[<0;1mb\r"):
            for begin in range(0, len(keys), 1000):
                at.type(keys[begin : begin + 1000])
            at.expect("yes")
            at.expect(PROMPT)
        quit_chat(at)
        assert "Traceback" not in at.plain() and "xception" not in at.plain()
    assert [chat[-1] for chat in scripted.chats()] == ["user: ab"] * 3


def test_ctrl_d_quits(scripted: ScriptedServer) -> None:
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        at.type(CTRL_D)
        assert at.expect_end() == 0 and at.is_restored()


# -- chat: errors, and untrusted text ----------------------------------------------------------------------------------


def refusal(message: str, code: str) -> Script:
    return [json.dumps({"error": {"message": message, "code": code}}).encode()]


ERRORS: list[tuple[int, dict[str, str], Script, str]] = [
    (
        503,
        {"Retry-After": "7"},
        refusal("9 wait already", "overloaded"),
        "9 wait already (the server is busy; try again in 7",
    ),
    (429, {}, refusal("limit", "rate_limit_exceeded"), "limit (the server is busy; try again later)"),
    (
        401,
        {},
        refusal("no", "invalid_api_key"),
        "the server requires an API key; give it with --api-key or SERVEKIT_API_KEY",
    ),
    (400, {}, refusal("none", "chat_template_missing"), "this model has no chat template, so it cannot chat;"),
    (400, {}, refusal("too long", "context_length_exceeded"), "too long (/new starts a new conversation)"),
    (502, {}, [b"<html>"], "answered 502 Bad Gateway"),
    (200, {}, [piece("some"), b"data: {]\n\n"], "the server sent an invalid answer"),
    (200, {}, [piece("some")], "the answer is incomplete: the server closed the connection"),
    (200, {}, [piece("some"), event({"error": {"message": "the worker was lost"}})], "failed: the worker was lost"),
    (
        200,
        {"Content-Encoding": "gzip"},
        [b"\x1f\x8b"],
        "answered with Content-Encoding gzip, which servekit does not accept",
    ),
]


def test_failed_answers_are_explained_and_their_question_is_discarded(scripted: ScriptedServer) -> None:
    with terminal("chat", scripted.url, columns=250) as at:
        at.expect(PROMPT)
        for status, headers, script, message in ERRORS:
            scripted.scripts[CHAT] = [script, [piece("yes"), DONE]]
            scripted.statuses[CHAT] = status, headers
            at.type("first\r")
            at.expect(message)
            at.expect(PROMPT)
            scripted.statuses.clear()
            at.type("second\r")
            at.expect("yes")
            assert scripted.chats()[-1] == ["user: second"], message
            at.expect(PROMPT)
            at.type("/new\r")
            at.expect("[new conversation]")
            at.expect(PROMPT)
        quit_chat(at)


@pytest.mark.parametrize("command", ["chat", "top"])
def test_an_unreachable_server_is_reported_in_one_line(command: str) -> None:
    with terminal(command, "http://127.0.0.1:1", columns=200) as at:
        assert at.expect_end() == 1 and at.is_restored()
        assert at.plain().strip() == "servekit: no server answers at http://127.0.0.1:1; `servekit serve` starts one"


def test_hostile_answers_and_names_are_printed_as_plain_text(scripted: ScriptedServer) -> None:
    scripted.scripts["/v1/models"] = [[json.dumps({"data": [{"id": "".join(HOSTILE[:-1])}]}).encode()]]
    scripted.scripts[CHAT] = [
        [*map(piece, HOSTILE), DONE],
        [*map(piece, "".join(HOSTILE[:-1])), piece("", HOSTILE[0])],
        [event({"error": {"message": "".join(HOSTILE)}})],
    ]
    with terminal("chat", scripted.url) as at:
        for printed in ("<script>alert(1)</script>xxx", "<script>alert(1)</script>", "the answer failed: ␛]52"):
            at.expect(PROMPT)
            at.type("hello\r")
            at.expect(printed)
        at.expect(PROMPT)
        quit_chat(at)
        assert at.plain().count("x" * 10_000) == 2
        assert not [harm for harm in HARMFUL if harm in at.output]


def test_reasoning_is_printed_apart_from_the_answer_and_is_not_sent_back(scripted: ScriptedServer) -> None:
    hostile = f"Hm, {HOSTILE[0]}"
    reasoning = event({"choices": [{"index": 0, "delta": {"reasoning_content": hostile}}]})
    scripted.scripts[CHAT] = [[reasoning, piece("Yes."), DONE]]
    with terminal("chat", scripted.url) as at:
        for _ in range(2):
            at.expect(PROMPT)
            at.type("hello\r")
            at.expect("Yes.")
        at.expect(PROMPT)
        quit_chat(at)
        assert b"\x1b[3mHm, " in at.output and not [harm for harm in HARMFUL if harm in at.output]
    assert scripted.chats()[-1] == ["user: hello", "assistant: Yes.", "user: hello"]


# -- top ---------------------------------------------------------------------------------------------------------------


def test_top_shows_running_sequences_and_q_quits(slow: ServerProcess) -> None:
    body = {"prompt": "hello", "n": 3, "max_tokens": 5000, "stream": True}
    with slow.client.stream("POST", "/v1/completions", json=body) as answer, terminal("top", slow.url) as at:
        lines = answer.iter_lines()  # its garbage collection closes the connection
        next(lines)
        at.expect("running 3")
        at.expect("of 2,000 held")
        for _ in range(3):
            at.expect("decode  ")
            while "█" not in at.expect("/ 5,000"):  # a sequence without a token yet has no such bar
                at.expect("decode  ")
        at.expect("running 3")  # and again, in another frame
        at.type("q")
        assert at.expect_end() == 0 and at.is_restored()
        assert at.output.count(b"\x1b[?1049h") == at.output.count(b"\x1b[?1049l") == 1
        assert at.output.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))
    slow.wait_until_at_rest()


@pytest.mark.parametrize(
    ("how", "exit_code"),
    [("key", 0), (CTRL_D, 0), (signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129), ("before a frame", 0)],
)
def test_top_quits_on_keys_and_signals(scripted: ScriptedServer, how: str | signal.Signals, exit_code: int) -> None:
    scripted.scripts["/ui/events"] = [[NEVER]] if how == "before a frame" else [[frame("demo"), NEVER]]
    with terminal("top", scripted.url) as at:
        if how == "before a frame":
            scripted.wait_for(num_asked=1)
        else:
            at.expect("no sequences")
        if isinstance(how, signal.Signals):
            at.process.send_signal(how)
        else:
            at.type(CTRL_D if how == CTRL_D else CTRL_C)
        assert at.expect_end() == exit_code and at.is_restored()
        assert at.output.count(b"\x1b[?1049h") == at.output.count(b"\x1b[?1049l")
        assert "Traceback" not in at.plain()


def test_top_reports_a_lost_server_and_reconnects(scripted: ScriptedServer) -> None:
    is_back = threading.Event()
    scripted.scripts["/ui/events"] = [[frame("before")], [is_back, frame("after"), NEVER]]
    with terminal("top", scripted.url, columns=120) as at:
        at.expect("before")
        at.expect(f"{scripted.url} closed the connection; this frame is ")
        while int(at.expect(" s old").rpartition(" ")[2]) < 1:  # some ages may be skipped
            at.expect("closed the connection; this frame is ")
        is_back.set()
        at.expect("after")
        at.expect("no sequences")
        at.type("q")
        assert at.expect_end() == 0 and at.is_restored()


def test_top_adapts_to_the_terminals_size(scripted: ScriptedServer) -> None:
    scripted.scripts["/ui/events"] = [[frame("demo"), NEVER]]
    with terminal("top", scripted.url, columns=30, rows=40) as at:
        at.expect("no sequences")
        assert "q quits" not in at.plain()
        at.resize(120, 40)
        at.expect("q quits")
        at.type("q")
        assert at.expect_end() == 0 and at.is_restored()


def test_characters_missing_in_the_encoding_become_question_marks(scripted: ScriptedServer) -> None:
    scripted.scripts["/ui/events"] = [[frame("démo", cells=[(0, 64)]), NEVER]]
    with terminal("top", scripted.url, PYTHONIOENCODING="latin-1") as at:
        at.expect("steps ? decode")
        at.expect("no sequences")
        at.type("q")
        assert at.expect_end() == 0 and at.is_restored()


def test_hostile_frames_are_printed_as_plain_text(scripted: ScriptedServer) -> None:
    name = "".join(HOSTILE)
    scripted.scripts["/ui/events"] = [[frame(name, num_running=1), NEVER]]
    with terminal("top", scripted.url, columns=250) as at:
        at.expect("␛]52")
        at.expect("and 1 more")
        at.type("q")
        assert at.expect_end() == 0 and at.is_restored()
        assert not [harm for harm in HARMFUL if harm in at.output]


def test_top_ends_with_a_message_at_an_invalid_frame(scripted: ScriptedServer) -> None:
    sequence = LiveSequence(0, "\x1b]0;x\x07", 1, 1, 1, 1, 0.0)  # type: ignore[arg-type]
    scripted.scripts["/ui/events"] = [[frame("demo", sequences=[sequence]), NEVER]]
    with terminal("top", scripted.url, columns=250) as at:
        assert at.expect_end() == 1 and at.is_restored()
        assert "servekit: the server sent an invalid answer" in at.plain()
        assert not [harm for harm in HARMFUL if harm in at.output]


def test_top_explains_a_missing_live_view(scripted: ScriptedServer) -> None:
    scripted.statuses["/ui/events"] = 404, {}
    scripted.scripts["/ui/events"] = [[b"{}"]]
    with terminal("top", scripted.url, columns=200) as at:
        assert at.expect_end() == 1 and at.is_restored()
        assert "has no live view: the server was started with --no-ui" in at.plain()
