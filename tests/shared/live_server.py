"""A Session → its live page, served in the background."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from offbeat.report.live import Session
from offbeat.report.server import LiveServer


@contextmanager
def serving(session: Session) -> Generator[LiveServer, None, None]:
    """The page for as long as the block runs."""
    with LiveServer(session) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
