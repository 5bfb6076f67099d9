"""A simulated object store: moto's S3 server on this machine, used with the real client."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_KEYS = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def simulated_store() -> Iterator[str]:
    """Yield a bucket of a store that s3:// means as long as this lasts, here and in processes begun here."""
    import s3fs

    moto, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with one_at_a_time:  # moto looks whether an object is there and writes it in two steps; a store does so in one
            return list(moto(environ, start_response))

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request
    server = make_server("127.0.0.1", 0, answer, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {**_KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
    with mock.patch.dict(os.environ, env):
        s3fs.S3FileSystem.clear_instance_cache()
        bucket = f"models-{server.server_port}"  # what one server has, the next one of this process has, too
        s3fs.S3FileSystem().mkdir(bucket)
        yield bucket
    s3fs.S3FileSystem.clear_instance_cache()  # what is kept has this store's keys
    server.shutdown()
