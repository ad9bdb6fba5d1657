import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from configs.schema import RewardConfig, RewardFunctionConfig
from reward.answers import AnswerError, accepted, check_answers
from reward.functions import FunctionError, exact_match, final_answer, load_function, math_verify, reasoning_gym
from rollout.types import Prompt

HERE = "tests.reward._functions"


class TestExactMatch:
    @pytest.mark.parametrize(
        ("response", "answer", "options", "score"),
        [
            ("4", "4", {}, 1.0),
            ("  4 \n", "4", {}, 1.0),
            ("a  b", "a b", {}, 1.0),
            ("a  b", "a b", {"ignore_whitespace": False}, 0.0),
            ("Paris", "paris", {}, 0.0),
            ("Paris", "paris", {"ignore_case": True}, 1.0),
            ("44", "4", {}, 0.0),
            ("4", 4, {}, 1.0),
            ("", "4", {}, 0.0),
            ("so 3, no: #### 4", "4", {"marker": "####"}, 1.0),
            ("#### 3 #### 4", "4", {"marker": "####"}, 1.0),
            ("4", "4", {"marker": "####"}, 0.0),
            ("b", ["a", "b"], {}, 1.0),
            ("['a', 'b']", ["a", "b"], {}, 0.0),
            ("B", ("a", "b"), {"ignore_case": True}, 1.0),
            ("24", {"target": [24, "24.0"]}, {}, 1.0),
            ("24.0", {"target": [24, "24.0"]}, {}, 1.0),
            ("25", {"target": [24, "24.0"]}, {}, 0.0),
            ("c", {"ground_truth": {"target": ["b", "c"]}, "style": "rule"}, {}, 1.0),
            ("0.00001", 1e-05, {}, 1.0),
            ("1e-05", 1e-05, {}, 1.0),
            ("00501", "00501", {}, 1.0),
            ("501", "00501", {}, 0.0),
            ("<answer>4</answer> and more", "4", {"marker": "<answer>", "end_marker": "</answer>"}, 1.0),
        ],
    )
    def test_scores(self, response: str, answer: Any, options: dict[str, Any], score: float) -> None:
        assert exact_match(response, answer, **options) == score

    @pytest.mark.parametrize("answer", [None, float("nan")])
    def test_a_row_without_an_answer_is_an_error_and_not_a_wrong_response(self, answer: Any) -> None:
        with pytest.raises(ValueError, match="no answer"):
            exact_match("4", answer)

    def test_an_empty_answer_is_an_answer(self) -> None:
        assert exact_match("", "") == 1.0
        assert final_answer("x", None, "y") == "x"


class TestMathVerify:
    @pytest.mark.parametrize(
        ("response", "answer", "score"),
        [
            (r"the result is \boxed{\frac{1}{2}}", "0.5", 1.0),
            (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
            (r"$x = 3$", "3", 1.0),
            (r"\boxed{4}", "3", 0.0),
            ("no idea", "3", 0.0),
            ("", "3", 0.0),
        ],
    )
    def test_scores(self, response: str, answer: str, score: float) -> None:
        assert math_verify(response, answer) == score

    @pytest.mark.parametrize(
        ("answer", "given", "score"),
        [
            ("25%", "0.25", 1.0),
            (r"25\%", "0.25", 1.0),
            ("25%", r"25\%", 1.0),
            ("0.25", r"25\%", 1.0),
            ("0.25", "25%", 1.0),
            ("1,234%", "12.34", 1.0),
            ("25%", "25", 0.0),
            ("25", r"25\%", 0.0),
            ("45°", "45", 1.0),
            ("45°", r"45^\circ", 1.0),
            (r"45^\circ", "45°", 1.0),
            ("45°", "44°", 0.0),
            ("√2", r"\sqrt{2}", 1.0),
            (r"\sqrt2", "√2", 1.0),
            ("√(x+1)", r"\sqrt{x+1}", 1.0),
            ("2√3", r"2\sqrt{3}", 1.0),
            ("√2", "2", 0.0),
            (r"0.\overline{3}", r"\frac{1}{3}", 1.0),
            (r"\frac{1}{3}", r"0.\overline{3}", 1.0),
            (r"0.1\overline{6}", r"\frac{1}{6}", 1.0),
            (r"-0.\overline{3}", r"-\frac{1}{3}", 1.0),
            (r"0.\bar{3}", "1/3", 1.0),
            (r"0.\dot{1}4285\dot{7}", "1/7", 1.0),
            ("0.(3)", "1/3", 1.0),
            (r"0.\overline{3}", "0", 0.0),
            (r"0.\overline{3}", "0.3", 0.0),
            (1e-05, "0.00001", 1.0),
            (1e-05, "1e-05", 1.0),
            (1e-05, "10^{-5}", 1.0),
            (1e-05, "e-5", 0.0),
            ("1e-05", "0.00001", 1.0),
            ("1e-05", "e-5", 0.0),
            (1e16, "10000000000000000", 1.0),
            (1e17, "10^{17}", 1.0),
            (1e16, "16e", 0.0),
            ("$3e - 5$", "3e-5", 1.0),
            ("$3e - 5$", "0.00003", 0.0),
            (r"\$18.90", "18.90", 1.0),
            (r"\$18.90", r"\$18.90", 1.0),
            (r"\$18.90", "18.91", 0.0),
            ("$18.90", "18.9", 1.0),
            (r"$\$18.90$", "18.9", 1.0),
            ("½", "0.5", 1.0),
            ("x²", "x^2", 1.0),
            ("−3", "-3", 1.0),
            (["1/2", "7"], "0.5", 1.0),
            (["1/2", "7"], "7", 1.0),
            (["1/2", "7"], "8", 0.0),
            ({"target": ["25%", "45°"]}, "45", 1.0),
        ],
    )
    def test_an_answer_is_read_as_its_author_meant_it(self, answer: Any, given: str, score: float) -> None:
        assert math_verify(rf"so it is \boxed{{{given}}}.", answer) == score
        if score:
            assert math_verify(f"#### {given}", answer, marker="####") == score

    @pytest.mark.parametrize(
        "answer",
        [
            *[
                "A",
                "18.90",
                "1,234",
                "1/2",
                "2x+1",
                "x^2",
                "-5",
                "00501",
                "1.50",
                "100,000",
                "yes",
                "i",
                "2:3",
                "12:30",
                "2024-01-03",
                "(1,2)",
                "[0,1)",
                "x=3",
            ],
            "1, 2, 3",
            r"\frac{1}{2}",
            r"\text{Paris}",
            r"\{1,2\}",
            "3 cm",
            "5 apples",
            "π/2",
            "∞",
            r"(-\infty, 3]",
            "x < 3",
            "3 + 4i",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            r"1.5 \times 10^{-5}",
            r"1 \text{ or } 2",
            "y = 2x + 1",
            r"10 \text{ m/s}",
        ],
    )
    def test_every_answer_equals_itself(self, answer: str) -> None:
        assert math_verify(rf"\boxed{{{answer}}}", answer) == 1.0
        assert math_verify(f"so ${answer}$", answer) == 1.0
        assert math_verify(f"#### {answer}", answer, marker="####") == 1.0

    @pytest.mark.parametrize("answer", ["$$", "", " ", r"\$", "。", r"\begin{"])
    def test_an_answer_that_is_no_expression_is_an_error(self, answer: str) -> None:
        with pytest.raises(AnswerError, match="not a mathematical expression"):
            math_verify("3", answer)


def row(answer: Any, row_id: str = "mine/7") -> Prompt:
    return Prompt(row_id, "mine", (1,), "x", ({"role": "user", "content": "x"},), answer)


def reward_of(*names: str) -> RewardConfig:
    return RewardConfig(functions=[RewardFunctionConfig(name=name, function=name) for name in names])


class TestAnswers:
    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (None, "the row has no answer"),
            (float("nan"), "the row has no answer"),
            ([], r"the answer \[\] is a list that can't be compared"),
            (["a", None], "the row has no answer"),
            ([["a"]], "a list of lists"),
            ({"target": 24, "numbers": [1, 2]}, "a dict that can't be compared"),
            ({"target": "a", "ground_truth": "b"}, "a dict that can't be compared"),
            ({}, "a dict that can't be compared"),
            (b"a", "a bytes that can't be compared"),
        ],
    )
    def test_what_cannot_be_compared_is_refused_and_never_compared_as_its_repr(self, answer: Any, message: str) -> None:
        with pytest.raises(AnswerError, match=message):
            accepted(answer)
        with pytest.raises(AnswerError, match=rf"prompt 'mine/7': .*{message}"):
            check_answers(reward_of("exact_match"), [row("a", "mine/6"), row(answer)])

    def test_text_that_is_no_mathematics_is_refused_by_row_for_math_verify_alone(self) -> None:
        rows = [row("a"), row("25%"), row("12", "mine/8"), row(["1", "。"], "mine/9")]
        check_answers(reward_of("exact_match"), rows)
        check_answers(reward_of("reasoning_gym"), [row(None)])
        check_answers(reward_of("math_verify"), rows[:3])
        with pytest.raises(AnswerError, match=r"prompt 'mine/9': the answer '。' is not a mathematical expression"):
            check_answers(reward_of("exact_match", "math_verify"), rows)


class TestReasoningGym:
    EXTRA: dict[str, Any] = {"reasoning_gym": {"task": "chain_sum", "params": {}, "question": "1 + 1", "metadata": {}}}  # noqa: RUF012

    def test_the_tasks_own_verifier_scores(self) -> None:
        assert reasoning_gym("2", "2", self.EXTRA) == 1.0
        assert reasoning_gym("<answer> 2 </answer>", "2", self.EXTRA, marker="<answer>", end_marker="</answer>") == 1.0
        assert reasoning_gym("3", "2", self.EXTRA) < 1.0
        assert reasoning_gym("2", "2", self.EXTRA, marker="<answer>") == 0.0

    def test_a_row_of_another_kind_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="not generated by reasoning-gym"):
            reasoning_gym("2", "2", {})


class TestLoading:
    def test_a_function_gets_the_fields_that_it_names(self) -> None:
        loaded = load_function(f"{HERE}:sees", {"factor": 2})
        assert loaded.wanted == ("prompt", "response", "answer", "extra", "messages")
        assert (loaded.batched, loaded.is_async) == (False, False)
        assert loaded.call(prompt="p", response="rr", answer=3, extra={"level": 4}, messages=[{}]) == 2 * 14321

    def test_plural_names_make_it_batched_and_async_def_makes_it_async(self) -> None:
        assert load_function(f"{HERE}:batch_rank", {}).batched
        assert load_function(f"{HERE}:slow_length", {}).is_async
        assert load_function("http", {"url": "http://x"}).is_async

    def test_a_file_is_loaded_from_its_path_and_shadows_nothing(self, tmp_path) -> None:
        (tmp_path / "reward.py").write_text("def mine(response): return 7\n")
        assert load_function(f"{tmp_path / 'reward.py'}:mine", {}).call(response="x") == 7
        import reward

        assert reward.__file__ != str(tmp_path / "reward.py")

    def test_files_of_one_name_in_two_folders_do_not_collide(self, tmp_path) -> None:
        calls = []
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "rewards.py").write_text(
                f"class Where: name = {folder!r}\ndef f(response): return Where.name\n"
            )
            calls.append(load_function(f"{tmp_path}/{folder}/rewards.py:f", {}).call)
        assert [call(response="x") for call in calls] == ["a", "b"]

    @pytest.mark.parametrize(
        ("spec", "params", "message"),
        [
            ("exact_mach", {}, r"not built in \(exact_match, math_verify"),
            (f"{HERE}:missing", {}, "has no function 'missing'"),
            (f"{HERE}:not_a_function", {}, "has no function 'not_a_function'"),
            ("gone.py:f", {}, r"no file .*gone\.py"),
            (f"{HERE}:nothing_to_see", {}, "must take some of prompt, response"),
            (f"{HERE}:both_forms", {}, "mixes response, responses"),
            (f"{HERE}:sees", {"factr": 2}, "unexpected keyword argument 'factr'"),
            (f"{HERE}:sees", {"answer": 2}, "params set answer, which the sample fills"),
            (f"{HERE}:batch_of", {}, "missing a required argument: 'what'"),
        ],
    )
    def test_what_cannot_be_called_is_refused(self, spec: str, params: dict[str, Any], message: str) -> None:
        with pytest.raises(FunctionError, match=message):
            load_function(spec, params)


class _Service(http.server.BaseHTTPRequestHandler):
    replies: list[tuple[int, bytes]]
    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, body = self.replies.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[tuple[str, type[_Service]]]:
    handler = type("Handler", (_Service,), {"replies": [], "seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/score", handler
        server.shutdown()
        thread.join()


class TestHttp:
    FIELDS: dict[str, Any] = {  # noqa: RUF012
        **{"prompt": "p", "response": "r", "answer": "a", "extra": {"x": 1}, "messages": []},
        "response_token_ids": [3],
    }

    def ask(self, url: str, **options: Any) -> Any:
        import asyncio

        import reward.functions

        return asyncio.run(reward.functions.http(**self.FIELDS, url=url, backoff_s=0.01, **options))

    def test_the_service_gets_the_sample_and_gives_the_score(self, service) -> None:
        url, handler = service
        handler.replies.append((200, b'{"score": 0.25}'))
        assert self.ask(url) == 0.25
        assert handler.seen == [self.FIELDS]

    def test_a_busy_service_is_asked_again(self, service) -> None:
        url, handler = service
        handler.replies += [(503, b""), (429, b""), (200, b'{"value": 2}')]
        assert self.ask(url, score_key="value") == 2
        assert len(handler.seen) == 3

    def test_a_service_that_stays_broken_is_an_error_after_the_last_attempt(self, service) -> None:
        url, handler = service
        handler.replies += [(500, b"")] * 3
        with pytest.raises(ConnectionError, match="2 attempts failed"):
            self.ask(url, attempts=2)
        assert len(handler.seen) == 2

    def test_a_refused_request_is_not_repeated(self, service) -> None:
        url, handler = service
        handler.replies += [(404, b"")] * 3
        with pytest.raises(OSError, match="404"):
            self.ask(url)
        assert len(handler.seen) == 1

    def test_a_reply_without_a_score_is_an_error(self, service) -> None:
        url, handler = service
        handler.replies.append((200, b'{"points": 1}'))
        with pytest.raises(ValueError, match="must be a JSON object with 'score'"):
            self.ask(url)

    def test_nobody_there(self) -> None:
        with pytest.raises(ConnectionError, match="1 attempts failed"):
            self.ask("http://127.0.0.1:9/", attempts=1)
