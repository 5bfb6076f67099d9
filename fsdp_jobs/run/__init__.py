"""A run's files: its directory, events, verdicts, status, goodput. No torch."""
