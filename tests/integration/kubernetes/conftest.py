"""These tests need a real cluster and an image in it; without FSDP_JOBS_TEST_KUBECONFIG there are none of them.

FSDP_JOBS_TEST_KUBECONFIG     kubeconfig of an administrator of a cluster with two machines or more
FSDP_JOBS_TEST_IMAGE          image built from deploy/Dockerfile that the machines have or can pull
FSDP_JOBS_TEST_STORAGE_CLASS  class that gives ReadWriteMany; without it a folder that all machines share is used:
FSDP_JOBS_TEST_HOST_PATH      ... this one (/tmp/fsdp-jobs-test)
"""

import os

collect_ignore_glob = [] if "FSDP_JOBS_TEST_KUBECONFIG" in os.environ else ["test_*.py"]
