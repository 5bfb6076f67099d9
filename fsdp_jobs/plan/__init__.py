"""Decide how a job is sharded: arithmetic, without torch; only `shape_client` starts a process."""
