"""What all processes of a run share: its files, events and verdicts, and the messages between them. No torch."""
