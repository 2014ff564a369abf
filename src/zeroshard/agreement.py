"""Agreement: a slow side channel over which ranks say where they are, used only when something is not as expected.

[Note: agreement]
Collectives carry no name: two ranks that gather different units at the same moment hang, crash, or, where sizes agree,
silently exchange each other's data. Naming every collective would cost a round trip each. Instead every rank predicts
the next collective from the recorded order (``engine/order.py``). Ranks with one history predict the same; a rank that
does what was predicted needs to ask nobody. A rank about to do something *else* first announces it here and waits
until all have announced the same. So a mismatched collective is never launched: the rank that left the order gets an
error after the timeout, or at once when all have announced and differ, and those that wait for it inside a collective
read here where it went.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store


class RanksDisagreeError(RuntimeError):
    """Ranks wait for each other at different places: the job cannot go on."""


class Agreement:
    """The announcements of the ranks of one sharded model, in the process group's key-value store."""

    def __init__(
        self, store: Store | None, prefix: str, rank: int, ranks: int, timeout: float, members: Sequence[int] = ()
    ) -> None:
        self._store = store  # None: one rank, or a backend that communicates nothing
        self._prefix = prefix
        self.rank, self._ranks = rank, ranks
        self.members = list(members)  # the ranks of the mesh, as the job counts them
        self._timeout = timeout
        self._settled = -1  # the last moment all ranks announced and agreed at
        self._stale: list[str] = []  # its keys, deleted once every rank has come to a later one

    @property
    def real(self) -> bool:
        """Whether there are other ranks that really answer."""
        return self._store is not None

    def agree(self, moment: int, what: str, expected: str) -> None:
        """Go on when all ranks are at ``moment`` and about to do ``what``; raise when they are not.

        ``expected`` is what the recorded order has there: what ranks that announce nothing are doing.
        """
        if self._store is None:
            return
        self._announce(moment, what)
        key = f"{self._prefix}/{moment}"
        self._store.add(f"{key}/{what}", 1)
        last = self._store.add(f"{key}/all", 1) == self._ranks
        if last:
            same = self._store.add(f"{key}/{what}", 0) == self._ranks
            self._store.set(f"{key}/verdict", "go" if same else "differ")
        try:
            self._store.wait([f"{key}/verdict"], timedelta(seconds=self._timeout))
        except RuntimeError as error:
            if failure := self._failure():
                raise RanksDisagreeError(f"rank {self.rank} waits in vain to {what}: {failure}") from error
            waited = f"waited {self._timeout:g} s to {what}, where the recorded order has: {expected}"
            raise self._error(waited) from error
        if self._store.get(f"{key}/verdict") != b"go":
            raise self._error(f"is about to {what}, where the recorded order has: {expected}")
        if last:  # every rank has read the verdict before this one
            for stale in self._stale:
                self._store.delete_key(stale)
        self._settled = moment
        self._stale = [f"{key}/{what}", f"{key}/all", f"{key}/verdict"]

    def exchange(self, topic: str, text: str) -> str | None:
        """Return what rank 0 says on a topic; None where there is nobody to ask."""
        if self._store is None:
            return None
        key = f"{self._prefix}/{topic}"
        if self.rank == 0:
            self._store.set(key, text)
        return str(self._get(key, f"hear from rank 0 about the {topic}").decode())

    def complain(self, topic: str, complaint: str) -> dict[int, str]:
        """Tell all ranks of a complaint, or of none (""), and return all complaints by rank."""
        if self._store is None:
            return {}
        key = f"{self._prefix}/{topic}"
        self._store.set(f"{key} {self.rank}", complaint)
        self._store.add(f"{key} bad", 1 if complaint else 0)
        if self._store.add(f"{key} told", 1) == self._ranks:
            self._store.set(f"{key} verdict", str(self._store.add(f"{key} bad", 0)))
        bad = int(self._get(f"{key} verdict", f"hear what all ranks say about the {topic}"))
        if not bad:
            return {}
        said = {rank: self._store.get(f"{key} {rank}").decode() for rank in range(self._ranks)}
        return {rank: text for rank, text in said.items() if text}

    def _get(self, key: str, what: str) -> bytes:
        if self._store is None:
            raise ValueError("there is no store to read")
        try:
            self._store.wait([key], timedelta(seconds=self._timeout))
        except RuntimeError as error:
            waited = f"rank {self.rank} waited {self._timeout:g} s to {what}"
            raise RanksDisagreeError(f"{waited}: have all ranks called shard()?") from error
        return self._store.get(key)

    def tell_failure(self, why: str) -> None:
        """Leave word for the ranks that will wait for this one in vain."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store went down with its rank
                self._store.set(f"{self._prefix}/failure", f"rank {self.rank} failed: {why}")

    def _failure(self) -> str:
        key = f"{self._prefix}/failure"
        return self._store.get(key).decode() if self._store is not None and self._store.check([key]) else ""

    def stuck(self, what: str, error: RuntimeError) -> RanksDisagreeError:
        """Explain a collective that did not end."""
        first_line = str(error).partition("\n")[0]
        if self._store is None:
            return RanksDisagreeError(f"{what} failed: {first_line}")
        try:
            if failure := self._failure():
                return RanksDisagreeError(f"rank {self.rank} could not finish to {what}, because {failure}")
            return self._error(f"could not finish to {what} within {self._timeout:g} s ({first_line})")
        except RuntimeError:  # the store went down with its rank
            return RanksDisagreeError(f"rank {self.rank} could not finish to {what}: {first_line}")

    def _announce(self, moment: int, what: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/rank {self.rank}", f"{moment}:{what}")

    def _error(self, what: str) -> RanksDisagreeError:
        if self._store is None:
            raise ValueError("one rank cannot disagree with itself")
        elsewhere, silent = [], []
        for rank in range(self._ranks):
            key = f"{self._prefix}/rank {rank}"
            moment, said = -1, ""
            if rank != self.rank and self._store.check([key]):
                number, _, said = self._store.get(key).decode().partition(":")
                moment = int(number)
            if moment > self._settled:
                elsewhere.append(f"rank {rank} is about to {said}")
            elif rank != self.rank:
                silent.append(rank)
        if silent:
            elsewhere.append(f"ranks {silent} follow the recorded order, or do not answer")
        return RanksDisagreeError(
            f"ranks disagree: rank {self.rank} {what}. " + "; ".join(elsewhere) + ". All ranks must run the same units "
            "in the same order: look for a branch on rank or data around that unit, or a rank that skipped a call."
        )
