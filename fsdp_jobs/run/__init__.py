"""What a run leaves behind: its directory, events, verdicts, status, goodput. No torch."""
