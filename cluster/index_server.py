"""The embedded prefix index as a Serve deployment: for clusters that were given no Redis URL."""

from cluster.embedded_valkey import EmbeddedValkey


class IndexServer:
    """Keeps one private Valkey alive beside the Gateways.

    The address is fixed when the application is built, so that everybody knows it before anybody runs. It
    is a loopback address: replicas on other machines need a real `index.url`.
    """

    def __init__(self, port: int, password: str) -> None:
        self._valkey = EmbeddedValkey(port=port, password=password)
        self._valkey.start()

    def __call__(self) -> str:
        """Never called over HTTP: Serve wants a deployment to be callable."""
        return "ok"

    def __del__(self) -> None:
        if (valkey := getattr(self, "_valkey", None)) is not None:
            valkey.close()
