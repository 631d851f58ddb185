"""What processes of one server share: sockets, messages on them, logs, signs of life."""
