"""The first module that the fork server imports: it takes over the workers' environment before anything that reads it is imported.

From here on its output goes to a log. Otherwise the messages of libraries, while they are imported and while they shut down, would
appear between the run's own lines. (A worker's output goes to a log of its own, see `service.py`.)
"""

import json
import os
import sys

NAME = "EXACTRL_FORK_SERVER"
"""Name of the variable that holds the environment, the import path and the log, as JSON."""

if NAME in os.environ:
    _told = json.loads(os.environ[NAME])
    os.environ.clear()
    os.environ.update(_told["env"])
    sys.path[:] = _told["path"]
    _log = os.open(_told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for _stream in (1, 2):
        os.dup2(_log, _stream)
    os.close(_log)
