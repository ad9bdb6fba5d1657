"""The built-in environments; each module has a class `Environment` (`rollout/turns/environment.py`)."""
