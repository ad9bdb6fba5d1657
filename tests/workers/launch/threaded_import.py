"""Leaves a thread behind when it is imported; for the tests of the fork server."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
