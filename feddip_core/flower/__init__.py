"""FedDIP on Flower: the same experiment, to the same bits, with its clients in other processes or on other hosts.

`Server` is a `Federation` whose clients are Flower's nodes. It overrides who trains, and nothing else. A client answers
three messages, with the functions that `run` uses too: who are you, a question of the method, and a round of training.
`server_app` and `client_app` are what `flwr run` starts; `simulate` runs them on one machine, on Ray.
"""

import os
import secrets

# Flower and Ray read these when they are imported: they report nothing to their makers unless the user says so, and Ray
# leaves a GPU's variables alone.
os.environ.update({
    "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
} | os.environ)  # fmt: skip
# Ray listens on the network. Without this process's token nobody can connect. Your own cluster has its own rules.
if not {"RAY_AUTH_MODE", "RAY_ADDRESS"} & os.environ.keys():
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

from .apps import client_app, configured, server_app, servers, simulate
from .client import clients
from .server import NobodyAnswered, Server

__all__ = [
    "NobodyAnswered", "Server", "client_app", "clients", "configured", "server_app", "servers", "simulate",
]  # fmt: skip
