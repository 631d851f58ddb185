"""Opens the listening socket before anything is loaded, so a taken port is reported at once."""

from __future__ import annotations

import errno
import os
import socket

_BACKLOG = 2048


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a listening socket. `flag` names the port in errors.

    Raises `ValueError` if the port is in use or the address is not one of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except UnicodeError:
        raise ValueError(f"cannot listen on --host {host}: this is no host name") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is in use; choose another with {flag}, or stop what "
                "listens there"
            ) from None
        reason = (
            error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        )
        raise ValueError(f"cannot listen on --host {host} {flag} {port}: {reason}") from None
