"""Decide how a job is sharded: arithmetic only, no torch, no I/O."""
