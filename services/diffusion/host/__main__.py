"""A host process: `python -m services.diffusion.host image|upscaler SOCKET IN OUT`, the numbers of three open files."""

import signal
import socket
import sys

import setproctitle

from services.kit.hosts.board import Board
from services.kit.hosts.pipe import Pipe


def main() -> None:
    """Take the role that the command line names."""
    role, descriptor, inbox, outbox = sys.argv[1], *map(int, sys.argv[2:5])
    # A terminal's Ctrl-C and a process manager's stop reach the whole group; the service drains and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(f"omniserve-diffusion-{role}")
    pipe, boards = Pipe(socket.socket(fileno=descriptor)), (Board(inbox), Board(outbox))
    if role == "image":
        from services.diffusion.host.image_role import serve_images  # noqa: PLC0415 - a host loads its own role only

        serve_images(pipe, *boards)
    elif role == "upscaler":
        from services.diffusion.host.upscaler_role import serve_upscaler  # noqa: PLC0415 - as above

        serve_upscaler(pipe, *boards)
    else:
        sys.exit(f"no role {role!r}")


if __name__ == "__main__":
    main()
