"""Shared memory for one small message at a time, from one process to another that is likely to wait for it.

A message through a socket costs each process a system call, and a process that polls the socket another one for each
look. In a mailbox, the receiver reads a number in memory that the sender increments.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.runtime.shared_wait import MemoryFence

_HEADER_BYTES = 256
_SENT, _NBYTES = 0, 1
"""Words that the sender writes: the number of messages sent, and the size of the last one."""
_RECEIVED, _ASLEEP = 16, 17
"""Words that the receiver writes, in another cache line: the number of messages received, and whether it sleeps."""


class Mailbox:
    """One end of the memory. The other process has the other end."""

    def __init__(self, memory: SharedMemory, offset: int, nbytes: int) -> None:
        """`nbytes` is the size of the mailbox, which is at this offset of the memory."""
        view = memory.view()[offset : offset + nbytes]
        self._words = view[:_HEADER_BYTES].cast("q")
        self._content = view[_HEADER_BYTES:]
        self._capacity = nbytes - _HEADER_BYTES
        self._fence = MemoryFence()
        self._sleep_lock = threading.Lock()
        self._num_asleep = 0

    @property
    def num_sent(self) -> int:
        """The number of messages that the sender has sent."""
        return self._words[_SENT]

    @property
    def num_received(self) -> int:
        """The number of messages that the receiver has received."""
        return self._words[_RECEIVED]

    def put(self, parts: Sequence[bytes]) -> bool:
        """Send a message. Returns False, and sends none, if it is too large or the last one was not received yet.

        After an interruption the message was either sent or not sent. If it was sent, `is_receiver_asleep` was perhaps
        not asked: the next message wakes the receiver.
        """
        words, content = self._words, b"".join(parts)
        number, nbytes = words[_SENT], len(content)
        if words[_RECEIVED] != number or nbytes > self._capacity:
            return False
        self._fence()
        self._content[:nbytes] = content
        words[_NBYTES] = nbytes
        self._fence()
        words[_SENT] = number + 1
        self._fence()
        return True

    def is_receiver_asleep(self) -> bool:
        """Whether the receiver has to be woken after `put`."""
        return bool(self._words[_ASLEEP])

    def has_message(self) -> bool:
        """Whether a message can be taken."""
        return self._words[_SENT] != self._words[_RECEIVED]

    def take(self, buffer: memoryview) -> int:
        """Receive a message into a buffer. Returns its size."""
        words = self._words
        self._fence()
        nbytes = words[_NBYTES]
        buffer[:nbytes] = self._content[:nbytes]
        self._fence()
        words[_RECEIVED] += 1
        return nbytes

    def begin_sleep(self) -> None:
        """Make the sender wake this process for each message, until as many `end_sleep`.

        Several threads may sleep. Look for messages again before sleeping.
        """
        with self._sleep_lock:
            self._num_asleep += 1
            self._words[_ASLEEP] = 1
        self._fence()

    def end_sleep(self) -> None:
        """End what `begin_sleep` began."""
        with self._sleep_lock:
            self._num_asleep -= 1
            self._words[_ASLEEP] = self._num_asleep > 0
