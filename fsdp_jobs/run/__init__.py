"""What a run leaves behind: its directory, events, verdicts and status. No torch."""
