"""Show all runs under a folder, live, in a browser."""
