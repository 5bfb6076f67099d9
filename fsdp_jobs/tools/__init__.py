"""Rehearse a job, examine a cluster, read Accelerate's files."""
