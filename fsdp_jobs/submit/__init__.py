"""Submit jobs, query them and stop them. No torch."""
