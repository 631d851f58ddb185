"""What every room of the compiler shares: its errors, and the ops at which a forward is split."""
