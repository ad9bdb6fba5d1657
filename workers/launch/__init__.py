"""Groups of workers, launchers, processes, transport."""
