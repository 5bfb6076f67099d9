"""Sweeps: the table of their jobs, how they are submitted, shown and compared."""
