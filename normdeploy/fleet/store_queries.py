"""Send the driver's queries to the store: look up records and claim steps.

Queries to a remote store run in threads, many at a time. A folder answers at once, without threads. Every claim is
released in the end, even if its step never ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .job_state import JobState
from .step_inputs import lookup_record
from .step_store import StepRecord, StepStore

# Maximum number of parallel queries to a remote store.
AT_A_TIME = 16
Answer = TypeVar("Answer")


class StoreQueries:
    """Send queries to a store, and keep the claims of this driver.

    Args:
        void: True removes damaged records.
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
        # Key → function that releases its claim.
        self._claims: dict[str, Callable[[], None]] = {}

    def submit_query(self, run: JobState, question: Callable[[], Answer], then: Callable[[Answer], None]) -> None:
        """Run a query and pass its answer to ``then``.

        For a folder this happens at once. Otherwise ``question`` runs in a thread, and ``deliver_answers`` calls
        ``then``.

        Args:
            run: state of the job to which the query belongs.
        """
        if self._threads is None:
            then(question())
        else:
            self._asked[self._threads.submit(question)] = run, then

    @property
    def pending_queries(self) -> Iterable[Future[Any]]:
        """Return the queries that run in threads."""
        return self._asked

    def deliver_answers(self, done: set[Future[Any]]) -> Iterator[JobState]:
        """Deliver the answers of finished queries.

        Yields:
            the states of the jobs to which the queries belong.
        """
        for answer in [asked for asked in self._asked if asked in done]:
            run, then = self._asked.pop(answer)
            then(answer.result())
            yield run

    def find_first_record(self, keys: Iterable[str]) -> StepRecord | None:
        """Find the first record that exists, and add a note for each damaged record.

        Returns:
            the record; None if no key has a record.
        """
        for key in keys:
            record, note = lookup_record(self._store, key, void=self._void)
            if note:
                self.notes += [note]
            if record is not None:
                return record
        return None

    def claim(self, key: str) -> bool:
        """Claim the step of a key. The claim fails if another driver, or another job of this driver, is running the
        step.

        If this runs in a thread, Ctrl-C can't interrupt between the claim and its entry in the list of claims.

        Returns:
            True if the claim succeeded.
        """
        release = self._store.place.claim(key)
        if release is not None:
            self._claims[key] = release
        return release is not None

    def release_later(self, key: str) -> None:
        """Release a claim, so that another driver can claim the step. Call this only outside of queries."""
        if self._threads is None:
            self.release_now(key)
        else:
            self._threads.submit(self.release_now, key)

    def release_now(self, key: str) -> None:
        """Release a claim at once. Call this only inside a query."""
        if (release := self._claims.pop(key, None)) is not None:
            release()

    def close(self) -> None:
        """Stop all queries and release all claims, including claims of queries whose answer was not delivered."""
        if self._threads is None:
            for key in list(self._claims):
                self.release_now(key)
            return
        self._threads.shutdown(cancel_futures=True)
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            list(threads.map(self.release_now, list(self._claims)))
