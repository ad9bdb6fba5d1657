"""The last module that the fork server imports: it says in `logs/imports.log` when an import has left threads behind.

A fork has none of its server's threads. What such a thread held (a lock, a pool's work) is held for ever in the fork.
"""

import os

_threads = len(os.listdir("/proc/self/task"))
if _threads > 1:
    print(
        f"exactrl: imports have left {_threads - 1} threads behind, which forks of this process don't have", flush=True
    )
