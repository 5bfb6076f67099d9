"""Settings for the tests with the client library."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:HTTPResponse.getheader:DeprecationWarning:kubernetes")
