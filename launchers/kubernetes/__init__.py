"""Launcher `kubernetes_fsdp`: nodes are pods of an Indexed Job, a JobSet, or a Volcano job."""
