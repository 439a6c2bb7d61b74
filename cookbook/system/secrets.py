"""Secrets of the environment: where one may be sent."""

from urllib.parse import SplitResult

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def may_have_secret(address: SplitResult) -> bool:
    """Return whether a secret that is sent to an address stays on this machine or is encrypted on its way."""
    return address.scheme == "https" or address.hostname in LOCAL_HOSTS
