"""The page and the state slot that no request owns: rows that only pad a batch use them."""

RESERVED_PAGE = 0  # Padding tokens write to this page, and block tables are padded with it.
RESERVED_SLOT = 0  # Padding rows read zeros here; a request that begins copies its state from it.
