"""What is raised when a law is broken."""

from __future__ import annotations

from flowrl.errors import FlowError


class LawError(FlowError, AssertionError):
    """A loss or an advantage breaks a law.

    Args:
        subject: the node, with its settings.
        law: which one, in a few words: "micro-batches", "row order", …
        what: what it does.
        expected, received, do: see :class:`FlowError`.
    """

    def __init__(self, subject: str, law: str, what: str, *, expected: object, received: object, do: str) -> None:
        super().__init__(f"{subject} breaks the law of {law}: {what}", expected=expected, received=received, do=do)
        self.subject = subject
        self.law = law
