"""What the driver asks of the store: which records are there, and who may run a step.

A store that is far away is asked many questions at a time, in threads; a folder answers at once. Whatever is claimed is
released in the end, whether its claim was made use of or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .job_state import JobState
from .step_inputs import lookup_record
from .step_store import StepRecord, StepStore

# questions to a store that is far away
AT_A_TIME = 16
Answer = TypeVar("Answer")


class StoreQueries:
    """Args:
    void: whether damaged records are removed.
    """

    def __init__(self, store: StepStore, *, void: bool) -> None:
        self.notes: list[str] = []
        self._store = store
        self._void = void
        if store.place.local:
            self._threads = None
        else:
            self._threads = ThreadPoolExecutor(AT_A_TIME)
        self._asked: dict[Future[Any], tuple[JobState, Callable[[Any], None]]] = {}
        # key -> what releases it
        self._claims: dict[str, Callable[[], None]] = {}

    def submit_query(self, run: JobState, question: Callable[[], Answer], then: Callable[[Answer], None]) -> None:
        """Have ``then`` called with the answer: now, or by ``deliver_answers``. ``question`` may run in a thread."""
        if self._threads is None:
            then(question())
        else:
            self._asked[self._threads.submit(question)] = run, then

    @property
    def pending_queries(self) -> Iterable[Future[Any]]:
        return self._asked

    def deliver_answers(self, done: set[Future[Any]]) -> Iterator[JobState]:
        """Tell the answers that came; the jobs that they are about."""
        for answer in [asked for asked in self._asked if asked in done]:
            run, then = self._asked.pop(answer)
            then(answer.result())
            yield run

    def find_first_record(self, keys: Iterable[str]) -> StepRecord | None:
        """The first record that there is."""
        for key in keys:
            record, note = lookup_record(self._store, key, void=self._void)
            if note:
                self.notes += [note]
            if record is not None:
                return record
        return None

    def claim(self, key: str) -> bool:
        """Whether the step of a key is ours to run; another driver, or another cell of this one, may be at it.

        In a thread no Ctrl-C can come between a claim and the note of it.
        """
        release = self._store.place.claim(key)
        if release is not None:
            self._claims[key] = release
        return release is not None

    def release_later(self, key: str) -> None:
        """Another driver may have it; to be called outside of questions."""
        if self._threads is None:
            self.release_now(key)
        else:
            self._threads.submit(self.release_now, key)

    def release_now(self, key: str) -> None:
        """The same at once, in a question."""
        if (release := self._claims.pop(key, None)) is not None:
            release()

    def close(self) -> None:
        """Ask no more, and release what is claimed, by questions whose answer nobody has read too."""
        if self._threads is None:
            for key in list(self._claims):
                self.release_now(key)
            return
        self._threads.shutdown(cancel_futures=True)
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            list(threads.map(self.release_now, list(self._claims)))
