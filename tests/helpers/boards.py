"""Boards, on which processes read what others posted, of several simulated processes in this
one.
"""

import threading


class Boards:
    """Boards of several simulated processes in one process, which wait up to `timeout_s`."""

    def __init__(self, num_processes, timeout_s=20):
        self.num_processes = num_processes
        self.timeout_s = timeout_s
        self.texts = {}
        self.most = 0
        self.changed = threading.Condition()

    def of(self, process):
        boards = self

        class Board:
            num_processes = boards.num_processes

            def post(self, name, text):
                with boards.changed:
                    assert (name, self.process) not in boards.texts
                    boards.texts[name, self.process] = text
                    boards.most = max(boards.most, len(boards.texts))
                    boards.changed.notify_all()

            def read(self, name, other):
                with boards.changed:
                    assert boards.changed.wait_for(
                        lambda: (name, other) in boards.texts, timeout=boards.timeout_s
                    )
                    return boards.texts[name, other]

            def remove(self, name):
                with boards.changed:
                    del boards.texts[name, self.process]

        board = Board()
        board.process = process
        return board
