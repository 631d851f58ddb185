"""What the processes of one server share: sockets, messages, logs, heartbeats."""
