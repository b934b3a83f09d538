"""Deciding (ledger) and moving (mover), and who drives them."""
