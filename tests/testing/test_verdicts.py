"""A verdict's message, and the test runner that hears of it."""

from __future__ import annotations

import threading

from normdeploy.testing.verdicts import Verdict, listening, publish_verdict

PASSED = Verdict(assertion="assert_parity", ok=True, text="verified on 3 inputs")
FAILED = Verdict(assertion="assert_parity", ok=False, text="NOT verified", details=("a", "b"), culprit="the weight")


def test_message_has_verdict_details_and_culprit_each_in_a_line() -> None:
    assert PASSED.message == "verified on 3 inputs"
    assert FAILED.message == "NOT verified\na\nb\nculprit: the weight"


def test_innermost_listener_hears_the_verdict_also_from_a_thread() -> None:
    outer, inner = list[Verdict](), list[Verdict]()
    with listening(outer.append):
        with listening(inner.append):
            thread = threading.Thread(target=publish_verdict, args=(FAILED,))
            thread.start()
            thread.join()
        publish_verdict(PASSED)
    publish_verdict(FAILED)
    assert (outer, inner) == ([PASSED], [FAILED])
