"""Rehearse faults, examine clusters, remove old runs."""
