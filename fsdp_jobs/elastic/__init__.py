"""Elastic jobs: one coordinator per job, one torch elastic agent per node, and state shared with each rank."""
