"""What goes first, where there is no room for all: orders of eviction. They order; the ledger decides."""
