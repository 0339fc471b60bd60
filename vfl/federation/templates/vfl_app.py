"""The Flower app of this project; the installed vfl package contains all of its code."""

from pathlib import Path

from vfl.clients.app import client_app
from vfl.server.app import server_app

server = server_app(Path(__file__).parent)
client = client_app()
