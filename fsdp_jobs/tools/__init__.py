"""Rehearse faults, examine clusters, convert Accelerate's files."""
