"""The launcher `docker_fsdp`: every node is a container of this machine's Docker."""
