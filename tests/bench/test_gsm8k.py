"""GSM8K: prompts and answers as SGLang's harness has them, accuracy, failures, and the comparison
of two servers.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import scripted_server
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer, serve

from piecework.bench.datasets import GSM8K_STOPS, Question, few_shot_prompts, load_gsm8k
from piecework.bench.gsm8k import Gsm8kResult, Gsm8kSettings, answer_value, paired_difference, run
from piecework.bench.report import Failures, Report
from piecework.bench.target import Api, Target
from piecework.cli.main import main

QUESTIONS = [
    Question(f"What is {n} plus {n}?", f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}")
    for n in range(600, 620)
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question._asdict()) + "\n" for question in QUESTIONS))
    return str(path)


def asked(prompt: str) -> int:
    """Which number the last question of a prompt is about."""
    return int(re.findall(r"What is (\d+)", prompt)[-1])


def solve(prompt: str) -> str:
    return f" The answer is {2 * asked(prompt):,} ."


def evaluate(
    server: ScriptedServer,
    data: str,
    *,
    compare: str | None = None,
    target: dict[str, Any] | None = None,
    **settings: Any,
) -> int:
    asked = Gsm8kSettings(data_path=data, **settings)
    return run(Target(base_url=server.url, **(target or {})), asked, compare, Report(None))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 18", 18),
        (" She pays $1,234,567 in all.", 1234567),
        ("First 3, then 5", 5),
        ("It costs 18.50", 50),
        ("-7", 7),
        ("none", None),
        ("", None),
        ("agent 007", None),
        ("00", 0),
        ("in 2024, 12", 12),
        ("1" * 5000, None),
        ("٣", None),
    ],
)
def test_the_answer_is_the_last_run_of_digits(text: str, value: int | None) -> None:
    """As SGLang's `get_answer_value`, in what it does to decimals and leading zeros too."""
    assert answer_value(text) == value


@given(
    before=st.text(),
    number=st.integers(0, 10**30),
    after=st.text(st.characters(exclude_categories=["Nd", "Cs"])),
)
def test_a_number_is_found_in_any_text(before: str, number: int, after: str) -> None:
    assert answer_value(f"{before} {number:,} {after}") == number


def test_prompts_are_the_harness_s_letter_by_letter() -> None:
    questions = [
        Question("Q1", "A1\n#### 1"),
        Question("Q2", "A2\n#### 2"),
        Question("Q3", "A3\n#### 3"),
    ]
    assert few_shot_prompts(questions, 2, 3)[2] == (
        "Question: Q1\nAnswer: A1\n#### 1\n\nQuestion: Q2\nAnswer: A2\n#### 2\n\nQuestion: "
        "Q3\nAnswer:"
    )
    assert few_shot_prompts(questions, 0, 1) == ["Question: Q1\nAnswer:"]
    assert len(few_shot_prompts(questions, 1, 100)) == 3
    with pytest.raises(ValueError, match="--num-shots 4"):
        few_shot_prompts(questions, 4, 1)


@pytest.mark.parametrize("api", list(Api))
def test_the_four_lines(
    server: ScriptedServer, data: str, capsys: pytest.CaptureFixture[str], api: Api
) -> None:
    server.reply = lambda prompt: solve(prompt) if asked(prompt) != 600 else " who knows"
    server.delay = 0.01
    assert evaluate(server, data, num_questions=8, target={"api": api}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Accuracy: 0.875", "Invalid: 0.125"]
    assert re.fullmatch(r"Latency: \d+\.\d{3} s", lines[2])
    throughput = re.fullmatch(r"Output throughput: (\d+\.\d{3}) token/s", lines[3])
    assert throughput is not None and len(lines) == 4
    tokens = 7 * 5 + 2
    assert float(throughput[1]) == pytest.approx(tokens / float(lines[2].split()[1]), rel=0.02)


def test_requests_are_the_harness_s(server: ScriptedServer, data: str) -> None:
    evaluate(server, data, num_questions=4, num_shots=2, max_new_tokens=77)
    bodies = sorted((body for _, body in server.requests), key=lambda body: str(body["prompt"]))
    assert [body["prompt"] for body in bodies] == few_shot_prompts(QUESTIONS, 2, 4)
    for body in bodies:
        assert (body["temperature"], body["max_tokens"], body["stop"]) == (
            0.0,
            77,
            list(GSM8K_STOPS),
        )


def test_an_answer_ends_where_the_next_question_begins(
    server: ScriptedServer, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda prompt: f"{solve(prompt)} Question: What is 1 plus 1?"
    evaluate(server, data, num_questions=5)
    assert capsys.readouterr().out.startswith("Accuracy: 1.000\n")
    server.honour_stops = False
    evaluate(server, data, num_questions=5)
    assert capsys.readouterr().out.startswith("Accuracy: 0.000\n")


def test_so_many_requests_at_once_and_no_more(server: ScriptedServer, data: str) -> None:
    server.delay = 0.05
    evaluate(server, data, num_questions=20, parallel=6)
    assert server.most_running == 6
    assert len(server.requests) == 20


def test_failed_requests_are_counted_and_told(
    server: ScriptedServer, data: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.reply = solve
    server.fail = lambda number: {3: 500, 5: 500, 7: 0}.get(number)
    settings = Gsm8kSettings(data_path=data, num_questions=10, parallel=1)
    assert run(Target(base_url=server.url), settings, None, Report(str(tmp_path / "out.json"))) == 1
    out = capsys.readouterr().out
    assert out.startswith("Accuracy: 0.700\nInvalid: 0.000\n")
    assert (
        "Failed: 3 of 10 requests, counted as wrong\n  2 x HTTP 500: scripted 500\n  1 x "
        "connection lost: " in out
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["accuracy"], written["failed"], written["failures"]) == (
        0.7,
        3,
        {"HTTP 500": 2, "connection lost": 1},
    )
    assert written["predictions"][3] is None and written["predictions"][4] == 1208


def test_answers_without_usage_are_told(
    server: ScriptedServer, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.usage = False
    assert evaluate(server, data, num_questions=3) == 0
    assert "3 answers came without usage" in capsys.readouterr().out


def test_two_servers_on_the_same_questions(
    server: ScriptedServer, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = solve
    with serve(
        ScriptedServer(
            reply=lambda prompt: "9" if asked(prompt) in (602, 605, 611) else solve(prompt)
        )
    ) as other:
        settings = Gsm8kSettings(data_path=data, num_questions=20)
        assert (
            run(
                Target(base_url=server.url), settings, other.url, Report(str(tmp_path / "out.json"))
            )
            == 0
        )
        assert {body["prompt"] for _, body in server.requests} == {
            body["prompt"] for _, body in other.requests
        }
    out = capsys.readouterr().out
    assert "Accuracy: 1.000" in out and "Accuracy: 0.850" in out
    # Differences: 3 ones, 17 zeros; variance 20/19 * (0.15 - 0.15^2).
    error = math.sqrt(20 / 19 * (0.15 - 0.15**2) / 20)
    pairs = "paired, 20 questions; right in the first alone 3, in the second alone 0"
    assert f"Accuracy difference: +0.1500, standard error {error:.4f} ({pairs})" in out
    written = json.loads((tmp_path / "out.json").read_text())
    assert [each["accuracy"] for each in written["servers"]] == [1.0, 0.85]
    assert written["difference"]["standard_error"] == pytest.approx(error)


def test_commands_are_started_in_turn_and_compared(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The harness's own four lines of each, and the difference."""
    right = "lambda prompt: ' ' + str(2 * int((re.findall(r'What is (\\d+)', prompt) or [0])[-1]))"
    written = tmp_path / "out.json"
    flags = ["--data-path", data, "--num-questions", "20", "--json", str(written)]
    flags += ["--server", f"off={scripted_server.command(reply=right)}"]
    wrong = f"lambda prompt: '9' if 'What is 602' in prompt[-60:] else ({right})(prompt)"
    flags += ["--server", f"on={scripted_server.command(reply=wrong)}"]
    assert main(["bench", "gsm8k", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["Accuracy", "Invalid", "Latency", "Output throughput"]
    assert [line.partition(":")[0] for line in lines] == [
        *["off", *names, ""],
        *["on", *names, ""],
        "Accuracy difference",
    ]
    assert lines[1] == "Accuracy: 1.000" and lines[7] == "Accuracy: 0.950"
    assert "difference: +0.0500, standard error 0.0500 (paired, 20 questions" in lines[-1]
    answer = json.loads(written.read_text())
    assert [(each["name"], each["accuracy"]) for each in answer["servers"]] == [
        ("off", 1.0),
        ("on", 0.95),
    ]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--server", "off"], "'off' is not NAME=COMMAND"),
        (["--server", "off=false"], "the server off ended; run its command by hand to see why"),
        (["--server", "off=/nowhere/x"], "/nowhere/x: No such file or directory"),
        (["--server", "a=b", "--compare", "http://127.0.0.1:1"], "--server starts its own servers"),
    ],
)
def test_a_command_that_cannot_be_measured_is_one_line(
    data: str, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["bench", "gsm8k", "--data-path", data, *flags])
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr().err
    assert code == 2 and text in printed and printed.count("\n") == 1


def test_a_command_that_dies_gives_an_exit_code_of_1(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = scripted_server.command(dies_at=3)
    flags = ["--num-questions", "4", "--parallel", "1", "--server", f"dying={dying}"]
    assert main(["bench", "gsm8k", "--data-path", data, *flags]) == 1
    assert "Failed: 2 of 4 requests, counted as wrong" in capsys.readouterr().out


def result(right: list[bool | None]) -> Gsm8kResult:
    """One that is right, wrong, or (None) without an answer."""
    predictions = [None if each is None else int(each) for each in right]
    answered = [each is not None for each in right]
    return Gsm8kResult(
        labels=[1] * len(right),
        predictions=predictions,
        answered=answered,
        failures=Failures(),
        latency=1,
        output_tokens=0,
    )


@given(
    st.lists(st.tuples(st.sampled_from([True, False, None]), st.sampled_from([True, False, None])))
)
def test_the_paired_standard_error(pairs: list[tuple[bool | None, bool | None]]) -> None:
    """Of n pairs with b right in the first alone and c in the second alone: sqrt((b + c - (b - c)^2
    / n) / (n (n - 1))).
    """
    difference = paired_difference(result([a for a, _ in pairs]), result([b for _, b in pairs]))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    n, b, c = len(both), both.count((True, False)), both.count((False, True))
    assert (difference.pairs, difference.only_a, difference.only_b) == (n, b, c)
    assert difference.value == pytest.approx((b - c) / n if n else 0.0)
    if n < 2:
        assert difference.standard_error is None
    else:
        assert difference.standard_error == pytest.approx(
            math.sqrt((b + c - (b - c) ** 2 / n) / (n * (n - 1))), abs=1e-9
        )
    assert "standard error" in difference.line()


def test_the_json_alone_on_standard_output(
    server: ScriptedServer, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        Target(base_url=server.url),
        Gsm8kSettings(data_path=data, num_questions=3),
        None,
        Report("-"),
    )
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"] == "scripted"
    assert "Accuracy: " in printed.err


def test_a_second_server_that_is_not_there_is_found_before_the_first_question(
    server: ScriptedServer, data: str, nobody: str
) -> None:
    with pytest.raises(ValueError, match="no server answers"):
        evaluate(server, data, compare=nobody)
    assert server.requests == []


# Data


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"question": "q", "answer": "1"}\nnonsense\n', "line 2"),
        ('{"question": "q"}\n', "line 1"),
        ("[1]\n", "line 1"),
        ("", "no questions"),
    ],
)
def test_a_file_that_is_not_as_it_should_be(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=problem):
        load_gsm8k(str(path))


def test_a_label_without_a_number(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q", "answer": "none"}\n')
    with pytest.raises(ValueError, match="question 2 has no number"):
        evaluate(server, str(path), num_shots=0)


def test_offline_it_says_which_file_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="--data-path FILE") as error:
        load_gsm8k(None, url=f"{nobody}/test.jsonl")
    assert "\n" not in str(error.value)
    assert list(tmp_path.rglob("*.*")) == []


def test_it_is_downloaded_once(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server.files["/test.jsonl"] = "".join(
        json.dumps(question._asdict()) + "\n" for question in QUESTIONS
    )
    assert load_gsm8k(None, url=f"{server.url}/test.jsonl") == QUESTIONS
    server.files.clear()
    assert load_gsm8k(None, url=f"{server.url}/test.jsonl") == QUESTIONS
