"""Notes each of its imports in a file, slowly when told to; for the tests of the fork server."""

import os
import time

with open(os.environ["NOTED"], "a", encoding="utf-8") as notes:
    notes.write(f"{os.getpid()}\n")
time.sleep(float(os.environ.get("SLOWLY", "0")))
