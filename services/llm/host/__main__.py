"""A host process: `python -m services.llm.host engine|text|embed FD`. Speaks on the socket FD and ends when its peer closes it."""

import signal
import socket
import sys

import setproctitle

from services.kit.hosts.pipe import Pipe


def main() -> None:
    """Take the role that the command line names."""
    role, descriptor = sys.argv[1], int(sys.argv[2])
    # A terminal's Ctrl-C and a process manager's stop reach the whole group; the service drains and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(f"omniserve-llm-{role}")
    pipe = Pipe(socket.socket(fileno=descriptor))
    if role == "engine":
        from services.llm.host.engine_role import serve_engine  # noqa: PLC0415 - a host loads its own role only

        serve_engine(pipe)
    elif role == "text":
        from services.llm.host.text_role import serve_text  # noqa: PLC0415 - a host loads its own role only

        serve_text(pipe)
    elif role == "embed":
        from services.llm.host.embed_role import serve_embed  # noqa: PLC0415 - a host loads its own role only

        serve_embed(pipe)
    else:
        sys.exit(f"no role {role!r}")


if __name__ == "__main__":
    main()
